# The lines of the scratch table, see bulk.py.

cdef enum:
    OPERATIONS_MAX = 16
    INTEGER = 0
    SHORTEST = 1
    DOUBLE = 2
    FIELD = 0
    CODE = 1
    ARGUMENT = 2
    ARGUMENT_END = 3
