"""Replica sets of real Tarantool servers and Flowstone nodes, as processes on loopback.

`FLOWSTONE_TARANTOOL` lists the `tarantool` binaries (default: the one on PATH); each test names the versions that it
supports. With `FLOWSTONE_INTEROP_OURS=tarantool` real servers replace all Flowstone nodes: a failure then is a bug of
the test.
"""
