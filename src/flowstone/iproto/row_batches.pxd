# Why a scan of packets stopped, the places of its progress, and bounds of rows, see row_batches.py.

cdef enum:
    ROW_OVERHEAD = 88
    NO_ROOM = -1
    NEED = 0
    BAD_LENGTH = 2
    BAD_ROW = 3
    BAD_REPLICA_ID = 4
    BAD_TSN = 5
    INTERLEAVED = 6
    TOO_LARGE = 7
    ERROR_PACKET = 8
    AT = 0
    ROWS = 1
    WHOLE_AT = 2
    WHOLE_ROWS = 3
    OPEN = 4
    OPEN_TSN = 5
    NEEDED = 6
