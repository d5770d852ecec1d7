"""Compiled: tables, the descriptions of spaces by which the lane checks tuples and computes their keys.

A `Table` holds the rules of a space as arrays: the kinds of values in each field (`box/engine/format.py`) and the parts
of each key (`box/engine/keys.py`). Whatever the arrays cannot express is left to the rules themselves: a tuple that the
kernel does not accept, and a key with a path, a collation or an unusual value. The results are the same.
"""

from __future__ import annotations

from typing import Any

import cython
import numpy as np

from flowstone.box.engine import key_parts
from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.key_encoding import ABOVE
from flowstone.box.engine.keys import Key, KeyKind, KeyLayout, Span
from flowstone.box.engine.space import NOT_KNOWN, EngineSpace
from flowstone.box.engine.statements import primary_key_of
from flowstone.box.engine.tuple_kernels import STACK_SIZE
from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.box.update.bulk import DOUBLE, SHORTEST, scratch
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import unpack

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.box.engine.key_kernels import put_part
    from flowstone.box.engine.key_parts import (
        ALWAYS,
        ENCODED,
        EQ,
        FIXED_SIZE_MAX,
        GT,
        LE,
        LT,
        NEVER,
        REQ,
        STRING,
        WITH_NIL,
    )
    from flowstone.box.engine.tuple_kernels import KINDS, check_tuple, note_fields
    from flowstone.box.update.kernels import put_array
    from flowstone.iproto.scan import Bytes, Cells
    from flowstone.native.msgpack import NIL, read_array, read_integer, read_text, value_end
    from flowstone.native.words import byte, content, copy, piece, poke, target, written

ZERO = b"\0"
"""Suffix that makes a string greater than itself by the least."""

_KINDS = {KeyKind.ENCODED: key_parts.ENCODED, KeyKind.INTEGER: key_parts.INTEGER, KeyKind.STRING: key_parts.STRING}
_OUT_SIZE = 1024
_NUMBERING = (RequestType.INSERT.value, RequestType.REPLACE.value)


class TableIndex:
    """One index of a table, with the layout of its keys. `is_compiled` is False if only `index.key` computes them."""

    def __init__(self, index: EngineIndex) -> None:
        key = index.key
        layout = key.layout
        self.index = index
        self.entries = index.entries
        self.views = index.views
        self.key = key
        self.id = index.definition.id
        self.part_count = len(index.definition.parts)
        self.is_unique = key.is_unique
        self.is_ordered = index.is_ordered
        self.is_compiled = layout is not None
        self.kind = _KINDS[key.kind]
        layout = layout or KeyLayout((), (), (), (), 0)
        self.fields = np.array(layout.fields, np.int64)
        self.kinds = np.array(layout.kinds, np.int64)
        self.accepted = np.array(layout.accepted, np.int64)
        self.nullable = np.array(layout.nullable, np.int64)
        self.own_count = layout.own_count
        self.tail = ALWAYS if not key.is_unique else WITH_NIL if any(layout.nullable) else NEVER


class Table:
    """A user space for the lane. It is replaced when the definition of the space changes.

    `is_plain` is False for spaces with constraints, each of whose statements must be checked, and for spaces whose rows
    are not replicated.
    """

    def __init__(self, space: EngineSpace) -> None:
        definition, format = space.definition, space.format
        self.space = space
        self.space_id = space.id
        self.is_sync = definition.is_sync
        self.is_memtx = definition.engine == "memtx"
        self.is_plain = not (definition.is_temporary or definition.is_local or space.guards is not None)
        self.indexes = [TableIndex(index) for index in space.served]
        self.primary = self.indexes[0]
        self.by_id = {index.id: index for index in self.indexes}
        self.has_masks = format.masks is not None
        self.masks = format.masks if format.masks is not None else np.empty(0, np.int64)
        self.count_min = format.field_count_min
        self.count_exact = format.field_count_exact
        fields = [field for index in self.indexes for field in list(index.fields)]
        size = max(fields, default=-1) + 1
        self.starts = np.empty(size, np.int64)
        self.old_starts = np.empty(size, np.int64)
        self.forms = np.array([DOUBLE if field.type == "double" else SHORTEST for field in format.fields], np.int64)
        self.key_fields = np.array([part.field for part in space.served[0].definition.parts], np.int64)
        self.part_count = max(len(index.fields) for index in self.indexes)
        self.stack = np.empty(STACK_SIZE, np.int64)
        self.noted = scratch()
        self.out = np.empty(_OUT_SIZE, np.uint8)
        self.values_of = b""
        self.values = ()

    def takes(self, kind: int) -> bool:
        """Return True if a write of this type changes nothing but the indexes, and adds one row to the log."""
        return self.is_plain and (self.space.sequence is None or kind not in _NUMBERING)

    # --- tuples ---

    def make_room(self, size: int) -> None:
        """Make room in the scratch array for a key or a tuple made of `size` bytes of input.

        Zero bytes in a key take twice their size. A field that a secondary and the primary key share is there twice.
        """
        size = FIXED_SIZE_MAX * self.part_count + 4 * size + _OUT_SIZE
        if size > self.out.shape[0]:
            self.out = np.empty(2 * size, np.uint8)

    def unpacked(self, raw: bytes) -> object:
        """Return the values of a tuple; those of the last one are kept."""
        if raw is not self.values_of:
            self.values = unpack(raw)
            self.values_of = raw
        return self.values

    def fits(self, raw: bytes) -> bool:
        """Return True for nearly all valid tuples, and no others; note the fields in `starts`."""
        if not self.has_masks:
            return False
        return bool(
            check_tuple(
                content(raw), 0, len(raw), self.masks, self.count_min, self.count_exact, self.starts, self.stack
            )
        )

    def check(self, raw: bytes) -> bool:
        """Check a new tuple and note its fields in `starts`; raise the server's error if it is invalid."""
        if self.fits(raw):
            return True
        values = self.unpacked(raw)
        if not isinstance(values, tuple):
            return False
        self.space.format.check(raw, values)
        return bool(note_fields(content(raw), 0, len(raw), self.starts))

    def note_old(self, raw: bytes) -> None:
        """Note the fields of a stored tuple in `old_starts`."""
        note_fields(content(raw), 0, len(raw), self.old_starts)

    def keys_of(self, index: TableIndex, raw: bytes, starts: Cells) -> Key | list[Key]:
        """Return the key of a tuple, whose fields are noted in `starts`, or a list of its keys."""
        if index.is_compiled:
            self.make_room(len(raw))
            key = compiled_key(index, content(raw), starts, target(self.out))
            if key is not None:
                return key
        values: Any = self.unpacked(raw)
        return index.key.entries(values)

    def primary_key(self, raw: bytes, starts: Cells) -> Key:
        """Return the primary key of a tuple whose fields are noted in `starts`."""
        key = self.keys_of(self.primary, raw, starts)
        return key[0] if isinstance(key, list) else key

    def logged_key(self, raw: bytes) -> bytes:
        """Return the primary key of a tuple, whose fields are noted in `old_starts`, as the key of a request."""
        index = self.primary
        if not index.is_compiled:
            return primary_key_of(self.space, raw)
        self.make_room(len(raw))
        buf, out = content(raw), target(self.out)
        to = put_array(out, 0, index.own_count)
        for part in range(index.own_count):
            at = self.old_starts[index.fields[part]]
            to = copy(out, to, buf, at, value_end(buf, at, len(raw)) - at)
        return written(out, to)

    # --- keys of requests ---

    def exact(self, index: TableIndex, buf: Bytes, at: int, end: int) -> Key:
        """Return the key of a request that must match one tuple; raise the server's error if it cannot."""
        if index.is_compiled:
            self.make_room(end - at)
            count, start = read_array(buf, at, end)
            if count == index.own_count:
                key = request_key(index, buf, start, end, count, False, target(self.out))
                if key is not None:
                    return key
        return index.key.exact(index.key.read(piece(buf, at, end)))

    def point(self, index: TableIndex, buf: Bytes, at: int, end: int) -> Key | None:
        """Like `exact`, but return None for a key with nil, which may match any number of tuples."""
        if index.is_compiled:
            self.make_room(end - at)
            count, start = read_array(buf, at, end)
            key = request_key(index, buf, start, end, count, False, target(self.out))
            if key is not None:
                return key
        values = index.key.read(piece(buf, at, end))
        return None if None in values else index.key.exact(values)

    def span(self, index: TableIndex, iterator: int, buf: Bytes, at: int, end: int) -> Span:
        """Return the span that a SELECT reads; raise the server's error if the key is wrong."""
        count, start = read_array(buf, at, end)
        if not index.is_compiled or not 0 < count <= index.own_count:
            return index.key.span(iterator, index.key.read(piece(buf, at, end)))
        self.make_room(end - at)
        low = request_key(index, buf, start, end, count, True, target(self.out))
        if low is None:
            return index.key.span(iterator, index.key.read(piece(buf, at, end)))
        if iterator == LT:
            return Span(None, low, True)
        high = low + 1 if isinstance(low, int) else low + (ABOVE if index.kind == ENCODED else ZERO)
        if iterator in (EQ, REQ):
            return Span(low, high, iterator == REQ)
        if iterator == LE:
            return Span(None, high, True)
        return Span(high if iterator == GT else low, None, False)


def compiled_key(index: TableIndex, buf: Bytes, starts: Cells, out: Bytes) -> Key | None:
    """Return the key of a tuple with these fields; None if a value is too unusual."""
    if index.kind != ENCODED:
        return plain_key(index.kind, buf, starts[index.fields[0]])
    count = index.own_count if index.tail != ALWAYS else index.fields.shape[0]
    to = part = 0
    while part < count:
        at = starts[index.fields[part]]
        if at < 0 or byte(buf, at) == NIL:
            to = poke(out, to, 0x01)
            if index.tail == WITH_NIL:
                count = index.fields.shape[0]
        else:
            to = put_part(buf, at, index.kinds[part], out, to)
            if to < 0:
                return None
        part += 1
    return written(out, to)


def plain_key(kind: int, buf: Bytes, at: int) -> Key | None:
    """Return the number or the string at `at`."""
    if kind == STRING:
        start, end = read_text(buf, at)
        return piece(buf, start, end) if start >= 0 else None
    value, fits = read_integer(buf, at)
    return value if fits else None


def request_key(
    index: TableIndex, buf: Bytes, at: int, end: int, count: int, takes_nil: bool, out: Bytes
) -> Key | None:
    """Return the key with the `count` values from `at` on, which are complete; None if one is wrong or unusual."""
    if index.kind != ENCODED:
        return plain_key(index.kind, buf, at) if KINDS[byte(buf, at)] & index.accepted[0] else None
    to = 0
    for part in range(count):
        marker = byte(buf, at)
        if KINDS[marker] & index.accepted[part]:
            to = put_part(buf, at, index.kinds[part], out, to)
            if to < 0:
                return None
        elif marker == NIL and takes_nil and index.nullable[part]:
            to = poke(out, to, 0x01)
        else:
            return None
        at = value_end(buf, at, end)
        if at < 0:
            return None
    return written(out, to)


def table_of(space: EngineSpace) -> Table | None:
    """Return the table of a user space with an index; cached, as only the box changes a space, with its constraints."""
    if space.table is NOT_KNOWN:
        is_stored = space.primary is not None and space.primary.is_served and space.id >= FIRST_USER_SPACE_ID
        space.table = Table(space) if is_stored else None
    table: Table | None = space.table
    return table
