"""Rows of a lake compared with their own tuples: contradicting columns, and invalid tuples."""

from __future__ import annotations

from typing import Any

import msgpack
import pyarrow as pa
import pytest

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.columns.sort_keys import sort_keys
from flowstone.lake.table_schema import LakeSchema, prefixed
from flowstone.spark.verification.lake_check import checked_rows

SET, OTHER_SET = "aaaaaaaa-0000-4000-8000-000000000001", "bbbbbbbb-0000-4000-8000-000000000001"
SPACE = SpaceDefinition(
    512,
    "orders",
    fields=(
        FieldDefinition("id", "unsigned"),
        FieldDefinition("name", "string", is_nullable=True),
        FieldDefinition("share", "double", is_nullable=True),
    ),
    indexes=(IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),)),),
)


def stored(schema: LakeSchema, *tuples: Any, uuid: str = SET) -> pa.RecordBatch:
    """Return rows as a mirror writes them."""
    data = pa.array([msgpack.packb(each) for each in tuples], pa.binary())
    keys = prefixed(schema.prefix(uuid), sort_keys(schema.space, data))
    return schema.rows(keys, data).combine_chunks().to_batches()[0]


def edited(batch: pa.RecordBatch, column: str, row: int, value: Any) -> pa.RecordBatch:
    values = batch.column(column).to_pylist()
    values[row] = value
    place = batch.schema.get_field_index(column)
    return batch.set_column(place, column, pa.array(values, batch.column(column).type))


def wrong(schema: LakeSchema, batch: pa.RecordBatch) -> list[str | None]:
    found: list[str | None] = checked_rows(schema, SET, batch).column("wrong").to_pylist()
    return found


@pytest.fixture
def schema() -> LakeSchema:
    return LakeSchema(SPACE)


ROWS = ([1, "a", 1.5], [2, None, float("nan")], [3, "c"], [4, "d", 0.25, "more"])


def test_rows_of_a_mirror_are_consistent(schema: LakeSchema) -> None:
    found = checked_rows(schema, SET, stored(schema, *ROWS))
    assert found.column("wrong").to_pylist() == [None] * 4
    assert found.column("space_id").to_pylist() == [512] * 4
    assert [msgpack.unpackb(each)[0] for each in found.column("tuple").to_pylist()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("name", "b", "name is 'b', but its tuple has 'c'"),
        ("name", None, "name is null, but its tuple has 'c'"),
        ("share", 0.0, "share is 0.0, but its tuple has null"),
        ("id", 33, "id is 33, but its tuple has 3"),
        ("_extra", "[1]", "_extra is '[1]', but its tuple has null"),
        ("_key", b"\x00", "_key is x'00', but its tuple has x'4000000000000000 03'"),
    ],
)
def test_contradicting_column_is_named(schema: LakeSchema, column: str, value: Any, said: str) -> None:
    found = wrong(schema, edited(stored(schema, *ROWS), column, 2, value))
    assert found == [None, None, said.replace(" 03'", "03'"), None]


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"\x92\x03", "_tuple is not a tuple"), (b"", "_tuple is not a tuple"), (b"\x91\x03\x03", "_tuple is not a tuple"),
     (b"\x91\xa1x", "_tuple does not fit the space"), (None, "_tuple is not a tuple")],
)  # fmt: skip
def test_invalid_tuple_affects_only_its_row(schema: LakeSchema, data: bytes | None, said: str) -> None:
    batch = edited(stored(schema, *ROWS), "_tuple", 2, data)
    found = checked_rows(schema, SET, batch)
    texts = found.column("wrong").to_pylist()
    assert [text is None for text in texts] == [True, True, False, True]
    assert texts[2].startswith(said)
    assert found.column("sort_key").to_pylist()[2] == batch.column("_key").to_pylist()[2]


def test_value_that_does_not_fit_its_column_is_null_there(schema: LakeSchema) -> None:
    batch = edited(stored(schema, *ROWS), "_tuple", 2, msgpack.packb([3, 5]))
    assert wrong(schema, edited(batch, "name", 2, None)) == [None, None, None, None]
    assert wrong(schema, batch)[2] == "name is 'c', but its tuple has null"


def test_one_of_several_replica_sets_is_checked_without_the_key_prefix() -> None:
    schema = LakeSchema(SPACE, several_sets=True)
    both = pa.Table.from_batches([stored(schema, [1, "a"]), stored(schema, [1, "b"], uuid=OTHER_SET)])
    (batch,) = both.combine_chunks().to_batches()
    found = checked_rows(schema, OTHER_SET, batch)
    assert found.column("wrong").to_pylist() == [None]
    assert found.column("tuple").to_pylist() == [msgpack.packb([1, "b"])]
    plain = LakeSchema(SPACE)
    assert found.column("sort_key").equals(checked_rows(plain, SET, stored(plain, [1, "b"])).column("sort_key"))


def test_empty_batch_has_no_rows(schema: LakeSchema) -> None:
    assert len(checked_rows(schema, SET, stored(schema, *ROWS).slice(0, 0))) == 0


@pytest.mark.parametrize("several_sets", [False, True])
def test_files_of_other_writers_with_binary_views_are_read(several_sets: bool) -> None:
    """delta-rs writes such files when it updates or compacts."""
    schema = LakeSchema(SPACE, several_sets=several_sets)
    batch = stored(schema, *ROWS)
    views = pa.schema(
        [
            pa.field(each.name, pa.binary_view() if each.type == pa.binary() else pa.string_view())
            if each.type in (pa.binary(), pa.string())
            else each
            for each in batch.schema
        ]
    )
    arrays = [column.cast(kind) for column, kind in zip(batch.columns, views.types, strict=True)]
    assert wrong(schema, pa.RecordBatch.from_arrays(arrays, schema=views)) == [None] * 4
