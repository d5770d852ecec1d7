"""Record batches to requests: every type as MessagePack, columns by name, and errors before any request is sent."""

from __future__ import annotations

import datetime
import os
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.packet import encode_request
from flowstone.spark.sources.tarantool.row_sender import _tuple_of
from flowstone.spark.sources.tarantool.tuple_encoder import CannotWrite, TupleEncoder

KEY = IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),))
EXAMPLES = settings(max_examples=10) if os.environ.get("FLOWSTONE_INTERPRETED") == "1" else settings()
"""A small limit, because interpreted kernels are slow."""

MOMENT = pa.timestamp("us", tz="UTC")


def space(*fields: tuple[str, str] | tuple[str, str, bool]) -> SpaceDefinition:
    return SpaceDefinition(512, "t", fields=tuple(FieldDefinition(*each) for each in fields), indexes=(KEY,))


def encoded(definition: SpaceDefinition, table: pa.Table) -> list[bytes]:
    encoder = TupleEncoder(definition, table.schema, RequestType.REPLACE)
    found = []
    for batch in table.to_batches(max_chunksize=3):
        requests = encoder.requests(batch, 1)
        found += [_tuple_of(requests.packet(row)) for row in range(len(requests))]
    return found


def one(kind: str, column: pa.Array) -> list[Any]:
    """Return the encoding of a column in a field of the given type."""
    return [unpack(raw)[0] for raw in encoded(space(("x", kind, True)), pa.table({"x": column}))]


def wide(*values: int | None) -> pa.Array:
    return pa.array([None if value is None else Decimal(value) for value in values], pa.decimal128(38, 0))


ID = [("id", "unsigned")]


@pytest.mark.parametrize(
    ("kind", "type", "values"),
    [
        ("unsigned", pa.int64(), [0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1, None]),
        ("unsigned", pa.decimal128(20, 0), [Decimal(0), Decimal(2**63), Decimal(2**64 - 1), None]),
        ("integer", pa.int64(), [-1, -32, -33, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63), 5, None]),
        ("integer", pa.int8(), [-128, 127, None]),
        ("integer", pa.decimal128(38, 0), [Decimal(-(2**63)), Decimal(2**64 - 1), Decimal(-1), None]),
        ("number", pa.float64(), [1.5, -0.0, float("inf"), None]),
        ("number", pa.int32(), [7, None]),
        ("double", pa.float32(), [0.5, None]),
        ("string", pa.string(), ["", "a" * 31, "a" * 32, "ä" * 200, "a" * 70000, None]),
        ("varbinary", pa.binary(), [b"", b"\x00" * 255, b"\x01" * 256, b"\x02" * 70000, None]),
        ("boolean", pa.bool_(), [True, False, None, True]),
        ("any", pa.binary(), [b"raw", None]),
        ("scalar", pa.bool_(), [True, None]),
        ("decimal", pa.decimal128(38, 2), [Decimal("1.25"), Decimal("-0.01"), Decimal("0.00"), None]),
        ("decimal", pa.decimal128(38, 30), [Decimal("1E-30"), Decimal("-12345678.5")]),
        ("decimal", pa.int64(), [Decimal(12), Decimal(-3), None]),
        ("array", pa.list_(pa.int64()), [(1, 2, None), (), None]),
        ("map", pa.map_(pa.string(), pa.list_(pa.float64())), [{"a": (1.5,)}, {}, None]),
    ],
)
def test_values_round_trip_for_every_type(kind: str, type: pa.DataType, values: list[Any]) -> None:
    given: list[Any] = [list(value.items()) if isinstance(value, dict) else value for value in values]
    if type == pa.int64():
        given = [None if each is None else int(each) for each in given]
    found = one(kind, pa.array(given, type))
    assert found == values
    assert [value.__class__ for value in found] == [
        int if isinstance(value, Decimal) and kind in ("unsigned", "integer") else value.__class__ for value in values
    ]


@EXAMPLES
@given(st.lists(st.one_of(st.none(), st.decimals(allow_nan=False, allow_infinity=False, places=5)), min_size=1))
def test_decimals_equal_their_texts(values: list[Decimal | None]) -> None:
    values = [value for value in values if value is None or len(value.as_tuple().digits) <= 38]
    texts = pa.array([None if value is None else str(value) for value in values], pa.string())
    found = one("decimal", texts)
    assert found == values
    assert all(each is None or -each.as_tuple().exponent == 5 for each in found)


@EXAMPLES
@given(st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))), st.integers(0, 3))
def test_numbers_have_the_shortest_encoding(values: list[int | None], offset: int) -> None:
    column = pa.array(values, pa.int64())[offset:]
    raw = encoded(space(("x", "integer", True)), pa.table({"x": column}))
    assert raw == [pack((value,)) for value in values[offset:]]


@EXAMPLES
@given(st.lists(st.one_of(st.none(), st.uuids())), st.lists(st.one_of(st.none(), st.text()), max_size=5))
def test_uuids_and_texts_round_trip(uuids: list[UUID | None], texts: list[str | None]) -> None:
    assert one("uuid", pa.array([None if each is None else str(each).upper() for each in uuids], pa.string())) == uuids
    assert one("string", pa.array(texts, pa.string())) == texts


@EXAMPLES
@given(st.lists(st.one_of(st.none(), st.datetimes(timezones=st.just(datetime.UTC)))))
def test_moments_round_trip(values: list[datetime.datetime | None]) -> None:
    found = one("datetime", pa.array(values, MOMENT))
    assert [None if each is None else each.to_datetime() for each in found] == values


def test_json_texts_and_structs_become_maps() -> None:
    texts = pa.array(['{"a": [1, 2.5, null, "x"]}', None, "{}"], pa.string())
    assert one("map", texts) == [{"a": (1, 2.5, None, "x")}, None, {}]
    assert one("any", pa.array(['"text"', "18446744073709551615", "[]"], pa.string())) == ["text", 2**64 - 1, ()]
    structs = pa.array(
        [{"a": 1, "b": {"c": [True]}}, None], pa.struct({"a": pa.int64(), "b": pa.struct({"c": pa.list_(pa.bool_())})})
    )
    assert one("map", structs) == [{"a": 1, "b": {"c": (True,)}}, None]


def test_columns_are_matched_by_name_and_missing_ones_are_null() -> None:
    definition = space(("id", "unsigned"), ("gap", "string", True), ("name", "string"))
    assert encoded(definition, pa.table({"name": ["a"], "id": [1]})) == [pack((1, None, "a"))]
    extra = pa.table({"id": [1, 2], "name": ["a", "b"], "_extra": ['[null, {"k": 1}]', None]})
    assert encoded(definition, extra) == [pack((1, None, "a", None, {"k": 1})), pack((2, None, "b"))]


@pytest.mark.parametrize("count", [14, 15, 2**16 - 2, 2**16 - 1, 2**16])
def test_tuple_may_have_any_number_of_extra_fields(count: int) -> None:
    table = pa.table({"id": [1], "_extra": [f"[{','.join('0' * count)}]"]})
    assert encoded(space(("id", "unsigned")), table) == [pack((1, *(0,) * count))]


def test_raw_tuple_is_sent_unchanged() -> None:
    raw = [b"\x93\x01\xcd\x00\x05\xd8\x02" + bytes(16), b"\x91\x02"]
    table = pa.table({"_tuple_msgpack": pa.array(raw, pa.binary()), "_space": ["t", "t"]})
    assert encoded(space(("id", "unsigned")), table) == raw
    with pytest.raises(CannotWrite, match=r"column '_tuple_msgpack' is .*, which is not the MessagePack of one value"):
        encoded(space(("id", "unsigned")), pa.table({"_tuple_msgpack": pa.array([b"\x92\x01"], pa.binary())}))


def test_requests_equal_those_of_other_clients() -> None:
    encoder = TupleEncoder(
        space(("id", "unsigned"), ("name", "string")),
        pa.schema({"id": pa.int64(), "name": pa.string()}),
        RequestType.INSERT,
    )
    batch = pa.RecordBatch.from_pydict({"id": [1, 300], "name": ["a", "b" * 40]})
    requests = encoder.requests(batch, 255)
    wanted = [
        encode_request(RequestType.INSERT, 255 + row, pack({0x10: 512, 0x21: values}))
        for row, values in enumerate([(1, "a"), (300, "b" * 40)])
    ]
    assert [requests.packet(0), requests.packet(1)] == wanted
    many = space(*((f"f{number}", "unsigned") for number in range(40)))
    (raw,) = encoded(many, pa.table({f"f{number}": [number] for number in range(40)}))
    assert raw == pack(tuple(range(40)))


@pytest.mark.parametrize(
    ("fields", "columns", "message"),
    [
        (ID, {"id": pa.string()}, "'id' of type STRING cannot be written to a field of type 'unsigned' of space 't'"),
        (ID, {"id": pa.string()}, "; unsigned takes BIGINT, INT, SMALLINT, TINYINT or DECIMAL(n, 0)"),
        (ID, {"id": pa.float64()}, "column 'id' of type DOUBLE cannot be written"),
        (ID, {"id": pa.decimal128(10, 2)}, "of type DECIMAL128(10, 2) cannot be written"),
        (ID, {"id": pa.int64(), "x": pa.int64()}, "space 't' has no field 'x'; its fields are: id"),
        ([*ID, ("a", "string")], {"id": pa.int64()}, "column 'a' is missing: the field of space 't' is not nullable"),
        ([("i", "interval", True)], {"i": pa.string()}, "interval takes column _tuple_msgpack only"),
        ([("d", "datetime")], {"d": pa.timestamp("us")}, "datetime takes TIMESTAMP"),
        ([], {"id": pa.int64()}, "space 't' has no format to match columns with"),
        (ID, {"_tuple_msgpack": pa.string()}, "'_tuple_msgpack' for space 't' has type string, expected binary"),
        (ID, {"_tuple_msgpack": pa.binary(), "id": pa.int64()}, "space 't' has no field 'id'"),
    ],
)
def test_unsuitable_columns_are_named(fields: Any, columns: Any, message: str) -> None:
    with pytest.raises(CannotWrite) as caught:
        TupleEncoder(space(*fields), pa.schema(columns), RequestType.REPLACE)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "column", "message"),
    [
        ("unsigned", pa.array([1, 2, -3]), "row with id = 12 cannot be written to space 't': column 'x' is -3, which"),
        ("unsigned", wide(1, None, 2**64), "which is below 0 or above 2^64-1"),
        ("unsigned", wide(1, None, -1), "which is below 0 or above 2^64-1"),
        ("integer", wide(1, None, -(2**63) - 1), "which does not fit 64 bits"),
        (
            "uuid",
            pa.array(["x"] * 3),
            "row with id = 10 cannot be written to space 't': column 'x' is 'x', which is not",
        ),
        ("uuid", pa.array([None, None, "0" * 36]), "which is not a UUID"),
        ("decimal", pa.array(["1", "1.5e3", "1.5.2"]), "column 'x' is '1.5.2', which is not a decimal"),
        ("decimal", pa.array(["1", "1", "9" * 77]), "which is not a decimal of at most 76 digits"),
        ("map", pa.array(["{}", "{}", "{" + "x" * 100]), "…, which is not JSON"),
        ("double", pa.array([1, 2, 2**53 + 1]), "does not fit space 't'"),
    ],
)
def test_unsuitable_values_are_reported_with_their_key(kind: str, column: pa.Array, message: str) -> None:
    definition = space(("id", "unsigned"), ("x", kind, True))
    with pytest.raises(CannotWrite) as caught:
        encoded(definition, pa.table({"id": [10, 11, 12], "x": column}))
    assert message in str(caught.value)
