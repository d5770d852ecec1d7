# The lines of the scratch table, see bulk.py.

cdef enum:
    OPERATIONS_MAX = 16
    FIELD = 0
    CODE = 1
    ARGUMENT = 2
    ARGUMENT_END = 3
