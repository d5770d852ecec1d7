from flowstone.iproto.constants cimport TYPE_ERROR, VCLOCK_MAX, Key, RequestType
from flowstone.iproto.row_batches cimport (
    AT,
    BAD_LENGTH,
    BAD_REPLICA_ID,
    BAD_ROW,
    BAD_TSN,
    ERROR_PACKET,
    INTERLEAVED,
    NEED,
    NEEDED,
    OPEN,
    OPEN_TSN,
    ROWS,
    TOO_LARGE,
    WHOLE_AT,
    WHOLE_ROWS,
)
from flowstone.iproto.scan cimport (
    BODY_AT,
    COMMIT,
    DONE,
    FLAGS,
    FULL,
    GROUP_ID,
    INDEX_BASE,
    INDEX_ID,
    KEY_AT,
    KEY_END,
    LSN,
    MALFORMED,
    OPS_AT,
    OPS_END,
    REPLICA_ID,
    ROW_AT,
    ROW_END,
    SINGLE,
    SPACE_ID,
    SPAN,
    TIMESTAMP,
    TSN,
    TUPLE_AT,
    TUPLE_END,
    TYPE,
)
from flowstone.native.msgpack cimport read_length, read_map, read_uint, read_unsigned, value_end
from flowstone.native.words cimport Source, big64, byte, i64, signed, source, u8, word

cdef i64 ROW_HEADER_SIZE_MAX

cpdef i64 skip_value(const u8[::1] buf, i64 at, i64 end) noexcept nogil
cdef i64 scan_header(Source buf, i64 at, i64 end, i64[:, :] cells, i64 row) noexcept nogil
cdef i64 scan_body(Source buf, i64 at, i64 end, i64[:, :] cells, i64 row) noexcept nogil
cpdef (i64, i64, i64, i64) scan_spans(
    const u8[::1] buf, const i64[:, :] spans, i64 span, i64 at, i64[:, :] cells, i64 row
) noexcept nogil
cdef i64 scan_packet(Source buf, i64 at, i64 end, i64[:, :] cells, i64 row) noexcept nogil
cpdef i64 scan_packets(
    const u8[::1] buf, i64[:, :] cells, i64 room, i64 packet_size_max, i64 transaction_size_max, i64[::1] progress
) noexcept nogil
cpdef void scan_images(const u8[::1] buf, const i64[:, :] cells, const i64[:] rows, i64[:, :] out) noexcept nogil
