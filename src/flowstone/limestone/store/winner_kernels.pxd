cimport cython

from flowstone.limestone.format cimport entry_table
from flowstone.limestone.store.winner_table cimport (
    AT,
    KEY_AT,
    KEY_SIZE,
    MAJOR,
    MINOR,
    ORIGIN,
    SIZE,
    STORAGE_ID,
)
from flowstone.native.words cimport (
    Out,
    Source,
    big64,
    byte,
    copy,
    high_product,
    i64,
    little64,
    poke64,
    signed,
    source,
    target,
    u8,
    u64,
    word,
)

cpdef enum:
    COUNT = 0
    KEYS_END = 1
    MAX_BLOB = 2
    SEED = 3

cdef u64 PRIME, TAG

cdef u64 _mixed(u64 value, u64 more) noexcept nogil
cdef u64 _short_word(Source data, i64 at, i64 count) noexcept nogil
cdef u64 _tag(Source data, i64 at, i64 size, u64 storage_id, u64 seed) noexcept nogil
cdef bint _is_same(Source data, i64 at, Source other, i64 other_at, i64 size) noexcept nogil
cpdef i64 settle(
    const u8[::1] buf,
    i64 base,
    i64 origin,
    const u64[:, :] table,
    i64 start,
    const u8[::1] takes,
    u64[::1] slots,
    u64[:, ::1] rows,
    u8[::1] keys,
    u64[::1] state,
) noexcept
cpdef void refill(const u64[::1] old, u64[::1] new) noexcept
cpdef void prefixes(const u64[:, ::1] rows, u8[::1] keys, u64[:, ::1] words) noexcept
@cython.locals(is_swapped=bint)
cpdef bint order_by(const u64[::1] words, i64[::1] order, i64[::1] other, i64[::1] counts) noexcept
cdef void _distribute(
    const u64[::1] words, i64 shift, const i64[::1] order, i64[::1] out, i64[::1] places
) noexcept nogil
cdef bint _is_after(const u64[:, ::1] rows, Source data, i64 row, i64 other) noexcept nogil
cdef void _sift(const u64[:, ::1] rows, Source data, i64[::1] order, i64 first, i64 root, i64 end) noexcept nogil
cpdef void order_ties(const u64[:, ::1] rows, const u8[::1] keys, const u64[:, ::1] words, i64[::1] order) noexcept
cpdef void copy_spans(
    const u8[::1] buf, const i64[::1] starts, const i64[::1] sizes, u8[::1] out, const i64[::1] targets
) noexcept
cpdef void zero_versions(u8[::1] out, const i64[::1] targets, const i64[::1] key_sizes) noexcept
