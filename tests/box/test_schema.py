"""The schema along a log: every kind of change, its validity range, and invalid rows, which never stop the reader."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.schema import (
    FieldDefinition,
    IndexDefinition,
    IndexPart,
    SchemaChange,
    SchemaHistory,
    SchemaTracker,
    SpaceDefinition,
    UnknownSpace,
)
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack

SPACE, INDEX = 280, 288
ORDERS: tuple[Any, ...] = (512, 1, "orders", "memtx", 0, {}, ({"name": "id", "type": "unsigned"},))
PRIMARY = (512, 0, "pk", "tree", {"unique": True}, ((0, "unsigned"),))


def insert(tracker: SchemaTracker, table: int, row: tuple[Any, ...]) -> int | None:
    return tracker.apply(RequestType.INSERT, pack({0x10: table, 0x21: row}))


def update(tracker: SchemaTracker, table: int, key: tuple[int, ...], *operations: Any, base: int = 1) -> int | None:
    return tracker.apply(RequestType.UPDATE, pack({0x10: table, 0x15: base, 0x20: key, 0x21: operations}))


def delete(tracker: SchemaTracker, table: int, key: tuple[Any, ...], index_id: int = 0) -> int | None:
    return tracker.apply(RequestType.DELETE, pack({0x10: table, 0x11: index_id, 0x20: key}))


@pytest.fixture
def tracker() -> SchemaTracker:
    tracker = SchemaTracker()
    assert insert(tracker, SPACE, ORDERS) == 512
    assert insert(tracker, INDEX, PRIMARY) == 512
    return tracker


def test_space_and_index_are_defined_by_their_rows(tracker: SchemaTracker) -> None:
    assert tracker.schema.space("orders") == SpaceDefinition(
        id=512,
        name="orders",
        fields=(FieldDefinition("id", "unsigned"),),
        indexes=(IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),)),),
    )
    assert tracker.schema.get(512) is tracker.schema.get("orders")


def test_schema_is_the_same_object_until_a_change(tracker: SchemaTracker) -> None:
    schema = tracker.schema
    assert insert(tracker, SPACE, ORDERS) is None
    assert insert(tracker, 512, (1,)) is None
    assert tracker.apply(RequestType.INSERT, b"\xc1") is None
    assert tracker.schema is schema
    assert update(tracker, SPACE, (512,), ("=", 3, "bestellungen")) == 512
    assert tracker.schema is not schema
    assert schema.space("orders").name == "orders"


def test_space_can_be_renamed_by_field_number_or_name(tracker: SchemaTracker) -> None:
    update(tracker, SPACE, (512,), ("=", 3, "a"))
    assert tracker.schema.space(512).name == "a"
    update(tracker, SPACE, (512,), ("=", 2, "b"), base=0)
    assert tracker.schema.space(512).name == "b"
    update(tracker, SPACE, (512,), ("=", "name", "c"))
    assert tracker.schema.space(512).name == "c"
    update(tracker, SPACE, (512,), ("=", -5, "d"))
    assert tracker.schema.space(512).name == "d"
    assert tracker.schema.get("orders") is None


def test_format_and_is_sync_are_altered(tracker: SchemaTracker) -> None:
    update(tracker, SPACE, (512,), ("=", 7, ({"name": "id", "type": "unsigned"}, {"name": "sum", "type": "number"})))
    assert tracker.schema.space("orders").field_names == ("id", "sum")
    assert not tracker.schema.synchronous
    update(tracker, SPACE, (512,), ("=", "flags.is_sync", True))
    assert tracker.schema.space("orders").is_sync
    assert tracker.schema.synchronous == {512}


def test_index_part_given_as_a_pair_is_nullable_with_its_field(tracker: SchemaTracker) -> None:
    insert(tracker, INDEX, (512, 1, "sk", "tree", {"unique": False}, ((1, "string"),)))
    assert not tracker.schema.space(512).indexes[1].parts[0].is_nullable
    nullable = {"name": "text", "type": "string", "is_nullable": True}
    update(tracker, SPACE, (512,), ("!", 7, ({"name": "id"}, nullable)), ("#", 8, 1))
    assert tracker.schema.space(512).indexes[1].parts[0].is_nullable


def test_space_is_dropped_after_its_indexes(tracker: SchemaTracker) -> None:
    assert delete(tracker, INDEX, (512, 0)) == 512
    assert tracker.schema.space(512).primary_key is None
    assert delete(tracker, SPACE, (512,)) == 512
    assert tracker.schema.get(512) is None
    assert delete(tracker, SPACE, (512,)) is None


def test_rows_can_be_deleted_by_name(tracker: SchemaTracker) -> None:
    assert delete(tracker, INDEX, (512, "pk"), index_id=2) == 512
    assert delete(tracker, SPACE, ("orders",), index_id=2) == 512
    assert tracker.schema.get(512) is None


def test_upsert_inserts_or_changes(tracker: SchemaTracker) -> None:
    body = {0x10: SPACE, 0x15: 1, 0x21: ORDERS, 0x28: (("=", 3, "a"), ("+", 3, 1))}
    assert tracker.apply(RequestType.UPSERT, pack(body)) == 512
    assert tracker.schema.space(512).name == "a"
    body[0x21] = (513, *ORDERS[1:])
    assert tracker.apply(RequestType.UPSERT, pack(body)) == 513
    assert tracker.schema.space(513).name == "orders"


def test_invalid_space_row_keeps_the_space_by_id_with_the_reason(tracker: SchemaTracker) -> None:
    assert update(tracker, SPACE, (512,), ("=", 7, "nonsense")) == 512
    assert tracker.schema.get(512) is None
    assert tracker.schema.problem(512) == "format is 'nonsense', not an array of fields"
    with pytest.raises(UnknownSpace, match="unknown space 512: format is 'nonsense'"):
        tracker.schema.space(512)
    assert update(tracker, SPACE, (512,), ("=", 7, ())) == 512
    assert tracker.schema.space(512).primary_key is not None
    assert tracker.schema.problem(512) is None


def test_invalid_index_is_ignored_with_the_reason(tracker: SchemaTracker) -> None:
    assert insert(tracker, INDEX, (512, 1, "sk", "tree", {}, "x")) == 512
    assert len(tracker.schema.space(512).indexes) == 1
    assert tracker.schema.problem(512) == "index 1: parts of the index are 'x', not an array of parts"


def test_inapplicable_operations_keep_the_space_by_id(tracker: SchemaTracker) -> None:
    assert update(tracker, SPACE, (512,), ("?", 3, "x")) == 512
    assert tracker.schema.get(512) is None
    assert "cannot follow a change of its definition" in str(tracker.schema.problem(512))


def test_update_of_an_undefined_row_is_ignored() -> None:
    assert update(SchemaTracker(), SPACE, (600,), ("=", 3, "x")) is None


def test_error_for_an_unknown_name_lists_the_known_names(tracker: SchemaTracker) -> None:
    with pytest.raises(UnknownSpace, match="unknown space 'order'; known spaces: orders"):
        tracker.schema.space("order")
    assert SchemaTracker().schema.get("orders") is None


@given(st.integers(0, 20), st.binary(max_size=60))
def test_any_row_is_applied_or_ignored(row_type: int, tail: bytes) -> None:
    tracker = SchemaTracker()
    tracker.apply(row_type, tail)
    tracker.apply(row_type, b"\x82\x10\xcd\x01\x18\x21" + tail)
    tracker.apply(row_type, b"\x84\x10\xcd\x01\x18\x15\x01\x20\x91\xcd\x02\x00\x21" + tail)
    assert len(tracker.schema)


# Random DDL against a model that keeps definitions, not rows.

NAMES = st.sampled_from([f"space{number}" for number in range(8)])
TYPES = st.sampled_from(["unsigned", "string", "number", "any", "map"])
FORMATS = st.lists(st.tuples(st.sampled_from("abcde"), TYPES, st.booleans()), max_size=4, unique_by=lambda f: f[0])
STEP = st.one_of(
    st.tuples(st.just("create"), st.integers(512, 516), NAMES, FORMATS),
    st.tuples(st.just("rename"), st.integers(512, 516), NAMES, st.sampled_from([3, "name", -5])),
    st.tuples(st.just("format"), st.integers(512, 516), FORMATS, st.sampled_from([7, "format", -1])),
    st.tuples(st.just("sync"), st.integers(512, 516), st.booleans(), st.sampled_from(["replace", "update", "path"])),
    st.tuples(st.just("index"), st.integers(512, 516), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("unindex"), st.integers(512, 516), st.integers(0, 3), st.none()),
    st.tuples(st.just("drop"), st.integers(512, 516), st.none(), st.none()),
)


def told(fields: list[tuple[str, str, bool]]) -> tuple[dict[str, object], ...]:
    return tuple({"name": name, "type": kind, "is_nullable": nullable} for name, kind, nullable in fields)


def meant(fields: list[tuple[str, str, bool]]) -> tuple[FieldDefinition, ...]:
    return tuple(FieldDefinition(name, kind, nullable) for name, kind, nullable in fields)


class Model:
    """Definitions by id, and the same change as rows for a tracker."""

    def __init__(self) -> None:
        self.tracker = SchemaTracker()
        self.system = {space.id: space for space in self.tracker.schema}
        self.spaces: dict[int, SpaceDefinition] = {}
        self.flags: dict[int, dict[str, object]] = {}

    def alter(self, space_id: int, **changes: Any) -> None:
        self.spaces[space_id] = msgspec.structs.replace(self.spaces[space_id], **changes)

    def row(self, space_id: int) -> tuple[Any, ...]:
        space = self.spaces[space_id]
        fields = [(field.name, field.type, field.is_nullable) for field in space.fields]
        return (space_id, 1, space.name, "memtx", 0, self.flags[space_id], told(fields))

    def step(self, what: str, space_id: int, first: Any, second: Any) -> None:
        if what == "create":
            if space_id not in self.spaces:
                self.flags[space_id] = {}
                self.spaces[space_id] = SpaceDefinition(space_id, first, fields=meant(second))
                insert(self.tracker, SPACE, self.row(space_id))
            return
        if space_id in self.spaces:
            getattr(self, what)(space_id, first, second)

    def rename(self, space_id: int, name: str, field: Any) -> None:
        self.alter(space_id, name=name)
        update(self.tracker, SPACE, (space_id,), ("=", field, name))

    def format(self, space_id: int, fields: list[tuple[str, str, bool]], field: Any) -> None:
        self.alter(space_id, fields=meant(fields))
        update(self.tracker, SPACE, (space_id,), ("=", field, told(fields)))

    def sync(self, space_id: int, is_sync: bool, how: str) -> None:
        self.alter(space_id, is_sync=is_sync)
        self.flags[space_id] = {"is_sync": is_sync}
        if how == "replace":
            self.tracker.apply(RequestType.REPLACE, pack({0x10: SPACE, 0x21: self.row(space_id)}))
        elif how == "update":
            update(self.tracker, SPACE, (space_id,), ("=", 6, self.flags[space_id]))
        else:
            update(self.tracker, SPACE, (space_id,), ("=", "flags.is_sync", is_sync))

    def index(self, space_id: int, index_id: int, as_map: bool) -> None:
        part: Any = {"field": index_id, "type": "unsigned"} if as_map else (index_id, "unsigned")
        insert(self.tracker, INDEX, (space_id, index_id, f"i{index_id}", "tree", {"unique": as_map}, (part,)))
        others = [index for index in self.spaces[space_id].indexes if index.id != index_id]
        # Nullability is evaluated at the end: parts given as pairs take it from the final format.
        parts = (IndexPart(index_id, "unsigned", is_nullable=not as_map),)
        index = IndexDefinition(space_id, index_id, f"i{index_id}", "tree", as_map, parts)
        self.alter(space_id, indexes=tuple(sorted([*others, index], key=lambda one: one.id)))

    def unindex(self, space_id: int, index_id: int, _: None) -> None:
        delete(self.tracker, INDEX, (space_id, index_id))
        rest = tuple(index for index in self.spaces[space_id].indexes if index.id != index_id)
        self.alter(space_id, indexes=rest)

    def drop(self, space_id: int, _: None, __: None) -> None:
        for index in self.spaces.pop(space_id).indexes:
            delete(self.tracker, INDEX, (space_id, index.id))
        delete(self.tracker, SPACE, (space_id,))

    def expected(self) -> dict[int, SpaceDefinition]:
        return {space_id: self._settled(space) for space_id, space in self.spaces.items()}

    def _settled(self, space: SpaceDefinition) -> SpaceDefinition:
        indexes = []
        for index in space.indexes:
            part = index.parts[0]
            nullable = part.is_nullable and part.field < len(space.fields) and space.fields[part.field].is_nullable
            indexes.append(msgspec.structs.replace(index, parts=(msgspec.structs.replace(part, is_nullable=nullable),)))
        return msgspec.structs.replace(space, indexes=tuple(indexes))


@given(st.lists(STEP, max_size=30))
def test_random_ddl_yields_the_schema_of_a_model_and_history_records_every_step(steps: list[Any]) -> None:
    model = Model()
    history: SchemaHistory[int] = SchemaHistory(model.tracker.schema)
    states = []
    for position, step in enumerate(steps):
        before = model.tracker.schema
        states.append(before)
        model.step(*step)
        schema = model.tracker.schema
        assert {space.id: space for space in schema} == {**model.system, **model.expected()}
        if schema is not before:
            history.record(position, step[1], schema)
    for position in (*range(len(states)), *reversed(range(len(states)))):
        assert history.at(position) == states[position]
    assert history.at(len(steps)) == model.tracker.schema


def test_history_accepts_any_ordered_position_and_lists_changes_of_one_space(tracker: SchemaTracker) -> None:
    history: SchemaHistory[tuple[int, int]] = SchemaHistory(SchemaTracker().schema)
    created = tracker.schema
    history.record((0, 100), 512, created)
    update(tracker, SPACE, (512,), ("=", 3, "renamed"))
    history.record((1, 50), 512, tracker.schema)
    delete(tracker, SPACE, (512,))
    history.record((1, 60), 512, tracker.schema)
    # A change takes effect after its row.
    assert history.at((0, 100)).get(512) is None
    assert history.at((0, 101)).space(512).name == "orders"
    assert history.at((1, 55)).space(512).name == "renamed"
    assert history.at((9, 0)).get(512) is None
    assert [change.position for change in history.changes_of(512)] == [(0, 100), (1, 50), (1, 60)]
    assert history.changes_of(512)[0] == SchemaChange((0, 100), created.space(512))
    assert history.changes_of(512)[2].space is None
    assert history.changes_of(513) == []
    with pytest.raises(ValueError, match=r"\(1, 59\) recorded after the one at \(1, 60\)"):
        history.record((1, 59), 512, tracker.schema)


def test_copy_is_independent(tracker: SchemaTracker) -> None:
    copy = tracker.copy()
    before = copy.schema
    assert insert(copy, SPACE, (513, 1, "other", "memtx", 0, {}, ())) == 513
    assert delete(copy, INDEX, (512, 0)) == 512
    assert tracker.schema == before
    assert tracker.schema.get("other") is None
    assert copy.schema.space("other").id == 513
    assert not copy.schema.space("orders").indexes
