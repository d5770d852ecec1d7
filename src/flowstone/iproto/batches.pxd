from flowstone.iproto.constants cimport Key, RequestType
from flowstone.iproto.request_scan cimport KEY_AT, KEY_END, SPACE_ID, SYNC, TUPLE_AT, TUPLE_END, TYPE
from flowstone.iproto.row_batch_kernels cimport put_header
from flowstone.iproto.scan cimport COMMIT
from flowstone.native.msgpack cimport put_big, put_uint
from flowstone.native.words cimport copy, float_bits, i64, poke, signed, source, target, u8

cdef i64 ROW_OVERHEAD
cdef i64 REPLY_OVERHEAD

cpdef i64 rows_bound(i64 count, i64 content) noexcept nogil
cpdef i64 replies_bound(i64 count, i64 content) noexcept nogil
cpdef (i64, i64) build_rows(
    const u8[::1] buf,
    const i64[:, :] cells,
    i64 start,
    i64 end,
    u8[::1] out,
    i64 replica_id,
    i64 lsn,
    double timestamp,
    i64 flags,
) noexcept nogil
cpdef i64 build_replies(
    const u8[::1] tuples,
    const i64[:] ats,
    const i64[:] sizes,
    const i64[:, :] cells,
    i64 start,
    i64 end,
    u8[::1] out,
    i64 schema_version,
    i64 wide,
    i64[::1] edges,
) noexcept nogil
