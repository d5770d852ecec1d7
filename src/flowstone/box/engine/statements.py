"""The statements: SELECT, INSERT, REPLACE, UPDATE, UPSERT, DELETE, with the checks and errors of a real server.

Each works on raw tuples and keys, and adds to its transaction the row that a real server would log. The order of the
checks is the server's: space, read-only, rights, index, key, format, unique keys (box.cc, memtx_space.c of 2.6.0).
"""

from __future__ import annotations

import base64
import binascii
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from flowstone.box import sysview
from flowstone.box.access import Privilege
from flowstone.box.engine.field_types import elements_of
from flowstone.box.engine.foreign_keys import check_referrers, check_runnable, check_tuple
from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.keys import Key, KeyKind, Span
from flowstone.box.engine.paths import find, parse_path
from flowstone.box.engine.read_view import contains, successor
from flowstone.box.engine.sequence import SpaceSequence, check_sequence
from flowstone.box.engine.space import EngineSpace, Values
from flowstone.box.engine.transaction import ADMIN, BoxTransaction, Statement
from flowstone.box.update.update import Operation, UpdateRules, decode_operations, update_raw, upsert_raw
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import encode_uint

if TYPE_CHECKING:
    from flowstone.box.box import Box

EMPTY_KEY: Final = b"\x90"
LIMIT_MAX: Final = 0xFFFFFFFF
BLACKHOLE: Final = "blackhole"
"""The engine that logs rows without storing tuples."""

EQ, REQ, ALL, LT, LE, GE, GT = range(7)
ITERATOR_COUNT: Final = 12
TUPLE_HEAD_SIZE: Final = 14
"""Bytes that a real server allocates in addition to the tuple; `memtx_max_tuple_size` includes them."""

_REVERSE: Final = frozenset((REQ, LT, LE))
_OF_HASH: Final = frozenset((EQ, ALL, GT))

# Plain integers: access to an enum member costs a noticeable part of a statement.
_READ, _WRITE = Privilege.READ.value, Privilege.WRITE.value
INSERT, REPLACE, UPDATE = RequestType.INSERT.value, RequestType.REPLACE.value, RequestType.UPDATE.value
DELETE, UPSERT = RequestType.DELETE.value, RequestType.UPSERT.value


def select(
    txn: BoxTransaction,
    space: EngineSpace,
    index_id: int,
    *,
    iterator: int = EQ,
    offset: int = 0,
    limit: int = LIMIT_MAX,
    key: bytes = EMPTY_KEY,
    after: bytes | None = None,
) -> list[bytes]:
    """Return the matching tuples; `after` is a position returned by `position_of`."""
    if not 0 <= iterator < ITERATOR_COUNT:
        raise errors.IllegalParams("Illegal parameters, Invalid iterator type")
    check_access(txn, space, _READ)
    index = space.index(index_id)
    values = index.key.read(key)
    if _is_point(index, iterator, values) and after is None:
        found = _find_visible(txn, space, index, index.key.exact(values))
        return [found] if found is not None and not offset and limit else []
    span = _span(space, index, iterator, values)
    if after is not None:
        span = _behind(index, span, after)
    offset, limit = min(offset, LIMIT_MAX), min(limit, LIMIT_MAX)  # no space has more tuples
    if not limit or _is_after_nothing(txn, index, iterator, values):
        return []
    if space.definition.engine == "sysview":
        return [raw for _, raw in islice(sysview.scan(txn, space, index, span), offset, offset + limit)]
    return txn.collect(index, span, offset, limit)


def count(txn: BoxTransaction, space: EngineSpace, index_id: int, *, iterator: int = EQ, key: bytes = EMPTY_KEY) -> int:
    """Return the number of tuples that `select` would return."""
    check_access(txn, space, _READ)
    index = space.index(index_id)
    values = index.key.read(key)
    if space.definition.engine == "sysview":
        return len(select(txn, space, index_id, iterator=iterator, key=key))
    if _is_point(index, iterator, values):
        return int(txn.find(index, index.key.exact(values)) is not None)
    span = _span(space, index, iterator, values)
    return 0 if _is_after_nothing(txn, index, iterator, values) else txn.count(index, span)


def get(txn: BoxTransaction, space: EngineSpace, index_id: int, key: bytes) -> bytes | None:
    """Return the tuple with this key of a unique index, or None."""
    check_access(txn, space, _READ)
    index = space.index(index_id)
    return _find_visible(txn, space, index, _exact(space, index, key))


def position_of(index: EngineIndex, tuple_: bytes) -> bytes:
    """Return an opaque position from which a later `select` continues after `tuple_`."""
    entry = index.key.entries(unpack(tuple_))
    if len(entry) != 1:
        raise errors.Unsupported(f"Index '{index.definition.name}' does not support pagination")
    return base64.b64encode(pack(entry[0]))


def insert(txn: BoxTransaction, space: EngineSpace, raw: bytes, *, numbered: bool = True) -> bytes:
    """Insert a tuple and return it; with `numbered`, the sequence of the space, if any, fills a nil key."""
    raw, values = _checked_tuple(txn, space, raw, numbered=numbered)
    if space.primary is not None:
        if txn.find(space.primary, space.primary.key.entries(values)[0]) is not None:
            raise space.duplicate(space.primary)
        txn.write(space, None, raw, None, values)
    txn.log(Statement(INSERT, space, tuple_body(space, raw)))
    return raw


def replace(txn: BoxTransaction, space: EngineSpace, raw: bytes) -> bytes:
    raw, values = _checked_tuple(txn, space, raw)
    if space.primary is not None:
        old = txn.find_to_replace(space, space.primary, space.primary.key.entries(values)[0])
        if old is not None and space.guards is not None:
            _check_referrers(txn, space, old, raw)
        txn.write(space, old, raw, None, values)
    txn.log(Statement(REPLACE, space, tuple_body(space, raw)))
    return raw


def delete(txn: BoxTransaction, space: EngineSpace, index_id: int, key: bytes) -> bytes | None:
    """Delete and return the tuple with this key. Log the row even if there is no such tuple, as servers do."""
    index = _index_to_write(txn, space, index_id)
    old = txn.find(index, _exact(space, index, key))
    if old is not None:
        _check_referrers(txn, space, old, None)
        txn.write(space, old, None, None, None)
    index, key = _logged_key(space, index, key, old)
    txn.log(Statement(DELETE, space, key_body(space, index, 0, key)))
    return old


def update(
    txn: BoxTransaction, space: EngineSpace, index_id: int, key: bytes, operations: bytes, index_base: int = 0
) -> bytes | None:
    """Return the new tuple, or None if no tuple has the key; then the operations are not even decoded."""
    index = _index_to_write(txn, space, index_id)
    old = txn.find(index, _exact(space, index, key))
    new = None
    if old is not None:
        new = updated(txn.box, space, old, operations, index_base)
        new_values, old_values = unpack(new), unpack(old)
        _check_referrers(txn, space, old, new)
        _check_size(txn, new)
        _check_fit(txn, space, new, new_values)
        primary = _primary(space)
        entries = primary.key.entries(new_values)
        if entries != primary.key.entries(old_values):
            if txn.find(primary, entries[0]) is not None:
                raise space.duplicate(primary)
            raise errors.CantUpdatePrimaryKey(
                f"Attempt to modify a tuple field which is part of index '{primary.definition.name}'"
                f" in space '{space.name}'"
            )
        txn.write(space, old, new, old_values, new_values)
    index, key = _logged_key(space, index, key, old)
    txn.log(Statement(UPDATE, space, key_body(space, index, index_base, key, operations)))
    return new


def upsert(txn: BoxTransaction, space: EngineSpace, raw: bytes, operations: bytes, index_base: int = 0) -> None:
    """Insert the tuple, or apply the operations to the existing tuple with its primary key."""
    raw, values = _checked_tuple(txn, space, raw, numbered=False)
    primary = _primary(space)
    if any(index.key.is_unique for index in space.served[1:]) and space.definition.engine == "vinyl":
        raise errors.Unsupported("Vinyl does not support upsert with unique secondary indexes")
    decoded = decoded_operations(space, operations, index_base)
    key = primary.key.entries(values)[0]
    old = txn.find(primary, key)
    if old is None:
        txn.write(space, None, raw, None, values)
    else:
        new = upserted(txn.box, space, old, decoded)
        new_values = unpack(new)
        _check_referrers(txn, space, old, new)
        _check_size(txn, new)
        _check_fit(txn, space, new, new_values)
        # A change of the primary key is ignored, like every other operation that fails in an upsert.
        if primary.key.entries(new_values) == [key]:
            txn.write(space, old, new, None, new_values)
    txn.log(Statement(UPSERT, space, upsert_body(space, index_base, operations, raw)))


def updated(box: Box, space: EngineSpace, old: bytes, operations: bytes, index_base: int) -> bytes:
    """Return `old` with the operations of an UPDATE applied; the result is not checked yet."""
    # A logged update was valid on the server that executed it.
    rules = UpdateRules(box.dialect.fills_gaps, repeats=box.is_recovering)
    return update_raw(old, decoded_operations(space, operations, index_base), space.format, rules)


def upserted(box: Box, space: EngineSpace, old: bytes, operations: tuple[Operation, ...]) -> bytes:
    """Return `old` with the operations of an UPSERT applied; the result is not checked yet."""
    return upsert_raw(old, operations, space.format, UpdateRules(box.dialect.fills_gaps, box.repeats_updates))


def check_access(txn: BoxTransaction, space: EngineSpace, privilege: int) -> None:
    user = txn.user
    if user == ADMIN:
        return
    access = txn.box.access
    if not privilege & ~access.allows(user, space.id):
        return
    definition = space.definition
    if definition.engine == "sysview" and privilege == _READ:
        return  # all users may read views, which filter by user
    access.check(user, privilege, "space", definition.id, definition.owner, definition.name)


def check_writable(txn: BoxTransaction, space: EngineSpace) -> None:
    box = txn.box
    if box.is_recovering:
        return
    definition = space.definition
    if box.is_read_only and not definition.is_temporary and not definition.is_local:
        raise box.read_only_error()
    check_access(txn, space, _WRITE)
    if space.guards is not None:
        check_runnable(box, space, space.guards.checks)
    if definition.engine == "sysview":
        raise errors.ViewIsRo(f"View '{space.name}' is read-only")


def _checked_tuple(
    txn: BoxTransaction, space: EngineSpace, raw: bytes, *, numbered: bool = True
) -> tuple[bytes, Values]:
    """Check a new tuple; return it, with a number from the space's sequence if `numbered` (not for UPSERT)."""
    check_writable(txn, space)
    if space.definition.engine != BLACKHOLE:
        _primary(space)
    values = unpack(raw)
    if not isinstance(values, tuple):
        raise errors.TupleNotArray("Tuple/Key must be MsgPack array")
    if space.sequence is not None and numbered:
        raw, values = _numbered(txn, space.sequence, raw, values)
    _check_size(txn, raw)
    _check_fit(txn, space, raw, values)
    return raw, values


def _check_fit(txn: BoxTransaction, space: EngineSpace, raw: bytes, values: Values) -> None:
    """Check a new tuple against the format and the constraints of its space."""
    if space.guards is None:
        space.format.check(raw, values)
    else:
        check_tuple(txn, space, raw, values)


def _check_referrers(txn: BoxTransaction, space: EngineSpace, old: bytes, new: bytes | None) -> None:
    """Check that no tuple refers to `old`, which is deleted or replaced by `new`."""
    if space.guards is not None:
        check_referrers(txn, space, old, new)


def _numbered(txn: BoxTransaction, numbering: SpaceSequence, raw: bytes, values: Values) -> tuple[bytes, Values]:
    """Return the tuple with the next number of its sequence in place of nil; an explicit number advances the sequence.

    Numbers are never reused: a transaction that is rolled back leaves a gap.
    """
    if not numbering.is_generated and txn.user != ADMIN and not txn.box.is_recovering:
        check_sequence(txn, numbering.sequence)
    steps = (numbering.field, *parse_path(numbering.path or ""))
    value: Any = values
    for step in steps:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return raw, values  # the format check reports the missing field
    if type(value) is int:
        numbering.sequence.update(value)
    if value is not None:
        return raw, values
    number = numbering.sequence.next()
    assign = Operation("=", numbering.field, (number,), steps[1:], value=pack(number))
    raw = update_raw(raw, (assign,))
    return raw, unpack(raw)


def decoded_operations(space: EngineSpace, operations: bytes, index_base: int) -> tuple[Operation, ...]:
    """Decode the operations of a request; raise the server's error if they are invalid for any tuple."""
    if index_base >= 1 << 31:
        index_base -= 1 << 32  # the server reads it as a signed 32-bit integer
    return decode_operations(operations, index_base=index_base, field_names=space.format.field_names)


def _check_size(txn: BoxTransaction, raw: bytes) -> None:
    size = len(raw) + TUPLE_HEAD_SIZE
    if size > txn.box.tuple_size_max and not txn.box.is_recovering:
        raise errors.MemtxMaxTupleSize(
            f"Failed to allocate {size} bytes for tuple: tuple is too large. "
            "Check 'memtx_max_tuple_size' configuration option."
        )


def _primary(space: EngineSpace) -> EngineIndex:
    if space.primary is None:
        raise errors.NoSuchIndexId(f"No index #0 is defined in space '{space.name}'")
    return space.primary


def _index_to_write(txn: BoxTransaction, space: EngineSpace, index_id: int) -> EngineIndex:
    check_writable(txn, space)
    _primary(space)
    return space.index(index_id)


def _exact(space: EngineSpace, index: EngineIndex, key: bytes) -> Key:
    _check_served(space, index)
    if not index.definition.unique:
        raise errors.MoreThanOneTuple("Get() doesn't support partial keys and non-unique indexes")
    return index.key.exact(index.key.read(key))


def _is_point(index: EngineIndex, iterator: int, values: Any) -> bool:
    """Return True if the key selects at most one tuple, whose entry can be computed from the key."""
    return (
        (iterator == EQ or (iterator == REQ and index.is_ordered))
        and index.is_served
        and index.definition.unique
        and isinstance(values, tuple)
        and len(values) == len(index.definition.parts)
        and None not in values
    )


def _is_after_nothing(txn: BoxTransaction, index: EngineIndex, iterator: int, values: Values) -> bool:
    """Return True for GT in a HASH index that does not have the key: no tuple comes after it."""
    return iterator == GT and bool(values) and not index.is_ordered and txn.find(index, index.key.exact(values)) is None


def _span(space: EngineSpace, index: EngineIndex, iterator: int, values: Values) -> Span:
    _check_served(space, index)
    if iterator <= GT and (index.is_ordered or iterator in _OF_HASH):
        return index.key.span(iterator, values)
    index.key.span(EQ, values)  # an invalid key is reported first
    raise errors.UnsupportedIndexFeature(
        f"Index '{index.definition.name}' ({index.definition.type.upper()}) of space '{space.name}'"
        f" ({space.definition.engine}) does not support requested iterator type"
    )


def _check_served(space: EngineSpace, index: EngineIndex) -> None:
    if not index.is_served:
        kind = "functional" if index.definition.is_functional else index.definition.type.upper()
        raise errors.Unsupported(
            f"Flowstone does not support reading through {kind} index '{index.definition.name}'"
            f" of space '{space.name}': use another index"
        )


def _behind(index: EngineIndex, span: Span, position: bytes) -> Span:
    try:
        entry = unpack(base64.b64decode(position, validate=True))
    except (binascii.Error, ValueError, FlowstoneError):
        entry = None
    kind = int if index.key.kind is KeyKind.INTEGER else bytes
    if type(entry) is not kind or not index.is_ordered:
        raise errors.IteratorPosition("Iterator position is invalid")
    if not contains(span, entry):
        raise errors.IteratorPosition("Iterator position is invalid")
    if span.reverse:
        return Span(span.low, entry, True)
    return Span(successor(entry), span.high, False)


def _find_visible(txn: BoxTransaction, space: EngineSpace, index: EngineIndex, key: Key) -> bytes | None:
    if space.definition.engine != "sysview":
        return txn.find(index, key)
    return sysview.find(txn, space, index, key)


def tuple_body(space: EngineSpace, raw: bytes) -> bytes:
    """Return the body of an INSERT or REPLACE row."""
    return b"\x82\x10" + encode_uint(space.id) + b"\x21" + raw


def _logged_key(space: EngineSpace, index: EngineIndex, key: bytes, old: bytes | None) -> tuple[EngineIndex, bytes]:
    """Return the index and key to log: the primary key of `old`, as servers do, or the request's own if None."""
    if old is None or not index.definition.id:
        return index, key
    return _primary(space), primary_key_of(space, old)


def primary_key_of(space: EngineSpace, raw: bytes) -> bytes:
    """Return the primary key of a tuple as the key of a request."""
    fields = elements_of(raw)
    parts = [_part_of(fields[part.field], part.path) for part in _primary(space).definition.parts]
    return pack([()] * len(parts))[: -len(parts)] + b"".join(parts)


def _part_of(field: bytes, path: str | None) -> bytes:
    return field if path is None else pack(find(unpack(field), parse_path(path)))


def key_body(space: EngineSpace, index: EngineIndex, index_base: int, key: bytes, operations: bytes = b"") -> bytes:
    """Return the body of a DELETE or UPDATE row."""
    parts = [b"\x10" + encode_uint(space.id)]
    if index.definition.id:
        parts.append(b"\x11" + encode_uint(index.definition.id))
    if index_base:
        parts.append(b"\x15" + encode_uint(index_base))
    parts.append(b"\x20" + key)
    if operations:
        parts.append(b"\x21" + operations)
    return bytes((0x80 + len(parts),)) + b"".join(parts)


def upsert_body(space: EngineSpace, index_base: int, operations: bytes, raw: bytes) -> bytes:
    """Return the body of an UPSERT row."""
    base = b"\x15" + encode_uint(index_base) if index_base else b""
    head = bytes((0x83 + bool(index_base),))
    return head + b"\x10" + encode_uint(space.id) + base + b"\x28" + operations + b"\x21" + raw
