# MessagePack values. Every function that takes `end` is bounded by it; the others trust their caller.

from libc.stdint cimport int8_t, int16_t, int32_t
from libc.string cimport memcpy

from flowstone.native.words cimport (
    Out,
    Source,
    __builtin_bswap64,
    big16,
    big32,
    big64,
    byte,
    i64,
    poke,
    signed,
    u64,
)

cdef enum:
    NIL = 0xC0
    NO_VALUE = 255

cdef extern from *:
    """
    /* Per first byte of a value, as in msgpack.py: tests/native/test_msgpack.py compares them. */
    #define FLOWSTONE_ROW(value) value, value, value, value, value, value, value, value, \\
        value, value, value, value, value, value, value, value
    static const unsigned char flowstone_fixed[256] = {
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0),
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0),
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0),
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
        16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
        0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 4, 8, 1, 2, 4, 8,
        1, 2, 4, 8, 2, 3, 5, 9, 17, 0, 0, 0, 0, 0, 0, 0,
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0)};
    static const unsigned char flowstone_children[256] = {
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0),
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0),
        0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0),
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2,
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0)};
    static const unsigned char flowstone_length[256] = {
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0),
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0),
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0), FLOWSTONE_ROW(0),
        0, 255, 0, 0, 1, 2, 4, 1, 2, 4, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 2, 4, 2, 4,
        FLOWSTONE_ROW(0), FLOWSTONE_ROW(0)};
    """
    const unsigned char* FIXED "flowstone_fixed"
    const unsigned char* CHILDREN "flowstone_children"
    const unsigned char* LENGTH "flowstone_length"


cdef inline i64 value_end(Source buf, i64 at, i64 end) noexcept nogil:
    cdef i64 todo = 1
    cdef i64 marker, width, count, children
    while todo > 0:
        if at >= end:
            return -1
        marker = byte(buf, at)
        at += 1
        width = LENGTH[marker]
        if width == 0:
            at += FIXED[marker]
            todo += CHILDREN[marker] - 1
        else:
            if width == NO_VALUE or at + width > end:
                return -1
            count = byte(buf, at) if width == 1 else (big16(buf, at) if width == 2 else big32(buf, at))
            at += width
            children = CHILDREN[marker]
            todo -= 1
            if children:
                todo += count * children
            else:
                at += count + FIXED[marker]
    return at if at <= end else -1


cdef inline (i64, i64) read_unsigned(Source buf, i64 at, i64 end) noexcept nogil:
    cdef i64 marker, after
    if at >= end:
        return 0, -1
    marker = byte(buf, at)
    if marker < 0x80:
        return marker, at + 1
    if marker < 0xCC or marker > 0xCF:
        return 0, -1
    after = at + 1 + (1 << (marker - 0xCC))
    if after > end:
        return 0, -1
    if marker == 0xCC:
        return byte(buf, at + 1), after
    if marker == 0xCD:
        return big16(buf, at + 1), after
    if marker == 0xCE:
        return big32(buf, at + 1), after
    return signed(big64(buf, at + 1)), after


cdef inline (i64, i64) read_uint(Source buf, i64 at, i64 end) noexcept nogil:
    cdef i64 value, after
    value, after = read_unsigned(buf, at, end)
    return value, (after if value >= 0 else -1)


cdef inline (i64, i64) read_map(Source buf, i64 at, i64 end) noexcept nogil:
    cdef i64 marker
    if at >= end:
        return 0, -1
    marker = byte(buf, at)
    if 0x80 <= marker <= 0x8F:
        return marker & 0x0F, at + 1
    if marker == 0xDE and at + 3 <= end:
        return big16(buf, at + 1), at + 3
    if marker == 0xDF and at + 5 <= end:
        return big32(buf, at + 1), at + 5
    return 0, -1


cdef inline (i64, i64) read_array(Source buf, i64 at, i64 end) noexcept nogil:
    cdef i64 marker
    if at >= end:
        return -1, at
    marker = byte(buf, at)
    if 0x90 <= marker <= 0x9F:
        return marker & 0x0F, at + 1
    if marker == 0xDC and at + 3 <= end:
        return big16(buf, at + 1), at + 3
    if marker == 0xDD and at + 5 <= end:
        return big32(buf, at + 1), at + 5
    return -1, at


cdef inline (i64, i64) read_integer(Source buf, i64 at) noexcept nogil:
    cdef i64 marker = byte(buf, at)
    cdef i64 value
    if marker < 0x80:
        return marker, 1
    if marker >= 0xE0:
        return marker - 0x100, 1
    if marker == 0xCC:
        return byte(buf, at + 1), 1
    if marker == 0xCD:
        return big16(buf, at + 1), 1
    if marker == 0xCE:
        return big32(buf, at + 1), 1
    if marker == 0xD0:
        return <int8_t>byte(buf, at + 1), 1
    if marker == 0xD1:
        return <int16_t>big16(buf, at + 1), 1
    if marker == 0xD2:
        return <int32_t>big32(buf, at + 1), 1
    if marker == 0xCF or marker == 0xD3:
        value = signed(big64(buf, at + 1))
        return value, 1 if marker == 0xD3 or value >= 0 else 0
    return 0, 0


cdef inline (i64, i64) read_text(Source buf, i64 at) noexcept nogil:
    cdef i64 marker = byte(buf, at)
    if 0xA0 <= marker <= 0xBF:
        return at + 1, at + 1 + (marker & 0x1F)
    if marker == 0xD9:
        return at + 2, at + 2 + byte(buf, at + 1)
    if marker == 0xDA:
        return at + 3, at + 3 + big16(buf, at + 1)
    if marker == 0xDB:
        return at + 5, at + 5 + big32(buf, at + 1)
    return -1, -1


cdef inline i64 put_big(Out out, i64 at, i64 value, i64 width) noexcept nogil:
    cdef u64 word = __builtin_bswap64(<u64>value << (64 - 8 * width))
    memcpy(out + at, &word, width)
    return at + width


cdef inline i64 put_uint(Out out, i64 at, i64 value) noexcept nogil:
    if value >> 32:
        return put_big(out, poke(out, at, 0xCF), value, 8)
    if value < 0x80:
        return poke(out, at, value)
    if value < 0x100:
        return poke(out, poke(out, at, 0xCC), value)
    if value < 0x10000:
        return put_big(out, poke(out, at, 0xCD), value, 2)
    return put_big(out, poke(out, at, 0xCE), value, 4)


cdef inline i64 put_pair(Out out, i64 at, i64 key, i64 value) noexcept nogil:
    return put_uint(out, poke(out, at, key), value)


cdef inline (i64, i64) read_length(Source buf, i64 at, i64 end) noexcept nogil:
    cdef i64 marker, after, size
    if at >= end:
        return -2, at + 1
    marker = byte(buf, at)
    if marker >= 0x80:
        if marker < 0xCC or marker > 0xCF:
            return -1, at
        after = at + 1 + (1 << (marker - 0xCC))
        if after > end:
            return -2, after
    size, after = read_uint(buf, at, end)
    if after < 0:
        return -1, at
    return size, after
