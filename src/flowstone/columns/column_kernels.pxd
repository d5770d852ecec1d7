cimport cython
from flowstone.columns.column_limits cimport (
    COLUMN_FULL,
    COPY_ROOM,
    DECIMAL_DIGITS_MAX,
    FITS,
    OFFSET_MAX,
    OUT_OF_RANGE,
    TOO_LARGE,
    TOO_PRECISE,
    WRONG_TYPE,
)
from flowstone.iproto.constants cimport RequestType
from flowstone.iproto.extensions cimport DECIMAL_EXPONENT_MAX, ExtensionType
from flowstone.iproto.scan cimport INDEX_ID, KEY_AT, KEY_END, TUPLE_AT, TUPLE_END, TYPE
from flowstone.native.msgpack cimport NIL, put_big, read_array, read_integer, value_end
from flowstone.native.words cimport (
    Out,
    Source,
    big16,
    big32,
    big64,
    byte,
    copy,
    copy32,
    float32,
    float64,
    high_product,
    i32,
    i64,
    little32,
    little64,
    poke,
    poke64,
    signed,
    signed32,
    source,
    target,
    u8,
    u64,
    word,
)

cdef i64 SECONDS_MAX
cdef i64 NANOSECONDS_END
cdef u64 ONES
cdef u64 NIBBLES
cdef u64 BYTES_APART
cdef u64 PAIRS_APART

cpdef i64 split_tuples(
    const u8[::1] buf, const i64[:, :] cells, const i64[:] rows, const i64[:] key_fields, i32[:, ::1] starts
) noexcept
cdef (i64, i64) read_int(Source buf, i64 at) noexcept nogil
@cython.locals(at=i64, nulls=i64)
cpdef (i64, i64, i64) int_column(const u8[::1] buf, const i32[::1] starts, i64[::1] out, u8[::1] valid) noexcept
@cython.locals(at=i64, nulls=i64, deferred=i64)
cpdef (i64, i64, i64, i64) double_column(
    const u8[::1] buf, const i32[::1] starts, double[::1] out, u8[::1] valid, i64[::1] later
) noexcept
@cython.locals(at=i64, marker=i64, nulls=i64)
cpdef (i64, i64, i64) bool_column(const u8[::1] buf, const i32[::1] starts, u8[::1] out, u8[::1] valid) noexcept
cdef (i64, i64) bytes_of(Source buf, i64 at) noexcept nogil
@cython.locals(at=i64, nulls=i64, total=i64)
cpdef (i64, i64, i64) bytes_lengths(
    const u8[::1] buf, const i32[::1] starts, i32[::1] offsets, u8[::1] valid
) noexcept
cdef void copy_value(Source buf, i64 end, i64 start, i64 length, Out out, i64 at) noexcept nogil
@cython.locals(at=i64, length=i64)
cpdef void bytes_copy(const u8[::1] buf, const i32[::1] starts, const i32[::1] offsets, u8[::1] out) noexcept
@cython.locals(at=i64, length=i64)
cpdef void span_copy(const u8[::1] buf, const i64[:] starts, const i32[::1] offsets, u8[::1] out) noexcept
cpdef void value_ends(const u8[::1] buf, const i32[::1] starts, i64[::1] ends) noexcept
@cython.locals(start=i64, at=i64, count=i64, to=i64)
cpdef i64 gather_extra(
    const u8[::1] buf, const i32[::1] starts, const i64[:] ends, u8[::1] out, i64[::1] begins, i64[::1] finishes
) noexcept
cdef (i64, i64, i64) extension(Source buf, i64 at) noexcept nogil
cdef bint is_decimal(Source buf, i64 at) noexcept nogil
cdef u64 hex_digits(u64 value) noexcept nogil
@cython.locals(at=i64, nulls=i64, to=i64)
cpdef (i64, i64, i64) uuid_column(
    const u8[::1] buf, const i32[::1] starts, i32[::1] offsets, u8[::1] out, u8[::1] valid
) noexcept
@cython.locals(at=i64, nulls=i64, rest=i64)
cpdef (i64, i64, i64) datetime_column(const u8[::1] buf, const i32[::1] starts, i64[::1] out, u8[::1] valid) noexcept
@cython.locals(count=i64, is_last=bint)
cdef (i64, i64, i64, i64) decimal_digits(Source buf, i64 at, Out digits, i64 room) noexcept nogil
@cython.locals(rest=u64, negative=bint, count=i64)
cdef (i64, i64, i64, i64) whole_digits(Source buf, i64 at, Out digits) noexcept nogil
@cython.locals(at=i64)
cpdef (i64, i64) decimal_kinds(const u8[::1] buf, const i32[::1] starts, u8[::1] digits) noexcept
@cython.locals(carry=u64)
cdef (u64, u64) times_ten_plus(u64 high, u64 low, i64 digit) noexcept nogil
@cython.locals(at=i64, nulls=i64, high=u64, low=u64)
cpdef (i64, i64, i64) decimal128_column(
    const u8[::1] buf, const i32[::1] starts, i64 scale, u64[::1] out, u8[::1] valid, u8[::1] digits
) noexcept
