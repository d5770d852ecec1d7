cimport cython

from flowstone.iproto.constants cimport GROUP_LOCAL, RequestType
from flowstone.iproto.row_batches cimport NO_ROOM, ROW_OVERHEAD
from flowstone.iproto.scan cimport (
    BODY_AT,
    COMMIT,
    FLAGS,
    GROUP_ID,
    LSN,
    REPLICA_ID,
    ROW_END,
    SINGLE,
    TIMESTAMP,
    TSN,
    TYPE,
)
from flowstone.native.msgpack cimport put_big, put_pair
from flowstone.native.words cimport (
    Out,
    Source,
    copy,
    float_bits,
    i64,
    poke,
    signed,
    source,
    target,
    u8,
    word,
)

cdef enum:
    NOT_SIGN = 0x7FFF_FFFF_FFFF_FFFF

@cython.locals(alone=bint)
cdef i64 put_header(
    Out out,
    i64 at,
    i64 kind,
    i64 sync,
    i64 replica_id,
    i64 group_id,
    i64 lsn,
    i64 timestamp,
    i64 tsn,
    i64 flags,
    bint is_explicit,
) noexcept nogil
cdef bint was_control(const i64[:, :] cells, i64 row) noexcept nogil
cdef i64 put_body(Source buf, const i64[:, :] cells, i64 row, Out out, i64 at) noexcept nogil
cdef bint fits(const i64[:, :] cells, i64 row, i64 room, i64 at) noexcept nogil
cdef bint is_sent(const i64[:, :] cells, i64 row, const u8[::1] keep) noexcept nogil
cdef i64 put_log_row(Source buf, const i64[:, :] cells, i64 row, i64 timestamp, Out out, i64 at) noexcept nogil
cpdef i64 build_log_rows(
    const u8[::1] buf, const i64[:, :] cells, i64 first, i64 stop, double timestamp, u8[::1] out
) noexcept nogil
@cython.locals(flags=i64, has_effect=bint, is_first=bint, is_local=bint)
cpdef i64 build_packets(
    const u8[::1] buf, const i64[:, :] cells, const u8[::1] keep, i64 sync, u8[::1] out
) noexcept nogil
cpdef i64 gather_log_rows(
    const u8[::1] buf, const i64[:, :] cells, i64 first, i64 stop, u8[::1] out
) noexcept nogil
cpdef i64 gather_snapshot_rows(
    const u8[::1] buf, const i64[:, :] cells, i64 first, i64 stop, i64 number, double timestamp, u8[::1] out
) noexcept nogil
cpdef i64 gather_tuples(
    const u8[::1] buf, const i64[:] offsets, i64 space_id, i64 group_id, i64 number, double timestamp, u8[::1] out
) noexcept nogil
