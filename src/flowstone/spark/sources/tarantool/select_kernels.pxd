from flowstone.iproto.constants cimport Key
from flowstone.native.msgpack cimport read_array, read_map, read_uint, value_end
from flowstone.native.words cimport i64, source, u8

cpdef i64 tuple_spans(const u8[::1] buf, i64[::1] edges) noexcept
