"""Rows as objects of a class: what fits is stored and read unchanged, what does not is named."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.arguments import pack_fields
from flowstone.box.row_forms import ObjectForm, RowMismatch, TupleForm
from flowstone.box.tuples import Tuple, field_numbers
from flowstone.errors import LocalProtocolError
from flowstone.iproto.msgpack import pack, unpack

NAMES = ("id", "name", "price", "tag", "at")
NUMBERS = field_numbers(NAMES)
NOON = datetime.datetime(2026, 11, 19, 12, tzinfo=datetime.UTC)


@dataclass
class Product:
    id: int
    name: str
    price: Decimal = Decimal(0)
    tag: UUID | None = None
    at: datetime.datetime | None = None


class Short(msgspec.Struct):
    id: int
    name: str


products = st.builds(
    Product,
    st.integers(0, 2**63),
    st.text(),
    st.decimals(allow_nan=False, allow_infinity=False, places=2, max_value=10**9, min_value=0),
    st.none() | st.uuids(),
    st.none() | st.datetimes(datetime.datetime(1970, 1, 1), timezones=st.just(datetime.UTC)),  # noqa: DTZ001
)


@given(products)
def test_object_is_read_as_it_was_stored(product: Product) -> None:
    form = ObjectForm(Product)
    assert form.read(form.pack(product, NAMES), NUMBERS) == product


def test_mapping_sequence_and_tuple_are_stored_like_the_object() -> None:
    form = ObjectForm(Short)
    raw = form.pack(Short(1, "tea"), NAMES)
    assert unpack(raw) == (1, "tea")
    assert form.pack({"name": "tea", "id": 1}, NAMES) == raw
    assert form.pack((1, "tea"), NAMES) == raw
    assert form.pack(Tuple(raw, NUMBERS), NAMES) == raw


def test_fields_that_the_class_lacks_are_left_out() -> None:
    assert ObjectForm(Short).read(pack((1, "tea", Decimal(3), None, NOON)), NUMBERS) == Short(1, "tea")


def test_default_is_used_when_the_tuple_ends_before_the_field() -> None:
    assert ObjectForm(Product).read(pack((1, "tea")), NUMBERS) == Product(1, "tea")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Product(1, 2), r"Product: field 'name': expected `str`, got `int`"),  # type: ignore[arg-type]
        ({"id": 1}, r"Product: field 'name' is missing, got id"),
        ((1, "tea", "cheap"), r"Product: field 'price': invalid decimal"),
        (7, r"expected Product or a mapping, got int"),
        ("tea", r"expected Product or a mapping, got str"),
    ],
)
def test_row_that_does_not_fit_is_rejected_with_its_field(row: Any, message: str) -> None:
    with pytest.raises(RowMismatch, match=message):
        ObjectForm(Product).pack(row, NAMES)


def test_stored_row_that_does_not_fit_is_rejected_with_its_field() -> None:
    with pytest.raises(RowMismatch, match=r"Short: field 'name': expected `str`, got `null`"):
        ObjectForm(Short).read(pack((1, None)), NUMBERS)


def test_class_with_a_field_outside_the_format_is_rejected() -> None:
    with pytest.raises(
        RowMismatch, match=r"Product: field 'price' is not in the format of the space; the format has id"
    ):
        ObjectForm(Product).read(pack((1, "tea")), field_numbers(("id", "name")))


@pytest.mark.parametrize("kind", [int, dict[str, int], "Product"])
def test_type_without_fields_is_rejected(kind: Any) -> None:
    with pytest.raises(LocalProtocolError, match="use a dataclass"):
        ObjectForm(kind)


def test_tuples_are_the_default_form() -> None:
    form = TupleForm()
    for row in ({"id": 1}, (1,), [1], (1, "x" * 100_000), (Decimal(1), NOON)):
        stored = form.read(form.pack(row, NAMES), NUMBERS)
        assert stored.raw == pack_fields(row, NAMES)
    with pytest.raises(LocalProtocolError, match="not supported"):
        form.pack((object(),), NAMES)
