# The constants of json_limits.py; tests/native/test_headers.py compares the values.

cdef enum:
    OK = 0
    MALFORMED = 1
    TOO_DEEP = 2
    FULL = 3
    UNSUPPORTED = 4
    DECIMAL_DIGITS_MAX = 38
    EXTENSION_TEXT_MAX = 92
    ROOM = 112
