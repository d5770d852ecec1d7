"""One fuzz target per decoder, in `targets.py`. The suite runs each for a second, `python -m tests.fuzz` for long.

A target takes any bytes and may raise errors of our own family, nothing else. Inputs that take new ways through our
code (`coverage.py`) are what others are made from (`guided.py`, `mutation.py`). With NUMBA_DISABLE_JIT=1 kernels run as
plain Python: their ways are seen, and a read outside of the bytes, which machine code would not notice, is an
IndexError.
"""
