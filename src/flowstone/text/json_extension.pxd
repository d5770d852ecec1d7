from flowstone.iproto.extensions cimport ExtensionType
from flowstone.native.words cimport (
    Out,
    Source,
    big16,
    byte,
    i64,
    little64,
    poke,
    poke64,
    signed,
    signed32,
    source,
    u8,
    word,
)
from flowstone.text.integer_text cimport eight_digits
from flowstone.text.json_limits cimport DECIMAL_DIGITS_MAX

cdef enum:
    ZEROS = 0x3030303030303030

cdef enum:
    FIRST_SECOND = -62167219200
    LAST_SECOND = 253402300799

cdef enum:
    DAY = 86400
    NANOSECONDS = 1000000000
    OFFSET_MIN = -720
    OFFSET_MAX = 840
    ZONE_INDEX_MAX = 1024

cdef const u8[::1] ALPHABET

cdef i64 base64_size(i64 count) noexcept nogil
cdef i64 write_base64(Source buf, i64 at, i64 count, Out out, i64 to) noexcept nogil
cdef i64 write_hex(i64 value, Out out, i64 to) noexcept nogil
cdef i64 write_uuid(Source buf, i64 at, i64 count, Out out, i64 to) noexcept nogil
cdef (i64, i64) read_scale(Source buf, i64 at, i64 end) noexcept nogil
cdef i64 nibble(Source buf, i64 at, i64 index) noexcept nogil
cdef i64 write_decimal(Source buf, i64 at, i64 count, Out out, i64 to) noexcept nogil
cdef i64 write_two(i64 value, Out out, i64 to) noexcept nogil
cdef i64 write_date(i64 days, Out out, i64 to) noexcept nogil
cdef i64 write_fraction(i64 nanoseconds, Out out, i64 to) noexcept nogil
cdef i64 write_datetime(Source buf, i64 at, i64 count, Out out, i64 to) noexcept nogil
cdef i64 write_extension(i64 kind, Source buf, i64 at, i64 count, Out out, i64 to) noexcept nogil
