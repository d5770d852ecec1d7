# The columns of winning entries, see winner_table.py.

cdef enum:
    STORAGE_ID = 0
    KEY_AT = 1
    KEY_SIZE = 2
    MAJOR = 3
    MINOR = 4
    AT = 5
    SIZE = 6
    ORIGIN = 7
