"""Arithmetic, bitwise and splice operations on one value, from MessagePack to MessagePack.

Numbers have the server's ranges: 64-bit integers, doubles, and decimals of 38 digits.
"""

from __future__ import annotations

import decimal
import struct
from decimal import Decimal
from typing import Any, Final, NamedTuple

from flowstone.box.engine.field_types import KIND_DOUBLE, KIND_STR, KIND_UINT, kind_at
from flowstone.box.update.operation import Operation, is_number, out_of_bound, wrong_type
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack

_INT64_MIN: Final = -(1 << 63)
_UINT64_MAX: Final = (1 << 64) - 1
_DECIMAL_PROBLEMS: Final = (decimal.InvalidOperation, decimal.Overflow, decimal.DivisionByZero)
_DECIMAL_DIGITS: Final = 38
_DOUBLE_DIGITS: Final = 15
"""DBL_DIG: the server converts a double to a decimal by way of a text with this many digits."""

_FLOAT_MAX: Final = 3.4028234663852886e38
_FLOAT: Final = struct.Struct(">f")


class Float(NamedTuple):
    """A floating-point result. It is stored as a 4-byte float if that is exact, unless the format requires a double."""

    value: float
    was_double: bool

    def packed(self, is_double: bool) -> bytes:
        if not is_double and -_FLOAT_MAX <= self.value <= _FLOAT_MAX:
            short = _FLOAT.pack(self.value)
            if _FLOAT.unpack(short)[0] == self.value:
                return b"\xca" + short
        return pack(self.value)


Result = bytes | Float


def compute(operation: Operation, raw: bytes) -> Result:
    """Return the result of the operation on the value `raw`."""
    if operation.code in "+-":
        return _arithmetic(operation, raw)
    return _splice(operation, raw) if operation.code == ":" else _bitwise(operation, raw)


def _arithmetic(operation: Operation, raw: bytes) -> Result:
    left, right = unpack(raw), operation.arguments[0]
    if not is_number(left):
        raise wrong_type(operation, "a number")
    if type(left) is int and type(right) is int:
        integer = left + right if operation.code == "+" else left - right
        if not _INT64_MIN <= integer <= _UINT64_MAX:
            raise errors.UpdateIntegerOverflow(
                f"Integer overflow when performing '{operation.code}' operation on field {operation.where}"
            )
        return pack(integer)
    if isinstance(left, Decimal) or isinstance(right, Decimal):
        return pack(_decimal_arithmetic(operation, left, right))
    total = float(left) + float(right) if operation.code == "+" else float(left) - float(right)
    return Float(total, kind_at(raw, 0) == KIND_DOUBLE)


def _decimal_arithmetic(operation: Operation, left: Any, right: Any) -> Decimal:
    # The server's decNumber context: 38 digits, up to 38 of them after the point.
    context = decimal.Context(
        prec=_DECIMAL_DIGITS,
        rounding=decimal.ROUND_HALF_UP,
        Emin=-1,
        Emax=_DECIMAL_DIGITS - 1,
        capitals=1,
        clamp=0,
        flags=[],
        traps=[],
    )
    first, second = _to_decimal(left, context), _to_decimal(right, context)
    if any(context.flags[problem] for problem in _DECIMAL_PROBLEMS):
        raise wrong_type(operation, "a number convertible to decimal")
    result = context.add(first, second) if operation.code == "+" else context.subtract(first, second)
    if any(context.flags[problem] for problem in _DECIMAL_PROBLEMS):
        raise errors.UpdateDecimalOverflow(
            f"Decimal overflow when performing operation '{operation.code}' on field {operation.where}"
        )
    return result


def _to_decimal(value: float | Decimal, context: decimal.Context) -> Decimal:
    if isinstance(value, float):
        number = context.create_decimal(f"{value:.{_DOUBLE_DIGITS}g}")
        if not number.is_finite():
            context.flags[decimal.InvalidOperation] = True
        return number
    return Decimal(value)


def _bitwise(operation: Operation, raw: bytes) -> bytes:
    if kind_at(raw, 0) != KIND_UINT:
        raise wrong_type(operation, "a positive integer")
    left: int = unpack(raw)
    right: int = operation.arguments[0]
    if operation.code == "&":
        return pack(left & right)
    return pack(left | right if operation.code == "|" else left ^ right)


def _splice(operation: Operation, raw: bytes) -> bytes:
    if kind_at(raw, 0) != KIND_STR:
        raise wrong_type(operation, "a string")
    # Offsets count bytes and may split a character.
    text: str = unpack(raw)
    old = text.encode("utf-8", "surrogateescape")
    offset, cut, paste = operation.arguments
    if offset < 0:
        offset += len(old) + 1
        if offset < 0:
            raise out_of_bound(operation)
    offset = min(offset, len(old))
    end = offset + cut if cut >= 0 else max(offset, len(old) + cut)
    if cut < 0 and -cut > len(old) - offset:
        end = offset
    spliced: bytes = old[:offset] + paste + old[end:]
    return pack(spliced.decode("utf-8", "surrogateescape"))
