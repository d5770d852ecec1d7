cimport cython

from flowstone.iproto.constants cimport Key, RequestType
from flowstone.iproto.request_scan cimport (
    INDEX_BASE,
    INDEX_ID,
    KEY_AT,
    KEY_END,
    OPS_AT,
    OPS_END,
    SPACE_ID,
    SYNC,
    TUPLE_AT,
    TUPLE_END,
    TYPE,
)
from flowstone.iproto.row_batch_kernels cimport put_header
from flowstone.iproto.scan cimport COMMIT
from flowstone.native.msgpack cimport put_big, put_pair, put_uint
from flowstone.native.words cimport Out, Source, content, copy, float_bits, i64, poke, signed, source, target, u8

cdef i64 ROW_OVERHEAD
cdef i64 REPLY_OVERHEAD

@cython.locals(key=bytes)
cpdef i64 rows_bound(i64 content_size, list logged) except -1
@cython.locals(raw=bytes, size=i64)
cpdef i64 replies_bound(list results) except -1
@cython.locals(key=bytes, row=i64, at=i64, count=i64, row_lsn=i64, kind=i64)
cpdef (i64, i64) build_rows(
    const u8[::1] buf,
    const i64[:, :] cells,
    i64 start,
    list logged,
    u8[::1] out,
    i64 replica_id,
    i64 lsn,
    double timestamp,
    i64 flags,
) except *
cdef i64 put_part(Source buf, i64 start, i64 end, Out out, i64 at) noexcept
@cython.locals(is_update=bint, index_id=i64, pairs=i64)
cdef i64 put_key_body(Source buf, const i64[:, :] cells, i64 row, bytes key, Out out, i64 at) noexcept
cdef i64 put_upsert_body(Source buf, const i64[:, :] cells, i64 row, Out out, i64 at) noexcept
@cython.locals(raw=bytes, at=i64, i=i64, head=i64, sync=i64)
cpdef i64 build_replies(
    list results,
    const i64[:, :] cells,
    i64 start,
    u8[::1] out,
    i64 schema_version,
    i64 wide,
    i64[::1] edges,
) except -1
cdef i64 put_head(Out out, i64 at, i64 sync, i64 schema_version, i64 wide, i64 count) noexcept nogil
