"""Columnar decoding: equal to the row decoder on random schemas and data, with clear errors for invalid values."""

from __future__ import annotations

import datetime
import json
import math
import struct
import uuid
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.columns.arrow_columns import (
    GENERIC_SCHEMA,
    MISFIT_TEXT_MAX,
    Column,
    ColumnError,
    ColumnOptions,
    FieldMisfits,
    TypedDecoder,
    generic_batch,
)
from flowstone.columns.column_types import ColumnType
from flowstone.errors import FlowstoneError
from flowstone.iproto import msgpack
from flowstone.iproto.constants import type_name
from flowstone.iproto.extensions import Datetime
from flowstone.iproto.row import Row, decode_row
from tests.xlog.slabs import array, body, insert, slab_of

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
METADATA = ["_replica_id", "_lsn", "_tsn", "_timestamp", "_type", "_flags"]
TAIL = ["_extra", "_key", "_operations", "_index_id", "_index_base"]
JSON_TYPES = ("map", "array", "any", "scalar", "interval")
INSERT, REPLACE, UPDATE, DELETE, UPSERT = 2, 3, 4, 5, 9
NIL = b"\xc0"

INTEGER_FORMS = dict(zip(range(0xCC, 0xD4), (">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True))


def integer_forms(value: int) -> list[bytes]:
    """Return every MessagePack encoding of an integer."""
    forms = [bytes((value & 0xFF,))] if -32 <= value < 128 else []
    for marker, layout in INTEGER_FORMS.items():
        try:
            forms.append(bytes((marker,)) + struct.pack(layout, value))
        except struct.error:
            continue
    return forms


def integers(low: int, high: int) -> st.SearchStrategy[bytes]:
    edges = [n for n in (0, -1, -32, -33, 127, 128, 255, 256, 2**16, 2**31, 2**32, low, high) if low <= n <= high]
    numbers = st.one_of(st.sampled_from(edges), st.integers(low, high), st.integers(max(low, -200), min(high, 300)))
    return numbers.flatmap(lambda number: st.sampled_from(integer_forms(number)))


DOUBLES = st.floats(allow_nan=False).map(lambda value: b"\xcb" + struct.pack(">d", value))
FLOATS = st.floats(allow_nan=False, width=32).map(lambda value: b"\xca" + struct.pack(">f", value))
STRINGS = st.text(max_size=40).map(msgpack.pack)
LONG_STRINGS = st.sampled_from((33, 255, 256, 70000)).map(lambda n: msgpack.pack("é" * n))
BINARIES = st.binary(max_size=40).map(msgpack.pack)
BOOLEANS = st.sampled_from((b"\xc2", b"\xc3"))
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20, places=5)
SMALL_DECIMALS = st.builds(
    lambda number, exponent: Decimal((int(number < 0), tuple(map(int, str(abs(number)))), exponent)),
    st.integers(-(10**16), 10**16),
    st.integers(-9, 9),
)
UUIDS = st.uuids().map(msgpack.pack)
MOMENTS = st.builds(
    Datetime,
    st.integers(-62135596800, 253402300799) | st.integers(-3, 3),
    st.sampled_from((0, 1, 999, 1000, 999_999_999)) | st.integers(0, 999_999_999),
    st.integers(-720, 840),
    st.integers(0, 500),
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PLAIN_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FINITE | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
).map(msgpack.pack)

VALUES: dict[str, st.SearchStrategy[bytes]] = {
    "unsigned": integers(0, 2**63 - 1),
    "integer": integers(-(2**63), 2**63 - 1),
    "int8": integers(-128, 127),
    "uint64": integers(0, 2**63 - 1),
    "number": st.one_of(integers(-(2**63), 2**64 - 1), DOUBLES, FLOATS, SMALL_DECIMALS.map(msgpack.pack)),
    "double": st.one_of(DOUBLES, FLOATS),
    "string": st.one_of(STRINGS, STRINGS, LONG_STRINGS),
    "varbinary": BINARIES,
    "boolean": BOOLEANS,
    "decimal": st.one_of(SMALL_DECIMALS.map(msgpack.pack), DECIMALS.map(msgpack.pack), integers(-(2**63), 2**64 - 1)),
    "uuid": UUIDS,
    "datetime": MOMENTS.map(msgpack.pack),
    "map": st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**64 - 1), max_size=3).map(msgpack.pack),
    "array": st.lists(st.text(max_size=5), max_size=4).map(msgpack.pack),
    "any": PLAIN_JSON,
    "scalar": st.one_of(STRINGS, BOOLEANS, FINITE.map(msgpack.pack)),
}


@st.composite
def schemas(draw: st.DrawFn) -> list[Column]:
    types = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=8))
    return [Column(f"f{number}", kind, draw(st.booleans())) for number, kind in enumerate(types)]


@st.composite
def headers(draw: st.DrawFn, kind: int, pairs: dict[int, bytes]) -> bytes:
    """Draw a row with any header and the given body."""
    lsn = draw(st.integers(0, 2**40))
    row = Row(
        kind,
        replica_id=draw(st.integers(0, 31)),
        lsn=lsn,
        tsn=draw(st.sampled_from((lsn, max(lsn - 3, 0)))),
        timestamp=draw(st.floats(0, 4e9)),
        flags=draw(st.sampled_from((1, 3, 7))),
        body=body(pairs),
    )
    return row.encode()


@st.composite
def tuples(draw: st.DrawFn, columns: list[Column], shortest: int = 0) -> list[bytes]:
    """Draw the field values of a tuple that may be shorter or longer than the format."""
    values = [
        draw(VALUES[column.type] | st.just(NIL) if column.nullable else VALUES[column.type]) for column in columns
    ]
    if draw(st.booleans()):
        return values
    if draw(st.booleans()):
        return values[: draw(st.integers(min(shortest, len(values)), len(values)))]
    return values + draw(st.lists(PLAIN_JSON, min_size=1, max_size=3))


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[Column], list[int], list[bytes]]:
    """Draw a schema, its key fields, and rows of every type."""
    columns = draw(schemas())
    key_fields = draw(st.permutations(range(len(columns))))[: draw(st.integers(0, 2))]
    rows = []
    for _ in range(draw(st.integers(0, 10))):
        kind = draw(st.sampled_from((INSERT, REPLACE, UPDATE, DELETE, UPSERT)))
        pairs = {0x10: b"\xcd\x02\x00"}
        key = array([draw(VALUES[columns[number].type]) for number in key_fields])
        operations = msgpack.pack([["=", 1, draw(st.text(max_size=3))]])
        if draw(st.booleans()):
            pairs[0x15] = b"\x01"
        if kind in (UPDATE, DELETE):
            if draw(st.integers(0, 4)) == 0:
                pairs[0x11] = b"\x01"
            pairs[0x20] = key
        if kind == UPSERT:
            pairs[0x28] = operations
        if kind == UPDATE:
            pairs[0x21] = operations
        elif kind != DELETE:
            pairs[0x21] = array(draw(tuples(columns)))
        rows.append(draw(headers(kind, pairs)))
    return columns, list(key_fields), rows


def json_of(value: Any) -> Any:
    """Return the result of a JSON reader for a decoded value."""
    if isinstance(value, tuple):
        return [json_of(item) for item in value]
    if isinstance(value, dict):
        return {key: json_of(item) for key, item in value.items()}
    return value


def reference_value(column: Column, value: Any, options: ColumnOptions) -> Any:
    """Return the value of a column by the rules of its type."""
    kind = column.type
    if value is None:
        return None
    if kind in ("unsigned", "uint64") or (kind == "integer" and options.unsigned_as != "int64"):
        return {"int64": int, "double": float, "decimal": Decimal}[options.unsigned_as](value)
    if kind in ("number", "double"):
        return float(value)
    if kind == "decimal":
        if options.decimal_scale is None:
            return format(Decimal(value), "f")
        return Decimal(value)
    if kind == "uuid":
        return str(value)
    if kind == "datetime":
        return EPOCH + datetime.timedelta(seconds=value.seconds, microseconds=value.nsec // 1000)
    return json_of(value) if kind in JSON_TYPES else value


def reference_row(columns: list[Column], key_fields: list[int], raw: bytes, options: ColumnOptions) -> dict[str, Any]:
    row = decode_row(raw)
    parts = msgpack.unpack_body(row.body)
    found: dict[str, Any] = {
        "_replica_id": row.replica_id,
        "_lsn": row.lsn,
        "_tsn": row.tsn,
        "_timestamp": EPOCH + datetime.timedelta(microseconds=round(row.timestamp * 1e6)),
        "_type": type_name(row.type),
        "_flags": row.flags,
    }
    fields: dict[int, Any] = {}
    if row.type in (UPDATE, DELETE):
        if parts.get(0x11, 0) == 0:
            fields = dict(zip(key_fields, parts[0x20], strict=False))
    else:
        fields = dict(enumerate(parts[0x21]))
    for number, column in enumerate(columns):
        found[column.name] = reference_value(column, fields.get(number), options)
    extra = [fields[number] for number in sorted(fields) if number >= len(columns)]
    found["_extra"] = json_of(tuple(extra)) if extra else None
    found["_key"] = parts.get(0x20)
    found["_operations"] = parts[0x21] if row.type == UPDATE else parts.get(0x28)
    found["_index_id"], found["_index_base"] = parts.get(0x11, 0), parts.get(0x15, 0)
    return found


def readable(columns: list[Column], batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the batch's rows, with JSON and MessagePack decoded."""
    batch.validate(full=True)
    texts = {"_extra", *(column.name for column in columns if column.type in JSON_TYPES)}
    rows = batch.to_pylist()
    for row in rows:
        for name in texts & row.keys():
            row[name] = None if row[name] is None else json.loads(row[name])
        for name in {"_key", "_operations"} & row.keys():
            row[name] = None if row[name] is None else msgpack.unpack(row[name])
    return rows


def all_rows(slab: Any) -> Any:
    return np.arange(len(slab), dtype=np.int64)


options_of = st.builds(ColumnOptions, st.sampled_from(("int64", "decimal", "double")), st.sampled_from((None, 12)))


@given(logs(), options_of)
def test_typed_columns_equal_the_row_decoder(
    log: tuple[list[Column], list[int], list[bytes]], options: ColumnOptions
) -> None:
    columns, key_fields, rows = log
    slab = slab_of(rows)
    decoder = TypedDecoder(columns, key_fields=key_fields, options=options)
    batch = decoder.batch(slab, all_rows(slab))
    assert batch.schema == decoder.schema
    assert readable(columns, batch) == [reference_row(columns, key_fields, row, options) for row in rows]


@given(logs(), st.data())
def test_selection_of_rows_and_columns_equals_that_part_of_the_table(
    log: tuple[list[Column], list[int], list[bytes]], data: st.DataObject
) -> None:
    columns, key_fields, rows = log
    slab = slab_of(rows)
    whole = TypedDecoder(columns, key_fields=key_fields)
    numbers = sorted(data.draw(st.sets(st.sampled_from(range(len(rows)))) if rows else st.just(set())))
    wanted = data.draw(st.sets(st.sampled_from(whole.schema.names)))
    part = TypedDecoder(columns, key_fields=key_fields, wanted=wanted)
    chosen = np.array(numbers, np.int64)
    expected = whole.batch(slab, all_rows(slab)).take(pa.array(numbers, pa.int64()))
    names = [name for name in whole.schema.names if name in wanted]
    assert part.schema.names == names
    found = part.batch(slab, chosen)
    assert found.num_rows == len(numbers)
    if names:
        assert found.to_pylist() == [{name: row[name] for name in names} for row in expected.to_pylist()]


@given(logs())
def test_generic_columns_equal_the_row_decoder(log: tuple[list[Column], list[int], list[bytes]]) -> None:
    rows = log[2]
    slab = slab_of(rows)
    batch = generic_batch(slab, all_rows(slab))
    batch.validate(full=True)
    assert batch.schema == GENERIC_SCHEMA
    for raw, found in zip(rows, batch.to_pylist(), strict=True):
        row, parts = decode_row(raw), msgpack.unpack_body(decode_row(raw).body)
        assert (found["replica_id"], found["lsn"], found["tsn"]) == (row.replica_id, row.lsn, row.tsn)
        assert (found["type"], found["flags"]) == (type_name(row.type), row.flags)
        assert (found["space_id"], found["index_id"], found["index_base"]) == (
            512,
            parts.get(0x11, 0),
            parts.get(0x15, 0),
        )
        spans = [found["key"], found["tuple"], found["operations"]]
        is_update = row.type == UPDATE
        values = [
            parts.get(0x20),
            None if is_update else parts.get(0x21),
            parts.get(0x21) if is_update else parts.get(0x28),
        ]
        assert [None if span is None else msgpack.unpack(span) for span in spans] == values
        assert all(span in raw for span in spans if span is not None)


@given(st.data())
def test_fields_of_a_snapshot_are_nullable_as_declared(data: st.DataObject) -> None:
    columns = data.draw(schemas())
    behind = max((number + 1 for number, column in enumerate(columns) if not column.nullable), default=0)
    rows = [insert(data.draw(tuples(columns, behind)), lsn=n + 1, tsn=n + 1) for n in range(3)]
    decoder = TypedDecoder(columns, partial=False)
    for column in columns:
        assert decoder.schema.field(column.name).nullable == (column.nullable or column.type == "any")
    slab = slab_of(rows)
    batch = decoder.batch(slab, all_rows(slab))
    assert readable(columns, batch) == [reference_row(columns, [], row, ColumnOptions()) for row in rows]


def typed(column: Column, value: bytes, options: ColumnOptions = ColumnOptions(), **settings: Any) -> Any:
    """Return the column value of the second row of two; the first row has a null."""
    rows = [insert([NIL], lsn=6, tsn=6), insert([value], lsn=7, tsn=7)]
    slab = slab_of(rows)
    return (
        TypedDecoder([column], options=options, **settings).batch(slab, all_rows(slab)).column(column.name)[1].as_py()
    )


def test_dates_are_days_since_1970() -> None:
    days = {-719_162: "0001-01-01", -1: "1969-12-31", 0: "1970-01-01", 2_932_896: "9999-12-31"}
    for number, text in days.items():
        assert str(typed(Column("day", "date"), msgpack.pack(number))) == text


def test_decimal_field_can_name_its_digits() -> None:
    assert typed(Column("price", "decimal(10,2)"), msgpack.pack(Decimal("1.5"))) == Decimal("1.50")
    assert TypedDecoder([Column("price", "decimal(10,2)")]).schema.field("price").type == pa.decimal128(10, 2)


ABOVE = msgpack.pack(2**63)


@pytest.mark.parametrize("kind", ["unsigned", "integer", "uint64"])
def test_error_for_a_number_above_int64_names_the_option(kind: str) -> None:
    with pytest.raises(ColumnError, match=r"some.xlog: row 7 of replica 1, space 512: field 'id' .*unsignedAs=decimal"):
        typed(Column("id", kind), ABOVE)


@pytest.mark.parametrize(("unsigned_as", "expected"), [("decimal", Decimal(2**64 - 1)), ("double", float(2**64 - 1))])
def test_unsigned_as_option_accepts_numbers_above_int64(
    unsigned_as: Literal["decimal", "double"], expected: object
) -> None:
    for kind in ("unsigned", "integer", "uint64"):
        assert typed(Column("id", kind), msgpack.pack(2**64 - 1), ColumnOptions(unsigned_as)) == expected
    assert typed(Column("id", "integer"), msgpack.pack(-(2**63)), ColumnOptions("decimal")) == -(2**63)


@pytest.mark.parametrize("value", [b"\xa2\xc3\x28", b"\xa1\xff", b"\xa3\xed\xa0\x80", b"\xa3ab\xc3"])
def test_error_for_a_string_with_invalid_utf8_names_row_and_field(value: bytes) -> None:
    with pytest.raises(ColumnError, match=r"row 7 of replica 1, space 512: field 'name' is not UTF-8"):
        typed(Column("name", "string"), value)


def test_string_with_invalid_utf8_can_be_read_as_bytes() -> None:
    assert typed(Column("name", "string"), b"\xa2\xc3\x28", ColumnOptions(strings_as="binary")) == b"\xc3\x28"


def test_replacement_character_is_valid_utf8() -> None:
    assert typed(Column("name", "string"), msgpack.pack("\ufffd")) == "\ufffd"


def decimal(payload: bytes) -> bytes:
    return bytes((0xC7, len(payload), 1)) + payload


WRONG = {
    "unsigned": [b"\xa1x", b"\xcb" + bytes(8), b"\xc3", b"\x90"],
    "double": [b"\xa1x", b"\xc2", decimal(b"\x00\x0f\xff"), decimal(b"")],
    "string": [b"\x01", b"\x90", b"\xd4\x01\x00"],
    "varbinary": [b"\xc3"],
    "boolean": [b"\x00", b"\xa0"],
    "uuid": [b"\xd8\x01" + bytes(16), b"\xd7\x02" + bytes(8), msgpack.pack("not a uuid")],
    "datetime": [
        b"\xd6\x04" + bytes(4),
        b"\xd7\x02" + bytes(8),
        b"\xd8\x04" + struct.pack("<qihh", 0, -1, 0, 0),
        b"\xd8\x04" + struct.pack("<qihh", 0, 2_000_000_000, 0, 0),
    ],
    "decimal": [
        b"\xa11", b"\xc3", b"\xcb" + bytes(8), decimal(b""), decimal(b"\x00"), decimal(b"\xa1\x1c"),
        decimal(b"\x00\x1a\x1c"), decimal(b"\x00\x11"), decimal(b"\xcd\x01"), b"\xd4\x02\x1c",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in WRONG.items() for value in values])
def test_error_for_a_value_of_another_type_names_row_and_field(kind: str, value: bytes) -> None:
    for options in (ColumnOptions(), ColumnOptions(decimal_scale=3)):
        with pytest.raises(ColumnError, match=rf"row 7 of replica 1, space 512: field 'f' is not of type {kind}"):
            typed(Column("f", kind), value, options)


@pytest.mark.parametrize(
    ("text", "scale"),
    [("1.2345", 3), ("1e30", 12), ("123456789012345678901234567890123456789", 0), ("-0.001", 2), ("1e-200", 38)],
)
def test_decimal_with_more_digits_than_the_column_raises_an_error(text: str, scale: int) -> None:
    with pytest.raises(
        ColumnError, match=r"field 'f' has more digits than the column keeps; choose another decimalScale"
    ):
        typed(Column("f", "decimal"), msgpack.pack(Decimal(text)), ColumnOptions(decimal_scale=scale))


@pytest.mark.parametrize(
    "scale", [b"\xd3" + b"\x80" + bytes(7), b"\xd3\x7f" + b"\xff" * 7, b"\xcf" + b"\xff" * 8, b"\xce\xff\xff\xff\xff"]
)
def test_decimal_with_a_huge_scale_raises_an_error_in_constant_time(scale: bytes) -> None:
    for options in (ColumnOptions(), ColumnOptions(decimal_scale=3)):
        with pytest.raises(ColumnError, match="field 'f'"):
            typed(Column("f", "decimal"), decimal(scale + b"\x1c"), options)


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("0", 0),
        ("-0.00", 1),
        ("1.500", 1),
        ("1e37", 0),
        ("-1e-38", 38),
        ("18446744073709551616", 2),
        ("-18446744073709551616", 0),
        ("-99999999999999999999999999999999999999", 0),
    ],
)
def test_decimals_at_the_limits_of_the_column_are_accepted(text: str, scale: int) -> None:
    found = typed(Column("f", "decimal"), msgpack.pack(Decimal(text)), ColumnOptions(decimal_scale=scale))
    assert found == Decimal(text)
    assert found.as_tuple().exponent == -scale


@pytest.mark.parametrize("sign", "abcdef")
def test_every_sign_nibble_of_a_decimal_is_accepted(sign: str) -> None:
    value = decimal(b"\x01" + bytes.fromhex("01" + "5" + sign))
    expected = "-1.5" if sign in "bd" else "1.5"
    assert typed(Column("f", "decimal"), value) == expected
    assert typed(Column("f", "decimal"), value, ColumnOptions(decimal_scale=2)) == Decimal(expected)


def test_datetime_beyond_the_timestamp_range_raises_an_error() -> None:
    for seconds in (10**14, -(10**14)):
        with pytest.raises(ColumnError, match="field 'f' is too far from 1970"):
            typed(Column("f", "datetime"), msgpack.pack(Datetime(seconds)))


def test_number_column_accepts_every_numeric_type() -> None:
    for value in (1, -1, 2**64 - 1, 1.5, Decimal("2.25")):
        assert typed(Column("f", "number"), msgpack.pack(value)) == float(value)
    assert (
        typed(Column("f", "number"), b"\xca" + struct.pack(">f", -0.1))
        == struct.unpack(">f", struct.pack(">f", -0.1))[0]
    )
    assert math.isnan(typed(Column("f", "number"), msgpack.pack(math.nan)))


def test_null_in_a_field_that_is_not_nullable_raises_an_error() -> None:
    slab = slab_of([insert([b"\x01", b"\x02"], lsn=1), insert([b"\x01"], lsn=2, tsn=2)])
    decoder = TypedDecoder([Column("a", "unsigned"), Column("b", "unsigned", False)], partial=False)
    with pytest.raises(
        ColumnError, match=r"row 2 of replica 1, space 512: field 'b' is null, but not declared nullable"
    ):
        decoder.batch(slab, all_rows(slab))


def test_error_names_the_row_whose_tuple_is_not_an_array() -> None:
    slab = slab_of([Row(INSERT, 1, lsn=9, body=body({0x10: b"\x05", 0x21: b"\xa1x"})).encode()])
    with pytest.raises(ColumnError, match=r"some.xlog: row 9 of replica 1, space 5: tuple or key is not an array"):
        TypedDecoder([Column("a", "any")]).batch(slab, all_rows(slab))


def test_no_rows_and_no_fields_yield_empty_batches() -> None:
    empty = slab_of([])
    for columns in ([], [Column(f"f{n}", kind) for n, kind in enumerate(sorted(VALUES))]):
        decoder = TypedDecoder(columns, key_fields=range(len(columns)))
        batch = decoder.batch(empty, all_rows(empty))
        batch.validate(full=True)
        assert (batch.num_rows, batch.schema) == (0, decoder.schema)
    assert generic_batch(empty, all_rows(empty)).num_rows == 0


def test_all_fields_are_extra_without_a_format() -> None:
    slab = slab_of([insert([b"\x01", msgpack.pack("x"), NIL]), insert([], lsn=2, tsn=2)])
    batch = TypedDecoder([]).batch(slab, all_rows(slab))
    assert batch.schema.names == METADATA + TAIL
    assert batch.column("_extra").to_pylist() == ['[1,"x",null]', None]


def test_row_type_of_a_newer_server_is_shown_as_its_number() -> None:
    rows = [Row(kind, 1, lsn=n + 1, tsn=n + 1, body=b"\x80").encode() for n, kind in enumerate((2, 129, 40000, 2**40))]
    slab = slab_of(rows)
    assert generic_batch(slab, all_rows(slab)).column("type").to_pylist() == ["INSERT", "129", "40000", str(2**40)]


@pytest.mark.parametrize(("key", "name"), [(2, "replica id"), (9, "flags")])
def test_header_number_out_of_range_raises_an_error(key: int, name: str) -> None:
    header = b"\x83\x00\x02\x03\x05" + bytes((key,)) + b"\xce\x80\x00\x00\x00"
    slab = slab_of([header + b"\x80"])
    with pytest.raises(ColumnError, match=f"row 5 of replica .*: {name} 214748364[89] is above 2147483647"):
        generic_batch(slab, all_rows(slab))


@pytest.mark.parametrize("timestamp", [math.nan, math.inf, -math.inf, 1e300, 1e13])
def test_time_beyond_the_timestamp_range_raises_an_error(timestamp: float) -> None:
    slab = slab_of([b"\x83\x00\x02\x03\x05\x04\xcb" + struct.pack(">d", timestamp) + b"\x80"])
    with pytest.raises(ColumnError, match=r"row 5 of replica 0: timestamp of .* s is out of range"):
        generic_batch(slab, all_rows(slab))


def test_error_for_an_unknown_column_lists_the_known_columns() -> None:
    with pytest.raises(
        FlowstoneError, match=r"no column 'x'; known columns: _replica_id, .*, a, _extra, .*, _index_base"
    ):
        TypedDecoder([Column("a", "any")], wanted={"x"})


@pytest.mark.parametrize("names", [("a", "a"), ("_lsn",), ("_extra",)])
def test_duplicate_column_name_raises_an_error(names: tuple[str, ...]) -> None:
    with pytest.raises(FlowstoneError, match="duplicate column"):
        TypedDecoder([Column(name, "any") for name in names])


@pytest.mark.parametrize("settings", [{"unsigned_as": "text"}, {"decimal_scale": -1}, {"decimal_scale": 39}])
def test_options_out_of_range_raise_an_error(settings: dict[str, Any]) -> None:
    with pytest.raises(FlowstoneError, match=r"; use "):
        ColumnOptions(**settings)


def test_uuid_column_has_the_text_of_the_uuid() -> None:
    value = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
    assert typed(Column("f", "uuid"), msgpack.pack(value)) == str(value)


# --- values that do not fit ---

MISFITS: list[tuple[str, bytes, ColumnOptions, str, str]] = [
    ("unsigned", ABOVE, ColumnOptions(), "too_large", "9223372036854775808"),
    ("unsigned", msgpack.pack("x"), ColumnOptions(), "wrong_type", '"x"'),
    ("unsigned", msgpack.pack("x"), ColumnOptions("double"), "wrong_type", '"x"'),
    ("boolean", b"\x01", ColumnOptions(), "wrong_type", "1"),
    ("string", b"\xa3a\xffb", ColumnOptions(), "not_utf8", r'"a\udcffb"'),
    ("string", b"\x07", ColumnOptions(), "wrong_type", "7"),
    ("varbinary", b"\x07", ColumnOptions(), "wrong_type", "7"),
    ("uuid", msgpack.pack("no"), ColumnOptions(), "wrong_type", '"no"'),
    ("datetime", b"\xd7\x04" + struct.pack("<q", 10**15), ColumnOptions(), "out_of_range", ""),
    ("decimal", msgpack.pack(Decimal("1.23456")), ColumnOptions(decimal_scale=4), "too_precise", '"1.23456"'),
    ("decimal", msgpack.pack("1.5"), ColumnOptions(decimal_scale=4), "wrong_type", '"1.5"'),
    ("decimal", msgpack.pack("1.5"), ColumnOptions(), "wrong_type", '"1.5"'),
    ("number", msgpack.pack(True), ColumnOptions(), "wrong_type", "true"),
    ("date", msgpack.pack(2_932_897), ColumnOptions(), "out_of_range", "2932897"),
    ("date", msgpack.pack(-(2**63)), ColumnOptions(), "out_of_range", ""),
    ("date", msgpack.pack("x"), ColumnOptions(), "wrong_type", '"x"'),
    ("decimal(3,1)", msgpack.pack(Decimal("123.4")), ColumnOptions(), "too_precise", '"123.4"'),
    ("number", b"\xd5\x01\x00\x00", ColumnOptions(), "wrong_type", ""),
]
"""Field type, value, options, reason, and the value as text ("" if the test does not compare it)."""


@pytest.mark.parametrize(("kind", "value", "options", "reason", "text"), MISFITS)
@pytest.mark.parametrize("places", [[0], [5], [0, 1, 2], [2, 3, 9], list(range(10))])
def test_misfit_is_null_and_reported_with_row_reason_and_value(
    kind: str,
    value: bytes,
    options: ColumnOptions,
    reason: str,
    text: str,
    places: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowstone.columns.arrow_columns.RESUME_ROWS", 4)
    fitting = {"boolean": b"\xc3", "string": b"\xa1s", "varbinary": b"\xc4\x01s"}.get(kind, b"\x05")
    fitting = {"uuid": msgpack.pack(uuid.UUID(int=1)), "datetime": msgpack.pack(Datetime(1))}.get(kind, fitting)
    slab = slab_of([insert([value if n in places else fitting], lsn=n + 1, tsn=n + 1) for n in range(10)])
    misfits: list[FieldMisfits] = []
    batch = TypedDecoder([Column("f", kind)], options=options).batch(slab, all_rows(slab), misfits)
    batch.validate(full=True)
    assert [n for n, each in enumerate(batch.column("f").to_pylist()) if each is None] == places
    (found,) = misfits
    assert (found.column, found.rows.tolist(), found.reasons) == ("f", places, [reason] * len(places))
    texts = found.values.to_pylist()
    assert len(texts) == len(places)
    assert not text or set(texts) == {text}


def test_misfits_of_several_reasons_and_columns_are_all_reported() -> None:
    values = [
        [ABOVE, b"\xa1s"],
        [b"\x01", b"\xa1\xff"],
        [b"\xa1x", b"\x07"],
        [NIL, NIL],
        [b"\x02", b"\xa2\xc3\xa9"],
        [],
    ]
    slab = slab_of([insert(each, lsn=n + 1, tsn=n + 1) for n, each in enumerate(values)])
    misfits: list[FieldMisfits] = []
    batch = TypedDecoder([Column("a", "unsigned"), Column("b", "string")]).batch(slab, all_rows(slab), misfits)
    assert batch.column("a").to_pylist() == [None, 1, None, None, 2, None]
    assert batch.column("b").to_pylist() == ["s", None, None, None, "é", None]
    assert [(each.column, each.rows.tolist(), each.reasons) for each in misfits] == [
        ("a", [0, 2], ["too_large", "wrong_type"]),
        ("b", [1, 2], ["not_utf8", "wrong_type"]),
    ]


@given(st.data())
def test_decoding_with_misfits_equals_strict_decoding_of_the_other_values(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(VALUES)))
    options = ColumnOptions(decimal_scale=data.draw(st.sampled_from((None, 2))))
    values = data.draw(st.lists(st.one_of(*VALUES.values(), st.just(NIL), st.just(b"\xa1\xff")), max_size=12))
    slab = slab_of([insert([value], lsn=n + 1, tsn=n + 1) for n, value in enumerate(values)])
    decoder, misfits = TypedDecoder([Column("f", kind)], options=options), list[FieldMisfits]()
    column = decoder.batch(slab, all_rows(slab), misfits).column("f")
    wrong = [row for each in misfits for row in each.rows.tolist()]
    for row in range(len(values)):
        try:
            expected = decoder.batch(slab, all_rows(slab)[row : row + 1]).column("f")[0]
        except ColumnError:
            assert row in wrong
            assert not column[row].is_valid
        else:
            assert row not in wrong
            assert column[row].equals(expected) or str(column[row]) == str(expected) == "nan"


def test_text_of_a_misfit_is_cut() -> None:
    slab = slab_of([insert([msgpack.pack("é" * 5000)])])
    misfits: list[FieldMisfits] = []
    TypedDecoder([Column("a", "unsigned")]).batch(slab, all_rows(slab), misfits)
    assert misfits[0].values.to_pylist() == ['"' + "é" * (MISFIT_TEXT_MAX - 1)]


def test_tuple_that_is_not_an_array_is_an_error_also_with_misfits() -> None:
    slab = slab_of([Row(INSERT, 1, lsn=9, body=body({0x10: b"\x05", 0x21: b"\xa1x"})).encode()])
    with pytest.raises(ColumnError, match="tuple or key is not an array"):
        TypedDecoder([Column("a", "any")]).batch(slab, all_rows(slab), [])


@pytest.mark.parametrize(
    ("kind", "declared", "value", "expected"),
    [
        ("unsigned", "decimal(20,0)", 2**64 - 1, Decimal(2**64 - 1)),
        ("unsigned", "decimal(20,2)", 7, Decimal("7.00")),
        ("unsigned", "double", 2**63, float(2**63)),
        ("unsigned", "string", 2**64 - 1, "18446744073709551615"),
        ("decimal", "decimal(6,5)", Decimal("-1.23456"), Decimal("-1.23456")),
        ("decimal", "string", Decimal("1.23456"), "1.23456"),
        ("decimal", "double", Decimal("0.5"), 0.5),
        ("decimal128", "decimal(38,6)", Decimal("0.5"), Decimal("0.500000")),
        ("string", "binary", "x\udcff", b"x\xff"),
        ("varbinary", "string", b"x", "x"),
        ("any", "bigint", 5, 5),
        ("any", "boolean", True, True),
        ("any", "binary", b"\xff", b"\xff"),
        ("scalar", "decimal(3,1)", Decimal("1.5"), Decimal("1.5")),
        ("uuid", "string", uuid.UUID(int=1), str(uuid.UUID(int=1))),
        ("boolean", "string", True, "true"),
        ("any", "timestamp", Datetime(5), EPOCH + datetime.timedelta(seconds=5)),
    ],
)
def test_declared_type_determines_the_column(kind: str, declared: str, value: Any, expected: Any) -> None:
    column = Column("f", kind, declared=ColumnType.parse(declared))
    assert typed(column, msgpack.pack(value), ColumnOptions(decimal_scale=1)) == expected


@pytest.mark.parametrize("value", [10**3, -(10**3), Decimal("1000.0"), Decimal(10**30)])
def test_decimal_of_more_digits_than_declared_is_a_misfit(value: Any) -> None:
    slab = slab_of([insert([msgpack.pack(each)], lsn=n + 1, tsn=n + 1) for n, each in enumerate([999, value, -999])])
    decoder, misfits = (
        TypedDecoder([Column("f", "any", declared=ColumnType.parse("decimal(5,2)"))]),
        list[FieldMisfits](),
    )
    batch = decoder.batch(slab, all_rows(slab), misfits)
    assert batch.column("f").type == pa.decimal128(5, 2)
    assert batch.column("f").to_pylist() == [Decimal("999.00"), None, Decimal("-999.00")]
    assert [(each.rows.tolist(), each.reasons) for each in misfits] == [([1], ["too_precise"])]
