"""Decoded rows, one at a time, with the definition of their space: the input of the readable formats.

Takes pieces from `Reading`. Names of spaces and fields are the names in force at the row. This is the slow path:
writers format `strips` of rows as columns, and use records only for rows with rare content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flowstone.box.schema import SpaceDefinition
from flowstone.errors import RemoteProtocolError
from flowstone.history.log_reading import Piece
from flowstone.history.selection import Mask
from flowstone.iproto import scan as rows_of
from flowstone.iproto.constants import Flag, Key, RaftKey, RequestType, type_name
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.row import Row
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab
from flowstone.xlog.errors import DamagedLog

_KEY_NAMES = {key.value: key.name.lower() for key in Key} | {Key.OPS.value: "operations"}
_RAFT_NAMES = {key.value: key.name.lower() for key in RaftKey}
# Plain integers: an operation on an IntFlag costs as much as the rest of a header.
_WAIT_SYNC, _WAIT_ACK = Flag.WAIT_SYNC.value, Flag.WAIT_ACK.value
_RAFT_STATES = {1: "follower", 2: "candidate", 3: "leader"}


@dataclass(frozen=True, slots=True)
class Record:
    """One row, the definition of its space if known, and a number that all rows of its transaction share."""

    row: Row
    body: dict[int, Any]
    space: SpaceDefinition | None
    transaction: tuple[int, int]

    @property
    def is_alone(self) -> bool:
        """True if the row is a transaction by itself."""
        return self.row.is_commit and self.row.tsn == self.row.lsn

    @property
    def space_id(self) -> int | None:
        return self.body.get(Key.SPACE_ID) if self.row.type != RequestType.RAFT else None

    @property
    def operations(self) -> Sequence[Any] | None:
        """The operations of an UPDATE or UPSERT; an UPDATE has them under the key that other rows use for the tuple."""
        return self.body.get(Key.TUPLE if self.row.type == RequestType.UPDATE else Key.OPS)

    @property
    def tuple(self) -> Sequence[Any] | None:
        return None if self.row.type == RequestType.UPDATE else self.body.get(Key.TUPLE)

    def plain_body(self) -> dict[str, Any]:
        """Return the body by key names, in the order of the file, plus the name of the space."""
        if self.row.type == RequestType.RAFT:
            return _raft_body(self.body)
        body: dict[str, Any] = {}
        for key, value in self.body.items():
            body[_KEY_NAMES.get(key, str(key))] = value
            if key == Key.SPACE_ID and self.space is not None:
                body["space"] = self.space.name
        return body

    def named_body(self) -> dict[str, Any]:
        """Return `plain_body` with field names: tuples and keys as maps, operations with the names of their fields."""
        body = self.plain_body()
        if self.space_id is None:
            return body
        if self.row.type == RequestType.UPDATE and "tuple" in body:
            body["operations"] = body.pop("tuple")
        if self.space is None:
            return body
        names = self.space.field_names
        if isinstance(body.get("tuple"), tuple):
            body["tuple"] = name_fields(names, body["tuple"])
        if isinstance(body.get("key"), tuple):
            body["key"] = name_fields(self._key_names(), body["key"])
        if isinstance(body.get("operations"), tuple):
            base = body.pop("index_base", 0)
            body["operations"] = [_named_operation(each, names, base) for each in body["operations"]]
        return body

    def _key_names(self) -> list[str | int]:
        return key_names(self.space, self.body.get(Key.INDEX_ID, 0)) if self.space is not None else []


def key_names(space: SpaceDefinition, index_id: int) -> list[str | int]:
    """Return the names of the fields in the index's key, numbers for unnamed fields; [] for an unknown index."""
    names = space.field_names
    index = next((each for each in space.indexes if each.id == index_id), None)
    fields = [part.field for part in index.parts] if index is not None else []
    return [names[field] if field < len(names) else field + 1 for field in fields]


def header_of(record: Record) -> list[tuple[str, Any]]:
    """Return names and values of the row's header as `tt cat` shows them, plus the flags of synchronous replication."""
    row = record.row
    header: list[tuple[str, Any]] = [("lsn", row.lsn)] if row.lsn else []
    header += [("commit", True)] if row.is_commit and not record.is_alone else []
    header += [("wait_sync", True)] if row.flags & _WAIT_SYNC else []
    header += [("wait_ack", True)] if row.flags & _WAIT_ACK else []
    header += [("replica_id", row.replica_id)] if row.replica_id else []
    header += [("group_id", row.group_id)] if row.group_id else []
    header.append(("type", type_name(row.type)))
    header += [("tsn", row.tsn)] if not record.is_alone else []
    header += [("timestamp", row.timestamp)] if row.timestamp else []
    return header


def name_fields(names: Sequence[str | int], values: Sequence[Any]) -> dict[str | int, Any]:
    """Return `values` by field name; values without a name by their number, starting at 1 as in Lua."""
    return {names[at] if at < len(names) else at + 1: value for at, value in enumerate(values)}


class Records:
    """All rows of the pieces, in order. Iterate once, either over this object or over its `pieces`."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[Record]:
        slab: Slab | None = None
        number, numbers = 0, np.empty(0, np.int64)
        for piece in self.pieces:
            if piece.slab is not slab:
                slab, number, numbers = piece.slab, number + 1, transaction_numbers(piece.slab)
            shared = numbers[piece.rows].tolist()
            for row, transaction in zip(slab.rows(piece.rows), shared, strict=True):
                body = _body(piece, row)
                space_id = body.get(Key.SPACE_ID) if row.type != RequestType.RAFT else None
                space = piece.schema.get(space_id) if isinstance(space_id, int) else None
                yield Record(row, body, space, (number, transaction))


def records(pieces: Iterable[Piece]) -> Records:
    """Return all rows of the pieces, in order."""
    return Records(pieces)


STRIP_ROWS = 8192
"""Maximum number of rows whose texts are in memory at once."""


def strips(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Split the pieces into pieces of at most STRIP_ROWS rows, in order."""
    for piece in pieces:
        for start in range(0, len(piece.rows), STRIP_ROWS):
            yield replace(piece, rows=piece.rows[start : start + STRIP_ROWS])


def alone(cells: Cells) -> Mask:
    """Return `Record.is_alone` for each row of a scanner's table."""
    mask: Mask = (cells[rows_of.FLAGS] & rows_of.COMMIT != 0) & (cells[rows_of.TSN] == cells[rows_of.LSN])
    return mask


def transaction_numbers(slab: Slab) -> Cells:
    """Return the transaction number of each row of the slab; a transaction is never split between slabs."""
    commits = slab.cells[rows_of.FLAGS] & rows_of.COMMIT
    numbers: Cells = np.cumsum(commits) - commits
    return numbers


def _body(piece: Piece, row: Row) -> dict[int, Any]:
    try:
        return unpack_body(row.body)
    except RemoteProtocolError as error:
        lsns = piece.slab.cells[rows_of.LSN]
        block = piece.slab.cells[rows_of.SPAN, int(np.flatnonzero(lsns == row.lsn)[0])]
        what = f"body of row {row.lsn} of replica {row.replica_id} is malformed ({error})"
        raise DamagedLog(piece.slab.path, int(piece.slab.offsets[block]), what) from error


def _raft_body(body: dict[int, Any]) -> dict[str, Any]:
    named = {_RAFT_NAMES.get(key, str(key)): value for key, value in body.items()}
    if named.get("state") in _RAFT_STATES:
        named["state"] = _RAFT_STATES[named["state"]]
    return named


def _named_operation(operation: Any, names: Sequence[str], base: int) -> Any:
    if not isinstance(operation, tuple) or len(operation) < 2 or type(operation[1]) is not int:
        return operation
    field = operation[1] - base
    # A negative number counts from the end: which field it means depends on the tuple.
    if operation[1] < 0 or not 0 <= field < len(names):
        return operation
    return (operation[0], names[field], *operation[2:])
