cimport cython
from flowstone.limestone.tsurugi.row_layout cimport (
    FIXED,
    FORM,
    HAS_MARK,
    MASK,
    SIZE,
    SIZED,
    TARGET,
    TERMINATOR_SIZE,
    TEXT,
)
from flowstone.native.words cimport Out, Source, big32, big64, byte, i64, poke, signed, source, target, u8, u64, word

cdef i64 NULL_MARK
cdef i64 VALUE_MARK
cdef i64 SECOND_NANOSECONDS
cdef i64 SIGN32
cdef i64 ALL32

@cython.locals(at=i64, end=i64)
cpdef void split_rows(
    const u8[::1] buf,
    const i64[:] starts,
    const i64[:] ends,
    const i64[:, ::1] layout,
    i64[:, ::1] begins,
    i64[:, ::1] finishes,
    u8[::1] bad,
) noexcept
@cython.locals(line=i64, mask=i64, form=i64, mark=i64, size=i64, after=i64)
cdef i64 split_field(
    Source data,
    i64 at,
    i64 end,
    const i64[:, ::1] layout,
    i64 field,
    i64[:, ::1] begins,
    i64[:, ::1] finishes,
    i64 row,
) noexcept nogil
@cython.locals(at=i64, value=i64, is_valid=i64, nulls=i64, long_mask=u64, short_mask=i64)
cpdef i64 integer_column(
    const u8[::1] buf,
    const i64[::1] begins,
    i64 size,
    i64 mask,
    i64 least,
    i64 most,
    i64[::1] out,
    u8[::1] valid,
    u8[::1] bad,
) noexcept
@cython.locals(at=i64, bits=u64, short=i64, is_valid=i64, nulls=i64, long_mask=u64, short_mask=i64)
cpdef i64 float_column(
    const u8[::1] buf, const i64[::1] begins, i64 size, i64 mask, u64[::1] out, u8[::1] valid, u8[::1] bad
) noexcept
@cython.locals(
    at=i64, high=u64, low=u64, above=u64, below=u64, first=i64, each=i64, is_valid=i64, nulls=i64, limit_high=u64,
    limit_low=u64
)
cpdef i64 decimal_column(
    const u8[::1] buf,
    const i64[::1] begins,
    i64 size,
    i64 mask,
    i64 high_end,
    i64 low_end,
    u64[::1] out,
    u8[::1] valid,
    u8[::1] bad,
) noexcept
@cython.locals(at=i64, rest=i64, is_valid=i64, nulls=i64, long_mask=u64, short_mask=i64)
cpdef i64 point_column(
    const u8[::1] buf,
    const i64[::1] begins,
    i64 mask,
    i64[::1] seconds,
    i64[::1] nanos,
    u8[::1] valid,
    u8[::1] bad,
) noexcept
@cython.locals(at=i64, value=i64, is_valid=i64, nulls=i64, long_mask=u64)
cpdef i64 lob_column(
    const u8[::1] buf, const i64[::1] begins, i64 mask, i64[::1] out, u8[::1] valid, u8[::1] bad
) noexcept
@cython.locals(nulls=i64, total=i64, is_valid=i64)
cpdef i64 byte_lengths(
    const i64[::1] begins, const i64[::1] finishes, i64[::1] offsets, u8[::1] valid, u8[::1] bad
) noexcept
@cython.locals(at=i64, to=i64)
cpdef void byte_copies(
    const u8[::1] buf, const i64[::1] begins, i64 mask, const i64[::1] offsets, u8[::1] out
) noexcept
