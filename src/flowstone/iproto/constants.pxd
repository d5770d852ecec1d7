# Constants of constants.py that compiled modules use; tests/native/test_headers.py compares the values.

cdef enum RequestType:
    SELECT = 1
    INSERT = 2
    REPLACE = 3
    UPDATE = 4
    DELETE = 5
    UPSERT = 9
    NOP = 12
    RAFT = 30

cdef enum Key:
    REQUEST_TYPE = 0x00
    SYNC = 0x01
    REPLICA_ID = 0x02
    LSN = 0x03
    TIMESTAMP = 0x04
    SCHEMA_VERSION = 0x05
    SERVER_VERSION = 0x06
    GROUP_ID = 0x07
    TSN = 0x08
    FLAGS = 0x09
    STREAM_ID = 0x0A
    SPACE_ID = 0x10
    INDEX_ID = 0x11
    LIMIT = 0x12
    OFFSET = 0x13
    ITERATOR = 0x14
    INDEX_BASE = 0x15
    FETCH_POSITION = 0x1F
    KEY = 0x20
    TUPLE = 0x21
    OPS = 0x28
    OLD_TUPLE = 0x2C
    NEW_TUPLE = 0x2D
    DATA = 0x30

cdef enum RaftKey:
    STATE = 2

cdef enum Flag:
    WAIT_SYNC = 2
    WAIT_ACK = 4

cdef enum:
    GROUP_LOCAL = 1
    TYPE_ERROR = 0x8000
    VCLOCK_MAX = 32
