# The lines of the table of rows, see scan.py.

from flowstone.native.words cimport i64

cdef enum:
    TYPE = 0
    REPLICA_ID = 1
    GROUP_ID = 2
    LSN = 3
    TSN = 4
    TIMESTAMP = 5
    FLAGS = 6
    SINGLE = 7
    SPACE_ID = 8
    INDEX_ID = 9
    INDEX_BASE = 10
    KEY_AT = 11
    KEY_END = 12
    TUPLE_AT = 13
    TUPLE_END = 14
    OPS_AT = 15
    OPS_END = 16
    ROW_AT = 17
    BODY_AT = 18
    ROW_END = 19
    SPAN = 20
    COMMIT = 1
    DONE = 0
    FULL = 1
    MALFORMED = 2
