# The columns of the table of blocks and the parts of a fixheader, see block_table.py.

cdef enum:
    BLOCK_AT = 0
    PAYLOAD_AT = 1
    PAYLOAD_END = 2
    IS_ZSTD = 3
    CONTENT_BOUND = 4
    FULL = 0
    NEED = 1
    OTHER = 2
    FIXHEADER_SIZE = 19

cdef enum:
    ROW_WORD = 0xD5BA0BAB
    ZROW_WORD = 0xD5BA0BBA
