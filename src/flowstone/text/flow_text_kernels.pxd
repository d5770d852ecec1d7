from flowstone.iproto.constants cimport Key
from flowstone.native.msgpack cimport read_map, value_end
from flowstone.native.words cimport (
    Out,
    Source,
    big32,
    big64,
    byte,
    copy,
    float32,
    float64,
    i64,
    numbers,
    poke,
    put,
    source,
    target,
    u8,
    word,
)
from flowstone.text.flow_shapes cimport HAS_INDEX_BASE, HAS_INDEX_ID, KEY_SIZE_MAX, STRANGE, Shape
from flowstone.text.integer_text cimport write_unsigned
from flowstone.text.json_limits cimport FULL, OK, ROOM, UNSUPPORTED
from flowstone.text.json_text_kernels cimport container, read_length, write_value

cdef i64 mark_body(Source buf, i64 at, i64 end) noexcept nogil
cpdef void body_marks(const u8[::1] buf, const i64[:] starts, const i64[:] ends, i64[::1] marks) noexcept
cdef bint is_odd_character(Source buf, i64 at, i64 end) noexcept nogil
cdef bint is_double_plain(Source buf, i64 at) noexcept nogil
cdef (i64, i64) string_bounds(Source buf, i64 at, i64 end) noexcept nogil
cdef bint are_keys_plain(Source buf, i64 at, i64 items, i64 end) noexcept nogil
cdef bint is_plain(Source buf, i64 at, i64 end) noexcept nogil
cdef i64 write_name(i64* offsets, i64 count, Source texts, i64 field, Out out, i64 room, i64 to) noexcept nogil
cdef (i64, i64) write_items(
    Source buf,
    i64 size,
    i64 at,
    i64 end,
    i64 shape,
    i64* offsets,
    i64 count,
    Source texts,
    Out out,
    i64 room,
    i64 to,
    i64* stack,
) noexcept nogil
cdef (i64, i64, i64) write_operation(
    Source buf,
    i64 size,
    i64 at,
    i64 end,
    i64 base,
    i64* offsets,
    i64 count,
    Source texts,
    Out out,
    i64 room,
    i64 to,
    i64* stack,
) noexcept nogil
cdef (i64, i64) write_operations(
    Source buf,
    i64 size,
    i64 at,
    i64 end,
    i64 base,
    i64* offsets,
    i64 count,
    Source texts,
    Out out,
    i64 room,
    i64 to,
    i64* stack,
) noexcept nogil
cdef bint has_surrogate(Source out, i64 start, i64 end) noexcept nogil
cpdef (i64, i64, i64) write_texts(
    const u8[::1] buf,
    const i64[:] starts,
    const i64[:] ends,
    const i64[:] bases,
    i64 first,
    i64 shape,
    i64[::1] offsets,
    const u8[::1] texts,
    u8[::1] out,
    i64 to,
    i64[::1] stack,
) noexcept
