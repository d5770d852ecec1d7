# Numbers of one to eight bytes, literal texts and runs of bytes, at any offset. Nothing here checks bounds.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, strlen

ctypedef int64_t i64
ctypedef uint64_t u64
ctypedef int32_t i32
ctypedef uint32_t u32
ctypedef uint8_t u8
ctypedef const uint8_t* Source
ctypedef uint8_t* Out

cdef extern from *:
    """
    #include <stdint.h>
    static inline uint64_t flowstone_high_product(uint64_t a, uint64_t b) {
        return (uint64_t)(((unsigned __int128)a * b) >> 64);
    }
    static inline int64_t flowstone_trailing_zeros(uint64_t value) {
        return value ? __builtin_ctzll(value) : 64;
    }
    static inline int64_t flowstone_bit_length(uint64_t value) {
        return value ? 64 - __builtin_clzll(value) : 0;
    }
    """
    uint16_t __builtin_bswap16(uint16_t) noexcept nogil
    uint32_t __builtin_bswap32(uint32_t) noexcept nogil
    uint64_t __builtin_bswap64(uint64_t) noexcept nogil
    u64 high_product "flowstone_high_product"(u64 a, u64 b) noexcept nogil
    i64 trailing_zeros "flowstone_trailing_zeros"(u64 value) noexcept nogil
    i64 bit_length "flowstone_bit_length"(u64 value) noexcept nogil


cdef inline Source source(const uint8_t[::1] buf) noexcept nogil:
    return &buf[0]


cdef inline Out target(uint8_t[::1] buf) noexcept nogil:
    return &buf[0]


cdef inline Source content(bytes raw) noexcept:
    return <Source>PyBytes_AS_STRING(raw)


cdef inline bytes piece(Source buf, i64 at, i64 end):
    return PyBytes_FromStringAndSize(<const char*>buf + at, end - at)


cdef inline bytes written(Out out, i64 end):
    return PyBytes_FromStringAndSize(<const char*>out, end)


cdef inline i64* numbers(int64_t[::1] array) noexcept nogil:
    return &array[0]


cdef inline i64 byte(Source buf, i64 at) noexcept nogil:
    return buf[at]


cdef inline i64 signed(u64 word) noexcept nogil:
    return <i64>word


cdef inline i64 signed32(i64 value) noexcept nogil:
    return <i32>value


cdef inline u64 word(i64 value) noexcept nogil:
    return <u64>value


cdef inline i64 big16(Source buf, i64 at) noexcept nogil:
    cdef uint16_t value
    memcpy(&value, buf + at, 2)
    return __builtin_bswap16(value)


cdef inline i64 big32(Source buf, i64 at) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, buf + at, 4)
    return __builtin_bswap32(value)


cdef inline u64 big64(Source buf, i64 at) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, buf + at, 8)
    return __builtin_bswap64(value)


cdef inline i64 little32(Source buf, i64 at) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, buf + at, 4)
    return value


cdef inline u64 little64(Source buf, i64 at) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, buf + at, 8)
    return value


cdef inline double float64(u64 word) noexcept nogil:
    cdef double value
    memcpy(&value, &word, 8)
    return value


cdef inline i64 float32_bits(double value) noexcept nogil:
    cdef float short = <float>value
    cdef uint32_t bits
    memcpy(&bits, &short, 4)
    return bits


cdef inline double float32(i64 word) noexcept nogil:
    cdef uint32_t bits = <uint32_t>word
    cdef float value
    memcpy(&value, &bits, 4)
    return value


cdef inline u64 float_bits(double value) noexcept nogil:
    cdef uint64_t word
    memcpy(&word, &value, 8)
    return word


cdef inline i64 poke(Out out, i64 at, i64 value) noexcept nogil:
    out[at] = <uint8_t>value
    return at + 1


cdef inline void poke64(Out out, i64 at, u64 value) noexcept nogil:
    memcpy(out + at, &value, 8)


cdef inline i64 put(Out out, i64 at, const char* text) noexcept nogil:
    cdef size_t count = strlen(text)
    memcpy(out + at, text, count)
    return at + <i64>count


cdef inline i64 copy(Out out, i64 at, Source source, i64 start, i64 count) noexcept nogil:
    memcpy(out + at, source + start, count)
    return at + count


cdef inline void copy32(Out out, i64 at, Source source, i64 start) noexcept nogil:
    memcpy(out + at, source + start, 32)
