"""MessagePack extension types as values: decimal, uuid, datetime, interval, and raw bytes for any other code.

Relies on the layouts of `docs/spec/iproto.md#extension-types` and writes the same bytes as a real server. A payload
that a real server rejects is an error here. The error extension (3) contains MessagePack, so `msgpack.py` encodes it;
only its classes live here.
"""

from __future__ import annotations

import datetime
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from enum import IntEnum
from typing import Any

import msgpack

from flowstone.errors import LocalProtocolError, RemoteProtocolError


class ExtensionType(IntEnum):
    """Codes that Tarantool defines. 5 is opaque outside Enterprise; 7 and 8 are newer than 2.11."""

    DECIMAL = 1
    UUID = 2
    ERROR = 3
    DATETIME = 4
    COMPRESSION = 5
    INTERVAL = 6
    TUPLE = 7
    ARROW = 8


class ExtensionError(RemoteProtocolError):
    """The payload of an extension violates the layout of its type."""


DECIMAL_DIGITS_MAX = 76
"""Digits that servers since 3.5 store; older servers reject more than 38 themselves."""

DECIMAL_EXPONENT_MAX = 999_999
"""Largest adjusted exponent of a server's decimal."""

DECIMAL_SCALE_PLAIN_MAX = 76
"""Largest scale printed in plain notation: no server stores a larger one.

Without a limit, an exponent of five bytes would print as a megabyte of zeros.
"""

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MINUTE = datetime.timedelta(minutes=1)
_SECONDS_MIN = -(2**31) * 86400 - 719163 * 86400
_SECONDS_MAX = (2**31 - 1) * 86400 - 719163 * 86400
_NANOSECONDS_END = 2_000_000_000  # leap seconds: servers accept nsec below two seconds
_OFFSET_MIN, _OFFSET_MAX = -12 * 60, 14 * 60
_ZONE_INDEX_MAX = 1024


@dataclass(frozen=True, slots=True)
class Extension:
    """An extension of an unknown type, or with content that is invalid for its type, kept byte for byte."""

    code: int
    data: bytes


@dataclass(frozen=True, slots=True, repr=False)
class Datetime:
    """A point in time with nanoseconds and a zone; `tz_index` is an index into Tarantool's table of zones."""

    seconds: int
    nsec: int = 0
    tz_offset: int = 0
    tz_index: int = 0

    @classmethod
    def from_datetime(cls, moment: datetime.datetime) -> Datetime:
        """Return the same moment, with its offset from UTC in whole minutes; the name of the zone is lost.

        Raise LocalProtocolError for a datetime without a timezone, because it does not define a moment.
        """
        offset = moment.utcoffset()
        if offset is None:
            raise LocalProtocolError(
                f"cannot encode as MessagePack: datetime {moment} has no timezone",
                hint="add a timezone, as in datetime.now(timezone.utc) or moment.replace(tzinfo=timezone.utc)",
            )
        since = moment - _EPOCH
        return cls(since.days * 86400 + since.seconds, since.microseconds * 1000, round(offset / _MINUTE))

    def to_datetime(self) -> datetime.datetime:
        """Return a standard datetime in microseconds with a fixed offset.

        Raise OverflowError outside the years 1 to 9999.
        """
        zone = datetime.timezone(_MINUTE * self.tz_offset)
        moment = _EPOCH + datetime.timedelta(seconds=self.seconds, microseconds=self.nsec // 1000)
        return moment.astimezone(zone)

    def __repr__(self) -> str:
        return f"Datetime({self}, tz_index={self.tz_index})" if self.tz_index else f"Datetime({self})"

    def __str__(self) -> str:
        days, second = divmod(self.seconds + self.tz_offset * 60 + self.nsec // 1_000_000_000, 86400)
        year, month, day = _civil(days)
        hour, minute = second // 3600, second // 60 % 60
        nsec = self.nsec % 1_000_000_000
        fraction = f".{nsec:09d}".rstrip("0") if nsec else ""
        sign, offset = ("-" if self.tz_offset < 0 else "+"), abs(self.tz_offset)
        zone = f"{sign}{offset // 60:02d}:{offset % 60:02d}" if offset else "Z"
        date = f"{'-' if year < 0 else ''}{abs(year):04d}-{month:02d}-{day:02d}"
        return f"{date}T{hour:02d}:{minute:02d}:{second % 60:02d}{fraction}{zone}"


def _civil(days: int) -> tuple[int, int, int]:
    """Return year, month and day of a day counted from 1970-01-01 (proleptic Gregorian), for any year.

    Dates of the standard library end at year 9999, a server's dates end at year 5879611. The Gregorian calendar repeats
    every 400 years, so the day is moved into the range of the library.
    """
    cycles, rest = divmod(days, 146097)
    date = datetime.date(1970, 1, 1) + datetime.timedelta(days=rest)
    return date.year + 400 * cycles, date.month, date.day


@dataclass(frozen=True, slots=True)
class Interval:
    """A span of calendar time. Fields are separate because months and days have no fixed ratio."""

    year: int = 0
    month: int = 0
    week: int = 0
    day: int = 0
    hour: int = 0
    minute: int = 0
    second: int = 0
    nsec: int = 0
    adjust: int = 0

    def __str__(self) -> str:
        named = zip(_INTERVAL_WORDS, self._values(), strict=False)
        parts = [f"{value:+d} {name}" for name, value in named if value]
        return ", ".join(parts) or "0 seconds"

    def _values(self) -> tuple[int, ...]:
        return tuple(getattr(self, item.name) for item in fields(self))


_INTERVAL_WORDS = ("years", "months", "weeks", "days", "hours", "minutes", "seconds", "nanoseconds")
_INTERVAL_LIMITS = ((31,) * 3) + ((63,) * 4) + (31,)
_ADJUST_MAX = 2


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """One error of a stack: class name, location in the server's source, message, errno, code, named details."""

    type: str
    message: str
    file: str = ""
    line: int = 0
    errno: int = 0
    code: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ErrorStack:
    """A server's error object: the newest error, then its causes."""

    errors: tuple[ErrorRecord, ...]

    def __str__(self) -> str:
        return "; caused by ".join(f"{record.type}: {record.message}" for record in self.errors)


def encode_decimal(value: Decimal) -> bytes:
    """Encode the scale as a MessagePack integer, then the digits as packed BCD with the sign in the last nibble."""
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise LocalProtocolError(f"decimal fields cannot hold {value}")
    if len(digits) > DECIMAL_DIGITS_MAX or abs(exponent + len(digits) - 1) > DECIMAL_EXPONENT_MAX:
        raise LocalProtocolError(f"decimal of {len(digits)} digits and scale {-exponent} is out of range")
    nibbles = "".join(map(str, digits)) + ("d" if sign else "c")
    scale: bytes = msgpack.packb(-exponent)
    return scale + bytes.fromhex(nibbles if len(nibbles) % 2 == 0 else "0" + nibbles)


def decode_decimal(data: bytes) -> Decimal:
    scale, at = _read_int(data, 0)
    nibbles = data[at:].hex()
    digits, sign = nibbles[:-1].lstrip("0") or "0", nibbles[-1:]
    if not nibbles or sign not in "abcdef" or not digits.isdecimal():
        raise ExtensionError(f"decimal {data.hex()} is not a packed BCD number")
    if len(digits) > DECIMAL_DIGITS_MAX or abs(len(digits) - 1 - scale) > DECIMAL_EXPONENT_MAX:
        raise ExtensionError(f"decimal of {len(digits)} digits and scale {scale} is out of range")
    return Decimal((sign in "bd", tuple(map(int, digits)), -scale))


def decimal_text(value: Decimal) -> str:
    """Return plain notation, as servers print it, or scientific notation if plain would be mostly zeros."""
    exponent = value.as_tuple().exponent
    is_plain = isinstance(exponent, int) and abs(exponent) <= DECIMAL_SCALE_PLAIN_MAX
    return f"{value:f}" if is_plain else str(value)


def encode_datetime(value: Datetime) -> bytes:
    problem = _datetime_problem(value)
    if problem:
        raise LocalProtocolError(f"datetime fields cannot hold {problem}")
    seconds = struct.pack("<q", value.seconds)
    if not (value.nsec or value.tz_offset or value.tz_index):
        return seconds
    return seconds + struct.pack("<ihh", value.nsec, value.tz_offset, value.tz_index)


def decode_datetime(data: bytes) -> Datetime:
    if len(data) == 8:
        value = Datetime(*struct.unpack("<q", data))
    elif len(data) == 16:
        value = Datetime(*struct.unpack("<qihh", data))
    else:
        raise ExtensionError(f"datetime has {len(data)} bytes, expected 8 or 16")
    problem = _datetime_problem(value)
    if problem:
        raise ExtensionError(f"datetime out of range: {problem}")
    return value


def _datetime_problem(value: Datetime) -> str | None:
    if not _SECONDS_MIN <= value.seconds <= _SECONDS_MAX:
        return f"{value.seconds} seconds"
    if not 0 <= value.nsec < _NANOSECONDS_END:
        return f"{value.nsec} nanoseconds"
    if not _OFFSET_MIN <= value.tz_offset <= _OFFSET_MAX:
        return f"a zone offset of {value.tz_offset} minutes"
    if not 0 <= value.tz_index <= _ZONE_INDEX_MAX:
        return f"zone index {value.tz_index}"
    return None


def encode_interval(value: Interval) -> bytes:
    parts = []
    for number, amount in enumerate(value._values()):
        problem = _interval_problem(number, amount)
        if problem:
            raise LocalProtocolError(f"interval fields cannot hold {problem}")
        if amount:
            parts.append(bytes((number,)) + msgpack.packb(amount))
    return bytes((len(parts),)) + b"".join(parts)


def decode_interval(data: bytes) -> Interval:
    if not data:
        raise ExtensionError("interval has no field count")
    values = [0] * 9
    at = 1
    for _ in range(data[0]):
        if at >= len(data) or data[at] >= len(values):
            raise ExtensionError(f"interval {data.hex()} has an invalid field at byte {at}")
        number = data[at]
        values[number], at = _read_int(data, at + 1)
        problem = _interval_problem(number, values[number])
        if problem:
            raise ExtensionError(f"interval out of range: {problem}")
    if at != len(data):
        raise ExtensionError(f"{len(data) - at} bytes follow the interval")
    return Interval(*values)


def _interval_problem(number: int, amount: int) -> str | None:
    if number == len(_INTERVAL_LIMITS):
        return None if 0 <= amount <= _ADJUST_MAX else f"adjust {amount}"
    bound = 1 << _INTERVAL_LIMITS[number]
    return None if -bound <= amount < bound else f"{amount} {_INTERVAL_WORDS[number]}"


def decode_uuid(data: bytes) -> uuid.UUID:
    if len(data) != 16:
        raise ExtensionError(f"uuid has {len(data)} bytes, expected 16")
    return uuid.UUID(bytes=data)


_INTEGERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}


def _read_int(data: bytes, at: int) -> tuple[int, int]:
    """Return the MessagePack integer at `at` and its end offset."""
    if at >= len(data):
        raise ExtensionError(f"extension payload {data.hex()} ends where a number is expected")
    head = data[at]
    if head < 0x80:
        return head, at + 1
    if head >= 0xE0:
        return head - 0x100, at + 1
    layout = _INTEGERS.get(head)
    if layout is None or at + 1 + struct.calcsize(layout) > len(data):
        raise ExtensionError(f"extension payload {data.hex()} has no number at byte {at}")
    (value,) = struct.unpack_from(layout, data, at + 1)
    return value, at + 1 + struct.calcsize(layout)
