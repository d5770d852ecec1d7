"""One fuzz target per decoder, in `targets.py`. The suite runs each for a second, `python -m tests.fuzz` for long.

A target accepts any bytes and may raise only errors of our own family. Inputs with new coverage (`coverage.py`) are the
base of further ones (`guided.py`, `mutation.py`). With NUMBA_DISABLE_JIT=1 kernels run as plain Python: their coverage
is measured, and an out-of-bounds read, which machine code would not notice, is an IndexError.
"""
