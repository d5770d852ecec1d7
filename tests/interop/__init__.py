"""Replica sets of real Tarantool servers and Flowstone nodes, as processes on loopback.

`FLOWSTONE_TARANTOOL` lists the `tarantool` binaries to take (default: the one on PATH); each test names the versions
it fits. With `FLOWSTONE_INTEROP_OURS=tarantool` a real server stands in for every Flowstone node: a test that fails
then is a wrong test.
"""
