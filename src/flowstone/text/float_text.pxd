cimport cython
from flowstone.native.words cimport (
    Out,
    bit_length,
    float_bits,
    high_product,
    i64,
    little64,
    poke,
    put,
    signed,
    source,
    u8,
    u64,
    word,
)
from flowstone.text.integer_text cimport write_eight, write_short, write_unsigned
from flowstone.text.powers_of_ten cimport POWER_MIN

cdef enum:
    MASK = 0xFFFFFFFFFFFFFFFF
    HIDDEN = 0x10000000000000
    FRACTION = 0xFFFFFFFFFFFFF
    SIGN = 0x8000000000000000

cdef const u8[::1] POWERS
cdef const u8[::1] SHORT_POWERS

cdef u64 ten_to(i64 k) noexcept nogil
cdef u64 round_to_odd(u64 high, u64 low, u64 value) noexcept nogil
@cython.locals(closer=bint, down=bint, up=bint)
cdef (u64, i64) shortest(u64 fraction, i64 exponent) noexcept nogil
cdef i64 count_digits(u64 value) noexcept nogil
cdef i64 write_padded(u64 value, i64 width, Out out, i64 at) noexcept nogil
cdef i64 write_padded_short(u64 value, i64 width, Out out, i64 at) noexcept nogil
cdef i64 write_decimal(u64 digits, i64 k, Out out, i64 at) noexcept nogil
cdef i64 write_exponent(i64 exponent, Out out, i64 at) noexcept nogil
cdef i64 write_double(double value, Out out, i64 at) noexcept nogil
