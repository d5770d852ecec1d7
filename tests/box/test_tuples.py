"""Tuples: fields by number and name, decoded to the same values in every representation."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.tuples import Tuple, decode, field_numbers
from flowstone.iproto.msgpack import pack, unpack

NUMBERS = field_numbers(("id", "name", "price"))

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
ANY = st.recursive(
    PLAIN | st.binary() | st.uuids() | st.decimals(-1000, 1000, places=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def made(*values: Any) -> Tuple:
    return Tuple(pack(values), NUMBERS)


def test_fields_are_found_by_number_and_by_name() -> None:
    tuple_ = made(1, "tea", 2.5, "more")
    assert (tuple_[0], tuple_[-1], tuple_["name"], tuple_.price) == (1, "more", "tea", 2.5)
    assert tuple_[1:3] == ("tea", 2.5)


def test_named_field_beyond_the_end_is_none_and_a_number_is_an_error() -> None:
    tuple_ = made(1)
    assert tuple_["name"] is None
    with pytest.raises(IndexError):
        tuple_[1]


def test_unknown_field_raises_the_error_of_its_kind_of_access() -> None:
    tuple_ = made(1)
    with pytest.raises(KeyError):
        tuple_["colour"]
    with pytest.raises(AttributeError, match="no field 'colour'"):
        tuple_.colour


def test_get_returns_a_default() -> None:
    tuple_ = made(1, "tea")
    assert [tuple_.get(field, "?") for field in ("name", "price", "colour", 0, 5)] == ["tea", "?", "?", 1, "?"]


def test_tuple_is_a_sequence_equal_to_its_values() -> None:
    tuple_ = made(1, "tea")
    assert isinstance(tuple_, Sequence)
    assert (len(tuple_), list(tuple_), "tea" in tuple_) == (2, [1, "tea"], True)
    assert tuple_ == (1, "tea") == tuple(tuple_)
    assert tuple_ == made(1, "tea") != made(1, "cup")
    assert hash(tuple_) == hash((1, "tea"))
    assert repr(tuple_) == "Tuple(1, 'tea')"


def test_as_dict_has_the_named_fields() -> None:
    assert made(1, "tea", 2.5, "more").to_dict() == {"id": 1, "name": "tea", "price": 2.5}
    assert made(1).to_dict() == {"id": 1}


def test_values_of_every_kind_equal_those_of_the_codec() -> None:
    raw = pack((1, b"\x00", Decimal("1.50"), uuid.UUID(int=7), [1, [2]], {"a": [1]}))
    assert decode(raw) == (1, b"\x00", Decimal("1.50"), uuid.UUID(int=7), (1, (2,)), {"a": (1,)})


def test_text_that_is_not_utf8_survives() -> None:
    raw = b"\x91\xa2\xff\xfe"
    assert pack(decode(raw)) == raw


@given(st.lists(ANY, max_size=6))
def test_decoding_agrees_with_the_codec(values: list[Any]) -> None:
    raw = pack(values)
    assert decode(raw) == unpack(raw)
    assert [type(value) for value in decode(raw)] == [type(value) for value in unpack(raw)]
