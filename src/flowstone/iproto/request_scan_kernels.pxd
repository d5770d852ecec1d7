from flowstone.iproto.constants cimport Key, RequestType
from flowstone.iproto.request_scan cimport (
    AT,
    CODE,
    END,
    INDEX_BASE,
    INDEX_ID,
    ITERATOR,
    KEY_AT,
    KEY_END,
    LIMIT,
    OFFSET,
    OPS_AT,
    OPS_END,
    PACKET_AT,
    PACKET_END,
    SIZE_MAX,
    SPACE_ID,
    SPACE_ID_MAX,
    SPAN,
    STATUS,
    SYNC,
    TOO_LARGE,
    TUPLE_AT,
    TUPLE_END,
    TYPE,
    TYPE_SHIFT,
    WRONG_LENGTH,
)
from flowstone.native.msgpack cimport read_array, read_map, read_uint, read_unsigned, value_end
from flowstone.native.words cimport Source, byte, i64, source, u8

cdef i64 scan_request(Source buf, i64 at, i64 end, i64[:, :] cells, i64 row) noexcept nogil
cdef i64 array_end(Source buf, i64 at, i64 end) noexcept nogil
cdef i64 scan_statement(Source buf, i64 at, i64 end, i64[:, :] cells, i64 row) noexcept nogil
cdef i64 is_statement(i64[:, :] cells, i64 row) noexcept nogil
cpdef i64 scan_packet(const u8[::1] buf, i64[:, :] cells) noexcept nogil
cpdef i64 scan_requests(const u8[::1] buf, i64[:, :] spans, i64[:, :] cells) noexcept nogil
