from flowstone.native.msgpack cimport read_uint
from flowstone.native.words cimport Source, big32, byte, i64, little64, signed, source, u8, u64, word
from flowstone.xlog.block_table cimport (
    BLOCK_AT,
    CONTENT_BOUND,
    FIXHEADER_SIZE,
    FULL,
    IS_ZSTD,
    NEED,
    OTHER,
    PAYLOAD_AT,
    PAYLOAD_END,
    ROW_WORD,
    ZROW_WORD,
)

cdef enum:
    ZSTD_MAGIC = 0x28B52FFD
    ZSTD_BLOCK_SIZE_MAX = 0x20000
    RUN = 1
    COMPRESSED = 2

cdef u64[:, ::1] CRC

cdef u64 column(u64 value, i64 number) noexcept nogil
cdef i64 crc32c(Source buf, i64 at, i64 end) noexcept nogil
cpdef i64 checksum(const u8[::1] buf, i64 at, i64 end) noexcept nogil
cpdef void checksums(const u8[::1] buf, const i64[::1] edges, i64[::1] out) noexcept
cdef (i64, i64, i64) parse_fixheader(Source buf, i64 at) noexcept nogil
cpdef (i64, i64, i64) read_fixheader(const u8[::1] buf, i64 at) noexcept nogil
cdef i64 bound_of_frame(Source buf, i64 at, i64 end) noexcept nogil
cpdef i64 frame_bound(const u8[::1] buf, i64 at, i64 end) noexcept nogil
cdef bint is_blank(Source buf, i64 payload, i64 size, i64 crc) noexcept nogil
cpdef (i64, i64, i64) walk(const u8[::1] buf, i64 at, i64[:, :] blocks, i64 count, bint verify) noexcept
cdef (i64, i64, i64) walk_blocks(
    Source buf, i64 limit, i64 at, i64[:, :] blocks, i64 count, bint verify
) noexcept nogil
