cimport cython
from flowstone.limestone.format.entry_table cimport (
    BLOB_COUNT,
    KEY_AT,
    KEY_END,
    MAJOR,
    MINOR,
    STORAGE_ID,
    VALUE_AT,
    VALUE_END,
)
from flowstone.native.msgpack cimport put_big, put_uint
from flowstone.native.words cimport Out, Source, byte, copy, i64, little64, poke, signed, source, target, u8, u64, word

cpdef enum:
    TUPLE_ROOM = 40
    BLOB_ROOM = 9
    HEAD_ROOM = 3

cdef u64 MIX

cdef i64 _put_bytes(Out out, i64 at, Source data, i64 start, i64 end) noexcept nogil
cpdef i64 entry_tuples(
    const u8[::1] buf, const u64[:, :] table, const i64[:] rows, u8[::1] out, i64[:] ends
) noexcept
@cython.locals(at=i64, start=i64)
cpdef i64 join_fields(const u8[::1] data, const i64[:, ::1] edges, u8[::1] out, i64[:] ends) noexcept
cpdef void key_shares(
    const u8[::1] buf, const u64[:, :] table, const i64[:] rows, i64 shares, i64[:] out
) noexcept
