"""One fuzz target per decoder, in `targets.py`. The suite runs each for a second, `python -m tests.fuzz` as long as
requested.

A target accepts any bytes and may raise only errors of our own family. Inputs with new coverage (`coverage.py`) are the
base of further ones (`guided.py`, `mutation.py`). With FLOWSTONE_INTERPRETED=1 kernels run as plain Python: their
coverage is measured, and an out-of-bounds read, which compiled code would not notice, is an IndexError.
"""
