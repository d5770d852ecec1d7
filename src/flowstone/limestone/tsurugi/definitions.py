"""Tables, columns and types of Tsurugi as values.

Pure. `metadata.py` reads them from the log; `row_reader.py` and `row_columns.py` decode rows by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final, NamedTuple

METADATA_STORAGE: Final = (1 << 64) - 2
"""Id of the storage that contains the definitions of all other storages."""

SEQUENCE_STORAGE: Final = (1 << 64) - 4
"""The storage of sequence values."""

SYSTEM_STORAGES: Final = frozenset({METADATA_STORAGE, SEQUENCE_STORAGE})

DECIMAL_DIGITS_MAX: Final = 38


class TypeName(IntEnum):
    """The types of columns, with their numbers in metadata."""

    BOOLEAN = 1
    INT1 = 2
    INT2 = 3
    INT4 = 4
    INT8 = 5
    FLOAT4 = 6
    FLOAT8 = 7
    DECIMAL = 8
    CHARACTER = 9
    OCTET = 11
    DATE = 15
    TIME = 16
    TIMESTAMP = 17
    TIME_WITH_ZONE = 19
    TIMESTAMP_WITH_ZONE = 20
    CLOB = 21
    BLOB = 22


SQL_NAMES: Final = {
    TypeName.BOOLEAN: "BOOLEAN",
    TypeName.INT1: "TINYINT",
    TypeName.INT2: "SMALLINT",
    TypeName.INT4: "INT",
    TypeName.INT8: "BIGINT",
    TypeName.FLOAT4: "REAL",
    TypeName.FLOAT8: "DOUBLE",
    TypeName.DATE: "DATE",
    TypeName.TIME: "TIME",
    TypeName.TIMESTAMP: "TIMESTAMP",
    TypeName.TIME_WITH_ZONE: "TIME WITH TIME ZONE",
    TypeName.TIMESTAMP_WITH_ZONE: "TIMESTAMP WITH TIME ZONE",
    TypeName.CLOB: "CLOB",
    TypeName.BLOB: "BLOB",
}

_BITS_BY_SIZE: Final = [8 * size - 1 for size in range(1, 17)]
_DIGITS_BY_SIZE: Final = [len(str(1 << bits)) - 1 for bits in _BITS_BY_SIZE]
"""The number of digits that every decimal of 1 to 16 bytes can hold."""


@dataclass(frozen=True)
class SqlType:
    """The type of a column. `length` is None for `*`; `precision` and `scale` are those of decimals."""

    name: TypeName
    length: int | None = None
    varying: bool = False
    precision: int = 0
    scale: int = 0

    def __str__(self) -> str:
        if self.name is TypeName.DECIMAL:
            return f"DECIMAL({self.precision},{self.scale})"
        if self.name in (TypeName.CHARACTER, TypeName.OCTET):
            plain = "CHAR" if self.name is TypeName.CHARACTER else "BINARY"
            length = "*" if self.length is None else self.length
            return f"{'VAR' if self.varying else ''}{plain}({length})"
        return SQL_NAMES[self.name]

    @property
    def decimal_size(self) -> int:
        """The bytes of a decimal: the fewest that hold `precision` digits and a sign."""
        return 1 + next(size for size, digits in enumerate(_DIGITS_BY_SIZE) if digits >= self.precision)


@dataclass(frozen=True)
class TableColumn:
    """A column of a table. `is_hidden` marks the generated row id of a table without a primary key."""

    name: str
    type: SqlType
    is_nullable: bool = True
    is_hidden: bool = False


class KeyColumn(NamedTuple):
    """A part of a primary key: the index of its column, and its order."""

    column: int
    is_descending: bool


@dataclass(frozen=True)
class SqlTable:
    """A table: its columns in declared order, and the columns in the keys and in the values of its entries.

    A descending key column is also in the values. `is_visible` is false while the table is being dropped, and for
    tables that Tsurugi keeps for itself.
    """

    name: str
    storage_id: int
    columns: tuple[TableColumn, ...]
    keys: tuple[KeyColumn, ...]
    values: tuple[int, ...]
    metadata_version: int = 0
    is_visible: bool = True

    @cached_property
    def column_names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.columns)

    @property
    def shape(self) -> tuple[object, ...]:
        """What makes the rows of two definitions the same: a storage, and its columns."""
        return self.storage_id, self.columns, self.keys, self.values

    @property
    def key_names(self) -> tuple[str, ...]:
        return tuple(self.columns[each.column].name for each in self.keys)


@dataclass(frozen=True)
class SecondaryIndex:
    """A secondary index of a table; its entries repeat columns of the table's rows."""

    name: str
    storage_id: int
    table: str
    metadata_version: int = 0
