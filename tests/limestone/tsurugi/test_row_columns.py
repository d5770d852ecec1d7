"""Rows as Arrow columns: equal to the readable decoder, compiled and interpreted, for every type and for damage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import date, time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from flowstone.limestone.errors import BadRow
from flowstone.limestone.tsurugi import row_columns, row_kernels
from flowstone.limestone.tsurugi.row_columns import RowColumns, RowSpans
from flowstone.limestone.tsurugi.row_reader import Date, LobId, Time, Timestamp, Value, read_key, read_row
from tests.limestone.tsurugi.encoder import ColumnSpec, TableSpec, field, key_of, value_of
from tests.limestone.tsurugi.specs import filled_tables
from tests.limestone.tsurugi.test_row_reader import table_of
from tests.native.twins import interpreted_module

DAMAGES = 10_000


@pytest.fixture(params=["compiled", "interpreted"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels raise when they access memory outside a buffer of bytes."""
    if request.param == "interpreted":
        monkeypatch.setattr(row_columns, "kernels", interpreted_module(row_kernels.__name__))


def spans_of(entries: list[tuple[bytes, bytes | None]]) -> RowSpans:
    """Return entries in one buffer that ends with the last of them; a value of None is a removal."""
    data, lines = b"", []
    for key, value in entries:
        key_at, value_at = len(data), len(data) + len(key)
        data += key + (value or b"")
        lines.append((key_at, value_at, -1 if value is None else value_at, len(data)))
    table = np.array(lines, np.int64).reshape(len(lines), 4).T
    return RowSpans(np.frombuffer(data, np.uint8), *table)


def as_arrow(value: Value) -> Any:
    """Return a value of the readable decoder as Arrow stores it."""
    match value:
        case Date(days):
            return days
        case Time(nanoseconds) | LobId(nanoseconds):
            return nanoseconds
        case Timestamp(seconds, nanoseconds):
            return seconds * 1_000_000 + nanoseconds // 1000
        case float():
            return "nan" if value != value else value
    return value


def stored(column: pa.Array) -> list[Any]:
    """Return the values of a column; numbers for dates and times, which Python cannot represent exactly."""
    if pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    elif pa.types.is_temporal(column.type):
        column = column.cast(pa.int64())
    return ["nan" if isinstance(value, float) and value != value else value for value in column.to_pylist()]


@pytest.mark.usefixtures("_both_ways")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(filled_tables())
def test_columns_equal_the_rows_of_the_readable_decoder(filled: tuple[TableSpec, list[dict[str, Any]]]) -> None:
    spec, rows = filled
    table = table_of(spec)
    entries: list[tuple[bytes, bytes | None]] = [(key_of(spec, row), value_of(spec, row)) for row in rows]
    found = RowColumns(table).decode(spans_of(entries))
    found.batch.validate(full=True)
    wanted = [[as_arrow(value) for value in read_row(table, key, value or b"")] for key, value in entries]
    too_large = [number for number, row in enumerate(rows) if has_large_lob(spec, row)]
    assert found.unfit.tolist() == too_large
    for place, name in enumerate(table.column_names):
        column = stored(found.batch.column(name))
        for number, row in enumerate(wanted):
            if number not in too_large:
                assert column[number] == row[place], name


def has_large_lob(spec: TableSpec, row: dict[str, Any]) -> bool:
    return any(each.type in ("blob", "clob") and (row[each.name] or 0) >= 1 << 63 for each in spec.columns)


@pytest.mark.usefixtures("_both_ways")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(filled_tables())
def test_removed_rows_have_only_their_key(filled: tuple[TableSpec, list[dict[str, Any]]]) -> None:
    spec, rows = filled
    table = table_of(spec)
    spans = spans_of([(key_of(spec, row), None) for row in rows])
    batch = RowColumns(table, partial=True).decode_all(spans)
    batch.validate(full=True)
    keys = [[as_arrow(value) for value in read_key(table, key_of(spec, row))] for row in rows]
    for place, name in enumerate(table.key_names):
        assert stored(batch.column(name)) == [key[place] for key in keys]
    for name in {*table.column_names} - {*table.key_names}:
        assert batch.column(name).null_count == len(rows)


def every_type() -> tuple[TableSpec, dict[str, Any]]:
    """Return a table with every type and a row of it."""
    values: dict[str, Any] = {
        "boolean": True, "int1": -1, "int2": 300, "int4": 70_000, "int8": 2**40, "float4": 1.5, "float8": -2.5,
        "decimal": "1.25", "character": "héllo", "octet": b"\x00\xff", "date": 19782, "time": 45296123456789,
        "timetz": 1000, "timestamp": (1709210096, 123456789), "timestamptz": (-1, 999999999), "blob": 7, "clob": 8,
    }  # fmt: skip
    columns = tuple(ColumnSpec(kind, kind, precision=9, scale=2) for kind in values)
    key = (ColumnSpec("id", "int8", nullable=False), ColumnSpec("k", "character", nullable=False, descending=True))
    return TableSpec("t", (*key, *columns), ("id", "k")), {"id": 1, "k": "k", **values}


def test_every_type_has_its_arrow_type() -> None:
    spec, row = every_type()
    batch = RowColumns(table_of(spec)).decode_all(spans_of([(key_of(spec, row), value_of(spec, row))]))
    assert [str(each) for each in batch.schema.types] == [
        *("int64", "string", "bool", "int8", "int16", "int32", "int64", "float", "double", "decimal128(9, 2)"),
        *("string", "binary", "date32[day]", "time64[ns]", "time64[ns]", "timestamp[us]", "timestamp[us, tz=UTC]"),
        *("int64", "int64"),
    ]
    values = batch.to_pylist()[0]
    assert values["decimal"] == Decimal("1.25")
    assert values["date"] == date(2024, 2, 29)
    assert values["time"] == time(12, 34, 56, 123456)
    assert values["timestamp"].isoformat() == "2024-02-29T12:34:56.123456"
    assert values["timestamptz"].isoformat() == "1969-12-31T23:59:59.999999+00:00"
    assert not batch.schema.field("id").nullable
    assert batch.schema.field("date").nullable


def test_damaged_rows_are_those_that_the_readable_decoder_rejects() -> None:
    spec, row = every_type()
    table, whole = table_of(spec), (key_of(spec, row), value_of(spec, row))
    entries = list(damaged(whole, DAMAGES))
    found = RowColumns(table).decode(spans_of([*entries]))
    unfit = frozenset(found.unfit.tolist())
    assert len(unfit) > len(entries) // 4
    for number, (key, value) in enumerate(entries):
        try:
            wanted = read_row(table, key, value)
        except BadRow:
            assert number in unfit, (key, value)
            continue
        assert (number in unfit) == is_out_of_range(wanted), wanted


def damaged(whole: tuple[bytes, bytes], count: int) -> Iterator[tuple[bytes, bytes]]:
    rng = random.Random(24)
    for _ in range(count):
        key, value = map(bytearray, whole)
        data = rng.choice((key, value, value))
        for _ in range(rng.randint(1, 2)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        yield bytes(key), bytes(value)


def is_out_of_range(row: tuple[Value, ...]) -> bool:
    """Return True if Python can represent a row that Arrow cannot."""
    names = [each.name for each in every_type()[0].columns]
    for name, value in zip(names, row, strict=True):
        if name in ("k", "character") and isinstance(value, bytes):
            return True
        if isinstance(value, Date) and not -(2**31) <= value.days < 2**31:
            return True
        if isinstance(value, LobId) and value.blob_id >= 2**63:
            return True
        if isinstance(value, Timestamp) and abs(value.seconds) > row_columns.SECONDS_MAX:
            return True
    return False


def test_row_that_does_not_fit_is_named_with_its_key_and_the_reason() -> None:
    spec = TableSpec("t", (ColumnSpec("id", "int4", nullable=False), ColumnSpec("v", "int4")), ("id",))
    good = key_of(spec, {"id": 1}), value_of(spec, {"id": 1, "v": 2})
    with pytest.raises(BadRow, match=r"table 't', row with key x'80000002': column 'v', byte 0: 0xff is no mark"):
        RowColumns(table_of(spec)).decode_all(spans_of([good, (bytes((128, 0, 0, 2)), b"\x00")]))
    with pytest.raises(BadRow, match="key has 1 more bytes"):
        RowColumns(table_of(spec), partial=True).decode_all(spans_of([good, (bytes((128, 0, 0, 2, 3)), None)]))


def test_text_that_is_not_utf8_is_named() -> None:
    spec = TableSpec("t", (ColumnSpec("id", "int4", nullable=False), ColumnSpec("v", "character")), ("id",))
    good = key_of(spec, {"id": 1}), value_of(spec, {"id": 1, "v": "あ"})
    odd = key_of(spec, {"id": 2}), field(spec.column("v"), b"\xe3\x81", inverted=True)
    decoder = RowColumns(table_of(spec))
    assert decoder.decode(spans_of([good, odd, good])).unfit.tolist() == [1]
    with pytest.raises(BadRow, match=r"x'80000002': .*a text is not UTF-8"):
        decoder.decode_all(spans_of([good, odd]))


def test_no_rows_are_an_empty_batch() -> None:
    spec, _ = every_type()
    assert RowColumns(table_of(spec)).decode_all(spans_of([])).num_rows == 0
