"""Results of arithmetic, bitwise and splice operations on a value."""

from __future__ import annotations

import math
import struct
from decimal import Decimal
from typing import Any

import pytest

from flowstone.box.update.operation import decode_operations
from flowstone.box.update.scalar import Float, compute
from flowstone.box.update.update import update
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack


def run(values: tuple[Any, ...], *operations: tuple[Any, ...]) -> tuple[Any, ...]:
    return update(values, decode_operations(operations, index_base=1))


def test_integer_arithmetic_raises_an_error_on_overflow() -> None:
    assert run((1, 5), ("+", 2, -7)) == (1, -2)
    assert run((1, 2**64 - 2), ("+", 2, 1)) == (1, 2**64 - 1)
    with pytest.raises(errors.UpdateIntegerOverflow):
        run((1, 2**64 - 1), ("+", 2, 1))
    with pytest.raises(errors.UpdateIntegerOverflow):
        run((1, -(2**63)), ("-", 2, 1))


def test_integer_operand_is_converted_to_double_or_decimal() -> None:
    assert run((1, 5), ("-", 2, 0.5)) == (1, 4.5)
    assert run((1, Decimal("1.10")), ("+", 2, 0.1)) == (1, Decimal("1.20"))
    assert run((1, 3), ("+", 2, Decimal("0.5"))) == (1, Decimal("3.5"))
    with pytest.raises(errors.UpdateDecimalOverflow):
        run((1, Decimal("9" * 38)), ("+", 2, Decimal("9" * 38)))
    with pytest.raises(errors.UpdateArgType, match="convertible to decimal"):
        run((1, math.inf), ("+", 2, Decimal(1)))


def test_bit_operations_require_unsigned_numbers() -> None:
    assert run((1, 0b1100), ("&", 2, 0b1010)) == (1, 0b1000)
    assert run((1, 0b1100), ("|", 2, 0b1010)) == (1, 0b1110)
    assert run((1, 0b1100), ("^", 2, 0b1010)) == (1, 0b0110)
    with pytest.raises(errors.UpdateArgType, match=r"'&' on field 2 .* expected a positive integer"):
        run((1, -1), ("&", 2, 1))
    with pytest.raises(errors.UpdateArgType):
        run((1, True), ("&", 2, 1))


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ((1, 0, "x"), "xabcde"),
        ((2, 2, "-"), "a-de"),
        ((100, 1, "x"), "abcdex"),
        ((-1, 0, "x"), "abcdex"),
        ((-6, 1, "x"), "xbcde"),
        ((2, -1, "x"), "axe"),
        ((2, -100, "x"), "axbcde"),
    ],
)
def test_splice_replaces_bytes(arguments: tuple[int, int, str], result: str) -> None:
    assert run((1, "abcde"), (":", 2, *arguments)) == (1, result)


def test_splice_counts_bytes_and_rejects_out_of_bounds_offsets() -> None:
    assert run((1, "é"), (":", 2, 2, 0, "")) == (1, "é")
    assert run((1, "é"), (":", 2, 2, 1, "")) == (1, "\udcc3")
    for offset in (-7, 0):
        with pytest.raises(errors.UpdateSplice):
            run((1, "abcde"), (":", 2, offset, 0, ""))


def test_float_result_is_single_precision_only_when_exact() -> None:
    half = b"\xca" + struct.pack(">f", 0.5)
    assert Float(0.5, was_double=False).packed(is_double=False) == half
    assert Float(0.5, was_double=False).packed(is_double=True) == pack(0.5)
    for value in 0.1, 3.5e38, math.inf, -math.inf, math.nan:
        assert Float(value, was_double=False).packed(is_double=False) == pack(value)


def test_bit_operation_on_a_signed_number_is_rejected() -> None:
    (operation,) = decode_operations((("&", 1, 1),))
    assert compute(operation, b"\xcc\x05") == b"\x01"
    with pytest.raises(errors.UpdateArgType):
        compute(operation, b"\xd0\x05")


def test_integers_are_encoded_in_the_shortest_form() -> None:
    (operation,) = decode_operations((("+", 1, 1),))
    assert compute(operation, b"\xcf" + bytes(8)) == b"\x01"
