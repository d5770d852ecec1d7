# The lines of the table of requests and the columns of the table of spans, see request_scan.py.

cdef enum:
    TYPE = 0
    SYNC = 1
    SPACE_ID = 2
    KEY_AT = 3
    KEY_END = 4
    TUPLE_AT = 5
    TUPLE_END = 6
    PACKET_AT = 7
    PACKET_END = 8
    CODE = 9
    SPAN = 10
    INDEX_ID = 11
    ITERATOR = 12
    OFFSET = 13
    LIMIT = 14
    INDEX_BASE = 15
    OPS_AT = 16
    OPS_END = 17
    END = 1
    AT = 2
    SIZE_MAX = 3
    STATUS = 4
    WRONG_LENGTH = 1
    TOO_LARGE = 2
    TYPE_SHIFT = 32
    SPACE_ID_MAX = 0xFFFFFFFF
