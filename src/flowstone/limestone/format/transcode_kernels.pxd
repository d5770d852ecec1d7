from flowstone.limestone.format.messages cimport ENTRY_SIZE_MIN, MessageType, SessionFlags
from flowstone.native.words cimport (
    Out,
    Source,
    big32,
    big64,
    byte,
    copy,
    i64,
    little32,
    poke,
    poke64,
    source,
    target,
    u8,
    u64,
    word,
)

cpdef enum:
    HEAD_SIZE = 13
    DONE = 0
    STARVED = 1
    SINGLE = 2
    OTHER = 3
    MARKERS = 0b1011101

cdef i64 _put_head_of_one(Out out, i64 to, u64 epoch) noexcept nogil
cpdef (i64, i64, i64, i64) to_wire(
    const u8[::1] buf, i64 at, u8[::1] out, i64 to, u64 epoch, bint alone
) noexcept
cdef (i64, i64, i64, i64) _log_entry(
    Source data, i64 limit, i64 at, i64 size_max, Out out, i64 to
) noexcept nogil
cpdef (i64, i64, i64, i64, i64, i64) log_entries(
    const u8[::1] buf, i64 at, i64 count, i64 size_max, u8[::1] out
) noexcept
cpdef (i64, i64, i64, i64) log_messages(const u8[::1] buf, i64 at, i64 size_max, u8[::1] out) noexcept
