# The rows of the table of entries, and why a walk stops, see entry_table.py.

cdef enum:
    AT = 0
    END = 1
    TYPE = 2
    STORAGE_ID = 3
    KEY_AT = 4
    KEY_END = 5
    VALUE_AT = 6
    VALUE_END = 7
    MAJOR = 8
    MINOR = 9
    BLOB_COUNT = 10
    FULL = 0
    NEED = 1
    OTHER = 2
