# What a part of a key holds, see key_parts.py.

cdef enum:
    PART_INTEGER = 1
    PART_NUMBER = 2
    PART_STRING = 3
    PART_BINARY = 4
    PART_BOOLEAN = 5
    PART_UUID = 6
