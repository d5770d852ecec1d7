"""Converts DML rows of a log to statements that a live server can execute.

Tuples, keys and operations are sliced from the row's body as MessagePack, without decoding. Has no side effects;
`play.py` sends the statements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgpack
import msgspec

from flowstone.box.system import TRUNCATE_ID
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.row import Row, RowError

SYSTEM_SPACES_END = 512
"""Ids below this number are system spaces: their rows change the schema or the cluster."""

LUA_BASE = 1
"""Lua counts fields from 1; a row counts from its INDEX_BASE, which is 0 if the client set none."""

_PLAYED = {
    RequestType.INSERT.value: (Key.TUPLE.value, None),
    RequestType.REPLACE.value: (Key.TUPLE.value, None),
    RequestType.UPDATE.value: (Key.KEY.value, Key.TUPLE.value),
    RequestType.DELETE.value: (Key.KEY.value, None),
    RequestType.UPSERT.value: (Key.TUPLE.value, Key.OPS.value),
}
"""The body keys of the tuple or key, and of the operations, for each request type."""

_BODY = msgspec.msgpack.Decoder(dict[int, msgspec.Raw])
_NUMBER = msgspec.msgpack.Decoder(Annotated[int, msgspec.Meta(ge=0)])
_FIELDS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ZERO = b"\x00"
_SPACE_ID, _INDEX_ID, _INDEX_BASE = Key.SPACE_ID.value, Key.INDEX_ID.value, Key.INDEX_BASE.value


class LogStatement(msgspec.Struct, frozen=True, gc=False):
    """A DML row. `subject` is its tuple or its key; `operations` are the operations of an UPDATE or UPSERT, otherwise
    empty."""

    row: Row
    space_id: int
    index_id: int
    index_base: int
    subject: bytes
    operations: bytes

    @property
    def changed_space_id(self) -> int:
        """The space whose tuples change: for a row of `_truncate`, the truncated space."""
        if self.space_id != TRUNCATE_ID:
            return self.space_id
        try:
            space_id: int = _NUMBER.decode(_FIELDS.decode(self.subject)[0])
        except (msgspec.DecodeError, IndexError):
            return self.space_id
        return space_id

    def for_lua(self) -> tuple[int, int, int, bytes, bytes]:
        """Return type, space, index, subject and operations, with field numbers as Lua counts them."""
        operations = rebase(self.operations, self.index_base) if self.operations else b""
        return self.row.type, self.space_id, self.index_id, self.subject, operations


def statement_of(row: Row) -> LogStatement | None:
    """Return the statement of `row`; None for a row that changes no space (NOP, RAFT, CONFIRM and so on).

    Also return None for a row of `_truncate` in a snapshot: it only counts past truncations, and would truncate the
    space on the server. Raise RowError if the body is invalid.
    """
    keys = _PLAYED.get(row.type)
    if keys is None:
        return None
    try:
        parts = _BODY.decode(row.body)
        space_id = _NUMBER.decode(parts[_SPACE_ID])
        index_id = _NUMBER.decode(parts.get(_INDEX_ID, _ZERO))
        index_base = _NUMBER.decode(parts.get(_INDEX_BASE, _ZERO))
        subject = bytes(parts[keys[0]])
        operations = bytes(parts[keys[1]]) if keys[1] is not None else b""
    except KeyError as error:
        raise RowError(f"row with LSN {row.lsn}: {RequestType(row.type).name} has no key {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RowError(f"row with LSN {row.lsn}: invalid body: {error}") from error
    if not (_is_array(subject) and (keys[1] is None or _is_array(operations))):
        name = RequestType(row.type).name
        raise RowError(f"row with LSN {row.lsn}: tuple, key or operations of {name} are not an array")
    if space_id == TRUNCATE_ID and is_of_snapshot(row):
        return None
    return LogStatement(row, space_id, index_id, index_base, subject, operations)


def is_of_snapshot(row: Row) -> bool:
    """True for a row of a snapshot, which has no originator, and a row number instead of an LSN."""
    return row.replica_id == 0 and row.group_id == 0


def _is_array(raw: bytes) -> bool:
    # `LUA` in `play.py` makes a tuple without validation, so only arrays may reach the server.
    return bool(raw) and (0x90 <= raw[0] <= 0x9F or raw[0] in (0xDC, 0xDD))


def rebase(operations: bytes, base: int) -> bytes:
    """Return `operations` with field numbers that count from LUA_BASE instead of `base`.

    Negative numbers, which count from the end, and field names stay unchanged. The offset of a splice counts like a
    field number. Raise RowError if the operations are invalid.
    """
    if base == LUA_BASE:
        return operations
    unpacker = msgpack.Unpacker(raw=True, strict_map_key=False, max_buffer_size=0)
    unpacker.feed(operations)
    try:
        count = unpacker.read_array_header()
        parts = [msgpack.Packer().pack_array_header(count)]
        for _ in range(count):
            parts += _rebased(unpacker, operations, base)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RowError(f"invalid update operations: {str(error) or type(error).__name__}") from error
    return b"".join(parts)


def _rebased(unpacker: msgpack.Unpacker, operations: bytes, base: int) -> Iterator[bytes]:
    """Yield one operation `[what, field, argument…]` in pieces, with its numbers converted."""
    size = unpacker.read_array_header()
    yield msgpack.Packer().pack_array_header(size)
    what = b""
    for position in range(size):
        start = unpacker.tell()
        number = None
        if position == 0:
            what = unpacker.unpack()
        elif position == 1 or (position == 2 and what == b":"):
            number = unpacker.unpack()
        else:
            unpacker.skip()
        if type(number) is int and number >= 0:
            # A number below its base is an error and stays one: Lua rejects field 0.
            yield msgpack.packb(max(number - base + LUA_BASE, 0))
        else:
            yield operations[start : unpacker.tell()]
