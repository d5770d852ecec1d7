"""The value order of the reference, in Fractions and tuples; shares no code with `keys.py`."""

from __future__ import annotations

import math
import struct
import uuid
from decimal import Decimal
from fractions import Fraction
from typing import Any

from flowstone.iproto.extensions import Datetime

Rank = tuple[Any, ...]


def rank(value: Any) -> Rank:
    """Return a tuple that sorts like the value among all values."""
    if value is None:
        return (0,)
    if isinstance(value, bool):
        return (1, value)
    if isinstance(value, int | float | Decimal):
        return (2, *number_rank(value))
    if isinstance(value, str):
        return (3, value.encode("utf-8", "surrogateescape"))
    if isinstance(value, bytes):
        return (4, value)
    if isinstance(value, uuid.UUID):
        return (5, value.bytes)
    assert isinstance(value, Datetime)
    return (6, value.seconds, value.nsec)


def number_rank(value: float | Decimal) -> Rank:
    if isinstance(value, float):
        if math.isnan(value):
            return (0, bool(struct.pack(">d", value)[1] & 0x08))
        if math.isinf(value):
            return (1,) if value < 0 else (3,)
        if not (value.is_integer() and abs(value) < 2**64):
            # Equal to the decimal to which the server converts the double, if that conversion is exact.
            decimal = f"{value:.15g}"
            if float(decimal) == value:
                return (2, Fraction(decimal))
    return (2, Fraction(value))


def key_rank(values: tuple[Any, ...]) -> tuple[Rank, ...]:
    return tuple(rank(value) for value in values)
