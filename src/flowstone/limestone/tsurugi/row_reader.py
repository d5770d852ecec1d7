"""A row of a Tsurugi table as Python values, decoded field by field from the key and the value of its entry.

Pure, and the readable twin of `row_columns.py`, which decodes many rows at once. Reads nothing past the end: a length
is checked before it is used. A key or a value with bytes left over is an error, too: it belongs to another definition.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from decimal import Context, Decimal
from typing import Final, NamedTuple

from flowstone.limestone.errors import BadRow
from flowstone.limestone.tsurugi.definitions import SqlTable, SqlType, TableColumn, TypeName

DAY_NANOSECONDS: Final = 86_400 * 10**9
SECOND_NANOSECONDS: Final = 10**9
_DATES: Final = range(date.min.toordinal() - date(1970, 1, 1).toordinal(), 1 + (date.max - date(1970, 1, 1)).days)
_EXACT: Final = Context(prec=60)
_INVERTED: Final = bytes(255 - byte for byte in range(256))
_TERMINATOR: Final = bytes(4)


class Date(NamedTuple):
    """A date, as days since 1970-01-01. Its text is a date if Python can represent it."""

    days: int

    def __str__(self) -> str:
        if self.days in _DATES:
            return str(date(1970, 1, 1) + timedelta(self.days))
        return f"{self.days} days after 1970-01-01"


class Time(NamedTuple):
    """A time of day, as nanoseconds since midnight."""

    nanoseconds: int

    def __str__(self) -> str:
        seconds, fraction = divmod(self.nanoseconds, SECOND_NANOSECONDS)
        minutes, second = divmod(seconds, 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}{_fraction(fraction)}"


class Timestamp(NamedTuple):
    """A point in time, as seconds since 1970 and nanoseconds after them; without a time zone, as if it were UTC."""

    seconds: int
    nanoseconds: int

    def __str__(self) -> str:
        days, second = divmod(self.seconds, 86_400)
        return f"{Date(days)} {Time(second * SECOND_NANOSECONDS + self.nanoseconds)}"


class LobId(NamedTuple):
    """The number of the blob that holds a BLOB or CLOB."""

    blob_id: int

    def __str__(self) -> str:
        return f"blob {self.blob_id}"


def _fraction(nanoseconds: int) -> str:
    return f".{nanoseconds:09}".rstrip("0") if nanoseconds else ""


Value = None | bool | int | float | Decimal | str | bytes | Date | Time | Timestamp | LobId
"""A value of a column. Text that is not UTF-8 is bytes."""


class _Fields:
    """The fields of a key or of a value, in order."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def field(self, column: TableColumn, *, is_inverted: bool) -> Value:
        """Return the next field. Raise BadRow if the bytes do not fit the column."""
        start = self._at
        try:
            if column.is_nullable:
                mark = self._take(1, is_inverted)[0]
                if mark == 0x80:
                    return None
                if mark != 0x81:
                    raise BadRow(f"{mark:#04x} is no mark of a nullable column")
            return self._value(column.type, is_inverted)
        except BadRow as error:
            raise BadRow(f"column {column.name!r}, byte {start}: {error.message}") from None

    @property
    def left(self) -> bytes:
        """The bytes that are not read yet."""
        return self._data[self._at :]

    def end(self, what: str) -> None:
        """Raise BadRow unless all bytes are read."""
        left = len(self._data) - self._at
        if left:
            raise BadRow(f"{what} has {left} more bytes than its columns")

    def _take(self, size: int, is_inverted: bool) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise BadRow(f"{size} bytes expected, {len(self._data) - self._at} left")
        found = self._data[self._at : end]
        self._at = end
        return found.translate(_INVERTED) if is_inverted else found

    def _value(self, kind: SqlType, is_inverted: bool) -> Value:
        match kind.name:
            case TypeName.CHARACTER:
                return self._text(is_inverted)
            case TypeName.OCTET:
                size = int.from_bytes(self._take(4, is_inverted)) if kind.varying else kind.length
                assert size is not None, "a type without a length is varying"
                return self._take(size, is_inverted)
            case TypeName.DECIMAL:
                return _decimal(self._take(kind.decimal_size, is_inverted), kind)
        size, decode = _DECODERS[kind.name]
        return decode(self._take(size, is_inverted))

    def _text(self, is_inverted: bool) -> str | bytes:
        end = self._data.find(b"\xff" if is_inverted else b"\x00", self._at)
        if end < 0:
            raise BadRow("text has no end")
        text = self._take(end - self._at, is_inverted)
        if self._take(4, is_inverted) != _TERMINATOR:
            raise BadRow("text has an incomplete end")
        try:
            return text.decode()
        except UnicodeDecodeError:
            return text


def _number(data: bytes) -> int:
    """Return a number whose sign bit is flipped, so that its bytes sort like numbers."""
    return int.from_bytes(data) - (1 << (8 * len(data) - 1))


def _integer(bits: int) -> Callable[[bytes], Value]:
    limit = 1 << (bits - 1)

    def decode(data: bytes) -> Value:
        value = _number(data)
        if not -limit <= value < limit:
            raise BadRow(f"{value} is not a number of {bits} bits")
        return value

    return decode


def _float(code: str) -> Callable[[bytes], Value]:
    def decode(data: bytes) -> Value:
        is_negative = data[0] < 0x80
        bits = data.translate(_INVERTED) if is_negative else bytes((data[0] ^ 0x80, *data[1:]))
        value: float = struct.unpack(code, bits)[0]
        return value

    return decode


def _boolean(data: bytes) -> Value:
    value = _number(data)
    if value not in (0, 1):
        raise BadRow(f"{value} is not a boolean")
    return bool(value)


def _decimal(data: bytes, kind: SqlType) -> Decimal:
    unscaled = _number(data)
    if abs(unscaled) >= 10**kind.precision:
        raise BadRow(f"decimal has more than {kind.precision} digits")
    return Decimal(unscaled).scaleb(-kind.scale, _EXACT)


def _time(data: bytes) -> Value:
    value = _number(data)
    if not 0 <= value < DAY_NANOSECONDS:
        raise BadRow(f"{value} ns is not a time of day")
    return Time(value)


def _timestamp(data: bytes) -> Value:
    nanoseconds = _number(data[8:])
    if not 0 <= nanoseconds < SECOND_NANOSECONDS:
        raise BadRow(f"{nanoseconds} ns is not a part of a second")
    return Timestamp(_number(data[:8]), nanoseconds)


def _lob(data: bytes) -> Value:
    return LobId(int.from_bytes(data))


_DECODERS: Final[dict[TypeName, tuple[int, Callable[[bytes], Value]]]] = {
    TypeName.BOOLEAN: (1, _boolean),
    TypeName.INT1: (4, _integer(8)),
    TypeName.INT2: (4, _integer(16)),
    TypeName.INT4: (4, _integer(32)),
    TypeName.INT8: (8, _integer(64)),
    TypeName.FLOAT4: (4, _float(">f")),
    TypeName.FLOAT8: (8, _float(">d")),
    TypeName.DATE: (8, lambda data: Date(_number(data))),
    TypeName.TIME: (8, _time),
    TypeName.TIME_WITH_ZONE: (8, _time),
    TypeName.TIMESTAMP: (12, _timestamp),
    TypeName.TIMESTAMP_WITH_ZONE: (12, _timestamp),
    TypeName.BLOB: (8, _lob),
    TypeName.CLOB: (8, _lob),
}
"""Size and decoder, by type, of the fields of a fixed size."""


def read_key(table: SqlTable, key: bytes) -> list[Value]:
    """Return the columns of the primary key, in key order. Raise BadRow if the key does not fit the table."""
    fields = _Fields(key)
    found = [fields.field(table.columns[part.column], is_inverted=part.is_descending) for part in table.keys]
    fields.end("key")
    return found


def read_row(table: SqlTable, key: bytes, value: bytes) -> tuple[Value, ...]:
    """Return the columns of a row, in declared order. Raise BadRow if key or value do not fit the table."""
    row: list[Value] = [None] * len(table.columns)
    _place(row, [part.column for part in table.keys], read_key(table, key))
    fields = _Fields(value)
    _place(row, table.values, [fields.field(table.columns[place], is_inverted=True) for place in table.values])
    fields.end("value")
    return tuple(row)


class Undecoded(NamedTuple):
    """The bytes from the first field on that does not fit its column."""

    data: bytes


def salvage_row(table: SqlTable, key: bytes, value: bytes | None) -> list[Value | Undecoded]:
    """Return the columns of a row that does not fit its table, as far as they can be decoded; then `Undecoded`, None.

    Bytes after the last column are a further element. A value of None is a removed row.
    """
    row: list[Value | Undecoded] = [None] * len(table.columns)
    parts = [(key, [(part.column, part.is_descending) for part in table.keys])]
    if value is not None:
        parts.append((value, [(place, True) for place in table.values]))
    for data, columns in parts:
        fields = _Fields(data)
        for place, is_inverted in columns:
            before = fields.left
            try:
                row[place] = fields.field(table.columns[place], is_inverted=is_inverted)
            except BadRow:
                row[place] = Undecoded(before)
                break
        else:
            if fields.left:
                row.append(Undecoded(fields.left))
    return row


def _place(row: list[Value], places: Sequence[int], values: Sequence[Value]) -> None:
    for place, value in zip(places, values, strict=True):
        row[place] = value
