"""Arguments of statements: equal forms give equal MessagePack."""

from __future__ import annotations

import pytest

from flowstone.box.arguments import iterator_number, pack_fields, pack_key, pack_operations
from flowstone.box.tuples import Tuple
from flowstone.iproto.errors import IllegalParams, NoSuchFieldName
from flowstone.iproto.msgpack import pack, unpack

NAMES = ("id", "name", "stock")


@pytest.mark.parametrize("key", [1, (1,), [1]])
def test_single_part_key_may_be_given_without_a_sequence(key: object) -> None:
    assert unpack(pack_key(key)) == (1,)


def test_key_is_empty_when_none() -> None:
    assert unpack(pack_key(None)) == ()


@pytest.mark.parametrize("fields", [(1, "tea"), {"name": "tea", "id": 1}, Tuple(pack((1, "tea")), {})])
def test_fields_are_in_the_order_of_the_format(fields: object) -> None:
    assert unpack(pack_fields(fields, NAMES)) == (1, "tea")  # type: ignore[arg-type]


def test_absent_field_is_nil_when_a_later_one_is_given() -> None:
    assert unpack(pack_fields({"id": 1, "stock": 3}, NAMES)) == (1, None, 3)


def test_unknown_field_is_rejected() -> None:
    with pytest.raises(NoSuchFieldName, match="'colour'"):
        pack_fields({"id": 1, "colour": "red"}, NAMES)


def test_mapping_of_operations_assigns_its_values() -> None:
    assert pack_operations({"stock": 3, "name": "cup"}) == pack_operations([("=", "stock", 3), ("=", "name", "cup")])


def test_iterator_is_found_by_name_or_number() -> None:
    assert iterator_number("ge") == iterator_number(5) == 5
    with pytest.raises(IllegalParams, match="sideways"):
        iterator_number("sideways")
