"""Columns of tables: names, values, and the note in the table's log."""

from __future__ import annotations

from copy import deepcopy

import pyarrow as pa
import pytest

from flowstone.box.definitions import FieldDefinition, SpaceDefinition
from flowstone.columns.arrow_columns import ColumnOptions
from flowstone.lake.table_schema import LakeError, LakeSchema, column_names, prefixed, unprefixed
from flowstone.text.row_table import UnknownColumn
from tests.spark.lake_rows_given import ORDERS, OTHER_UUID, UUID, packed, space


def named(*names: str) -> SpaceDefinition:
    return SpaceDefinition(512, "s", fields=tuple(FieldDefinition(name) for name in names))


def test_names_that_delta_refuses_are_replaced_by_a_fixed_rule() -> None:
    fields = ["plain", "a b", "a,b", "x=(1)", "", "Имя", "dotted.name"]
    assert column_names(named(*fields)) == ("plain", "a_b", "a_b_2", "x__1_", "field_5", "Имя", "dotted.name")


def test_names_that_collide_by_case_or_with_metadata_get_a_number() -> None:
    fields = ["id", "ID", "Id_2", "_key", "_TUPLE", "_lsn", "_is_current", "_extra"]
    expected = ("id", "ID_2", "Id_2_2", "_key_2", "_TUPLE_2", "_lsn_2", "_is_current_2", "_extra_2")
    assert column_names(named(*fields)) == expected


def test_rows_have_typed_columns_beside_key_and_tuple() -> None:
    rows = LakeSchema(ORDERS).rows(pa.array([b"k", b"l"]), pa.array([packed(7, "x", 2, True), packed(8)]))
    assert rows.to_pylist() == [
        {"id": 7, "name": "x", "amount": 2.0, "_extra": "[true]", "_key": b"k", "_tuple": packed(7, "x", 2, True)},
        {"id": 8, "name": None, "amount": None, "_extra": None, "_key": b"l", "_tuple": packed(8)},
    ]
    assert [each.name for each in rows.schema if not each.nullable] == ["_key", "_tuple"]


def test_slices_of_larger_arrays_are_decoded_correctly() -> None:
    keys, tuples = pa.array([b"j", b"k", b"l"]), pa.array([packed(6), packed(7), packed(8)])
    rows = LakeSchema(ORDERS).rows(keys.slice(1, 1), tuples.slice(1, 1))
    assert (rows["id"].to_pylist(), rows["_tuple"].to_pylist()) == ([7], [packed(7)])
    assert LakeSchema(ORDERS).rows(keys.slice(3), tuples.slice(3)).num_rows == 0


def test_error_for_an_unsuitable_value_names_its_key() -> None:
    problem = "space 'orders', tuple with _key x'6c': field 'name' is not of type string"
    with pytest.raises(LakeError, match=problem) as raised:
        LakeSchema(ORDERS).rows(pa.array([b"k", b"l"]), pa.array([packed(7, "x"), packed(8, 9)]))
    assert raised.value.hint == "specify the columns of the table"


def test_options_and_selected_columns_are_stored_in_the_note() -> None:
    options = ColumnOptions(unsigned_as="decimal")
    schema = LakeSchema(ORDERS, (UUID,), options, ("id",), several_sets=True, history=True, dropped=(UUID,))
    assert LakeSchema.from_note(schema.note) == schema == deepcopy(schema)
    assert schema.schema.names[:3] == ["id", "_extra", "_replicaset_uuid"]
    assert schema.schema.field("id").type == pa.decimal128(38, 0)
    assert schema.schema.field("_tuple").metadata[b"flowstone"].decode() == schema.note
    assert "_is_current" not in schema.file_schema.names
    assert schema.partition_by == ["_is_current"]
    with pytest.raises(UnknownColumn, match="no field 'nope'"):
        _ = LakeSchema(ORDERS, wanted=("nope",)).schema


def test_changed_definition_lists_its_changes() -> None:
    schema = LakeSchema(ORDERS, wanted=("id", "name"))
    plain = [(each.name, each.type) for each in ORDERS.fields]
    assert schema.shows_as(schema.moved(space(*plain, name="other")))
    assert not schema.shows_as(schema.moved(space(*plain[:1], ("name", "any"), *plain[2:])))
    assert not schema.shows_as(schema.moved(space(*plain, ("more", "any"))))  # `_extra` has other values then
    exchanged = space(("id", "unsigned"), ("x", "string"), ("y", "string"), ("z", "string"))
    chosen = LakeSchema(exchanged, wanted=("id", "y"))
    types = [("id", "unsigned"), ("y", "string"), ("x", "string"), ("z", "string")]
    assert not chosen.shows_as(chosen.moved(space(*types)))  # the same column names, for other fields
    assert chosen.shows_as(chosen.moved(space(types[0], ("z", "string"), types[1], ("x", "string"))))
    assert schema.moved(space(*plain[:1])).wanted == ("id",)
    assert schema.has_keys_of(schema.moved(space(*plain, ("more", "any"))))
    assert not schema.has_keys_of(schema.moved(space(*plain, key=1)))


@pytest.mark.parametrize("keys", [[], [b""], [b"a", b"b"], [b"a", b"", b"long" * 9]])
def test_keys_of_several_replica_sets_begin_with_the_uuid(keys: list[bytes]) -> None:
    schema = LakeSchema(ORDERS, several_sets=True)
    prefix = schema.prefix(OTHER_UUID)
    assert len(prefix) == 16
    given = pa.array([b"x", *keys], pa.binary()).slice(1)
    assert prefixed(prefix, given).to_pylist() == [prefix + key for key in keys]
    assert unprefixed(16, prefixed(prefix, given)).to_pylist() == keys
    rows = schema.rows(prefixed(prefix, given), pa.array([packed(1)] * len(keys), pa.binary()))
    assert rows["_replicaset_uuid"].to_pylist() == [OTHER_UUID] * len(keys)
    assert LakeSchema(ORDERS).prefix(OTHER_UUID) == b""
