"""The expected content of a history: every state of every tuple, computed from a server's log, one transaction at a
time.

A model of the mirror: dictionaries, one row after another, without batches, tables or kills. It shares with the mirror
only how files are read and how an operation changes a tuple. It supports spaces that keep their primary key, in a log
that begins with a snapshot and has one writer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import Schema
from flowstone.box.system import TRUNCATE_ID
from flowstone.box.update.update import decode_operations, update_raw, upsert_raw
from flowstone.history.log_reading import Piece, Reading
from flowstone.history.selection import Selection
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import unpack
from flowstone.outside import production
from flowstone.xlog.meta import FileType

NAMES = {
    kind: kind.name.lower()
    for kind in (
        RequestType.INSERT,
        RequestType.REPLACE,
        RequestType.UPDATE,
        RequestType.UPSERT,
        RequestType.DELETE,
    )
}
SHOWN = 3


class State(NamedTuple):
    """A tuple, the change that produced it (None: it was in the snapshot), and its first and last version.

    If `until` is None, the state is current.
    """

    raw: bytes
    operation: str
    place: tuple[int, int] | None
    since: int
    until: int | None


class Change(NamedTuple):
    """A row of the log: its position, its content, and the definition of its space at that time."""

    kind: int
    place: tuple[int, int]
    space_id: int
    key: bytes
    body: bytes
    operations: bytes
    base: int
    schema: Schema


class Effect(NamedTuple):
    """What a change did: the tuple before and after it. A truncation has neither."""

    operation: str
    place: tuple[int, int]
    version: int
    before: bytes | None
    after: bytes | None


class History:
    """The history of one space; `former` has the states that ended, with their counts."""

    def __init__(self) -> None:
        self.current: dict[Any, State] = {}
        self.former: Counter[State] = Counter()
        self.effects: list[Effect] = []

    @property
    def states(self) -> Counter[State]:
        return self.former + Counter(self.current.values())

    def begin(self, version: int) -> None:
        """Forget the origin of the states: a history begins with a snapshot."""
        self.former.clear()
        self.effects.clear()
        self.current = {key: State(state.raw, "insert", None, version, None) for key, state in self.current.items()}

    def change(self, change: Change, version: int) -> None:
        space = change.schema.get(change.space_id)
        assert space is not None, f"{change.place} belongs to an undefined space"
        is_keyed = change.kind in (RequestType.UPDATE, RequestType.DELETE)
        key = unpack(change.key) if is_keyed else key_of(space, change.body)
        old = self.current.get(key)
        new = _changed(change, old, space)
        operation = NAMES[RequestType(change.kind)]
        is_update_of_nothing = change.kind == RequestType.UPDATE and old is None
        if not is_update_of_nothing and (old is not None or new is not None):
            self.effects.append(Effect(operation, change.place, version, old.raw if old is not None else None, new))
        if old is not None:
            self._end(key, version)
        if new is not None:
            self.current[key] = State(new, operation, change.place, version, None)

    def truncate(self, change: Change, version: int) -> None:
        self.effects.append(Effect("truncate", change.place, version, None, None))
        for key in list(self.current):
            self._end(key, version)

    def _end(self, key: Any, version: int) -> None:
        self.former[self.current.pop(key)._replace(until=version)] += 1


def key_of(space: SpaceDefinition, raw: bytes) -> tuple[Any, ...]:
    assert space.primary_key is not None
    values = unpack(raw)
    return tuple(values[part.field] for part in space.primary_key.parts)


def _changed(change: Change, old: State | None, space: SpaceDefinition) -> bytes | None:
    """Return the tuple after a change.

    Servers also log an UPDATE or a DELETE without a match: such a row has no effect.
    """
    if change.kind == RequestType.DELETE:
        return None
    is_update = change.kind == RequestType.UPDATE
    if old is None or change.kind in (RequestType.INSERT, RequestType.REPLACE):
        return None if is_update else change.body
    raw = change.body if is_update else change.operations
    operations = decode_operations(raw, index_base=change.base, field_names=space.field_names)
    return (update_raw if is_update else upsert_raw)(old.raw, operations)


def expected(directory: Path, begun: int, spaces: Collection[int]) -> dict[int, History]:
    """Return the histories of the spaces since version `begun`, from the oldest snapshot of a directory and
    all its logs.
    """
    histories = {space_id: History() for space_id in spaces}
    has_begun = False
    for version, changes in _transactions(directory):
        if version > begun and not has_begun:
            has_begun = True
            for history in histories.values():
                history.begin(begun)
        for change in changes:
            if change.space_id in histories:
                histories[change.space_id].change(change, version)
            # A deletion here is part of a drop.
            elif change.space_id == TRUNCATE_ID and change.kind != RequestType.DELETE:
                emptied = unpack(change.body)[0]
                if emptied in histories:
                    histories[emptied].truncate(change, version)
    assert has_begun, f"nothing after {begun} in {directory}"
    return histories


def _transactions(directory: Path) -> Iterator[tuple[int, list[Change]]]:
    """Yield settled transactions with their version.

    With one writer, the version is the LSN of the last row, which is the sum of the position. Local rows do not count.
    """
    files = [min(directory.glob("*.snap")), *sorted(directory.glob("*.xlog"))]
    gathered: list[Change] = []
    version, writers = 0, set[int]()
    reading = Reading(production(), [*map(str, files)], selection=Selection(show_system=True), settled=True)
    for piece in reading.pieces():
        is_snapshot = piece.meta.file_type is FileType.SNAP
        for change, is_commit in _changes(piece):
            gathered.append(change)
            origin, lsn = change.place
            if origin and not is_snapshot:
                version = lsn
                writers.add(origin)
                assert len(writers) == 1, f"a log of several writers: {writers}"
            if is_commit:
                yield version, gathered
                gathered = []
    assert not gathered, "the log ends inside a transaction"


def _changes(piece: Piece) -> Iterator[tuple[Change, bool]]:
    """Yield the rows of a piece, and whether each is the last of its transaction."""
    lines = (
        *(scan.TYPE, scan.REPLICA_ID, scan.LSN, scan.SPACE_ID, scan.INDEX_BASE, scan.FLAGS),
        *(scan.KEY_AT, scan.KEY_END, scan.TUPLE_AT, scan.TUPLE_END, scan.OPS_AT, scan.OPS_END),
    )
    payload = piece.slab.payload
    for cells in piece.slab.cells[:, piece.rows].T.tolist():
        kind, origin, lsn, space_id, base, flags, *bounds = (cells[line] for line in lines)
        key, body, operations = (
            payload[bounds[at] : bounds[at + 1]] if bounds[at] >= 0 else b"" for at in range(0, len(bounds), 2)
        )
        change = Change(kind, (origin, lsn), space_id, key, body, operations, base, piece.schema)
        yield change, bool(flags & scan.COMMIT)


def found_in(rows: Iterable[Mapping[str, Any]]) -> Counter[State]:
    """Return the states in a table, with their counts."""
    states: Counter[State] = Counter()
    for row in rows:
        place = None if row["_lsn"] is None else (row["_replica_id"], row["_lsn"])
        state = State(row["_tuple"], row["_operation"], place, row["_from_version"], row["_to_version"])
        assert row["_is_current"] == (state.until is None), state
        states[state] += 1
    return states


def differences(wanted: Counter[State], found: Counter[State]) -> list[str]:
    """Return some states that a table has too often, and some that it lacks."""
    said = (("too often", found - wanted), ("missing", wanted - found))
    return [
        f"{what}: {state.operation} {state.place} of {state.raw[:40]!r}, from {state.since} to {state.until}"
        for what, states in said
        for state in sorted(states, key=lambda state: (state.since, state.raw))[:SHOWN]
    ]
