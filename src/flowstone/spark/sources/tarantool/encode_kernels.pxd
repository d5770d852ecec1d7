cimport cython
from flowstone.iproto.constants cimport TYPE_ERROR, Key
from flowstone.iproto.extensions cimport DECIMAL_DIGITS_MAX, ExtensionType
from flowstone.native.msgpack cimport NIL, put_big, put_pair, put_uint, read_length, read_map, read_uint, value_end
from flowstone.native.words cimport Out, Source, byte, copy, i32, i64, poke, poke64, source, target, u8, word

cdef i64 put_int(Out out, i64 at, i64 value) noexcept nogil
@cython.locals(at=i64)
cpdef i64 put_ints(const i64[::1] values, const u8[::1] valid, i64 least, u8[::1] out, i64[::1] edges) noexcept
@cython.locals(at=i64)
cpdef i64 put_wide_ints(const i64[::1] words, const u8[::1] valid, i64 least, u8[::1] out, i64[::1] edges) noexcept
@cython.locals(at=i64)
cpdef i64 put_doubles(const i64[::1] bits, const u8[::1] valid, u8[::1] out, i64[::1] edges) noexcept
cpdef i64 put_booleans(const u8[::1] values, const u8[::1] valid, u8[::1] out, i64[::1] edges) noexcept
cdef i64 put_sized_head(Out out, i64 at, i64 size, i64 is_text) noexcept nogil
@cython.locals(at=i64, start=i64, size=i64)
cpdef i64 put_sized(
    const u8[::1] data, const i32[::1] offsets, const u8[::1] valid, i64 is_text, u8[::1] out, i64[::1] edges
) noexcept
@cython.locals(at=i64, start=i64, end=i64)
cpdef i64 put_raw(
    const u8[::1] data, const i32[::1] offsets, const u8[::1] valid, u8[::1] out, i64[::1] edges
) noexcept
cdef i64 hex_value(i64 character) noexcept nogil
@cython.locals(at=i64, start=i64, place=i64)
cpdef i64 put_uuids(
    const u8[::1] data, const i32[::1] offsets, const u8[::1] valid, u8[::1] out, i64[::1] edges
) noexcept
@cython.locals(at=i64)
cpdef i64 put_datetimes(const i64[::1] microseconds, const u8[::1] valid, u8[::1] out, i64[::1] edges) noexcept
@cython.locals(minus=i64, count=i64, scale=i64, seen=i64, point=i64, down=i64, exponent=i64)
cdef (i64, i64, i64) read_decimal(Source data, i64 at, i64 end, Out digits) noexcept nogil
@cython.locals(at=i64, pending=i64, half=i64)
cpdef i64 put_decimals(
    const u8[::1] data, const i32[::1] offsets, const u8[::1] valid, u8[::1] digits, u8[::1] out, i64[::1] edges
) noexcept
@cython.locals(at=i64)
cpdef i64 build_requests(
    const u8[::1] data,
    const i64[:, ::1] edges,
    const i64[::1] extra,
    i64 is_whole,
    i64 kind,
    i64 space_id,
    i64 sync,
    u8[::1] out,
    i64[::1] ends,
) noexcept
@cython.locals(at=i64, count=i64, errors=i64)
cpdef (i64, i64, i64, i64) scan_replies(const u8[::1] buf, i64[::1] syncs, i64[:, ::1] refused) noexcept
cdef (i64, i64) read_reply_header(Source buf, i64 at, i64 end) noexcept nogil
