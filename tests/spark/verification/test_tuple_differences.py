"""Differences of two tuples: ignored encodings, significant types, and nested places."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.system import USER_ID
from flowstone.spark.verification.tuple_differences import field_differences, normal_form, same_values, shown_tuple

ID, TOTAL = "id", "total"


def packed(*values: Any) -> bytes:
    data: bytes = msgpack.packb(values)
    return data


def found(a: bytes, b: bytes, *names: str) -> list[tuple[str, str, str]]:
    return [(each.path, each.a, each.b) for each in field_differences(a, b, names)]


LONG_FORMS = [
    (b"\x91\x05", b"\x91\xcc\x05"),
    (b"\x91\x05", b"\x91\xd3" + struct.pack(">q", 5)),
    (b"\x91\x05", b"\xdc\x00\x01\x05"),
    (b"\x91\xff", b"\x91\xd1\xff\xff"),
    (b"\x91\xa1x", b"\x91\xdb\x00\x00\x00\x01x"),
    (b"\x91\xc4\x01x", b"\x91\xc6\x00\x00\x00\x01x"),
    (b"\x91\x81\x01\x02", b"\x91\xdf\x00\x00\x00\x01\x01\xcc\x02"),
    (b"\x91\xd4\x07x", b"\x91\xc7\x01\x07x"),
]


@pytest.mark.parametrize(("short", "long"), LONG_FORMS)
def test_longer_encoding_of_a_number_or_length_is_the_same_value(short: bytes, long: bytes) -> None:
    assert same_values(short, long)
    assert field_differences(short, long) == []


DIFFERENT = [
    (packed(1, 5), packed(1, 5.0), (TOTAL, "5", "5.0")),
    (packed(1, None), packed(1), (TOTAL, "null", "absent")),
    (packed(1), packed(1, None), (TOTAL, "absent", "null")),
    (packed(1, 0), packed(1, False), (TOTAL, "0", "false")),
    (packed(1, b"QQ=="), packed(1, "UVE9PQ=="), (TOTAL, '"UVE9PQ==" (binary)', '"UVE9PQ==" (string)')),
    (packed(1, {"a": [1, {"b": "xyz"}]}), packed(1, {"a": [1, {"b": "xyZ"}]}), ("total.a[2].b", '"xyz"', '"xyZ"')),
    (packed(1, {"a": 1, "b": 2}), packed(1, {"b": 2, "a": 1}), (TOTAL, '{"a":1,"b":2}', '{"b":2,"a":1}')),
    (packed(1, {"a": 1}), packed(1, {"a": 1, "b": 2}), ("total.b", "absent", "2")),
    (packed(1, 2, 3), packed(1, 2, 4), ("[3]", "3", "4")),
    (b"\x92\x01\xca" + struct.pack(">f", 1.5), packed(1, 1.5), (TOTAL, "1.5 (float)", "1.5 (double)")),
    (b"\x92\x01\xd4\x07x", b"\x92\x01\xd4\x08x", None),
]


@pytest.mark.parametrize(("a", "b", "expected"), DIFFERENT)
def test_differing_place_is_named(a: bytes, b: bytes, expected: tuple[str, str, str] | None) -> None:
    assert not same_values(a, b)
    (only,) = found(a, b, ID, TOTAL)
    assert expected is None or only == expected


def test_invalid_messagepack_differs_and_is_shown_as_bytes() -> None:
    assert not same_values(b"\x92\x01", b"\x91\x01")
    assert found(b"\x92\x01", b"\x91\x01") == [("", "broken: 9201", "broken: 9101")]
    assert shown_tuple(b"\x92\xa5x", 512) == "broken: 92a578"


def test_deeply_nested_difference_is_found() -> None:
    deep, other = b"\x91" * 100 + b"\x01", b"\x91" * 100 + b"\x02"
    ((path, a, b),) = found(deep, other)
    assert path == "[1]" * 33
    assert a != b


def test_password_hashes_are_not_shown() -> None:
    user = packed(32, 1, "app", "user", {"chap-sha1": "c2VjcmV0"})
    assert shown_tuple(user, USER_ID) == '[32,1,"app","user","<hidden>"]'
    assert shown_tuple(user, 512) == '[32,1,"app","user",{"chap-sha1":"c2VjcmV0"}]'
    other = packed(32, 1, "app", "user", {"chap-sha1": "b3RoZXI="})
    assert [(each.path, each.a, each.b) for each in field_differences(user, other, (), USER_ID)] == [
        ("[5].chap-sha1", "<hidden>", "<hidden>")
    ]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=5), st.lists(VALUES, max_size=5))
def test_tuples_are_the_same_if_their_shortest_encodings_are(a: list[Any], b: list[Any]) -> None:
    is_same = msgpack.packb(a) == msgpack.packb(b)
    assert same_values(msgpack.packb(a), msgpack.packb(b)) is is_same
    assert (not field_differences(msgpack.packb(a), msgpack.packb(b))) is is_same


@given(st.lists(VALUES, min_size=1, max_size=5), st.data())
def test_changed_byte_is_a_difference_or_another_encoding(values: list[Any], data: st.DataObject) -> None:
    whole = msgpack.packb(values)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    if same_values(whole, changed):
        assert normal_form(whole) == normal_form(changed)
        assert msgpack.unpackb(whole, strict_map_key=False) == msgpack.unpackb(changed, strict_map_key=False)
    else:
        assert field_differences(whole, changed)
