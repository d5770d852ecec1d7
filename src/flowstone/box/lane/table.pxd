cimport cython

from flowstone.box.engine.entries cimport Entries
from flowstone.box.engine.key_kernels cimport put_part
from flowstone.box.engine.key_parts cimport (
    ALWAYS,
    ENCODED,
    EQ,
    FIXED_SIZE_MAX,
    GT,
    INTEGER,
    LE,
    LT,
    NEVER,
    REQ,
    STRING,
    WITH_NIL,
)
from flowstone.box.engine.tuple_kernels cimport KINDS, check_tuple, note_fields
from flowstone.box.update.kernels cimport put_array
from flowstone.native.msgpack cimport NIL, read_array, read_integer, read_text, value_end
from flowstone.native.words cimport Out, Source, byte, content, copy, i64, piece, poke, target, u8, written

cdef bytes ZERO


@cython.final
cdef class TableIndex:
    cdef readonly object index
    cdef readonly Entries entries
    cdef readonly list views
    cdef readonly object key
    cdef readonly i64 id
    cdef readonly i64 part_count
    cdef readonly bint is_unique
    cdef readonly bint is_ordered
    cdef readonly bint is_compiled
    cdef readonly i64 kind
    cdef readonly const i64[::1] fields
    cdef readonly const i64[::1] kinds
    cdef readonly const i64[::1] accepted
    cdef readonly const i64[::1] nullable
    cdef readonly i64 own_count
    cdef readonly i64 tail


@cython.final
cdef class Table:
    cdef readonly object space
    cdef readonly i64 space_id
    cdef readonly bint is_sync
    cdef readonly bint is_memtx
    cdef readonly bint is_plain
    cdef readonly list indexes
    cdef readonly TableIndex primary
    cdef readonly dict by_id
    cdef bint has_masks
    cdef const i64[::1] masks
    cdef i64 count_min
    cdef i64 count_exact
    cdef readonly i64[::1] starts
    cdef i64[::1] old_starts
    cdef const i64[::1] forms
    cdef const i64[::1] key_fields
    cdef i64 part_count
    cdef i64[::1] stack
    cdef i64[:, ::1] noted
    cdef u8[::1] out
    cdef bytes values_of
    cdef object values

    cdef void make_room(self, i64 size) except *
    cdef object unpacked(self, bytes raw)
    cpdef bint fits(self, bytes raw) except -1
    cdef bint check(self, bytes raw) except -1
    cdef void note_old(self, bytes raw) except *
    cpdef object keys_of(self, TableIndex index, bytes raw, i64[::1] starts)
    cdef object primary_key(self, bytes raw, i64[::1] starts)
    @cython.locals(index=TableIndex, buf=Source, out=Out)
    cdef bytes logged_key(self, bytes raw)
    cdef object exact(self, TableIndex index, Source buf, i64 at, i64 end)
    cdef object point(self, TableIndex index, Source buf, i64 at, i64 end)
    cdef object span(self, TableIndex index, i64 iterator, Source buf, i64 at, i64 end)


cdef object compiled_key(TableIndex index, Source buf, i64[::1] starts, Out out)
cdef object plain_key(i64 kind, Source buf, i64 at)
cdef object request_key(TableIndex index, Source buf, i64 at, i64 end, i64 count, bint takes_nil, Out out)
