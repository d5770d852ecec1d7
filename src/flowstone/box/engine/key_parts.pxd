# What a part of a key holds, see key_parts.py.

cdef enum:
    PART_INTEGER = 1
    PART_NUMBER = 2
    PART_STRING = 3
    PART_BINARY = 4
    PART_BOOLEAN = 5
    PART_UUID = 6
    ENCODED = 0
    INTEGER = 1
    STRING = 2
    NEVER = 0
    WITH_NIL = 1
    ALWAYS = 2
    EQ = 0
    REQ = 1
    LT = 3
    LE = 4
    GE = 5
    GT = 6
    FIXED_SIZE_MAX = 18
