"""Types that a user declares for single columns, and the fields that each of them can hold.

Pure. Names are Spark's. `arrow_columns.py` decodes the columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from flowstone.errors import FlowstoneError

PRECISION_MAX: Final = 38
"""Digits of Arrow's and Spark's decimals."""

_INTEGERS: Final = frozenset(
    ("unsigned", "integer", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)
_FLOATS: Final = frozenset(("double", "float32", "float64"))
_OPEN: Final = frozenset(("any", "scalar"))
_FIELDS: Final = {
    "bigint": _INTEGERS | _OPEN | {"number"},
    "decimal": _INTEGERS | _OPEN | {"number", "decimal"},
    "double": _INTEGERS | _FLOATS | _OPEN | {"number", "decimal"},
    "binary": _OPEN | {"string", "varbinary"},
    "boolean": _OPEN | {"boolean"},
    "timestamp": _OPEN | {"datetime"},
}
"""The fields that a type can hold; `string` can hold all."""

NAMES: Final = "bigint, decimal(P,S), double, string, binary, boolean or timestamp"
_DECIMAL: Final = re.compile(r"decimal\(\s*(\d{1,3})\s*(?:,\s*(\d{1,3})\s*)?\)")


class WrongType(FlowstoneError):
    """A declared type cannot be parsed, or does not suit the field that it names."""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A declared type; only decimals have precision and scale."""

    name: str
    precision: int = 0
    scale: int = 0

    def __str__(self) -> str:
        return f"decimal({self.precision},{self.scale})" if self.name == "decimal" else self.name

    @classmethod
    def parse(cls, text: str) -> ColumnType:
        """Parse a type such as `decimal(20,0)`. Raise WrongType if it is none."""
        plain = text.strip().lower()
        found = _DECIMAL.fullmatch(plain)
        if found is not None:
            precision, scale = int(found[1]), int(found[2] or 0)
            if not 1 <= precision <= PRECISION_MAX or scale > precision:
                raise WrongType(
                    f"invalid type {text!r}",
                    hint=f"use 1 to {PRECISION_MAX} digits, and a scale that is not larger",
                )
            return cls("decimal", precision, scale)
        if plain == "decimal":
            raise WrongType(f"type {text!r} has no number of digits", hint="write it as decimal(38,6)")
        if plain != "string" and plain not in _FIELDS:
            raise WrongType(f"unknown type {text!r}", hint=f"use {NAMES}")
        return cls(plain)

    def holds(self, field_type: str) -> bool:
        """Return True if a column of this type can hold values of a field."""
        if self.name == "string":
            return True
        # Decimals of 3.x have names such as decimal128.
        return ("decimal" if field_type.startswith("decimal") else field_type) in _FIELDS[self.name]


def types_for(field_type: str) -> str:
    """Return the names of the types that can hold a field, for messages."""
    kind = "decimal" if field_type.startswith("decimal") else field_type
    names = [name for name, fields in _FIELDS.items() if kind in fields]
    return ", ".join(["decimal(P,S)" if name == "decimal" else name for name in names] + ["string"])
