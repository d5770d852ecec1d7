# Whole numbers as decimal text, see integer_text.py.

from flowstone.native.words cimport Out, i64, poke, poke64, trailing_zeros, u64, word

cdef enum:
    E16 = 10000000000000000
    LANES_2 = 0x0000007F0000007F
    LANES_4 = 0x000F000F000F000F
    ZEROS = 0x3030303030303030


cdef inline u64 eight_digits(u64 value) noexcept nogil:
    cdef u64 high = value // 10000
    cdef u64 x = high | ((value - high * 10000) << 32)
    high = ((x * 10486) >> 20) & LANES_2
    x = high | ((x - high * 100) << 16)
    high = ((x * 103) >> 10) & LANES_4
    return high | ((x - high * 10) << 8)


cdef inline i64 write_eight(u64 value, Out out, i64 at) noexcept nogil:
    poke64(out, at, eight_digits(value) | ZEROS)
    return at + 8


cdef inline i64 write_short(u64 value, Out out, i64 at) noexcept nogil:
    cdef u64 digits = eight_digits(value)
    cdef i64 skipped = min(trailing_zeros(digits) >> 3, 7)
    poke64(out, at, (digits | ZEROS) >> (skipped << 3))
    return at + 8 - skipped


cdef inline i64 write_unsigned(u64 value, Out out, i64 at) noexcept nogil:
    cdef u64 top, high
    if value < 100000000:
        return write_short(value, out, at)
    if value < E16:
        high = value // 100000000
        at = write_short(high, out, at)
        return write_eight(value - high * 100000000, out, at)
    top = value // E16
    value -= top * E16
    high = value // 100000000
    at = write_short(top, out, at)
    at = write_eight(high, out, at)
    return write_eight(value - high * 100000000, out, at)


cdef inline i64 write_signed(i64 value, Out out, i64 at) noexcept nogil:
    cdef u64 size = word(value)
    if value < 0:
        at = poke(out, at, 45)
        size = 0 - size
    return write_unsigned(size, out, at)
