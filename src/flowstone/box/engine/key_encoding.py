"""Encodes single values as bytes that compare as the server compares the values (docs/spec/files.md#index-key-order).

Each encoding is prefix-free and starts with a byte below 0xff, so that encodings can be concatenated to keys, and a key
followed by 0xff is greater than all keys that begin with it. The first byte is the class of the value, in the order of
a scalar index: nil, boolean, number, string, varbinary, uuid, datetime.

Numbers of all kinds compare by their exact value. A double with a fraction, or outside of the integer range, that has a
decimal form of at most 15 digits is encoded as that decimal, as servers convert it: 0.1 equals the decimal 0.1. NaN is
less than all numbers.
"""

from __future__ import annotations

import math
import struct
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from flowstone.box.dialect import Dialect
from flowstone.box.engine.collation import Collation
from flowstone.iproto.errors import IllegalParams
from flowstone.iproto.extensions import Datetime

Encoder = Callable[[Any], bytes]

ABOVE: Final = b"\xff"
"""Suffix that makes a key greater than all keys that begin with it."""

NIL: Final = b"\x01"
_FALSE: Final = b"\x08"
_TRUE: Final = b"\x09"
_NAN: Final = b"\x10"
_MINUS_INFINITY: Final = b"\x20"
_LARGE_NEGATIVE: Final = b"\x30"
_INTEGER_BIAS: Final = 0x40 << 64  # numbers with an integer part in 64-bit range begin with 0x3f or 0x40
_LARGE: Final = b"\x50"
_INFINITY: Final = b"\x60"
_STRING: Final = b"\x80"
_BINARY: Final = b"\x90"
_UUID: Final = b"\xa0"
_DATETIME: Final = b"\xb0"

_INTEGERS_END: Final = 1 << 64
_SHORT_DIGITS: Final = 15
"""DBL_DIG: number of decimal digits with which servers convert a double to a decimal."""

# The byte after the integer part of a number.
_NO_FRACTION: Final = b"\x00"
_FRACTION: Final = b"\x01"
_NEGATIVE_FRACTION: Final = b"\x02"

_COMPLEMENT: Final = bytes(255 - byte for byte in range(256))
_EXPONENT_BIAS: Final = 1 << 31
_DOUBLE_BIG: Final = struct.Struct(">d")
_QUIET_BIT: Final = 1 << 51


def encode_integer(value: int) -> bytes:
    """Encode an integer from -2^63 to 2^64-1 in nine bytes."""
    return (value + _INTEGER_BIAS).to_bytes(9, "big")


def encode_number(value: float | Decimal) -> bytes:
    if type(value) is int:
        return (value + _INTEGER_BIAS).to_bytes(9, "big") + _NO_FRACTION
    if type(value) is Decimal:
        return _encode_decimal(value)
    return _encode_float(value)  # type: ignore[arg-type]  # neither an int nor a Decimal


def _encode_float(value: float) -> bytes:
    if value != value:
        return _encode_nan(value)
    if math.isinf(value):
        return _INFINITY if value > 0 else _MINUS_INFINITY
    if value.is_integer() and -_INTEGERS_END < value < _INTEGERS_END:
        return (int(value) + _INTEGER_BIAS).to_bytes(9, "big") + _NO_FRACTION
    text = repr(value)
    if len(text) <= _SHORT_DIGITS and "e" not in text:
        whole, _, fraction = text.removeprefix("-").partition(".")
        return _encode_fraction(value < 0, int(whole), 0, fraction)
    short = f"{value:.{_SHORT_DIGITS}g}"
    return _encode_decimal(Decimal(short) if float(short) == value else Decimal(value))


def _encode_nan(value: float) -> bytes:
    (bits,) = struct.unpack(">Q", _DOUBLE_BIG.pack(value))
    return _NAN + (b"\x01" if bits & _QUIET_BIT else b"\x00")


def _encode_decimal(value: Decimal) -> bytes:
    sign, digit_tuple, exponent = value.as_tuple()
    digits = "".join(map(str, digit_tuple)).strip("0")
    if not digits:
        return encode_integer(0) + _NO_FRACTION
    point = value.adjusted() + 1  # number of digits before the point
    assert isinstance(exponent, int)
    if point > 20 or (point == 20 and abs(int(value)) >= _INTEGERS_END):
        large = _digits(point, digits)
        return _LARGE_NEGATIVE + large.translate(_COMPLEMENT) if sign else _LARGE + large
    whole = int(digits[:point].ljust(point, "0")) if point > 0 else 0
    fraction = digits[max(point, 0) :]
    if not fraction:
        return encode_integer(-whole if sign else whole) + _NO_FRACTION
    return _encode_fraction(bool(sign), whole, min(point, 0), fraction)


def _encode_fraction(is_negative: bool, whole: int, exponent: int, fraction: str) -> bytes:
    """Encode whole + 0.fraction × 10^exponent, negated if `is_negative`; the last digit is not 0."""
    digits = fraction.lstrip("0")
    encoded = _digits(exponent - (len(fraction) - len(digits)), digits)
    if is_negative:
        return encode_integer(-whole - 1) + _NEGATIVE_FRACTION + encoded.translate(_COMPLEMENT)
    return encode_integer(whole) + _FRACTION + encoded


def _digits(exponent: int, digits: str) -> bytes:
    """Encode 0.digits × 10^exponent; the first and the last digit are not 0."""
    return (exponent + _EXPONENT_BIAS).to_bytes(4, "big") + digits.encode() + b"\x00"


def encode_double(value: float) -> bytes:
    """Encode a double for an index that has only doubles."""
    if value != value:
        return _encode_nan(value)
    bits = _DOUBLE_BIG.pack(value + 0.0)  # turns -0.0 into 0.0
    if bits[0] & 0x80:
        return _LARGE_NEGATIVE + bits.translate(_COMPLEMENT)
    return _LARGE + bits


def encode_boolean(value: bool) -> bytes:
    return _TRUE if value else _FALSE


def encode_string(value: str) -> bytes:
    try:
        data = value.encode()
    except UnicodeEncodeError:
        data = value.encode("utf-8", "surrogateescape")
    if "\x00" in value:
        data = data.replace(b"\x00", b"\x00\xff")
    return b"\x80%b\x00\x00" % data  # b"\x80" is _STRING, inlined for speed


def encode_binary(value: bytes) -> bytes:
    return _BINARY + value.replace(b"\x00", b"\x00\xff") + b"\x00\x00"


def encode_uuid(value: uuid.UUID) -> bytes:
    return _UUID + value.bytes


def encode_datetime(value: Datetime) -> bytes:
    """Encode the point in time; the time zone does not affect the order."""
    return _DATETIME + (value.seconds + (1 << 63)).to_bytes(8, "big") + value.nsec.to_bytes(4, "big")


def _encode_unordered(value: object) -> bytes:
    raise IllegalParams(f"Illegal parameters, values of type {type(value).__name__} have no order")


def _collated(collation: Collation) -> Encoder:
    sort_key = collation.sort_key  # its result has a single zero byte, at the end
    return lambda value: _STRING + sort_key(value)


def _scalar(encode_text: Encoder) -> Encoder:
    encoders: dict[type, Encoder] = {
        bool: encode_boolean,
        int: encode_number,
        float: _encode_float,
        Decimal: _encode_decimal,
        str: encode_text,
        bytes: encode_binary,
        uuid.UUID: encode_uuid,
        Datetime: encode_datetime,
    }
    return lambda value: encoders.get(type(value), _encode_unordered)(value)


def _nullable(encode: Encoder) -> Encoder:
    return lambda value: NIL if value is None else encode(value)


_ENCODERS: Final[dict[str, Encoder]] = {
    "unsigned": encode_integer,
    "integer": encode_integer,
    "number": encode_number,
    "double": encode_double,
    "decimal": _encode_decimal,
    "boolean": encode_boolean,
    "varbinary": encode_binary,
    "uuid": encode_uuid,
    "datetime": encode_datetime,
}


def encoder(type: str, is_nullable: bool, collation: Collation | None, dialect: Dialect = Dialect.V2_6) -> Encoder:
    """Return the encoder for values of a field type; for a type without an order it raises IllegalParams."""
    if type in ("string", "scalar"):
        text = encode_string if collation is None or collation.is_binary else _collated(collation)
        encode = text if type == "string" else _scalar(text)
    elif type == "double" and dialect is Dialect.V2_11:
        encode = encode_number  # a double field of 2.11 also accepts integers
    else:
        encode = _ENCODERS.get(type, _encode_unordered)
    return _nullable(encode) if is_nullable else encode
