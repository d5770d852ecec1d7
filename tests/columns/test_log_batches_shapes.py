"""Record batches of a reading: the columns of a space at the time of each row, and keys of rows without tuples."""

from pathlib import Path

import pyarrow as pa

from flowstone.columns.log_batches import GenericShape, TypedShape
from flowstone.history.log_reading import Reading
from flowstone.history.selection import Selection
from flowstone.iproto.msgpack import unpack
from flowstone.outside import production
from tests.history.logs import Log


def typed(path: str, space: int | str) -> list[pa.RecordBatch]:
    reading = Reading(production(), [path], selection=Selection(spaces=(space,)))
    return list(map(TypedShape().batch, reading.pieces()))


def test_each_batch_has_the_columns_of_its_definition(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "users", ("id", "unsigned"))
        log.insert(512, 1)
        layout = [{"name": "id", "type": "unsigned"}, {"name": "name", "type": "string"}]
        log.insert(280, 512, 1, "users", "memtx", 0, {}, layout)
        log.insert(512, 2, "Ann", "more")
    before, after = typed(log.path, "users")
    assert before.column("id").to_pylist() == [1]
    assert "name" not in before.schema.names
    assert after.select(["id", "name", "_extra"]).to_pylist() == [{"id": 2, "name": "Ann", "_extra": '["more"]'}]


def test_delete_has_its_key_in_the_columns_of_the_primary_key(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "users", ("id", "unsigned"), ("name", "string"))
        log.delete(512, 7)
    (batch,) = typed(log.path, 512)
    assert batch.select(["_type", "id", "name"]).to_pylist() == [{"_type": "DELETE", "id": 7, "name": None}]


def test_rows_of_an_undefined_space_have_only_extra_fields(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.insert(600, 1, "x")
    (batch,) = typed(log.path, 600)
    assert batch.column("_extra").to_pylist() == ['[1,"x"]']


def test_generic_shape_preserves_messagepack(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.insert(600, 1, "x")
        log.delete(600, 1)
    table = pa.Table.from_batches(GenericShape().batches(Reading(production(), [log.path]).pieces()))
    assert table.column("type").to_pylist() == ["INSERT", "DELETE"]
    assert unpack(table.column("tuple")[0].as_py()) == (1, "x")
    assert unpack(table.column("key")[1].as_py()) == (1,)
