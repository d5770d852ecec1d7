"""Types of single columns, as the user of a mirror declares them: `orders.id=decimal(20,0)`, or a TOML file.

Pure, except for `read_types`. A type belongs to a field by name. At the start of a mirror, a type of an unknown field
is an error. Later, when a definition removes the field or gives it a type that the column cannot hold, the declared
type is ignored: a definition never stops a mirror.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from flowstone.box.definitions import SpaceDefinition
from flowstone.columns.column_types import ColumnType, WrongType, types_for

_FORM: Final = "use SPACE.FIELD=TYPE, such as orders.id=decimal(20,0)"
_FILE_FORM: Final = "use tables of types: [types.orders], then id = 'decimal(20,0)'"

Place = tuple[str, str]
"""The names of a space and of a field."""


@dataclass(frozen=True, slots=True)
class FieldTypes:
    """The declared types, by the names of space and field."""

    types: Mapping[Place, ColumnType] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> FieldTypes:
        """Parse types as written on the command line. The name of the space ends at the last dot before the `=`."""
        found: dict[Place, ColumnType] = {}
        for text in texts:
            place, equals, kind = text.rpartition("=")
            if not equals:
                raise WrongType(f"invalid type {text!r}", hint=_FORM)
            _add(found, place_of(place), kind)
        return cls(found)

    @classmethod
    def of(cls, types: Mapping[str, str]) -> FieldTypes:
        """Return types given by `SPACE.FIELD`."""
        found: dict[Place, ColumnType] = {}
        for place, kind in types.items():
            _add(found, place_of(place), kind)
        return cls(found)

    @classmethod
    def from_setting(cls, text: str) -> FieldTypes:
        """Parse the `setting` of a lake; an older lake has none."""
        rows: list[tuple[str, str, str]] = json.loads(text) if text else []
        return cls({(space, name): ColumnType.parse(kind) for space, name, kind in rows})

    @property
    def setting(self) -> str:
        """The types as a setting of a lake."""
        return json.dumps([[*place, str(kind)] for place, kind in sorted(self.types.items())]) if self.types else ""

    def __bool__(self) -> bool:
        return bool(self.types)

    def __iter__(self) -> Iterator[tuple[str, str, ColumnType]]:
        return ((space, name, kind) for (space, name), kind in self.types.items())

    def __or__(self, other: FieldTypes) -> FieldTypes:
        return FieldTypes({**self.types, **other.types})

    def of_space(self, space: SpaceDefinition) -> tuple[tuple[str, str], ...]:
        """Return the declared types of a space: field name and type, by field name."""
        return tuple((name, str(kind)) for owner, name, kind in sorted(self, key=str) if owner == space.name)

    def check(self, spaces: Mapping[str, SpaceDefinition], option: str) -> None:
        """Raise WrongType for a type of an unknown space or field, or of a field that it cannot hold."""
        for owner, name, kind in self:
            space = spaces.get(owner)
            if space is None:
                raise WrongType(f"{option}: no space {owner!r}", hint=_near(owner, list(spaces), "spaces"))
            kinds = {each.name: each.type for each in space.fields}
            if name not in kinds:
                raise WrongType(
                    f"{option}: space {owner!r} has no field {name!r}", hint=_near(name, list(kinds), "fields")
                )
            if not kind.holds(kinds[name]):
                raise WrongType(
                    f"{option} {owner}.{name}={kind}: a column of this type cannot hold a field of type {kinds[name]}",
                    hint=f"use {types_for(kinds[name])}",
                )


def place_of(text: str) -> Place:
    """Parse `SPACE.FIELD`."""
    space, dot, name = text.rpartition(".")
    if not (space and dot and name):
        raise WrongType(f"invalid field {text!r}", hint=_FORM)
    return space, name


def _add(found: dict[Place, ColumnType], place: Place, kind: str) -> None:
    if place in found:
        raise WrongType(f"{'.'.join(place)} has two types", hint="specify each field once")
    try:
        found[place] = ColumnType.parse(kind)
    except WrongType as error:
        raise WrongType(f"{'.'.join(place)}: {error.message}", hint=error.hint) from None


def _near(name: str, known: Sequence[str], what: str) -> str:
    near = get_close_matches(name, known, 1)
    if near:
        return f"did you mean {near[0]}?"
    return f"known {what}: {', '.join(sorted(known))}" if known else f"there are no named {what}"


def read_types(path: str) -> FieldTypes:
    """Read the types of a `mirror.toml`. Raise WrongType if the file is not readable or has anything else."""
    try:
        with open(path, "rb") as file:
            found: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise WrongType(f"{path}: {error.strerror}", hint="specify a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongType(f"{path}: {error}", hint=_FILE_FORM) from None
    unknown = sorted(found.keys() - {"types"})
    if unknown:
        raise WrongType(f"{path}: unknown option {unknown[0]}", hint=_FILE_FORM)
    types: dict[Place, ColumnType] = {}
    spaces = found.get("types", {})
    for space, fields in (spaces if isinstance(spaces, dict) else {"": spaces}).items():
        if not isinstance(fields, dict):
            raise WrongType(f"{path}: types of {space or 'spaces'} are not a table", hint=_FILE_FORM)
        for name, kind in fields.items():
            if not isinstance(kind, str):
                raise WrongType(f"{path}: type of {space}.{name} is not a text: {kind!r}", hint=_FILE_FORM)
            try:
                _add(types, (space, name), kind)
            except WrongType as error:
                raise WrongType(f"{path}: {error.message}", hint=error.hint) from None
    return FieldTypes(types)
