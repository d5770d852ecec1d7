"""Which part of a primary key the filters of a query ask for: ranges of keys for SELECTs.

Pure. What is found holds every row that the filters let through, and perhaps more: Spark looks at them again, so only
what the server orders and compares exactly as Spark does is used here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Any, Final
from uuid import UUID

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.xlog.columns import ColumnOptions

KEYS_MAX: Final = 10_000
"""Keys that are looked up one by one; of a longer list, a snapshot has them sooner."""

_INTEGERS: Final = {
    "unsigned": (0, 2**64 - 1),
    "integer": (-(2**63), 2**64 - 1),
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class KeyRange:
    """Keys that begin with `prefix`; the part behind it lies between the bounds, each a value and whether it is in."""

    prefix: tuple[Any, ...] = ()
    lower: tuple[Any, bool] | None = None
    upper: tuple[Any, bool] | None = None


WHOLE: Final = (KeyRange(),)


@dataclass
class _Wanted:
    """What the filters say about one part of the key. `values` is None where they do not name them."""

    values: tuple[Any, ...] | None = None
    lower: tuple[Any, bool] | None = None
    upper: tuple[Any, bool] | None = None
    is_impossible: bool = False


def can_walk(key: IndexDefinition | None) -> bool:
    """Whether SELECT can go through a whole index, page by page."""
    return key is not None and key.type == "tree" and not any(part.path for part in key.parts)


def key_ranges(
    space: SpaceDefinition, columns: ColumnOptions, filters: Iterable[Filter]
) -> tuple[KeyRange, ...] | None:
    """The ranges that hold all wanted rows; None where the filters do not narrow them down."""
    key = space.primary_key
    if key is None or any(part.path for part in key.parts):
        return None
    filters = list(filters)
    wanted = [_wanted(space, part, columns, filters) for part in key.parts]
    if any(each.is_impossible for each in wanted):
        return ()
    prefixes = _prefixes(wanted)
    count = len(prefixes[0])
    if key.type != "tree":
        return tuple(map(KeyRange, prefixes)) if count == len(key.parts) else None
    behind = wanted[count] if count < len(wanted) else _Wanted()
    if behind.values is not None and not isinstance(behind.values[0], UUID):
        # Too many to be named, or behind a gap; no row lies outside of them.
        behind = _Wanted(None, (min(behind.values), True), (max(behind.values), True))
    if not count and behind.lower is None and behind.upper is None:
        return None
    return tuple(KeyRange(prefix, behind.lower, behind.upper) for prefix in prefixes)


def _prefixes(wanted: Sequence[_Wanted]) -> list[tuple[Any, ...]]:
    prefixes: list[tuple[Any, ...]] = [()]
    for each in wanted:
        if each.values is None or len(prefixes) * len(each.values) > KEYS_MAX:
            break
        prefixes = [(*prefix, value) for prefix, value in product(prefixes, each.values)]
    return prefixes


def _wanted(space: SpaceDefinition, part: IndexPart, columns: ColumnOptions, filters: Sequence[Filter]) -> _Wanted:
    found = _Wanted()
    if part.field >= len(space.fields) or part.collation is not None:
        return found
    field = space.fields[part.field]
    is_ordered = field.type != "uuid"  # which the ages of servers order differently
    for each in filters:
        match each:
            case EqualTo(attribute=(field.name,), value=value):
                _narrow_to(found, (value,), field, columns)
            case In(attribute=(field.name,), value=values):
                _narrow_to(found, values, field, columns)
            case GreaterThan(attribute=(field.name,), value=value) if is_ordered:
                _raise_lower(found, value, False, field, columns)
            case GreaterThanOrEqual(attribute=(field.name,), value=value) if is_ordered:
                _raise_lower(found, value, True, field, columns)
            case LessThan(attribute=(field.name,), value=value) if is_ordered:
                _drop_upper(found, value, False, field, columns)
            case LessThanOrEqual(attribute=(field.name,), value=value) if is_ordered:
                _drop_upper(found, value, True, field, columns)
    return found


def _narrow_to(found: _Wanted, values: Iterable[Any], field: FieldDefinition, columns: ColumnOptions) -> None:
    """Null is equal to nothing, and a number that the field cannot hold is nowhere."""
    named = [_value(value, field, columns) for value in values if value is not None]
    if None in named:
        return
    low, high = _INTEGERS.get(field.type, (None, None))
    inside = [each for each in named if low is None or low <= each <= high]
    if found.values is not None:
        inside = [each for each in inside if each in found.values]
    found.values = tuple(dict.fromkeys(inside))
    found.is_impossible = found.is_impossible or not inside


def _raise_lower(found: _Wanted, value: Any, is_in: bool, field: FieldDefinition, columns: ColumnOptions) -> None:
    bound = _value(value, field, columns)
    low, high = _INTEGERS.get(field.type, (None, None))
    if bound is None or (low is not None and bound < low):
        return
    if high is not None and bound > high:
        found.is_impossible = True
    elif found.lower is None or _order(bound) > _order(found.lower[0]):
        found.lower = bound, is_in


def _drop_upper(found: _Wanted, value: Any, is_in: bool, field: FieldDefinition, columns: ColumnOptions) -> None:
    bound = _value(value, field, columns)
    low, high = _INTEGERS.get(field.type, (None, None))
    if bound is None or (high is not None and bound > high):
        return
    if low is not None and bound < low:
        found.is_impossible = True
    elif found.upper is None or _order(bound) < _order(found.upper[0]):
        found.upper = bound, is_in


def _order(value: Any) -> Any:
    """Texts are ordered by their bytes, there and in Spark."""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _value(value: Any, field: FieldDefinition, columns: ColumnOptions) -> Any:
    """The literal as a part of a key; None where the two are not compared in the same way."""
    kind = field.type
    if kind in _INTEGERS:
        return _integer(value, kind, columns)
    if kind == "boolean":
        return value if isinstance(value, bool) else None
    if kind == "string" and columns.strings_as == "binary":
        return _text(bytes(value)) if isinstance(value, bytes | bytearray) else None
    if kind == "string":
        return value if isinstance(value, str) else None
    if kind == "varbinary":
        return bytes(value) if isinstance(value, bytes | bytearray) else None
    return _uuid(value) if kind == "uuid" and isinstance(value, str) else None


def _integer(value: Any, kind: str, columns: ColumnOptions) -> int | None:
    if isinstance(value, bool) or (kind in ("unsigned", "uint64", "integer") and columns.unsigned_as == "double"):
        return None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else None
    return value if isinstance(value, int) else None


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _uuid(value: str) -> UUID | None:
    """In another spelling it is equal to no value of the column."""
    try:
        found = UUID(value)
    except ValueError:
        return None
    return found if str(found) == value else None
