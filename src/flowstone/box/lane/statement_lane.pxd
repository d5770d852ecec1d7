cimport cython

from flowstone.box.engine.tuple_kernels cimport KINDS, nested_end
from flowstone.box.engine.key_parts cimport EQ, GT, REQ
from flowstone.box.lane.table cimport Table, TableIndex
from flowstone.box.update.bulk cimport ARGUMENT, CODE as OPERATION, SHORTEST
from flowstone.box.update.kernels cimport ASSIGN, put_updated, read_operations
from flowstone.iproto.constants cimport RequestType
from flowstone.iproto.request_scan cimport (
    CODE,
    INDEX_BASE,
    INDEX_ID,
    ITERATOR,
    KEY_AT,
    KEY_END,
    LIMIT,
    OFFSET,
    OPS_AT,
    OPS_END,
    TUPLE_AT,
    TUPLE_END,
    TYPE,
)
from flowstone.iproto.scan cimport (
    INDEX_BASE as INDEX_BASE_OF_ROW,
    INDEX_ID as INDEX_ID_OF_ROW,
    KEY_AT as KEY_AT_OF_ROW,
    KEY_END as KEY_END_OF_ROW,
    OPS_AT as OPS_AT_OF_ROW,
    OPS_END as OPS_END_OF_ROW,
    SPACE_ID as SPACE_ID_OF_ROW,
    TUPLE_AT as TUPLE_AT_OF_ROW,
    TUPLE_END as TUPLE_END_OF_ROW,
    TYPE as TYPE_OF_ROW,
)
from flowstone.native.msgpack cimport read_array
from flowstone.native.words cimport Out, Source, byte, content, i64, piece, source, target, u8, written

cdef i64 TUPLE_HEAD_SIZE
cdef i64 TYPE_SHIFT
cdef i64 INDEX_BASE_MAX
cdef i64 TUPLES_MAX
cdef i64 NUMBERS
cdef i64 FIELDS_MAX


@cython.final
cdef class StatementLane:
    cdef object box
    cdef i64 size_max
    cdef readonly i64 size
    cdef readonly list results
    cdef readonly list logged
    cdef list changes
    cdef list marks

    cpdef void begin(self, object written, i64 size_max) except *
    @cython.locals(data=Source, row=i64, code=i64, table=Table)
    cpdef i64 execute(
        self, const u8[::1] buf, const i64[:, :] cells, i64 start, i64 end, dict tables, bint is_sync
    ) except -1
    @cython.locals(kind=i64)
    cdef bint request(self, Table table, Source buf, const i64[:, :] cells, i64 row) except -1
    @cython.locals(data=Source, row=i64, code=i64, own=i64, kind=i64, table=Table)
    cpdef i64 execute_rows(
        self, const u8[::1] buf, const i64[:, :] cells, i64 start, i64 end, dict tables
    ) except -1
    @cython.locals(
        kind=i64, key_at=i64, key_end=i64, at=i64, end=i64, ops_at=i64, ops_end=i64, index_id=i64, index_base=i64
    )
    cdef bint row(self, Table table, Source buf, const i64[:, :] cells, i64 row) except -1
    @cython.locals(index=TableIndex, count=i64, found=bytes, tuples=list)
    cdef bint select(
        self,
        Table table,
        Source buf,
        i64 index_id,
        i64 iterator,
        i64 offset,
        i64 limit,
        i64 key_at,
        i64 key_end,
    ) except -1
    @cython.locals(raw=bytes, old=bytes)
    cdef bint store(self, Table table, Source buf, i64 at, i64 end, bint is_insert) except -1
    @cython.locals(index=TableIndex, old=bytes, logged=bytes)
    cdef bint delete(self, Table table, Source buf, i64 index_id, i64 key_at, i64 key_end) except -1
    @cython.locals(index=TableIndex, old=bytes, new=bytes, logged=bytes)
    cdef bint update(
        self,
        Table table,
        Source buf,
        i64 index_id,
        i64 key_at,
        i64 key_end,
        i64 ops_at,
        i64 ops_end,
        i64 index_base,
    ) except -1
    @cython.locals(raw=bytes, old=bytes, new=bytes)
    cdef bint upsert(
        self, Table table, Source buf, i64 at, i64 end, i64 ops_at, i64 ops_end, i64 index_base
    ) except -1
    cdef void note(self, object result, bytes logged) except *
    cdef bint written(self, bytes result, bytes logged) except -1
    cdef bint is_valid(self, Table table, bytes raw) except -1
    @cython.locals(size=i64, data=Source, total=i64, out=Out, to=i64)
    cdef bytes changed(self, Table table, bytes raw, Source buf, i64 at, i64 end, i64 index_base)
    @cython.locals(total=i64, i=i64, argument=i64)
    cdef bint are_plain(self, Table table, Source buf, i64 at, i64 end, i64 index_base) except -1
    @cython.locals(count=i64, number=i64, index=TableIndex, removed=list, added=list)
    cdef bint write(self, Table table, bytes old, bytes new, object key) except -1
    cdef bint is_free(self, TableIndex index, object come, object gone, bytes old) except -1
    cdef void move(self, TableIndex index, object gone, object come, bytes new) except *
    @cython.locals(old=bytes)
    cdef void put(self, TableIndex index, object key, bytes raw) except *


cdef bint is_array(Source buf, i64 at, i64 end) noexcept
cdef list as_list(object keys)
