"""Strategies for tables and rows of every type, for the encoder that imports nothing from `src`."""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

from tests.limestone.tsurugi.encoder import ColumnSpec, TableSpec

INT_BITS = {"int1": 8, "int2": 16, "int4": 32, "int8": 64}
KEY_TYPES = ("boolean", "int1", "int2", "int4", "int8", "float4", "float8", "decimal", "character", "octet", "date",
             "time", "timetz", "timestamp", "timestamptz")  # fmt: skip
TYPES = (*KEY_TYPES, "blob", "clob")
DAY = 86_400 * 10**9
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
POINT = st.tuples(st.integers(-(10**11), 10**11), st.integers(0, 10**9 - 1))


def values(column: ColumnSpec) -> st.SearchStrategy[Any]:
    """Return the values that a column may have, besides NULL."""
    kind = column.type
    if kind in INT_BITS:
        limit = 1 << (INT_BITS[kind] - 1)
        return st.integers(-limit, limit - 1)
    if kind == "decimal":
        limit = 10**column.precision - 1
        return st.integers(-limit, limit).map(lambda unscaled: Decimal(f"{unscaled}E-{column.scale}"))
    if kind == "character":
        return TEXT if column.varying else TEXT.filter(lambda text: len(text.encode()) <= (column.length or 0))
    if kind == "octet":
        return st.binary(max_size=12 if column.varying else column.length)
    simple: dict[str, st.SearchStrategy[Any]] = {
        "boolean": st.booleans(),
        "float4": st.floats(width=32).map(lambda value: struct.unpack("f", struct.pack("f", value))[0]),
        "float8": st.floats(),
        "date": st.integers(-800_000, 2_900_000),
        "time": st.integers(0, DAY - 1),
        "timetz": st.integers(0, DAY - 1),
        "timestamp": POINT,
        "timestamptz": POINT,
        "blob": st.integers(0, 2**64 - 1),
        "clob": st.integers(0, 2**63 - 1),
    }
    return simple[kind]


@st.composite
def columns(draw: st.DrawFn, name: str, *, in_key: bool) -> ColumnSpec:
    kind = draw(st.sampled_from(KEY_TYPES if in_key else TYPES))
    precision = draw(st.integers(1, 38))
    varying = draw(st.booleans()) and not (in_key and kind == "octet")
    length = (
        draw(st.integers(1, 16)) if kind in ("character", "octet") and (not varying or draw(st.booleans())) else None
    )
    return ColumnSpec(
        name,
        kind,
        nullable=not in_key and draw(st.booleans()),
        length=length,
        varying=varying,
        precision=precision,
        scale=draw(st.integers(0, precision)),
        descending=in_key and draw(st.booleans()),
    )


@st.composite
def tables(draw: st.DrawFn) -> TableSpec:
    keys = draw(st.integers(1, 3))
    others = draw(st.integers(0, 6))
    found = [draw(columns(f"k{number}", in_key=True)) for number in range(keys)]
    found += [draw(columns(f"v{number}", in_key=False)) for number in range(others)]
    order = draw(st.permutations(range(keys)))
    return TableSpec("t", tuple(draw(st.permutations(found))), tuple(f"k{number}" for number in order))


@st.composite
def rows(draw: st.DrawFn, table: TableSpec) -> dict[str, Any]:
    return {
        column.name: None if column.nullable and draw(st.booleans()) else draw(values(column))
        for column in table.columns
    }


@st.composite
def filled_tables(draw: st.DrawFn) -> tuple[TableSpec, list[dict[str, Any]]]:
    table = draw(tables())
    return table, draw(st.lists(rows(table), max_size=5))


def expected(column: ColumnSpec, value: Any) -> Any:
    """Return what a decoder returns for a value: padded, and NaN and zero in one form."""
    if value is None:
        return None
    if column.type == "character" and not column.varying:
        return value.encode().ljust(column.length or 0).decode()
    if column.type == "octet" and not column.varying:
        return value.ljust(column.length or 0, b"\0")
    if column.type in ("float4", "float8"):
        return "nan" if value != value else value + 0.0 if value else 0.0
    if column.type in ("date", "time", "timetz", "blob", "clob"):
        return (value,)
    return value


def comparable(value: Any) -> Any:
    return "nan" if isinstance(value, float) and value != value else value
