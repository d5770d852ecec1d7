# The constants of json_row_names.py; tests/native/test_headers.py compares the values.

cdef enum:
    SLOT = 32
    KEYS_MAX = 128
