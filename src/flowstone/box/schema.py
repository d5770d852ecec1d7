"""The schema as recorded in a log: definitions by id and name, and how they change over time.

`Schema` is an immutable value. `SchemaTracker` applies rows of `_space` and `_index` in log order. `SchemaHistory`
records the changes by position. An invalid row never stops the reading of a log: its space is then known by id only,
and `Schema.problem` returns the reason.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from flowstone.box import system
from flowstone.box.definitions import (
    DefinitionError,
    FieldDefinition,
    IndexDefinition,
    IndexPart,
    SpaceDefinition,
    read_index,
    read_space,
    with_indexes,
)
from flowstone.box.update.update import decode_operations, update, upsert
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import MessagePackError, unpack_body

__all__ = [
    "DefinitionError",
    "FieldDefinition",
    "IndexDefinition",
    "IndexPart",
    "Schema",
    "SchemaChange",
    "SchemaHistory",
    "SchemaTracker",
    "SpaceDefinition",
    "UnknownSpace",
]

Row = tuple[Any, ...]
RowKey = tuple[int, ...]

_KEY_FIELDS: Final = {system.SPACE_ID: 1, system.INDEX_ID: 2}
"""Number of leading fields that form the primary key."""

_NAME_INDEX: Final = 2
"""Id of the index by name, in both `_space` and `_index`."""


class UnknownSpace(FlowstoneError):
    """No space has this id or name."""


class Schema:
    """All spaces at one moment. Immutable."""

    __slots__ = ("_by_id", "_by_name", "_problems", "_synchronous")

    def __init__(self, spaces: Mapping[int, SpaceDefinition], problems: Mapping[int, str] | None = None) -> None:
        self._by_id = dict(sorted(spaces.items()))
        self._by_name = {space.name: space for space in self._by_id.values()}
        self._problems = dict(problems or {})
        self._synchronous = frozenset(space.id for space in self._by_id.values() if space.is_sync)

    def get(self, space: int | str) -> SpaceDefinition | None:
        """Return the space with this id or name, or None."""
        return self._by_id.get(space) if isinstance(space, int) else self._by_name.get(space)

    def space(self, space: int | str) -> SpaceDefinition:
        """Return the space with this id or name; raise UnknownSpace, with the reason if known, if there is none."""
        found = self.get(space)
        if found is not None:
            return found
        if isinstance(space, int):
            reason = self._problems.get(space)
            raise UnknownSpace(f"unknown space {space}" + (f": {reason}" if reason else ""))
        names = [known for known in self._by_name if not known.startswith("_")]
        some = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        raise UnknownSpace(f"unknown space {space!r}", hint=f"known spaces: {some}" if names else None)

    def problem(self, space_id: int) -> str | None:
        """Return the error in the definition of the space or of one of its indexes, or None."""
        return self._problems.get(space_id)

    @property
    def synchronous(self) -> frozenset[int]:
        """Ids of the synchronous spaces (is_sync)."""
        return self._synchronous

    def __iter__(self) -> Iterator[SpaceDefinition]:
        """Iterate over the spaces in order of their ids."""
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self._by_id == other._by_id and self._problems == other._problems

    __hash__ = None  # type: ignore[assignment]  # compared, never a key

    def __repr__(self) -> str:
        return f"<Schema of {len(self._by_id)} spaces>"


class SchemaTracker:
    """Applies rows of `_space` and `_index`. The system spaces are known from the start."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[RowKey, Row]] = {
            system.SPACE_ID: {(row[0],): row for row in system.space_rows()},
            system.INDEX_ID: {(row[0], row[1]): row for row in system.index_rows()},
        }
        # Keys of each space's rows in `_index`, in order of the index ids.
        self._index_keys: dict[int, list[RowKey]] = {}
        for key in self._rows[system.INDEX_ID]:
            self._index_keys.setdefault(key[0], []).append(key)
        self._spaces: dict[int, SpaceDefinition] = {}
        self._problems: dict[int, str] = {}
        self._schema: Schema | None = None
        for space_id, *_ in list(self._rows[system.SPACE_ID].values()):
            self._define(space_id)

    def copy(self) -> SchemaTracker:
        """Return an independent copy. Rows and definitions are immutable and shared."""
        other = SchemaTracker.__new__(SchemaTracker)
        other._rows = {table_id: dict(rows) for table_id, rows in self._rows.items()}
        other._index_keys = dict(self._index_keys)
        other._spaces = dict(self._spaces)
        other._problems = dict(self._problems)
        other._schema = self._schema
        return other

    @property
    def schema(self) -> Schema:
        """The current schema. Created on demand; the same object until the next change."""
        if self._schema is None:
            self._schema = Schema(self._spaces, self._problems)
        return self._schema

    def rows(self) -> list[tuple[int, Row]]:
        """Return the current rows of `_space` and `_index`, each with the id of its system space."""
        return [(table_id, row) for table_id, rows in self._rows.items() for row in rows.values()]

    def apply(self, row_type: int, body: bytes) -> int | None:
        """Apply a row of the log; return the id of the space whose definition it changed, or None.

        Rows of other spaces and rows without effect are ignored.
        """
        try:
            request = unpack_body(body)
        except MessagePackError:
            return None
        table_id = request.get(Key.SPACE_ID)
        if type(table_id) is not int or table_id not in system.SCHEMA_SPACE_IDS:
            return None
        try:
            change = self._change(table_id, row_type, request)
        except TarantoolError as error:
            # The server that wrote the log could apply these operations and we cannot: the old definition is stale.
            key = self._key_of_request(table_id, request)
            if key is None:
                return None
            return self._keep(table_id, key, None, f"cannot follow a change of its definition: {error.message}")
        if change is None:
            return None
        key, row = change
        return self._keep(table_id, key, row)

    def _change(self, table_id: int, row_type: int, request: dict[int, Any]) -> tuple[RowKey, Row | None] | None:
        """Return the key that the request changes and its new row (None if deleted), or None for no effect."""
        if row_type in (RequestType.INSERT, RequestType.REPLACE):
            return _keyed(table_id, request.get(Key.TUPLE))
        if row_type == RequestType.UPSERT:
            return self._upserted(table_id, request)
        if row_type not in (RequestType.UPDATE, RequestType.DELETE):
            return None
        key = self._key_of_request(table_id, request)
        if key is None or key not in self._rows[table_id]:
            return None
        if row_type == RequestType.DELETE:
            return key, None
        return self._same_key(key, update(self._rows[table_id][key], self._operations(table_id, request, Key.TUPLE)))

    def _upserted(self, table_id: int, request: dict[int, Any]) -> tuple[RowKey, Row | None] | None:
        keyed = _keyed(table_id, request.get(Key.TUPLE))
        if keyed is None:
            return None
        key, row = keyed
        old = self._rows[table_id].get(key)
        if old is None:
            return key, row
        return self._same_key(key, upsert(old, self._operations(table_id, request, Key.OPS)))

    @staticmethod
    def _same_key(key: RowKey, row: Row) -> tuple[RowKey, Row | None] | None:
        """Ignore a changed primary key: servers reject it in UPDATE and ignore it in UPSERT."""
        return (key, row) if row[: len(key)] == key else None

    def _operations(self, table_id: int, request: dict[int, Any], key: Key) -> Any:
        table = self._spaces.get(table_id)
        base = request.get(Key.INDEX_BASE, 0)
        return decode_operations(
            request.get(key, ()),
            index_base=base if type(base) is int else 0,
            field_names=table.field_names if table else (),
        )

    def _key_of_request(self, table_id: int, request: dict[int, Any]) -> RowKey | None:
        key, index_id = request.get(Key.KEY), request.get(Key.INDEX_ID, 0)
        if not isinstance(key, tuple):
            keyed = _keyed(table_id, request.get(Key.TUPLE))
            return keyed[0] if keyed else None
        if index_id == 0:
            return key if len(key) == _KEY_FIELDS[table_id] and _is_key(key) else None
        if index_id == _NAME_INDEX:
            for primary, row in self._rows[table_id].items():
                if (*primary[:-1], *row[2:3]) == key:
                    return primary
        return None

    def _keep(self, table_id: int, key: RowKey, row: Row | None, problem: str | None = None) -> int | None:
        rows = self._rows[table_id]
        if problem is None and rows.get(key) == row:
            return None
        space_id = key[0]
        if row is None:
            rows.pop(key, None)
        else:
            rows[key] = row
        if table_id == system.INDEX_ID:
            keys = [other for other in self._index_keys.get(space_id, ()) if other != key]
            self._index_keys[space_id] = sorted([*keys, key]) if row is not None else keys
        before = self._spaces.get(space_id), self._problems.get(space_id)
        self._define(space_id)
        if problem is not None:
            self._problems[space_id] = problem
        if before == (self._spaces.get(space_id), self._problems.get(space_id)):
            return None
        self._schema = None
        return space_id

    def _define(self, space_id: int) -> None:
        """Read the definition of `space_id`, and any problem with it, from its rows."""
        self._spaces.pop(space_id, None)
        self._problems.pop(space_id, None)
        row = self._rows[system.SPACE_ID].get((space_id,))
        if row is None:
            return
        try:
            space = read_space(row)
        except DefinitionError as error:
            self._problems[space_id] = error.message
            return
        indexes = []
        for key in self._index_keys.get(space_id, ()):
            try:
                indexes.append(read_index(self._rows[system.INDEX_ID][key], space.fields))
            except DefinitionError as error:
                self._problems[space_id] = f"index {key[1]}: {error.message}"
        self._spaces[space_id] = with_indexes(space, indexes)


def _keyed(table_id: int, row: object) -> tuple[RowKey, Row] | None:
    """Return the row with its primary key, or None if it has no valid key."""
    if not isinstance(row, tuple):
        return None
    key = row[: _KEY_FIELDS[table_id]]
    return (key, row) if len(key) == _KEY_FIELDS[table_id] and _is_key(key) else None


def _is_key(key: tuple[object, ...]) -> bool:
    return all(type(part) is int and part >= 0 for part in key)


class Ordered(Protocol):
    """Required of positions: they can be compared with each other."""

    def __lt__(self, other: Any, /) -> bool: ...


P = TypeVar("P", bound=Ordered)


class SchemaChange(NamedTuple, Generic[P]):
    """A definition that a space got at `position`; None if it was dropped or is known by id only."""

    position: P
    space: SpaceDefinition | None


class SchemaHistory(Generic[P]):
    """Schemas by position. Positions are chosen by the caller, such as (file number, offset), and must be ordered.

    A change at a position applies to the rows after it, not to the row itself.
    """

    def __init__(self, initial: Schema) -> None:
        self._initial = initial
        self._positions: list[P] = []
        self._changes: list[tuple[int, SpaceDefinition | None, str | None]] = []
        # The schema returned last, and the number of changes it includes: readers usually ask in order.
        self._latest = initial
        self._included = 0

    def record(self, position: P, space_id: int, schema: Schema) -> None:
        """Record that the row at `position` changed space `space_id`, resulting in `schema`."""
        if self._positions and position < self._positions[-1]:
            raise ValueError(f"schema change at {position!r} recorded after the one at {self._positions[-1]!r}")
        self._positions.append(position)
        self._changes.append((space_id, schema.get(space_id), schema.problem(space_id)))

    def at(self, position: P) -> Schema:
        """Return the schema that applied when the row at `position` was written."""
        count = bisect_left(self._positions, position)
        if count != self._included:
            self._latest = self._rebuild(count)
            self._included = count
        return self._latest

    def changes_of(self, space_id: int) -> list[SchemaChange[P]]:
        """Return all changes of one space, oldest first."""
        return [
            SchemaChange(position, space)
            for position, (changed, space, _) in zip(self._positions, self._changes, strict=True)
            if changed == space_id
        ]

    def _rebuild(self, count: int) -> Schema:
        start = self._included if count > self._included else 0
        base = self._latest if start else self._initial
        spaces = {space.id: space for space in base}
        problems = dict(base._problems)
        for space_id, space, problem in self._changes[start:count]:
            spaces.pop(space_id, None)
            problems.pop(space_id, None)
            if space is not None:
                spaces[space_id] = space
            if problem is not None:
                problems[space_id] = problem
        return Schema(spaces, problems)
