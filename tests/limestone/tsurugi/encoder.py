"""An encoder of Tsurugi's metadata and rows, as its servers write them. Imports nothing from `src`.

`tests/limestone/tsurugi/test_encoder.py` compares it with recorded bytes. A column is a `ColumnSpec`; values are those
of `row_reader.py`, with plain numbers for dates, times and blob ids, and pairs for timestamps.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

ATOMS = {
    "boolean": 1, "int1": 2, "int2": 3, "int4": 4, "int8": 5, "float4": 6, "float8": 7, "decimal": 8, "character": 9,
    "octet": 11, "date": 15, "time": 16, "timestamp": 17, "timetz": 19, "timestamptz": 20, "clob": 21, "blob": 22,
}  # fmt: skip
INTEGER_SIZES = {"int1": 4, "int2": 4, "int4": 4, "int8": 8, "date": 8, "time": 8, "timetz": 8, "boolean": 1}


@dataclass(frozen=True)
class ColumnSpec:
    """A column of a table; `length` of None is `*`, `descending` matters only for columns of the primary key."""

    name: str
    type: str
    nullable: bool = True
    length: int | None = None
    varying: bool = True
    precision: int = 0
    scale: int = 0
    descending: bool = False
    hidden: bool = False


@dataclass(frozen=True)
class TableSpec:
    """A table; `keys` are the names of its primary key's columns, in key order."""

    name: str
    columns: tuple[ColumnSpec, ...]
    keys: tuple[str, ...]

    def column(self, name: str) -> ColumnSpec:
        return next(each for each in self.columns if each.name == name)

    @property
    def stored(self) -> list[ColumnSpec]:
        """The columns of the value: all that the key has not in ascending order."""
        return [each for each in self.columns if each.name not in self.keys or each.descending]


# --- rows ---------------------------------------------------------------------------------------------------------


def flipped(value: int, size: int) -> bytes:
    """Return a big-endian number with its sign bit flipped."""
    return (value + (1 << (8 * size - 1))).to_bytes(size, "big")


def decimal_size(precision: int) -> int:
    return next(size for size in range(1, 18) if math.floor((8 * size - 1) * math.log10(2)) >= precision)


def float_bytes(value: float, code: str) -> bytes:
    if value != value:
        return bytes.fromhex("ffc00000" if code == ">f" else "fff8000000000000")
    data = struct.pack(code, value + 0.0 if value else 0.0)
    first = data[0]
    return bytes((first ^ 0x80, *data[1:])) if first < 0x80 else bytes(255 - each for each in data)


def plain_field(column: ColumnSpec, value: Any) -> bytes:
    """Return a field in its ascending form, without a mark."""
    kind = column.type
    if kind in INTEGER_SIZES:
        return flipped(int(value), INTEGER_SIZES[kind])
    if kind in ("float4", "float8"):
        return float_bytes(value, ">f" if kind == "float4" else ">d")
    if kind == "decimal":
        sign, digits, exponent = Decimal(value).as_tuple()
        assert isinstance(exponent, int)
        unscaled = int("".join(map(str, digits))) * 10 ** (exponent + column.scale)
        return flipped(-unscaled if sign else unscaled, decimal_size(column.precision))
    if kind == "character":
        text = value.encode() if isinstance(value, str) else value
        return (text if column.varying else text.ljust(column.length or 0)) + bytes(4)
    if kind == "octet":
        return struct.pack(">I", len(value)) + value if column.varying else value.ljust(column.length or 0, b"\0")
    if kind in ("timestamp", "timestamptz"):
        return flipped(value[0], 8) + flipped(value[1], 4)
    assert kind in ("blob", "clob"), kind
    return struct.pack(">Q", value)


def field(column: ColumnSpec, value: Any, *, inverted: bool) -> bytes:
    mark = b"\x81" if column.nullable else b""
    found = b"\x80" if value is None else mark + plain_field(column, value)
    return bytes(255 - each for each in found) if inverted else found


def key_of(table: TableSpec, row: dict[str, Any]) -> bytes:
    columns = [table.column(name) for name in table.keys]
    return b"".join(field(each, row[each.name], inverted=each.descending) for each in columns)


def value_of(table: TableSpec, row: dict[str, Any]) -> bytes:
    return b"".join(field(each, row[each.name], inverted=True) for each in table.stored)


# --- metadata -----------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def number(field_number: int, value: int) -> bytes:
    """Return a field of a number; proto3 leaves out zeros."""
    return varint(field_number << 3) + varint(value) if value else b""


def block(field_number: int, data: bytes) -> bytes:
    return varint(field_number << 3 | 2) + varint(len(data)) + data


def named(field_number: int, name: str) -> bytes:
    return block(field_number, block(3, name.encode()))


def column_message(column: ColumnSpec) -> bytes:
    option = b""
    if column.type in ("character", "octet"):
        length = b"" if column.length is None else varint(21 << 3) + varint(column.length)
        option = block(20 if column.type == "character" else 22, number(20, int(column.varying)) + length)
    elif column.type == "decimal":
        scale = varint(21 << 3) + varint(column.scale)
        option = block(21, number(20, column.precision) + scale)
    kind = number(1, ATOMS[column.type]) + option
    features = block(100, bytes((1, 2))) if column.hidden else b""
    return block(1, column.name.encode()) + block(2, kind) + number(3, int(column.nullable)) + features


def metadata_key(surrogate_id: int) -> bytes:
    return struct.pack(">Q", surrogate_id)


def envelope(storage_id: int, index: bytes, version: int) -> bytes:
    return struct.pack("<QQ", storage_id, (1 << 64) - 1) + number(1, version) + block(11, index)


def table_metadata(
    table: TableSpec, storage_id: int, surrogate_id: int, *, version: int = 14, reserved: bool = False
) -> bytes:
    """Return the value of the entry that defines a table."""
    columns = b"".join(block(21, column_message(each)) for each in table.columns)
    keys = b"".join(
        block(40, block(1, name.encode()) + number(2, 2 if table.column(name).descending else 1)) for name in table.keys
    )
    values = b"".join(block(41, each.name.encode()) for each in table.stored)
    index = named(20, table.name) + block(25, metadata_key(surrogate_id)) + block(30, named(20, table.name) + columns)
    index += keys + values + block(42, bytes((1, 2, 3, 4))) + number(60, int(reserved))
    return envelope(storage_id, index, version)


def index_metadata(
    name: str, table: str, keys: Sequence[tuple[str, bool]], storage_id: int, surrogate_id: int, *, version: int = 14
) -> bytes:
    """Return the value of the entry that defines a secondary index; keys are names and whether they descend."""
    parts = b"".join(block(40, block(1, key.encode()) + number(2, 2 if down else 1)) for key, down in keys)
    index = named(20, name) + block(25, metadata_key(surrogate_id)) + block(31, named(1, table))
    return envelope(storage_id, index + parts + block(42, bytes((2, 3))), version)
