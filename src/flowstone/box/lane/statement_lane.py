"""Compiled: executes statements on tables, one after the other, up to the first that it cannot execute.

Each statement has the effect and the result that `box/engine/statements.py` defines. A statement that fails there, or
that is too unusual, has no effect here and ends the run: the caller executes it by way of a transaction, which reports
the error. Rights and modes of the box are up to the caller, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cython

from flowstone.box.engine import statements
from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.keys import Key
from flowstone.box.engine.statements import TUPLE_HEAD_SIZE as _TUPLE_HEAD_SIZE
from flowstone.box.lane.table import Table, TableIndex
from flowstone.box.lane.writes import Writes
from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from flowstone.box.box import Box

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.box.engine.key_parts import EQ, GT, REQ
    from flowstone.box.engine.tuple_kernels import KINDS, nested_end
    from flowstone.box.update.bulk import ARGUMENT, SHORTEST
    from flowstone.box.update.bulk import CODE as OPERATION
    from flowstone.box.update.kernels import ASSIGN, put_updated, read_operations
    from flowstone.iproto.constants import RequestType
    from flowstone.iproto.request_scan import (
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
    from flowstone.iproto.scan import INDEX_BASE as INDEX_BASE_OF_ROW
    from flowstone.iproto.scan import INDEX_ID as INDEX_ID_OF_ROW
    from flowstone.iproto.scan import KEY_AT as KEY_AT_OF_ROW
    from flowstone.iproto.scan import KEY_END as KEY_END_OF_ROW
    from flowstone.iproto.scan import OPS_AT as OPS_AT_OF_ROW
    from flowstone.iproto.scan import OPS_END as OPS_END_OF_ROW
    from flowstone.iproto.scan import SPACE_ID as SPACE_ID_OF_ROW
    from flowstone.iproto.scan import TUPLE_AT as TUPLE_AT_OF_ROW
    from flowstone.iproto.scan import TUPLE_END as TUPLE_END_OF_ROW
    from flowstone.iproto.scan import TYPE as TYPE_OF_ROW
    from flowstone.iproto.scan import Bytes, Cells
    from flowstone.native.msgpack import read_array
    from flowstone.native.words import byte, content, piece, source, target, written

TUPLE_HEAD_SIZE = _TUPLE_HEAD_SIZE
TYPE_SHIFT = 33
"""As in `rows.py`."""

INDEX_BASE_MAX = (1 << 31) - 1
"""Larger bases are negative numbers to servers."""

TUPLES_MAX = 100_000
"""A SELECT of more tuples is left to the caller."""

NUMBERS = 2 | 4 | 256 | 512
"""The kinds (`box/engine/field_types.py`) of arguments that `+` and `-` take: integers and doubles."""

FIELDS_MAX = 1 << 40
"""More fields than any tuple has: positions are not checked."""


Keys = Key | list[Key] | None
"""The keys of a tuple in one index: nearly always one; None if there is no tuple."""


class StatementLane:
    """Executes statements. `results` has the result of each: a tuple, None, or a list of tuples.

    `logged` has the key to log of each in place of the one in the request, or None. `size` is that of the tuples read.
    """

    def __init__(self, box: Box) -> None:
        self.box = box
        self.size_max = 0
        self.size = 0
        self.results: list[bytes | list[bytes] | None] = []
        self.logged: list[bytes | None] = []
        self.changes: list[EngineIndex | Key | bytes | None] = []
        self.marks: list[int] = []

    def begin(self, written: Writes, size_max: int) -> None:
        """Begin a run, with empty results; it adds its changes to `written`, and reads at most `size_max` bytes."""
        self.size_max = size_max
        self.size = 0
        self.results = []
        self.logged = []
        self.changes = written.changes
        self.marks = written.marks

    def execute(self, buf: Bytes, cells: Cells, start: int, end: int, tables: dict[int, Table], is_sync: bool) -> int:
        """Execute requests `start` to `end` of a table of requests; return how many were executed.

        `tables` has the table for each code; without one the run ends, and with a write to a space that is synchronous
        where `is_sync` is False, or the reverse.
        """
        data = source(buf)
        row = start
        code = -1
        table: Table | None = None
        try:
            while row < end:
                if cells[CODE, row] != code:
                    code = cells[CODE, row]
                    table = tables.get(code)
                if table is None:
                    break
                if cells[TYPE, row] != RequestType.SELECT and table.is_sync != is_sync:
                    break
                if not self.request(table, data, cells, row):
                    break
                row += 1
        except FlowstoneError:
            pass  # the caller executes the statement again, and reports the error
        return row - start

    def request(self, table: Table, buf: Bytes, cells: Cells, row: int) -> bool:
        """Execute one request; return False, with nothing done, if it needs the caller."""
        kind = cells[TYPE, row]
        if kind == RequestType.SELECT:
            return self.select(
                table,
                buf,
                cells[INDEX_ID, row],
                cells[ITERATOR, row],
                cells[OFFSET, row],
                cells[LIMIT, row],
                cells[KEY_AT, row],
                cells[KEY_END, row],
            )
        if kind == RequestType.UPDATE:
            return self.update(
                table,
                buf,
                cells[INDEX_ID, row],
                cells[KEY_AT, row],
                cells[KEY_END, row],
                cells[TUPLE_AT, row],
                cells[TUPLE_END, row],
                cells[INDEX_BASE, row],
            )
        if kind == RequestType.DELETE:
            return self.delete(table, buf, cells[INDEX_ID, row], cells[KEY_AT, row], cells[KEY_END, row])
        if kind == RequestType.UPSERT:
            return self.upsert(
                table,
                buf,
                cells[TUPLE_AT, row],
                cells[TUPLE_END, row],
                cells[OPS_AT, row],
                cells[OPS_END, row],
                cells[INDEX_BASE, row],
            )
        return self.store(table, buf, cells[TUPLE_AT, row], cells[TUPLE_END, row], kind == RequestType.INSERT)

    def execute_rows(self, buf: Bytes, cells: Cells, start: int, end: int, tables: dict[int, Table]) -> int:
        """Execute rows `start` to `end` of a table of rows (`iproto/scan.py`), which have no results; skip NOPs.

        Return how many were executed. A row whose code, of `rows.codes_of`, has no table ends the run.
        """
        data = source(buf)
        row = start
        code = -1
        table: Table | None = None
        try:
            while row < end:
                kind = cells[TYPE_OF_ROW, row]
                if kind != RequestType.NOP:
                    own = (kind << TYPE_SHIFT) + cells[SPACE_ID_OF_ROW, row] + 1
                    if own != code:
                        code = own
                        table = tables.get(code)
                    if table is None or not self.row(table, data, cells, row):
                        break
                row += 1
        except FlowstoneError:
            pass  # the caller executes the row again, and reports the error
        self.results = []
        self.logged = []
        return row - start

    def row(self, table: Table, buf: Bytes, cells: Cells, row: int) -> bool:
        """Execute one row; return False, with nothing done, if it needs the caller."""
        kind = cells[TYPE_OF_ROW, row]
        key_at, key_end = cells[KEY_AT_OF_ROW, row], cells[KEY_END_OF_ROW, row]
        at, end = cells[TUPLE_AT_OF_ROW, row], cells[TUPLE_END_OF_ROW, row]
        index_id, index_base = cells[INDEX_ID_OF_ROW, row], cells[INDEX_BASE_OF_ROW, row]
        index_id = max(index_id, 0)
        index_base = max(index_base, 0)
        if kind == RequestType.DELETE or kind == RequestType.UPDATE:
            if key_at < 0 or not is_array(buf, key_at, key_end):
                return False
            if kind == RequestType.DELETE:
                return self.delete(table, buf, index_id, key_at, key_end)
            return at >= 0 and self.update(table, buf, index_id, key_at, key_end, at, end, index_base)
        if at < 0:
            return False
        if kind == RequestType.UPSERT:
            ops_at, ops_end = cells[OPS_AT_OF_ROW, row], cells[OPS_END_OF_ROW, row]
            return ops_at >= 0 and self.upsert(table, buf, at, end, ops_at, ops_end, index_base)
        return self.store(table, buf, at, end, kind == RequestType.INSERT)

    # --- statements ---

    def select(
        self,
        table: Table,
        buf: Bytes,
        index_id: int,
        iterator: int,
        offset: int,
        limit: int,
        key_at: int,
        key_end: int,
    ) -> bool:
        """Execute a SELECT with a limit above 0."""
        index = table.by_id.get(index_id)
        if index is None or iterator > GT:
            return False
        count, _ = read_array(buf, key_at, key_end)
        if index.is_unique and count == index.part_count and (iterator == EQ or (iterator == REQ and index.is_ordered)):
            key = table.point(index, buf, key_at, key_end)
            if key is not None:
                found = index.entries.get(key)
                if found is not None:
                    self.size += len(found)
                    if self.size > self.size_max:
                        return False
                self.note(None if offset else found, None)
                return True
        if not index.is_ordered:
            return False
        span = table.span(index, iterator, buf, key_at, key_end)
        tuples = index.entries.collect(span.low, span.high, span.reverse, offset, min(limit, TUPLES_MAX + 1))
        for found in tuples:
            self.size += len(found)
        if len(tuples) > TUPLES_MAX or self.size > self.size_max:
            return False
        self.note(tuples, None)
        return True

    def store(self, table: Table, buf: Bytes, at: int, end: int, is_insert: bool) -> bool:
        """Execute an INSERT or a REPLACE."""
        if end - at + TUPLE_HEAD_SIZE > self.box.tuple_size_max:
            return False
        raw = piece(buf, at, end)
        if not table.check(raw):
            return False
        key = table.primary_key(raw, table.starts)
        old = table.primary.entries.get(key)
        if old is not None:
            if is_insert:
                return False
            table.note_old(old)
        return self.write(table, old, raw, key) and self.written(raw, None)

    def delete(self, table: Table, buf: Bytes, index_id: int, key_at: int, key_end: int) -> bool:
        """Execute a DELETE."""
        index = table.by_id.get(index_id)
        if index is None or not index.is_unique:
            return False
        key = table.exact(index, buf, key_at, key_end)
        old = index.entries.get(key)
        if old is None:
            return self.written(None, None)
        table.note_old(old)
        logged = None
        if index is not table.primary:
            key = table.primary_key(old, table.old_starts)
            logged = table.logged_key(old)
        return self.write(table, old, None, key) and self.written(old, logged)

    def update(
        self,
        table: Table,
        buf: Bytes,
        index_id: int,
        key_at: int,
        key_end: int,
        ops_at: int,
        ops_end: int,
        index_base: int,
    ) -> bool:
        """Execute an UPDATE."""
        index = table.by_id.get(index_id)
        if index is None or not index.is_unique:
            return False
        key = table.exact(index, buf, key_at, key_end)
        old = index.entries.get(key)
        if old is None:
            return self.written(None, None)
        new = self.changed(table, old, buf, ops_at, ops_end, index_base)
        if new is None:
            new = statements.updated(self.box, table.space, old, piece(buf, ops_at, ops_end), int(index_base))
        if not self.is_valid(table, new):
            return False
        table.note_old(old)
        logged = None
        if index is not table.primary:
            key = table.primary_key(old, table.old_starts)
            logged = table.logged_key(old)
        if table.primary_key(new, table.starts) != key:
            return False
        return self.write(table, old, new, key) and self.written(new, logged)

    def upsert(self, table: Table, buf: Bytes, at: int, end: int, ops_at: int, ops_end: int, index_base: int) -> bool:
        """Execute an UPSERT."""
        raw = piece(buf, at, end)
        if not table.is_memtx or not self.is_valid(table, raw):
            return False
        key = table.primary_key(raw, table.starts)
        old = table.primary.entries.get(key)
        if old is None:
            if not self.are_plain(table, buf, ops_at, ops_end, index_base):
                statements.decoded_operations(table.space, piece(buf, ops_at, ops_end), int(index_base))
            return self.write(table, None, raw, key) and self.written(None, None)
        new = self.changed(table, old, buf, ops_at, ops_end, index_base)
        if new is None:
            decoded = statements.decoded_operations(table.space, piece(buf, ops_at, ops_end), int(index_base))
            new = statements.upserted(self.box, table.space, old, decoded)
        if not self.is_valid(table, new):
            return False
        table.note_old(old)
        # A change of the primary key is ignored, like every other operation that fails in an upsert.
        if table.primary_key(new, table.starts) == key and not self.write(table, old, new, key):
            return False
        return self.written(None, None)

    def note(self, result: bytes | list[bytes] | None, logged: bytes | None) -> None:
        """Add the result of a statement, and the key to log in place of the one in the request."""
        self.results.append(result)
        self.logged.append(logged)

    def written(self, result: bytes | None, logged: bytes | None) -> bool:
        """Add the result of a write that took effect."""
        self.marks.append(len(self.changes))
        self.note(result, logged)
        return True

    # --- operations ---

    def is_valid(self, table: Table, raw: bytes) -> bool:
        """Check the size and the format of a new tuple, and note its fields; may raise the server's error."""
        return len(raw) + TUPLE_HEAD_SIZE <= self.box.tuple_size_max and table.check(raw)

    def changed(self, table: Table, raw: bytes, buf: Bytes, at: int, end: int, index_base: int) -> bytes | None:
        """Return a tuple with operations applied; None if they are not simple, or one of them fails."""
        size = len(raw)
        if index_base > INDEX_BASE_MAX or nested_end(buf, at, end, table.stack) != end:
            return None
        data = content(raw)
        count, start = read_array(data, 0, size)
        total = read_operations(buf, at, end, index_base, count, table.key_fields, table.noted)
        if total <= 0:
            return None
        table.make_room(size + end - at)
        out = target(table.out)
        to = put_updated(data, start, size, count, buf, total, table.noted, table.forms, SHORTEST, out, 0)
        return written(out, to) if to >= 0 else None

    def are_plain(self, table: Table, buf: Bytes, at: int, end: int, index_base: int) -> bool:
        """Return True if operations are simple, and so valid for some tuple."""
        if index_base > INDEX_BASE_MAX or nested_end(buf, at, end, table.stack) != end:
            return False
        total = read_operations(buf, at, end, index_base, FIELDS_MAX, table.key_fields, table.noted)
        for i in range(total):
            argument = table.noted[ARGUMENT, i]
            if table.noted[OPERATION, i] != ASSIGN and not KINDS[byte(buf, argument)] & NUMBERS:
                return False
        return total > 0

    # --- indexes ---

    def write(self, table: Table, old: bytes | None, new: bytes | None, key: Key) -> bool:
        """Replace tuple `old` by `new`, which have this primary key; either may be None.

        Their fields are noted. Return False, with nothing changed, if a unique key belongs to another tuple.
        """
        count = len(table.indexes)
        if count == 1:
            self.put(table.primary, key, new)
            return True
        removed: list[Keys] = []
        added: list[Keys] = []
        for number in range(1, count):
            index = table.indexes[number]
            gone = None if old is None else table.keys_of(index, old, table.old_starts)
            come = None if new is None else table.keys_of(index, new, table.starts)
            if index.is_unique and not self.is_free(index, come, gone, old):
                return False
            removed.append(gone)
            added.append(come)
        self.put(table.primary, key, new)
        for number in range(1, count):
            self.move(table.indexes[number], removed[number - 1], added[number - 1], new)
        return True

    def is_free(self, index: TableIndex, come: Keys, gone: Keys, old: bytes | None) -> bool:
        """Return True if no tuple but `old` has one of the keys `come`."""
        if isinstance(come, list):
            for key in come:
                found = index.entries.get(key)
                if found is not None and found != old:
                    return False
            return True
        if come is None or come == gone:
            return True
        found = index.entries.get(come)
        return found is None or found == old

    def move(self, index: TableIndex, gone: Keys, come: Keys, new: bytes | None) -> None:
        """Delete the keys `gone`, except those that are in `come`, and store `new` at the keys `come`."""
        if isinstance(gone, list) or isinstance(come, list):
            news = as_list(come)
            for key in as_list(gone):
                if key not in news:
                    self.put(index, key, None)
            for key in news:
                self.put(index, key, new)
            return
        if gone is not None and gone != come:
            self.put(index, gone, None)
        if come is not None:
            self.put(index, come, new)

    def put(self, index: TableIndex, key: Key, raw: bytes | None) -> None:
        """Store a tuple at `key`, or delete the entry if it is None; record the change."""
        old = index.entries.pop(key) if raw is None else index.entries.put(key, raw)
        if index.views:
            for view in index.views:
                view.keep(index.index, key, old)
        self.changes.append(index.index)
        self.changes.append(key)
        self.changes.append(old)


def is_array(buf: Bytes, at: int, end: int) -> bool:
    """Return True if the value at `at` is an array."""
    count, _ = read_array(buf, at, end)
    return count >= 0


def as_list(keys: Keys) -> list[Key]:
    """Return the keys of a tuple as a list."""
    return keys if isinstance(keys, list) else [] if keys is None else [keys]
