from flowstone.limestone.format.entry_table cimport AT, MAJOR, TYPE
from flowstone.native.words cimport i64, u8, u64

cpdef enum:
    OPEN = 0
    VALID = 1
    MARKED = 2
    HAS_ENTRIES = 3
    EPOCH = 4
    HEAD = 5
    MAX_EPOCH = 6
    COUNTED = 7

cpdef i64 follow(
    const u64[:, :] table, i64 start, u8[::1] takes, i64 base, u64 durable, u64[::1] state
) noexcept
