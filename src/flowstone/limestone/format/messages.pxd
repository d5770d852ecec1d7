# Constants of messages.py that compiled modules use.

cdef enum:
    ENTRY_SIZE_MIN = 37

cdef enum MessageType:
    LOG_ENTRIES = 0x11

cdef enum SessionFlags:
    BEGIN = 0x01
    END = 0x02
    FLUSH = 0x04
