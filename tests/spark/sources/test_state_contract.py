"""Columns of a state, and tuples to batches."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flowstone.box.definitions import FieldDefinition, SpaceDefinition
from flowstone.columns.arrow_columns import ColumnOptions
from flowstone.errors import FlowstoneError
from flowstone.iproto.msgpack import pack
from flowstone.spark.sources.state_contract import StateContract
from tests.spark.change_rows import ORDERS, SCHEMA, UUID, insert
from tests.xlog.slabs import slab_of


def binary(*values: Any) -> pa.Array:
    return pa.array([pack(value) for value in values], pa.binary())


def test_columns_of_a_space_are_its_fields_unless_chosen() -> None:
    contract = StateContract(UUID, ORDERS)
    assert contract.spark_schema == "`id` BIGINT, `name` STRING, `_extra` STRING"
    chosen = StateContract(UUID, ORDERS, wanted=("_tuple_msgpack", "name", "_space_id"))
    assert chosen.schema.names == ["_tuple_msgpack", "name", "_space_id"]
    assert StateContract(UUID, ORDERS, ColumnOptions("decimal")).schema.field("id").type == pa.decimal128(38, 0)
    with pytest.raises(FlowstoneError, match="no column 'nope'; known columns: id, name, _extra, _space"):
        _ = StateContract(UUID, ORDERS, wanted=("nope",)).schema


def test_field_with_the_name_of_a_metadata_column_is_refused() -> None:
    clash = SpaceDefinition(512, "t", fields=(FieldDefinition("_space", "string"),))
    with pytest.raises(FlowstoneError, match="field '_space' of space 't' has the name of a metadata column"):
        _ = StateContract(UUID, clash).schema


def test_tuples_become_rows() -> None:
    tuples = binary((0, "gone"), (1, "a"), (2, "b", None, [3]), (3,))[1:]
    assert StateContract(UUID, ORDERS).of_tuples(tuples).to_pylist() == [
        {"id": 1, "name": "a", "_extra": None},
        {"id": 2, "name": "b", "_extra": "[null,[3]]"},
        {"id": 3, "name": None, "_extra": None},
    ]
    wanted = ("_tuple", "_tuple_msgpack", "_space", "_space_id", "_replicaset_uuid")
    first = StateContract(UUID, ORDERS, wanted=wanted).of_tuples(tuples).to_pylist()[0]
    assert tuple(first.values()) == ('[1,"a"]', pack((1, "a")), "orders", 512, UUID)
    assert len(StateContract(UUID, ORDERS).of_tuples(binary())) == 0


@pytest.mark.parametrize("layout", [pa.large_binary(), pa.binary_view()])
def test_tuples_are_accepted_in_every_layout_of_arrow(layout: pa.DataType) -> None:
    tuples = binary((1, "a"), (2, "a name that is too long for a view to hold it"))
    contract = StateContract(UUID, ORDERS)
    assert contract.of_tuples(tuples.cast(layout)) == contract.of_tuples(tuples)


def test_rows_of_any_space_are_json_and_messagepack() -> None:
    slab = slab_of([insert(1, 1, "a").encode(), insert(2, 2, space=513).encode(), insert(3, 3, space=999).encode()])
    batch = StateContract(UUID).batch(slab, np.arange(3), SCHEMA)
    assert batch.column("_space").to_pylist() == ["orders", "other", None]
    assert batch.column("_space_id").to_pylist() == [512, 513, 999]
    assert batch.column("_tuple").to_pylist() == ['[1,"a"]', "[2]", "[3]"]


def test_contract_can_be_pickled() -> None:
    contract = StateContract(UUID, ORDERS, wanted=("id",))
    assert contract.of_tuples(binary((1, "a"))).to_pylist() == [{"id": 1}]
    assert pickle.loads(pickle.dumps(contract)) == contract
