"""Definitions of spaces, indexes and fields, and how to read them from tuples of `_space` and `_index`.

Definitions are frozen values. Tuples of all server versions are accepted: index parts as pairs or maps, type names in
any case, unknown options of newer servers ignored. An invalid tuple raises `DefinitionError`; readers of a log keep its
text and continue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from flowstone.box.engine.constraints import CheckConstraint, ForeignKey, read_constraints
from flowstone.errors import RemoteProtocolError
from flowstone.iproto.constants import GROUP_LOCAL

LEGACY_TYPES: Final = {"num": "unsigned", "str": "string", "*": "any"}
"""Type names from before 1.7, which servers still accept."""

FIELD_NUMBER_MAX: Final = (1 << 31) - 1
"""Largest field number: servers compute with TUPLE_INDEX_BASE in 32 bits."""


class DefinitionError(RemoteProtocolError):
    """A tuple of `_space` or `_index` is not a valid definition."""


class FieldDefinition(msgspec.Struct, frozen=True):
    """A named field of a format. `type` has its current, lower-case name; `collation` is an id in `_collation`."""

    name: str
    type: str = "any"
    is_nullable: bool = False
    collation: int | None = None


class IndexPart(msgspec.Struct, frozen=True):
    """A part of an index key. `field` counts from 0; `path` is a JSON path into that field.

    With `exclude_null` (2.11) tuples with nil in this part are not in the index.
    """

    field: int
    type: str
    is_nullable: bool = False
    collation: int | None = None
    path: str | None = None
    exclude_null: bool = False


class IndexDefinition(msgspec.Struct, frozen=True):
    """An index of a space. `type` is tree, hash, bitset or rtree, in lower case."""

    space_id: int
    id: int
    name: str
    type: str
    unique: bool
    parts: tuple[IndexPart, ...]
    is_functional: bool = False
    """True if a Lua function in `_func` computes the keys."""
    dimension: int = 2
    """Number of dimensions of the points and boxes in an rtree."""


Shape = tuple[int, tuple[FieldDefinition, ...], tuple[IndexPart, ...]]


class SpaceDefinition(msgspec.Struct, frozen=True):
    """A space and its indexes, in order of their ids. `field_count` is 0 if tuples may have any number of fields."""

    id: int
    name: str
    engine: str = "memtx"
    owner: int = 1
    field_count: int = 0
    fields: tuple[FieldDefinition, ...] = ()
    is_sync: bool = False
    is_local: bool = False
    is_temporary: bool = False
    is_view: bool = False
    indexes: tuple[IndexDefinition, ...] = ()
    foreign_keys: tuple[ForeignKey, ...] = ()
    checks: tuple[CheckConstraint, ...] = ()

    @property
    def primary_key(self) -> IndexDefinition | None:
        """Index 0; None for a view or a newly created space."""
        return self.indexes[0] if self.indexes and self.indexes[0].id == 0 else None

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @property
    def shape(self) -> Shape:
        """The parts that typed columns depend on; if they change, a query with one schema must stop.

        This includes the id: a space that is dropped and created again under the same name is a different space.
        """
        return self.id, self.fields, self.primary_key.parts if self.primary_key is not None else ()


def read_space(row: tuple[Any, ...]) -> SpaceDefinition:
    """Return the space, without indexes, that a tuple of `_space` defines."""
    flags = _at(row, 5, {})
    if isinstance(flags, str):
        # Before 1.7: an empty string or "temporary".
        flags = {flag.strip(): True for flag in flags.split(",")}
    if not isinstance(flags, dict):
        raise DefinitionError(f"flags of the space are {flags!r}, not a map")
    format = _at(row, 6, ())
    fields = _read_format(format)
    foreign_keys, checks = read_constraints(flags, format)
    return SpaceDefinition(
        id=_unsigned(row, 0, "space id"),
        owner=_unsigned(row, 1, "owner"),
        name=_text(row, 2, "space name"),
        engine=_text(row, 3, "engine", "memtx"),
        field_count=_unsigned(row, 4, "field_count", 0),
        fields=fields,
        is_sync=flags.get("is_sync") is True,
        is_local=flags.get("group_id", 0) == GROUP_LOCAL,
        # Since 3.0 `type` is "temporary" (definition and data) or "data-temporary".
        is_temporary=flags.get("temporary") is True or "temporary" in str(flags.get("type", "")),
        is_view=flags.get("view") is True,
        foreign_keys=foreign_keys,
        checks=checks,
    )


def read_index(row: tuple[Any, ...], fields: tuple[FieldDefinition, ...] = ()) -> IndexDefinition:
    """Return the index that a tuple of `_index` defines, on a space with format `fields`."""
    options, parts = _at(row, 4, None), _at(row, 5, None)
    if type(options) is int:
        # Before 1.6.5: unique, part count, then field and type of each part in turn.
        parts = tuple(zip(row[6::2], row[7::2], strict=False))
        options = {"unique": bool(options)}
    if not isinstance(options, dict):
        raise DefinitionError(f"options of the index are {options!r}, not a map")
    if not isinstance(parts, tuple) or not parts:
        raise DefinitionError(f"parts of the index are {parts!r}, not an array of parts")
    unique = options.get("unique", True)
    if not isinstance(unique, bool):
        raise DefinitionError(f"option unique of the index is {unique!r}, not a boolean")
    return IndexDefinition(
        space_id=_unsigned(row, 0, "space id"),
        id=_unsigned(row, 1, "index id"),
        name=_text(row, 2, "index name"),
        type=_text(row, 3, "index type").lower(),
        unique=unique,
        parts=tuple(_read_part(part, fields) for part in parts),
        is_functional=bool(options.get("func")),
        dimension=_positive(options.get("dimension"), 2),
    )


def with_indexes(space: SpaceDefinition, indexes: Iterable[IndexDefinition]) -> SpaceDefinition:
    """Return `space` with exactly these indexes."""
    return msgspec.structs.replace(space, indexes=tuple(sorted(indexes, key=lambda index: index.id)))


def field_type(name: object) -> str:
    """Return the current, lower-case name of a field type; unknown names are kept."""
    if not isinstance(name, str) or not name:
        raise DefinitionError(f"field type is {name!r}, not a name")
    lower = name.lower()
    return LEGACY_TYPES.get(lower, lower)


def _read_format(format: object) -> tuple[FieldDefinition, ...]:
    if not isinstance(format, tuple):
        raise DefinitionError(f"format is {format!r}, not an array of fields")
    fields: dict[str, FieldDefinition] = {}
    for number, entry in enumerate(format, 1):
        field = _read_field(number, entry)
        if field.name in fields:
            raise DefinitionError(f"duplicate field name {field.name!r} in the format")
        fields[field.name] = field
    return tuple(fields.values())


def _read_field(number: int, entry: object) -> FieldDefinition:
    if not isinstance(entry, dict):
        raise DefinitionError(f"field {number} of the format is {entry!r}, not a map")
    name = entry.get("name")
    if not isinstance(name, str):
        raise DefinitionError(f"field {number} of the format has no name")
    return FieldDefinition(name, field_type(entry.get("type", "any")), _is_nullable(entry), _collation(entry))


def _read_part(part: object, fields: tuple[FieldDefinition, ...]) -> IndexPart:
    if isinstance(part, tuple) and len(part) >= 2:
        field = _field_number(part[0])
        # A pair has no options of its own: it inherits nullability from its field.
        nullable = field < len(fields) and fields[field].is_nullable
        return IndexPart(field, field_type(part[1]), nullable)
    if not isinstance(part, dict):
        raise DefinitionError(f"index part is {part!r}, neither a map nor a pair of field and type")
    path = part.get("path")
    if path is not None and not isinstance(path, str):
        raise DefinitionError(f"path of an index part is {path!r}, not a string")
    return IndexPart(
        _field_number(part.get("field", 0)),  # servers default to the first field
        field_type(part.get("type")),
        _is_nullable(part),
        _collation(part),
        path,
        part.get("exclude_null") is True,
    )


def _field_number(number: object) -> int:
    if type(number) is not int or not 0 <= number <= FIELD_NUMBER_MAX:
        raise DefinitionError(f"invalid field number {number!r} in an index part")
    return number


def _is_nullable(options: dict[Any, Any]) -> bool:
    return options.get("is_nullable", options.get("nullable_action") == "none") is True


def _collation(options: dict[Any, Any]) -> int | None:
    collation = options.get("collation")
    if collation is not None and (type(collation) is not int or collation < 0):
        raise DefinitionError(f"collation is {collation!r}, not an id")
    return collation


def _positive(number: object, default: int) -> int:
    return number if type(number) is int and number > 0 else default


def _at(row: tuple[Any, ...], position: int, default: object) -> Any:
    return row[position] if position < len(row) else default


def _unsigned(row: tuple[Any, ...], position: int, what: str, default: int | None = None) -> int:
    value = _at(row, position, default)
    if type(value) is not int or value < 0:
        raise DefinitionError(f"{what} is {value!r}, not an unsigned number")
    return value


def _text(row: tuple[Any, ...], position: int, what: str, default: str | None = None) -> str:
    value = _at(row, position, default)
    if not isinstance(value, str) or not value:
        raise DefinitionError(f"{what} is {value!r}, not a name")
    return value
