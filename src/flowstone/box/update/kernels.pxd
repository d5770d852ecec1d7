from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN

from flowstone.box.update.bulk cimport ARGUMENT, ARGUMENT_END, CODE, DOUBLE, FIELD, INTEGER, OPERATIONS_MAX
from flowstone.native.msgpack cimport put_big, put_uint, read_array, read_integer, value_end
from flowstone.native.words cimport (
    Out,
    Source,
    big32,
    big64,
    byte,
    copy,
    float32,
    float32_bits,
    float64,
    float_bits,
    i64,
    poke,
    signed,
    source,
    target,
    u8,
)

cdef double FLOAT_MAX

cdef enum:
    ASSIGN = 0x3D
    ADD = 0x2B
    SUBTRACT = 0x2D

cdef i64 put_array(Out out, i64 at, i64 count) noexcept nogil
cdef i64 put_shortest(Out out, i64 at, i64 value) noexcept nogil
cdef i64 read_operations(
    Source ops, i64 at, i64 end, i64 base, i64 count, const i64[::1] keys, i64[:, ::1] noted
) noexcept nogil
cdef (double, i64) read_number(Source buf, i64 at) noexcept nogil
cdef i64 put_float_sum(
    Source buf, i64 at, Source ops, i64 argument, i64 code, bint is_double, Out out, i64 to
) noexcept nogil
cdef i64 put_sum(Source buf, i64 at, Source ops, i64 argument, i64 code, i64 form, Out out, i64 to) noexcept nogil
cdef i64 put_updated(
    Source buf,
    i64 at,
    i64 end,
    i64 count,
    Source ops,
    i64 total,
    i64[:, ::1] noted,
    const i64[::1] forms,
    i64 default_form,
    Out out,
    i64 to,
) noexcept nogil
cpdef i64 update_tuples(
    const u8[::1] buf,
    const i64[:] offsets,
    const u8[::1] ops,
    const i64[:] ops_offsets,
    const i64[:] bases,
    const i64[::1] keys,
    i64[:, ::1] noted,
    u8[::1] out,
    i64[::1] ends,
    u8[::1] is_done,
) noexcept
cdef i64 put_results(
    Source buf,
    const i64[:] offsets,
    Source ops,
    const i64[:] ops_offsets,
    const i64[:] bases,
    const i64[::1] keys,
    i64[:, ::1] noted,
    Out out,
    i64[::1] ends,
    u8[::1] is_done,
) noexcept nogil
