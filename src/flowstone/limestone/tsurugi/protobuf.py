"""A reader of protobuf messages: the numbers and values of their fields.

Pure. Knows no message types: `metadata.py` interprets the fields. Checks every length against the available bytes, so
damaged bytes raise BadMetadata, and nothing is read past the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flowstone.limestone.errors import BadMetadata

VARINT_BYTES_MAX: Final = 10
"""Bytes of the longest number: 64 bits, 7 in each byte."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES: Final = {_FIXED64: 8, _FIXED32: 4}


def message_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field; fixed-size values and nested messages are bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not number:
            raise BadMetadata(f"field 0 at byte {at} of a message")
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in _FIXED_SIZES:
            size = _FIXED_SIZES[kind]
        else:
            raise BadMetadata(f"unknown wire type {kind} of field {number} at byte {at} of a message")
        if size > len(data) - at:
            raise BadMetadata(
                f"field {number} at byte {at} of a message has {size} bytes, but {len(data) - at} are left"
            )
        yield number, data[at : at + size]
        at += size


def packed_numbers(data: bytes) -> Iterator[int]:
    """Yield the numbers of a packed repeated field."""
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def as_int64(value: int) -> int:
    """Return a number of type int64, which is negative from 2^63 on."""
    return value - (1 << 64) if value >> 63 else value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(VARINT_BYTES_MAX):
        if at >= len(data):
            raise BadMetadata("message ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
    raise BadMetadata(f"number before byte {at} of a message has more than 64 bits")
