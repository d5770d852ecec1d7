cimport cython
from flowstone.iproto.constants cimport Flag, Key, RaftKey, RequestType
from flowstone.iproto.scan cimport (
    BODY_AT,
    COMMIT,
    FLAGS,
    GROUP_ID,
    LSN,
    REPLICA_ID,
    ROW_END,
    SINGLE,
    SPACE_ID,
    TIMESTAMP,
    TSN,
    TYPE,
)
from flowstone.native.msgpack cimport read_map
from flowstone.native.words cimport (
    Out,
    Source,
    byte,
    copy,
    copy32,
    float64,
    i64,
    numbers,
    poke,
    put,
    source,
    target,
    u8,
    word,
)
from flowstone.text.float_text cimport write_double
from flowstone.text.integer_text cimport write_short, write_signed
from flowstone.text.json_limits cimport FULL, MALFORMED, OK, ROOM, UNSUPPORTED
from flowstone.text.json_row_names cimport KEYS_MAX, SLOT
from flowstone.text.json_text_kernels cimport write_value

cdef const u8[::1] TYPE_TEXTS
cdef const u8[::1] TYPE_LENGTHS
cdef const u8[::1] KEY_TEXTS
cdef const u8[::1] KEY_LENGTHS

cdef i64 write_rare(i64 value, Out out, i64 to) noexcept nogil
cdef i64 write_header(
    i64 lsn, bint single, i64 flags, i64 replica_id, i64 group_id, i64 kind, i64 tsn, Out out, i64 to
) noexcept nogil
cdef i64 write_space(
    i64* space_ids, i64 count, i64* offsets, Source texts, i64 space_id, Out out, i64 room, i64 to
) noexcept nogil
cdef i64 write_key(i64 key, i64 slot, Out out, i64 to) noexcept nogil
cdef i64 write_state(i64 state, Out out, i64 to) noexcept nogil
cpdef (i64, i64, i64) write_rows(
    const u8[::1] buf,
    const i64[:, :] cells,
    const i64[:] selected,
    i64 first,
    i64[::1] space_ids,
    i64[::1] offsets,
    const u8[::1] texts,
    u8[::1] out,
    i64 to,
    i64[::1] stack,
) noexcept
@cython.locals(raft=bint)
cdef (i64, i64) write_body(
    Source buf,
    i64 size,
    i64 at,
    i64 end,
    i64 kind,
    i64 space_id,
    i64* space_ids,
    i64 count,
    i64* offsets,
    Source texts,
    Out out,
    i64 room,
    i64 to,
    i64* stack,
) noexcept nogil
