"""Misfits as rows for the quarantine: their keys, values, types and origins."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa

from flowstone.box.definitions import IndexDefinition, IndexPart, SpaceDefinition
from flowstone.lake.misfits import MISFIT_SCHEMA, MisfitRows, key_texts
from flowstone.lake.table_schema import LakeSchema
from tests.spark.lake_rows_given import ORDERS, OTHER_UUID, START, UUID, packed

MOMENT = pa.timestamp("us", tz="UTC")


def test_misfits_have_key_value_type_and_origin() -> None:
    misfits, schema = MisfitRows(), LakeSchema(ORDERS, (UUID,))
    keys, tuples = pa.array([b"a", b"b", b"c"]), pa.array([packed(1, "x"), packed(2**63, 5), packed(3, 7)])
    origins = {"replica_id": pa.array([1, 2, 3]), "lsn": pa.array([4, 5, 6]), "time": pa.array([START] * 3, MOMENT)}
    rows = schema.rows(keys, tuples, misfits=misfits, origins=origins)
    assert (rows["id"].to_pylist(), rows["name"].to_pylist()) == ([1, None, 3], ["x", None, None])
    assert rows["_tuple"].to_pylist() == tuples.to_pylist()
    found = pa.concat_tables(misfits.new)
    assert found.schema == MISFIT_SCHEMA
    common = {"space": "orders", "space_id": 512, "replicaset_uuid": UUID, "time": START}
    too_large = {"field": "id", "field_type": "unsigned", "type": "BIGINT", "value": str(2**63), "reason": "too_large"}
    wrong = {"field": "name", "field_type": "string", "type": "STRING", "reason": "wrong_type"}
    second = {"key": f"[{2**63}]", "replica_id": 2, "lsn": 5, "_key": b"b"}
    third = {"key": "[3]", "replica_id": 3, "lsn": 6, "_key": b"c"}
    assert found.to_pylist() == [
        {**common, **too_large, **second},
        {**common, **wrong, **second, "value": "5"},
        {**common, **wrong, **third, "value": "7"},
    ]
    assert misfits.rebuilt == []


def test_rebuilt_rows_are_apart_and_have_no_origin() -> None:
    misfits, schema = MisfitRows(), LakeSchema(ORDERS, (UUID,))
    assert not misfits
    schema.rows(pa.array([b"a"]), pa.array([packed(1, 2)]), misfits=misfits)
    (found,) = misfits.rebuilt
    assert (found["lsn"].to_pylist(), found["time"].to_pylist()) == ([None], [None])
    assert (bool(misfits), misfits.new) == (True, [])


def test_rows_without_a_time_get_that_of_their_snapshot() -> None:
    misfits, moment = MisfitRows(), datetime(2026, 5, 1, tzinfo=UTC)
    LakeSchema(ORDERS, (UUID,)).rows(pa.array([b"a"]), pa.array([packed(1, 2)]), misfits=misfits, origins={})
    misfits.set_times(pa.scalar(moment, MOMENT))
    assert misfits.new[0]["time"].to_pylist() == [moment]


def test_misfits_of_several_sets_name_the_set_in_their_key() -> None:
    schema, misfits = LakeSchema(ORDERS, (UUID, OTHER_UUID), several_sets=True), MisfitRows()
    keys = pa.array([schema.prefix(OTHER_UUID) + b"a", schema.prefix(UUID) + b"a"])
    schema.rows(keys, pa.array([packed(1, 2), packed(1, 2)]), misfits=misfits, origins={})
    assert misfits.new[0]["replicaset_uuid"].to_pylist() == [OTHER_UUID, UUID]


def test_key_texts_are_arrays_of_the_key_fields_in_key_order() -> None:
    parts = (IndexPart(2, "string"), IndexPart(0, "unsigned"))
    space = SpaceDefinition(512, "s", indexes=(IndexDefinition(512, 0, "pk", "tree", True, parts),))
    tuples = pa.array([packed(1, None, "a"), packed(2**64 - 1, [1], "é", "more")])
    assert key_texts(space, tuples).to_pylist() == ['["a",1]', '["é",18446744073709551615]']
    assert key_texts(SpaceDefinition(512, "s"), tuples).to_pylist() == [None, None]
    assert key_texts(space, tuples.slice(0, 0)).to_pylist() == []
