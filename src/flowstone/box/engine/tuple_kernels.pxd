from flowstone.native.msgpack cimport CHILDREN, FIXED, LENGTH, NO_VALUE, read_array, value_end
from flowstone.native.words cimport Source, big16, big32, byte, i64

cdef i64 KIND_ALL
cdef i64[::1] KINDS

cdef i64 nested_end(Source buf, i64 at, i64 end, i64[::1] stack) noexcept nogil
cdef i64 check_tuple(
    Source buf,
    i64 at,
    i64 end,
    const i64[::1] masks,
    i64 count_min,
    i64 count_exact,
    i64[::1] starts,
    i64[::1] stack,
) noexcept nogil
cdef i64 note_fields(Source buf, i64 at, i64 end, i64[::1] starts) noexcept nogil
