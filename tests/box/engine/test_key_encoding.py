"""Encodings of single values: prefix-free, with known bytes, and short for common values."""

from __future__ import annotations

import math
import struct
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given

from flowstone.box.engine.collation import Collation
from flowstone.box.engine.key_encoding import ABOVE, NIL, encode_number, encoder
from flowstone.iproto import errors
from tests.box.engine.test_keys import SCALARS

SCALAR = encoder("scalar", True, None)


@given(SCALARS, SCALARS)
def test_no_encoding_begins_with_another(one: Any, other: Any) -> None:
    first, second = SCALAR(one), SCALAR(other)
    assert first == second or not first.startswith(second)


@given(SCALARS)
def test_no_encoding_reaches_the_upper_bound(value: Any) -> None:
    assert NIL < SCALAR(value) < ABOVE


@pytest.mark.parametrize(
    "same",
    [
        [0, 0.0, -0.0, Decimal(0), Decimal("-0.00"), Decimal("0E+30")],
        [1, 1.0, Decimal(1), Decimal("1.000")],
        [0.1, Decimal("0.1"), Decimal("0.100")],
        [-2.5, Decimal("-2.5")],
        [2**64 - 1, Decimal(2**64 - 1)],
        [1e23, Decimal("1e23")],
        [-1e300, Decimal("-1e300")],
        [2**63, 2.0**63, Decimal(2**63)],
    ],
)
def test_number_is_encoded_by_its_value(same: list[Any]) -> None:
    assert len({encode_number(value) for value in same}) == 1


def test_numbers_that_are_equal_as_doubles_have_different_encodings() -> None:
    ordered: list[Any] = [2**53, 2**53 + 1, 2**53 + 2, Decimal(2**53 + 2) + Decimal("1e-20"), 2**53 + 3]
    assert sorted(ordered, key=encode_number) == ordered
    assert encode_number(0.1 + 2**-56) > encode_number(Decimal("0.1"))


def test_signalling_nan_sorts_before_quiet_nan_and_both_before_all_numbers() -> None:
    (signalling,) = struct.unpack(">d", bytes.fromhex("7ff0000000000001"))
    ordered = [encode_number(value) for value in (signalling, math.nan, -math.inf, -1e308, 0, 1e308, math.inf)]
    assert ordered == sorted(ordered)
    assert encoder("double", False, None)(signalling) < encoder("double", False, None)(-math.inf)


def test_encoding_of_a_large_exponent_is_short() -> None:
    assert all(len(encode_number(value)) < 40 for value in (1e-300, -1e-300, 1e300, Decimal("-1e-38"), Decimal("1e37")))


def test_binary_collation_requires_no_library() -> None:
    plain, binary = encoder("string", False, None), encoder("string", False, Collation(3, "binary", "BINARY"))
    assert plain("é\x00") == binary("é\x00")


def test_value_without_an_order_is_rejected() -> None:
    for type in "array", "map", "any", "scalar":
        with pytest.raises(errors.IllegalParams, match="have no order"):
            encoder(type, False, None)(())
