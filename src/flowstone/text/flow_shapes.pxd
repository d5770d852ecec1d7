# The constants of flow_shapes.py; tests/native/test_headers.py compares the values.

cdef enum Shape:
    MAP = 0
    LIST = 1
    OPERATIONS = 2
    CELLS = 3

cdef enum:
    HAS_INDEX_ID = 1
    HAS_INDEX_BASE = 2
    STRANGE = 4
    KEY_SIZE_MAX = 160
