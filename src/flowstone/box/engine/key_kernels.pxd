from libc.math cimport floor

from flowstone.box.engine.key_parts cimport (
    PART_BINARY,
    PART_BOOLEAN,
    PART_INTEGER,
    PART_NUMBER,
    PART_STRING,
    PART_UUID,
)
from flowstone.native.msgpack cimport CHILDREN, FIXED, LENGTH, put_big, read_array, read_integer, read_text, value_end
from flowstone.native.words cimport Out, Source, big16, big32, big64, byte, copy, float64, i64, poke, source, target, u8

cdef double INTEGERS_END

cdef i64 put_integer(Out out, i64 to, i64 value) noexcept nogil
cdef i64 put_integer_at(Source buf, i64 at, Out out, i64 to) noexcept nogil
cdef i64 put_number_at(Source buf, i64 at, Out out, i64 to) noexcept nogil
cdef i64 put_bytes(Source buf, i64 start, i64 end, i64 first, Out out, i64 to) noexcept nogil
cdef i64 put_string_at(Source buf, i64 at, Out out, i64 to) noexcept nogil
cdef i64 put_binary_at(Source buf, i64 at, Out out, i64 to) noexcept nogil
cdef i64 put_boolean_at(Source buf, i64 at, Out out, i64 to) noexcept nogil
cdef i64 put_uuid_at(Source buf, i64 at, Out out, i64 to) noexcept nogil
cdef i64 put_scalar_at(Source buf, i64 at, Out out, i64 to) noexcept nogil
cdef i64 put_part(Source buf, i64 at, i64 kind, Out out, i64 to) noexcept nogil
cdef i64 find_fields(Source buf, i64 at, i64 end, const i64[::1] fields, i64[::1] starts) noexcept nogil
cpdef i64 encode_keys(
    const u8[::1] buf,
    const i64[:] offsets,
    const i64[::1] fields,
    const i64[::1] kinds,
    i64[::1] starts,
    u8[::1] out,
    i64[::1] ends,
    u8[::1] is_done,
) noexcept
cdef i64 put_keys(
    Source buf,
    const i64[:] offsets,
    const i64[::1] fields,
    const i64[::1] kinds,
    i64[::1] starts,
    Out out,
    i64[::1] ends,
    u8[::1] is_done,
) noexcept nogil
