"""The change contract: the columns of changes, how operations fill them, and their Spark types."""

from __future__ import annotations

import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flowstone.box.definitions import FieldDefinition, SpaceDefinition
from flowstone.columns.arrow_columns import ColumnOptions
from flowstone.columns.change_contract import ChangeContract, ColumnClash, FormerFormat, spark_ddl
from flowstone.iproto.row import Row
from flowstone.replication.vclock import VClock
from flowstone.spark.sources.stream_order import StreamPlace, stamp
from flowstone.text.row_table import UnknownColumn
from tests.node.archived_rows import confirm, slab
from tests.spark.change_rows import (
    DELETE,
    NOP,
    ORDERS,
    SCHEMA,
    UUID,
    delete,
    insert,
    statement,
    truncate,
    update,
    upsert,
    whole,
)

ALWAYS = "_operation _commit_version _commit_timestamp _replica_id _lsn _tsn _space _replicaset_uuid".split()
BEHIND = "_key _key_msgpack _operations _operations_msgpack _index_id _index_base _space_id".split()
MIXED = (
    whole(insert(1, 1, "one"), insert(2, 2, "two", "more", {"deep": [1.5]})),
    whole(update(3, 2, ("=", 2, "zwei"))),
    whole(statement(NOP, 4, {})),
    whole(upsert(5, (3, "three"), ("+", 0, 1))),
    confirm(6, 5),
    whole(truncate(7), insert(8, 9, "nine"), truncate(9, 513)),
    whole(delete(10, 9), insert(11, 1, space=513)),
)


def changes(contract: ChangeContract, *rows: bytes) -> pa.Table:
    together = slab(*rows)
    stamps, _ = stamp(together.cells, StreamPlace(VClock()), "log")
    batches = contract.batches(together, np.arange(len(together)), stamps, SCHEMA)
    return pa.Table.from_batches(batches, contract.schema)


def listed(table: pa.Table, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table.select(names).to_pylist()]


def test_space_columns_are_between_the_columns_of_every_change() -> None:
    assert ChangeContract(UUID, ORDERS).schema.names == [*ALWAYS, "id", "name", "_extra", *BEHIND]
    assert ChangeContract(UUID).schema.names == [*ALWAYS, "_tuple", "_tuple_msgpack", *BEHIND]


def test_every_operation_fills_typed_columns() -> None:
    table = changes(ChangeContract(UUID, ORDERS), *MIXED)
    table.validate(full=True)
    assert listed(table, "_operation", "_lsn", "_tsn", "id", "name", "_extra", "_key", "_operations") == [
        ("insert", 1, 1, 1, "one", None, None, None),
        ("insert", 2, 1, 2, "two", '["more",{"deep":[1.5]}]', None, None),
        ("update", 3, 3, 2, None, None, "[2]", '[["=",2,"zwei"]]'),
        ("upsert", 5, 5, 3, "three", None, None, '[["+",0,1]]'),
        ("truncate", 7, 7, None, None, None, None, None),
        ("insert", 8, 7, 9, "nine", None, None, None),
        ("delete", 10, 10, 9, None, None, "[9]", None),
    ]
    assert table.column("_commit_version").to_pylist() == [2, 2, 3, 5, 9, 9, 11]
    assert table.column("_index_base").to_pylist() == [0, 0, 1, 0, 0, 0, 0]
    assert set(table.column("_space").to_pylist()) == {"orders"}
    assert set(table.column("_replicaset_uuid").to_pylist()) == {UUID}
    assert table.column("_key_msgpack").to_pylist()[2] == b"\x91\x02"


def test_tuples_are_json_and_messagepack_without_a_space() -> None:
    table = changes(ChangeContract(UUID), *MIXED)
    table.validate(full=True)
    assert listed(table, "_operation", "_space", "_tuple", "_key", "_operations")[1:] == [
        ("insert", "orders", '[2,"two","more",{"deep":[1.5]}]', None, None),
        ("update", "orders", None, "[2]", '[["=",2,"zwei"]]'),
        ("upsert", "orders", '[3,"three"]', None, '[["+",0,1]]'),
        ("truncate", "orders", None, None, None),
        ("insert", "orders", '[9,"nine"]', None, None),
        ("truncate", "other", None, None, None),
        ("delete", "orders", None, "[9]", None),
        ("insert", "other", "[1]", None, None),
    ]
    assert table.column("_tuple_msgpack").to_pylist()[-1] == b"\x91\x01"


def test_system_spaces_are_shown_on_request() -> None:
    rows = whole(insert(1, "x", space=272)), whole(insert(2, 1, space=999))
    assert listed(changes(ChangeContract(UUID), *rows), "_lsn", "_space") == [(2, None)]
    assert changes(ChangeContract(UUID, show_system=True), *rows).column("_lsn").to_pylist() == [1, 2]


def test_dropped_space_is_not_truncated() -> None:
    assert not len(changes(ChangeContract(UUID, ORDERS), whole(delete(1, 512, space=330))))


@pytest.mark.parametrize("space", [ORDERS, None])
def test_columns_are_selected_by_name_in_the_given_order(space: SpaceDefinition | None) -> None:
    table = changes(ChangeContract(UUID, space, wanted=("_key", "_lsn", "_operations_msgpack")), *MIXED)
    assert table.column_names == ["_key", "_lsn", "_operations_msgpack"]
    assert table.column("_key").to_pylist()[2] == "[2]"
    assert len(changes(ChangeContract(UUID, space, wanted=()), *MIXED)) == (7 if space else 9)


def test_error_for_an_unknown_column_lists_the_known_ones() -> None:
    with pytest.raises(UnknownColumn, match=r"no column 'nope'; known columns: _operation, .*, id, name, _extra"):
        _ = ChangeContract(UUID, ORDERS, wanted=("id", "nope")).schema


def test_field_named_like_a_metadata_column_is_rejected() -> None:
    space = SpaceDefinition(512, "t", fields=(FieldDefinition("_commit_version"),))
    with pytest.raises(ColumnClash, match="field '_commit_version' of space 't' has the name of a metadata column"):
        _ = ChangeContract(UUID, space).schema


def test_spark_schema_equals_the_columns() -> None:
    names = "unsigned integer number double string varbinary boolean uuid datetime map any".split()
    fields = tuple(FieldDefinition(f"f`{name}", name) for name in names)
    contract = ChangeContract(UUID, SpaceDefinition(1, "t", fields=(*fields, FieldDefinition("price", "decimal"))))
    assert contract.spark_schema.startswith("`_operation` STRING NOT NULL, `_commit_version` BIGINT NOT NULL, ")
    own = contract.schema.names[len(ALWAYS) : -len(BEHIND)]
    assert spark_ddl([contract.schema.field(name) for name in own]) == (
        "`f``unsigned` BIGINT, `f``integer` BIGINT, `f``number` DOUBLE, `f``double` DOUBLE, `f``string` STRING, "
        "`f``varbinary` BINARY, `f``boolean` BOOLEAN, `f``uuid` STRING, `f``datetime` TIMESTAMP, `f``map` STRING, "
        "`f``any` STRING, `price` STRING, `_extra` STRING"
    )


def test_column_options_determine_spark_types_and_values() -> None:
    space = SpaceDefinition(512, "t", fields=(FieldDefinition("id", "unsigned"), FieldDefinition("price", "decimal")))
    options = ColumnOptions(unsigned_as="decimal", decimal_scale=2)
    contract = ChangeContract(UUID, space, options, wanted=("id", "price"))
    assert contract.spark_schema == "`id` DECIMAL(38, 0), `price` DECIMAL(38, 2)"
    table = changes(contract, whole(insert(1, 2**64 - 1, Decimal("1.5"))))
    assert listed(table, "id", "price") == [(Decimal(2**64 - 1), Decimal("1.50"))]


def test_contract_can_be_pickled() -> None:
    contract = ChangeContract(UUID, ORDERS, ColumnOptions(decimal_scale=1), wanted=("id",))
    changes(contract, *MIXED)
    copy = pickle.loads(pickle.dumps(contract))
    assert copy == contract
    assert copy.schema == contract.schema


def test_space_name_is_constant_for_rows_of_one_space() -> None:
    rows: list[Row] = [insert(number, number, "x") for number in range(1, 100)]
    table = changes(ChangeContract(UUID), *(whole(row) for row in rows))
    assert set(table.column("_space").to_pylist()) == {"orders"}


def test_sort_keys_are_optional_and_null_without_a_key() -> None:
    contract = ChangeContract(UUID, wanted=("_lsn", "_sort_key", "_space_id"))
    table = changes(contract, *MIXED, whole(statement(DELETE, 12, {0x10: 512, 0x11: 1, 0x20: ("x",)})))
    keys = dict(listed(table, "_lsn", "_sort_key"))
    assert keys[2] == keys[3] != keys[1]
    assert keys[8] == keys[10]
    assert {lsn for lsn, key in keys.items() if key is None} == {7, 9, 11, 12}  # LSN 12 has a key of another index
    assert dict(listed(table, "_lsn", "_space_id")) | {7: 512, 9: 513, 11: 513} == dict(
        listed(table, "_lsn", "_space_id")
    )
    assert "_sort_key" not in ChangeContract(UUID).schema.names


def test_space_can_have_tuple_columns_besides_its_fields() -> None:
    table = changes(ChangeContract(UUID, ORDERS, wanted=("id", "_tuple", "_tuple_msgpack")), *MIXED)
    assert listed(table, "id", "_tuple", "_tuple_msgpack")[0] == (1, '[1,"one"]', b"\x92\x01\xa3one")


def test_only_the_named_spaces_are_selected() -> None:
    contract = ChangeContract(UUID, wanted=("_lsn",), only=(513,))
    assert listed(changes(contract, *MIXED), "_lsn") == [(9,), (11,)]


def test_rows_of_former_formats_fill_columns_of_the_same_name_and_type() -> None:
    now = SpaceDefinition(
        512,
        "orders",
        fields=(FieldDefinition("name", "string"), FieldDefinition("new", "string")),
        indexes=ORDERS.indexes,
    )
    contract = ChangeContract(UUID, now, wanted=("_lsn", "name", "new"), follows_format=True)
    assert listed(changes(contract, *MIXED), "_lsn", "name", "new")[:3] == [
        (1, "one", None),
        (2, "two", None),
        (3, None, None),
    ]
    wrong = SpaceDefinition(512, "orders", fields=(FieldDefinition("id", "string"),), indexes=ORDERS.indexes)
    with pytest.raises(FormerFormat, match="field 'id' of space 'orders' changes its type after LSN 5: from int64"):
        changes(ChangeContract(UUID, wrong, follows_format=True), *MIXED)
    assert pickle.loads(pickle.dumps(contract)) == contract


def test_spark_types_are_spelled_as_by_spark() -> None:
    contract = ChangeContract(UUID, ORDERS, ColumnOptions(unsigned_as="decimal"), wanted=("id", "_commit_timestamp"))
    assert contract.spark_types == [("id", "decimal(38,0)"), ("_commit_timestamp", "timestamp")]
