# The lines of a layout and the forms of fields, see row_layout.py.

cdef enum:
    FORM = 0
    SIZE = 1
    MASK = 2
    HAS_MARK = 3
    TARGET = 4
    FIXED = 0
    TEXT = 1
    SIZED = 2
    TERMINATOR_SIZE = 4
