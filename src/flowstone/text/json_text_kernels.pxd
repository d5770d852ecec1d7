cimport cython
from flowstone.native.words cimport (
    Out,
    Source,
    big16,
    big32,
    big64,
    byte,
    float32,
    float64,
    i64,
    little64,
    numbers,
    poke,
    poke64,
    put,
    signed,
    signed32,
    source,
    target,
    trailing_zeros,
    u8,
    u64,
    word,
)
from flowstone.text.float_text cimport write_double
from flowstone.text.integer_text cimport write_short, write_signed, write_unsigned
from flowstone.text.json_extension cimport base64_size, write_base64, write_extension, write_hex
from flowstone.text.json_limits cimport FULL, MALFORMED, OK, ROOM, TOO_DEEP, UNSUPPORTED

cdef enum:
    LOWEST = 0x0101010101010101
    HIGHEST = 0x8080808080808080
    SPACES = 0x2020202020202020
    QUOTES = 0x2222222222222222
    BACKSLASHES = 0x5C5C5C5C5C5C5C5C

cdef const u8[::1] ESCAPES
cdef i64 NESTING_MAX

cdef u64 special_bits(u64 eight) noexcept nogil
cdef i64 sequence_length(Source buf, i64 at, i64 end) noexcept nogil
cdef (i64, i64) write_special(Source buf, i64 size, i64 at, i64 end, Out out, i64 room, i64 to) noexcept nogil
cdef i64 write_escape(i64 value, Out out, i64 to) noexcept nogil
cdef i64 write_string(Source buf, i64 size, i64 at, i64 end, Out out, i64 room, i64 to) noexcept nogil
cdef (i64, i64, i64) write_integer(i64 marker, Source buf, i64 at, Out out, i64 to) noexcept nogil
cdef (i64, i64, i64) write_number(i64 marker, Source buf, i64 at, i64 end, Out out, i64 to) noexcept nogil
cdef (i64, i64, i64) write_sized(i64 marker, Source buf, i64 at, i64 end, Out out, i64 room, i64 to) noexcept nogil
cdef (i64, i64) read_length(i64 exponent, Source buf, i64 at, i64 end) noexcept nogil
cdef (i64, i64, i64) write_plain(i64 marker, Source buf, i64 at, i64 end, Out out, i64 to) noexcept nogil
cdef (i64, i64, i64) write_scalar(
    i64 marker, Source buf, i64 at, i64 end, Out out, i64 room, i64 to, bint is_key
) noexcept nogil
cdef (i64, i64) string_bounds(i64 marker, Source buf, i64 at, i64 end) noexcept nogil
cdef (i64, i64, i64) container(Source buf, i64 at, i64 end) noexcept nogil
@cython.locals(is_key=bint)
cdef (i64, i64, i64) write_value(
    Source buf, i64 size, i64 at, i64 end, Out out, i64 room, i64 to, i64* stack
) noexcept nogil
cpdef (i64, i64) write_column(
    const u8[::1] buf, const i64[:] starts, const i64[:] ends, i64 first, u8[::1] out, i64[::1] offsets, i64[::1] stack
) noexcept
