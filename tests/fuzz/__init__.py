"""One fuzz target per decoder. `targets.py` has them; the suite runs them briefly, `python -m tests.fuzz` for long.

A target takes any bytes and may raise errors of our own family, nothing else. With NUMBA_DISABLE_JIT=1 kernels run as
plain Python, where a read outside of the bytes, which machine code would not notice, is an IndexError.
"""
