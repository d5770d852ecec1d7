"""The operations of UPDATE and UPSERT.

`operation.py` decodes an operation, `tree.py` applies it to a tuple, with the arithmetic of `scalar.py`, and
`update.py` is the call for both. `kernels.py` compiles the simplest operations, for many tuples at once.
"""
