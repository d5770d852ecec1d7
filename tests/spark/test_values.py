"""Every type of Tarantool: read as a batch, as a client sees it, and written back.

The tests use the real servers of FLOWSTONE_TARANTOOL, or the one on PATH, and omit types that an old server lacks.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from flowstone.columns.arrow_columns import ColumnError
from flowstone.iproto.extensions import Datetime
from flowstone.spark.sources.tarantool.source import TarantoolSource
from tests.interop.versions import Binary, binaries
from tests.spark.live_servers import create, insert, rows_of, run, server

MOMENT = datetime.datetime(2026, 5, 1, 12, 30, 0, 123456, tzinfo=datetime.UTC)
BIG = 2**64 - 1

OLD_TYPES: tuple[tuple[Any, ...], ...] = (
    ("id", "unsigned"),
    ("u", "unsigned", True),
    ("i", "integer", True),
    ("d", "double", True),
    ("n", "number", True),
    ("dec", "decimal", True),
    ("uid", "uuid", True),
    ("s", "string", True),
    ("vb", "varbinary", True),
    ("b", "boolean", True),
    ("a", "array", True),
    ("m", "map", True),
    ("x", "any", True),
    ("sc", "scalar", True),
)
NEW_TYPES: tuple[tuple[Any, ...], ...] = (*OLD_TYPES, ("dt", "datetime", True), ("iv", "interval", True))
UID = UUID("12345678-9abc-4def-8012-3456789abcde")

OLD_ROWS: tuple[tuple[Any, ...], ...] = (
    (1, 2**63 - 1, -(2**63), 1.5, 2.5, Decimal("-123.4500"), UID, "text ä", b"\x00\xff", True, (1, "a", None),
     {"k": (1.5, {"z": False})}, "any", "scalar"),
    (2, 0, 5, -0.0, 7, Decimal(0), UUID(int=0), "", b"", False, (), {}, (1,), 12),
    (3,) + (None,) * 13,
    (4,),
    (5, 1, -1, 2.0, -3, Decimal("1E+2"), UID, "x", b"y", True, (1,), {"a": 1}, {"b": 2}, True, None, None, "extra"),
)  # fmt: skip


@pytest.fixture(scope="module", params=binaries(), ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, bool]]:
    """Yield an address, and whether the server has the newer types."""
    binary: Binary = request.param
    with server("real", tmp_path_factory.mktemp("values"), binary=binary.path) as address:
        is_new = binary.version >= (2, 11, 0)
        create(address, 800, "types", NEW_TYPES if is_new else OLD_TYPES)
        insert(address, 800, [row[:14] + row[16:] if not is_new else row for row in OLD_ROWS])
        if is_new:
            run(
                address,
                """
                local datetime = require('datetime')
                box.space.types:update(1, {
                    {'=', 'dt', datetime.new{
                        year = 2026, month = 5, day = 1, hour = 14, min = 30, nsec = 123456000, tzoffset = 120}},
                    {'=', 'iv', datetime.interval.new{month = 1, sec = -5}}})
                """,
            )
        yield address, is_new


def read(address: str, **options: str) -> pa.Table:
    reader = TarantoolSource({"uri": address, **options}).reader(StructType())
    return pa.Table.from_batches([batch for part in reader.partitions() for batch in reader.read(part)])


def shown(kind: str, value: Any) -> Any:
    """Return the column value for a value from a client."""
    if value is None:
        return None
    if kind in ("number", "double"):
        return float(value)
    if kind == "decimal":
        return f"{value:f}"
    if kind == "uuid":
        return str(value)
    if kind == "datetime":
        assert isinstance(value, Datetime)
        return value.to_datetime()
    return value


@pytest.mark.parametrize("mode", ["snapshot", "select"])
def test_values_of_all_types_equal_those_of_a_client(served: tuple[str, bool], mode: str) -> None:
    address, is_new = served
    types = NEW_TYPES if is_new else OLD_TYPES
    told = rows_of(address, 800)
    found = read(address, space="types", readMode=mode).to_pylist()
    assert len(found) == len(told) == 5
    for row, values in zip(found, told, strict=True):
        padded = [*values, *[None] * (len(types) - len(values))]
        for (name, kind, *_), value in zip(types, padded, strict=False):
            if kind in ("array", "map", "any", "scalar", "interval"):
                assert (row[name] is None) == (value is None)
                if kind != "interval" and value is not None:
                    assert json.loads(row[name]) == json.loads(json.dumps(value))
            else:
                assert row[name] == shown(kind, value), name
    assert found[0]["i"] == -(2**63)
    assert str(found[1]["d"]) == "-0.0"
    assert found[4]["_extra"] == '["extra"]'
    if is_new:
        assert found[0]["dt"] == MOMENT


def test_large_numbers_and_invalid_texts_are_refused_unless_options_allow_them(served: tuple[str, bool]) -> None:
    address, _ = served
    create(address, 801, "odd", [("id", "unsigned"), ("s", "string")])
    insert(address, 801, [(BIG, "fine")])
    with pytest.raises(ColumnError, match=r"field 'id' is above 2\^63-1 and does not fit int64; choose unsignedAs"):
        read(address, space="odd")
    assert read(address, space="odd", unsignedAs="decimal").column("id").to_pylist() == [Decimal(BIG)]
    run(address, "box.space.odd:truncate() box.space.odd:insert{1, 'a\\xff'}")
    with pytest.raises(ColumnError, match=r"field 's' is not UTF-8; choose stringsAs=binary"):
        read(address, space="odd")
    assert read(address, space="odd", stringsAs="binary").column("s").to_pylist() == [b"a\xff"]
    run(address, "box.space.odd:drop()")


def test_values_can_be_read_and_written_back(served: tuple[str, bool]) -> None:
    """Typed values are read by columns, all values by tuples. The digits of a decimal and the zone of a
    date are lost.
    """
    address, is_new = served
    types = NEW_TYPES if is_new else OLD_TYPES
    for number, options in ((810, {"unsignedAs": "decimal"}), (811, {"columns": "_tuple_msgpack"})):
        create(address, number, f"copy{number}", types)
        table = read(address, space="types", **options)
        if number == 810 and is_new:
            table = table.drop_columns(["iv"])
        writer = TarantoolSource({"uri": address, "space": f"copy{number}"}).writer(
            from_arrow_schema(table.schema), False
        )
        assert writer.write(iter(table.to_batches())).row_count == 5
        copies, originals = rows_of(address, number), rows_of(address, 800)
        if number == 811:
            assert copies == originals
        for copy, original in zip(copies, originals, strict=True):
            for (name, kind, *_), one, other in zip(types, copy, original, strict=False):
                if kind == "datetime" and other is not None:
                    one, other = one.to_datetime(), other.to_datetime()
                if kind != "interval":
                    assert one == other, name
        run(address, f"box.space.copy{number}:drop()")
