# Constants of extensions.py that compiled modules use; tests/native/test_headers.py compares the values.

cdef enum ExtensionType:
    DECIMAL = 1
    UUID = 2
    ERROR = 3
    DATETIME = 4
    COMPRESSION = 5
    INTERVAL = 6
    TUPLE = 7
    ARROW = 8

cdef enum:
    DECIMAL_DIGITS_MAX = 76
    DECIMAL_EXPONENT_MAX = 999999
