# The constants of column_limits.py; tests/native/test_headers.py compares the values.

cdef enum:
    FITS = 0
    WRONG_TYPE = 1
    TOO_LARGE = 2
    TOO_PRECISE = 3
    OUT_OF_RANGE = 4
    COLUMN_FULL = 5
    OFFSET_MAX = 0x7FFFFFFF
    COPY_ROOM = 32
    DECIMAL_DIGITS_MAX = 38
