"""Shared functions of compiled modules: words and MessagePack values at any offset of a byte array.

A module that imports `cython` is compiled when Flowstone is built (hatch_build.py finds it). Its `.py` is plain Python;
the `.pxd` beside it declares the C types, like a header. Without the compiled file, the same source runs interpreted,
for debuggers and for the tests that compare the two (tests/native/twins.py).

`words` and `msgpack` are never compiled themselves: their `.pxd` has inline functions that become part of each compiled
module, and their `.py` the same functions for interpreted modules.

Compiled functions take NumPy arrays and numbers and return numbers. They allocate nothing and never raise: they return
a status, and their caller raises the error. They check no bounds, so each proves its offsets before it reads.
"""
