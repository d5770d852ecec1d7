"""Definitions of tables and secondary indexes out of the entries of the metadata storage.

Pure: keys and values of entries in, definitions out. An entry defines one storage. Unknown fields are ignored, as
servers do; an unknown version raises BadMetadata, because it may encode rows in another way.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from flowstone.limestone.errors import BadMetadata
from flowstone.limestone.tsurugi.definitions import (
    DECIMAL_DIGITS_MAX,
    KeyColumn,
    SecondaryIndex,
    SqlTable,
    SqlType,
    TableColumn,
    TypeName,
)
from flowstone.limestone.tsurugi.protobuf import as_int64, message_fields, packed_numbers

VERSIONS: Final = range(10, 15)
"""The versions of metadata that Tsurugi 1.0 to 1.12 write. They differ in added fields only."""

SYSTEM_SEQUENCES: Final = "__system_sequences"

_HEAD: Final = struct.Struct("<QQ")
_HIDDEN: Final = 2
_DESCENDING: Final = 2

# Numbers of fields, by message.
_VERSION, _INDEX = 1, 11
_NAME, _TABLE, _REFERENCE, _SYNTHESIZED, _KEYS, _VALUES, _RESERVED = 20, 30, 31, 35, 40, 41, 60
_ELEMENT, _REFERENCED = 3, 1
_COLUMNS = 21
_COLUMN_NAME, _COLUMN_TYPE, _NULLABLE, _FEATURES = 1, 2, 3, 100
_ATOM, _CHARACTER, _DECIMAL, _OCTET = 1, 20, 21, 22
_VARYING, _LENGTH, _PRECISION, _SCALE = 20, 21, 20, 21


class _Message:
    """The fields of a message. Of a field that may occur once, the last value counts, as in protobuf."""

    def __init__(self, data: bytes) -> None:
        self._values: dict[int, list[int | bytes]] = {}
        for number, value in message_fields(data):
            self._values.setdefault(number, []).append(value)

    def __contains__(self, field: int) -> bool:
        return field in self._values

    def number(self, field: int, default: int = 0) -> int:
        value = self._values.get(field, [default])[-1]
        if not isinstance(value, int):
            raise BadMetadata(f"field {field} of a message is not a number")
        return as_int64(value)

    def messages(self, field: int) -> list[bytes]:
        found = self._values.get(field, [])
        return [_bytes(field, value) for value in found]

    def message(self, field: int) -> _Message:
        # The parts of a message that is split are concatenated, as in protobuf.
        return _Message(b"".join(self.messages(field)))

    def text(self, field: int) -> str:
        return _text(self.messages(field)[-1]) if field in self else ""

    def texts(self, field: int) -> list[str]:
        return [_text(each) for each in self.messages(field)]

    def numbers(self, field: int) -> list[int]:
        """Return a repeated field, packed or not."""
        found: list[int] = []
        for value in self._values.get(field, []):
            found += [value] if isinstance(value, int) else packed_numbers(value)
        return found


def _bytes(field: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise BadMetadata(f"field {field} of a message is a number")
    return value


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadMetadata(f"name {data[:32]!r} is not UTF-8") from None


def defined_storage(value: bytes) -> int:
    """Return the storage that a metadata entry defines."""
    if len(value) < _HEAD.size:
        raise BadMetadata(f"metadata of {len(value)} bytes; at least {_HEAD.size} are expected")
    return int(_HEAD.unpack_from(value)[0])


def parse_metadata(value: bytes) -> SqlTable | SecondaryIndex | None:
    """Return the definition in the value of a metadata entry; None for a storage without one.

    Raise BadMetadata if it is damaged, of an unknown version, or has a column of an unknown type.
    """
    storage_id = defined_storage(value)
    if len(value) == _HEAD.size:
        return None
    storage = _Message(value[_HEAD.size :])
    version = storage.number(_VERSION)
    if version not in VERSIONS:
        raise BadMetadata(
            f"metadata version {version} is not supported",
            hint=f"supported versions: {VERSIONS[0]} to {VERSIONS[-1]} (Tsurugi 1.0 to 1.12)",
        )
    index = storage.message(_INDEX)
    name = _element(index.message(_NAME))
    if _TABLE in index:
        return _table(name, storage_id, version, index)
    if _REFERENCE in index:
        table = _element(index.message(_REFERENCE).message(_REFERENCED))
        return SecondaryIndex(name, storage_id, table, version)
    raise BadMetadata(f"{name!r} is neither a table nor a secondary index")


def _element(name: _Message) -> str:
    found = name.text(_ELEMENT)
    if not found:
        raise BadMetadata("a table or an index has no name")
    return found


def _table(name: str, storage_id: int, version: int, index: _Message) -> SqlTable:
    columns = tuple(_column(name, _Message(each)) for each in index.message(_TABLE).messages(_COLUMNS))
    places = {column.name: place for place, column in enumerate(columns)}
    if len(places) < len(columns):
        raise BadMetadata(f"table {name!r} has two columns of one name")
    parts = [_Message(each) for each in index.messages(_KEYS)]
    places_of_keys = _places(name, places, [part.text(_COLUMN_NAME) for part in parts])
    keys = tuple(
        KeyColumn(place, part.number(2) == _DESCENDING) for place, part in zip(places_of_keys, parts, strict=True)
    )
    values = _places(name, places, index.texts(_VALUES))
    if not keys:
        raise BadMetadata(f"table {name!r} has no primary key")
    if len(places) > len({*places_of_keys, *values}):
        raise BadMetadata(f"table {name!r} has a column that is neither in its keys nor in its values")
    is_visible = not index.number(_RESERVED) and not index.number(_SYNTHESIZED) and name != SYSTEM_SEQUENCES
    return SqlTable(name, storage_id, columns, keys, values, version, is_visible)


def _places(table: str, places: dict[str, int], names: Iterable[str]) -> tuple[int, ...]:
    found = tuple(names)
    for name in found:
        if name not in places:
            raise BadMetadata(f"table {table!r} stores an unknown column {name!r}")
    if len(set(found)) < len(found):
        raise BadMetadata(f"table {table!r} stores a column twice")
    return tuple(places[name] for name in found)


def _column(table: str, column: _Message) -> TableColumn:
    name = column.text(_COLUMN_NAME)
    if not name:
        raise BadMetadata(f"table {table!r} has a column without a name")
    try:
        kind = _type(column.message(_COLUMN_TYPE))
    except BadMetadata as error:
        raise BadMetadata(f"column {table}.{name}: {error.message}", hint=error.hint) from None
    return TableColumn(name, kind, bool(column.number(_NULLABLE)), _HIDDEN in column.numbers(_FEATURES))


def _type(message: _Message) -> SqlType:
    number = message.number(_ATOM)
    try:
        name = TypeName(number)
    except ValueError:
        raise BadMetadata(f"type {number} is not supported") from None
    if name is TypeName.DECIMAL:
        option = message.message(_DECIMAL)
        precision, scale = option.number(_PRECISION), option.number(_SCALE)
        if not 1 <= precision <= DECIMAL_DIGITS_MAX or not 0 <= scale <= precision:
            raise BadMetadata(f"DECIMAL({precision},{scale}) is not supported")
        return SqlType(name, precision=precision, scale=scale)
    if name not in (TypeName.CHARACTER, TypeName.OCTET):
        return SqlType(name)
    option = message.message(_CHARACTER if name is TypeName.CHARACTER else _OCTET)
    length = option.number(_LENGTH) if _LENGTH in option else None
    varying = bool(option.number(_VARYING))
    if (length is None and not varying) or (length is not None and not 0 <= length < 1 << 31):
        raise BadMetadata(f"{name.name} of length {length} is not supported")
    return SqlType(name, length, varying)
