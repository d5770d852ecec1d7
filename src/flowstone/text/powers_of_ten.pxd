# A constant of powers_of_ten.py; tests/native/test_headers.py compares the value.

cdef enum:
    POWER_MIN = -292
