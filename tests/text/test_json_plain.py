"""The plain formatter: examples of its rules, and the values that only it supports."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import msgpack
import pytest

from flowstone.iproto.extensions import Interval, encode_decimal, encode_interval
from flowstone.iproto.limits import NESTING_MAX
from flowstone.text.json_plain import JsonError, json_pairs, json_value


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (2**64 - 1, "18446744073709551615"),
        (-(2**63), "-9223372036854775808"),
        (1.0, "1.0"),
        (float("nan"), '"NaN"'),
        ('a"\\\b\f\n\r\t\x01/é€😀', '"a\\"\\\\\\b\\f\\n\\r\\t\\u0001/é€😀"'),
        (b"\x00\xff", '"AP8="'),
        ([None, True, False, [], {}], "[null,true,false,[],{}]"),
        ({"a": 1, 2: 3, None: 4, 1.5: 5, True: 6, b"\x00": 7}, '{"a":1,"2":3,"null":4,"1.5":5,"true":6,"AA==":7}'),
        ({(1, "x"): 2}, '{"[1,\\"x\\"]":2}'),
        (msgpack.ExtType(99, b"abc"), '{"ext":99,"data":"YWJj"}'),
        (msgpack.ExtType(2, b"short"), '{"ext":2,"data":"c2hvcnQ="}'),
        (msgpack.ExtType(6, encode_interval(Interval(year=1, second=-2))), '"+1 years, -2 seconds"'),
        (msgpack.ExtType(6, b"\x00"), '"0 seconds"'),
        (msgpack.ExtType(1, encode_decimal(Decimal("1E+50"))), f'"1{"0" * 50}"'),
        (msgpack.ExtType(1, encode_decimal(Decimal("-1E+999999"))), '"-1E+999999"'),
    ],
)
def test_plain_formatter_prints_value(value: Any, printed: str) -> None:
    assert json_value(msgpack.packb(value)) == printed
    json.loads(printed)


def test_invalid_utf8_byte_round_trips() -> None:
    assert json_value(b"\xa3a\xff\xc3") == '"a\\udcff\\udcc3"'
    assert json.loads(json_value(b"\xa3a\xff\xc3")).encode("utf-8", "surrogateescape") == b"a\xff\xc3"


def test_error_is_an_object_with_its_newest_cause() -> None:
    stack = {0: [{0: "ClientError", 1: "a.c", 2: 7, 3: 'bad "x"', 4: 0, 5: 77}, {0: "Older", 3: "y", 5: 1}]}
    printed = json_value(msgpack.packb(msgpack.ExtType(3, msgpack.packb(stack))))
    assert json.loads(printed) == {"message": 'bad "x"', "type": "ClientError", "code": 77}


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", b"\x80", msgpack.packb({0: []}), msgpack.packb({0: [{0: 1, 3: 2, 5: "x"}]})]
)
def test_malformed_error_keeps_its_bytes(content: bytes) -> None:
    assert json.loads(json_value(msgpack.packb(msgpack.ExtType(3, content))))["ext"] == 3


@pytest.mark.parametrize(
    "broken",
    [b"", b"\xc1", b"\xa2a", b"\x92\x01", b"\xdd\xff\xff\xff\xff", b"\x01\x02", b"\xcb\x00", b"\xc7\x02\x01\x00"],
)
def test_malformed_bytes_raise_an_error(broken: bytes) -> None:
    with pytest.raises(JsonError):
        json_value(broken)


def test_nesting_is_bounded() -> None:
    assert json_value(b"\x91" * (NESTING_MAX - 1) + b"\x90") == "[" * NESTING_MAX + "]" * NESTING_MAX
    with pytest.raises(JsonError, match="deeper"):
        json_value(b"\x91" * NESTING_MAX + b"\x90")


def test_json_pairs_returns_keys_and_values_of_a_map() -> None:
    assert json_pairs(msgpack.packb({16: 512, "x": [1]})) == [("16", "512"), ('"x"', "[1]")]
    for broken in (b"", b"\x90", b"\x81\x01", b"\x80\x00"):
        with pytest.raises(JsonError):
            json_pairs(broken)
