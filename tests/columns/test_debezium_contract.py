"""Messages in Debezium's form: keys, rows before and after, operations, sources; from archives with images."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.schema import Schema
from flowstone.columns.debezium_contract import MESSAGES, DebeziumContract
from flowstone.replication.vclock import VClock
from flowstone.spark.sources.options import WrongOption, tarantool_options, xlog_options
from flowstone.spark.sources.stream_order import StreamPlace, stamp
from tests.columns.test_image_rows import ROWS, row
from tests.node.archived_rows import slab
from tests.spark.change_rows import DELETE, INSERT, SCHEMA, UUID, whole


def messages(rows: bytes = ROWS, schema: Schema = SCHEMA, **how: Any) -> list[dict[str, Any]]:
    """Return the messages of the rows, with keys and values parsed."""
    together = slab(rows)
    contract = DebeziumContract(UUID, images="full", **how)
    stamps, _ = stamp(together.cells, StreamPlace(VClock()), "log")
    batches = contract.batches(together, np.arange(len(together)), stamps, schema)
    table = pa.Table.from_batches(batches, contract.schema)
    table.validate(full=True)
    return [
        {name: json.loads(text) if name != "topic" and text else text for name, text in each.items()}
        for each in table.to_pylist()
    ]


def test_messages_have_the_rows_before_and_after_each_change() -> None:
    found = messages()
    one, two, more = {"id": 1, "name": "one"}, {"id": 2, "name": "two"}, {"id": 1, "name": "eins", "_extra": ["more"]}
    three = {"id": 3, "name": "x"}
    assert [(each["value"]["op"], each["value"]["before"], each["value"]["after"]) for each in found] == [
        ("c", None, one),
        ("c", None, two),
        ("u", one, more),
        ("u", more, one),
        ("c", None, three),
        ("d", one, None),
        ("t", None, None),
    ]
    assert [each["key"] for each in found] == [{"id": number} for number in (1, 2, 1, 1, 3, 1)] + [None]
    assert {each["topic"] for each in found} == {"tarantool.orders"}


def test_message_names_its_source() -> None:
    (first, *_) = messages(prefix="shop")
    assert first["topic"] == "shop.orders"
    assert first["value"] | {"after": None} == {
        "before": None,
        "after": None,
        "source": {
            "connector": "tarantool",
            "name": "shop",
            "db": UUID,
            "table": "orders",
            "snapshot": "false",
            "ts_ms": 109_000,
            "txId": 9,
            "lsn": 1,
            "replica_id": 1,
        },
        "op": "c",
        "ts_ms": 109_000,
        "transaction": None,
    }


def test_rows_of_a_snapshot_are_read() -> None:
    contract = DebeziumContract(UUID, images="full").of_snapshot()
    assert isinstance(contract, DebeziumContract)
    (read,) = messages(whole(row(INSERT, 1, {0x21: (1, "a")})), is_snapshot=contract.is_snapshot)
    assert (read["value"]["op"], read["value"]["source"]["snapshot"]) == ("r", "true")


def test_fields_and_keys_follow_the_format() -> None:
    fields = (FieldDefinition('a "b"', "string"), FieldDefinition("", "any"), FieldDefinition("gone", "any"))
    parts = (IndexPart(1, "string"), IndexPart(0, "string"))
    key = IndexDefinition(512, 0, "pk", "tree", True, parts)
    schema = Schema({512: SpaceDefinition(512, "odd", fields=fields, indexes=(key,))})
    made = whole(row(INSERT, 1, {0x21: ("x\ny", {"k": [1, None]})}), row(DELETE, 2, {0x20: (1,)}, old=("o", "p", 3, 4)))
    first, second = messages(made, schema)
    assert first["value"]["after"] == {'a "b"': "x\ny", "field_2": {"k": [1, None]}, "gone": None}
    assert first["key"] == {"field_2": {"k": [1, None]}, 'a "b"': "x\ny"}
    assert second["value"]["before"] == {'a "b"': "o", "field_2": "p", "gone": 3, "_extra": [4]}
    bare = Schema({512: SpaceDefinition(512, "bare")})
    assert [each["value"]["after"] for each in messages(made, bare)] == [{"_extra": ["x\ny", {"k": [1, None]}]}, None]


def test_messages_of_other_spaces_are_left_out() -> None:
    assert messages(only=(513,)) == []
    assert len(messages(only=(512,))) == 7


def test_contract_can_be_pickled() -> None:
    contract = DebeziumContract(UUID, images="full", only=(512,), prefix="shop")
    assert pickle.loads(pickle.dumps(contract)) == contract
    assert contract.spark_schema == "`topic` STRING NOT NULL, `key` STRING, `value` STRING"
    assert contract.schema == MESSAGES


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"envelope": "avro"}, "envelope is 'avro'"),
        ({"envelope": "debezium", "columns": "id"}, "columns does not apply to envelope=debezium"),
        ({"envelope": "debezium", "images": "post"}, "images does not apply to envelope=debezium"),
        ({"topicPrefix": "shop"}, "topicPrefix needs an envelope"),
        ({"envelope": "debezium", "mode": "state", "space": "orders"}, "envelope does not apply to mode=state"),
    ],
)
def test_options_that_contradict_messages_are_rejected(given: dict[str, str], message: str) -> None:
    with pytest.raises(WrongOption, match=message):
        xlog_options({"path": "/logs", **given})


def test_batch_of_a_live_server_has_no_messages() -> None:
    with pytest.raises(WrongOption, match="envelope does not apply to a batch query"):
        tarantool_options({"uri": "db1:3301", "envelope": "debezium"})
