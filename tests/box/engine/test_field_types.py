"""Kinds of MessagePack values and the field types that accept them."""

from __future__ import annotations

import uuid
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.engine import field_types
from flowstone.box.engine.field_types import (
    ACCEPTS,
    KIND_DECIMAL,
    KIND_EXT,
    KIND_INT,
    KIND_UINT,
    PYTHON_TYPES,
    children_of,
    contains,
    elements_of,
    end_of,
    is_accepted,
    kind_at,
)
from flowstone.iproto.extensions import Datetime, Extension, Interval
from flowstone.iproto.msgpack import pack, unpack
from tests.iproto.test_msgpack import VALUES

KINDS = {
    "c0": "NIL",
    "05": "UINT",
    "cc05": "UINT",
    "cf0000000000000005": "UINT",
    "e0": "INT",
    "d005": "INT",
    "d3ffffffffffffffff": "INT",
    "a161": "STR",
    "d90161": "STR",
    "c400": "BIN",
    "90": "ARRAY",
    "dc0000": "ARRAY",
    "80": "MAP",
    "df00000000": "MAP",
    "c2": "BOOL",
    "ca00000000": "FLOAT",
    "cb0000000000000000": "DOUBLE",
    "d501000c": "DECIMAL",
    "d802" + "00" * 16: "UUID",
    "d704" + "00" * 8: "DATETIME",
    "c7010600": "EXT",
    "d4ff00": "EXT",
}


@pytest.mark.parametrize(("raw", "kind"), KINDS.items())
def test_type_is_recognized_by_its_first_bytes(raw: str, kind: str) -> None:
    assert kind_at(b"\x00" + bytes.fromhex(raw), 1) == getattr(field_types, f"KIND_{kind}")


def test_unsigned_field_rejects_a_number_encoded_as_signed() -> None:
    assert ACCEPTS["unsigned"] == KIND_UINT
    assert ACCEPTS["integer"] == KIND_UINT | KIND_INT


def test_unknown_extensions_match_no_type() -> None:
    for code, fits in ((7, True), (31, True), (33, True), (0, False), (32, False), (-1, False)):
        raw = pack(Extension(code, b"xxx"))
        assert is_accepted(ACCEPTS["any"], raw, 0) is fits, code
    assert not is_accepted(ACCEPTS["string"], pack(Extension(7, b"")), 0)
    assert is_accepted(KIND_DECIMAL, pack(Decimal(1)), 0)


SCALARS: list[Any] = [None, True, 1, -1, 0.5, Decimal(1), "a", b"a", uuid.UUID(int=1), Datetime(0)]
EXAMPLES: list[Any] = [*SCALARS, Interval(1), (), {}, Extension(9, b"")]


@pytest.mark.parametrize("type", ACCEPTS)
def test_decoded_and_raw_values_are_accepted_alike(type: str) -> None:
    for value in EXAMPLES:
        raw = pack(value)
        is_special = kind_at(raw, 0) == KIND_EXT and type == "interval"
        accepted = is_accepted(ACCEPTS[type], raw, 0) and not (is_special and not isinstance(value, Interval))
        is_negative = type == "unsigned" and value == -1
        of_python = value.__class__ in PYTHON_TYPES[type] and not is_negative
        assert accepted == of_python, value


def test_types_that_include_other_types() -> None:
    assert all(contains("any", type) for type in ACCEPTS)
    assert all(contains(type, type) for type in ACCEPTS)
    assert contains("scalar", "unsigned")
    assert contains("number", "decimal")
    assert not contains("double", "unsigned")
    assert not contains("unsigned", "integer")
    assert not contains("scalar", "array")
    narrower = [(outer, inner) for outer in ACCEPTS for inner in ACCEPTS if contains(outer, inner)]
    assert all(ACCEPTS[outer] & ACCEPTS[inner] == ACCEPTS[inner] for outer, inner in narrower)


@given(st.lists(VALUES, max_size=5).map(tuple))
def test_fields_are_found_in_raw_tuples(values: tuple[Any, ...]) -> None:
    raw = pack(values)
    assert children_of(raw, 0)[0] == len(values)
    assert end_of(raw, 0) == len(raw)
    assert elements_of(raw) == [pack(value) for value in unpack(raw)]
