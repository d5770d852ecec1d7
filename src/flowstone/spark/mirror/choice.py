"""Choose the spaces and columns that a mirror has tables for, and derive table changes from schema changes.

Pure. A space is mirrored if it is a user space, keeps its data in the log (it is neither temporary nor local nor a
view), has a primary key, and is chosen. Once a space has a table, its id identifies it: renaming the space renames
the table.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import Schema, UnknownSpace
from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.errors import FlowstoneError
from flowstone.text.row_table import UnknownColumn

Spaces = Mapping[int, SpaceDefinition]
"""Mirrored spaces by id."""

_ONCE: Final = "specify each space and each column once"


class WrongChoice(FlowstoneError):
    """The choice of spaces or columns is impossible or contradicts itself."""


@dataclass(frozen=True, slots=True)
class MirrorChoice:
    """The chosen spaces (none: all), the excluded spaces, and the chosen columns by space name.

    Spaces are given by name, id, or pattern of names (`*`, `?`, `[…]`).
    """

    spaces: tuple[int | str, ...] = ()
    excluded: tuple[int | str, ...] = ()
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, spaces: Sequence[str], excluded: Sequence[str], columns: Sequence[str]) -> MirrorChoice:
        """Parse the choice as written on the command line; columns as `users=id,name`."""
        found: dict[str, tuple[str, ...]] = {}
        for text in columns:
            space, equals, listed = text.partition("=")
            names = tuple(name.strip() for name in listed.split(",") if name.strip())
            if not (space and equals and names):
                raise WrongChoice(f"invalid --columns {text!r}", hint="use SPACE=COLUMN,…, such as users=id,name")
            if space in found:
                raise WrongChoice(f"--columns {text!r} has a duplicate", hint=_ONCE)
            found[space] = names
        return cls.of(tuple(map(_space, spaces)), tuple(map(_space, excluded)), found)

    @classmethod
    def of(
        cls, spaces: Collection[int | str], excluded: Collection[int | str], columns: Mapping[str, Sequence[str]]
    ) -> MirrorChoice:
        """Return the choice. Raise WrongChoice if it contradicts itself."""
        both = [name for name in spaces if name in excluded]
        if both:
            raise WrongChoice(f"space {both[0]!r} is both chosen and excluded", hint="omit one of the two options")
        for space, names in columns.items():
            if isinstance(names, str) or not names:
                raise WrongChoice(f"columns of space {space!r} must be a list of names, not {names!r}")
            if len(set(names)) < len(names):
                raise WrongChoice(f"--columns '{space}={','.join(names)}' has a duplicate", hint=_ONCE)
        return cls(tuple(spaces), tuple(excluded), {space: tuple(names) for space, names in columns.items()})

    def takes(self, space: SpaceDefinition) -> bool:
        """Return True if the space is chosen and can have a table."""
        if not _can_have_table(space) or any(names(each, space) for each in self.excluded):
            return False
        return not self.spaces or any(names(each, space) for each in self.spaces)

    def columns_of(self, space: SpaceDefinition) -> tuple[str, ...] | None:
        """Return the names of the typed columns, or None for all. Raise UnknownColumn if the space lacks a field."""
        wanted = self.columns.get(space.name)
        for name in wanted or ():
            if name not in space.field_names:
                known = ", ".join(space.field_names) or "no named fields"
                raise UnknownColumn(f"space {space.name!r} has no field {name!r}", hint=f"it has {known}")
        return wanted

    def check(self, schema: Schema) -> None:
        """Raise UnknownSpace if a chosen space is unknown or a system space, WrongChoice if the log lacks its rows."""
        for name in (*self.spaces, *self.columns):
            if is_pattern(name) and schema.get(name) is None:
                if not any(_can_have_table(space) and names(name, space) for space in schema):
                    raise UnknownSpace(f"no space matches {name!r}", hint=_known_spaces([schema]))
                continue
            space = schema.space(name)
            if space.primary_key is None or space.is_local or space.is_temporary or space.is_view:
                why = next(
                    why
                    for why, holds in (
                        ("a view", space.is_view),
                        ("local to its instance", space.is_local),
                        ("temporary", space.is_temporary),
                        ("without a primary key", True),
                    )
                    if holds
                )
                raise WrongChoice(f"space {name!r} is {why} and has no rows in the log", hint="choose another space")
            if space.id < FIRST_USER_SPACE_ID:
                raise UnknownSpace(f"space {name!r} is a system space", hint="only user spaces are mirrored")

    def check_excluded(self, schemas: Sequence[Schema], accepted: Collection[str] = ()) -> None:
        """Raise WrongChoice for an excluded name or pattern that fits no space: a misspelled space would be mirrored.

        `schemas` are the schemas of all sources. `accepted` are names that were checked when the lake was created; a
        space that has been dropped since then does not keep the mirror from restarting.
        """
        for name in self.excluded:
            if str(name) in accepted or any(schema.get(name) is not None for schema in schemas):
                continue
            if any(names(name, space) and _can_have_table(space) for schema in schemas for space in schema):
                continue
            what = "no space matches" if is_pattern(name) else "no such space"
            raise WrongChoice(f"--exclude {name}: {what}", hint=_known_spaces(schemas) or "omit --exclude")

    def spaces_of(self, schema: Schema, known: Spaces) -> dict[int, SpaceDefinition]:
        """Return the mirrored spaces under `schema`; spaces in `known` are already mirrored and stay chosen."""
        found: dict[int, SpaceDefinition] = {}
        for space in schema:
            if space.id < FIRST_USER_SPACE_ID:
                continue
            is_known = space.id in known and space.primary_key is not None
            if is_known or self.takes(space):
                found[space.id] = space
        return found


_PATTERN: Final = re.compile(r"[*?\[]")


def is_pattern(name: int | str) -> bool:
    return isinstance(name, str) and _PATTERN.search(name) is not None


def names(given: int | str, space: SpaceDefinition) -> bool:
    """Return True if a name, an id or a pattern means the space."""
    return given in (space.id, space.name) or (is_pattern(given) and fnmatchcase(space.name, str(given)))


def _known_spaces(schemas: Sequence[Schema]) -> str | None:
    known = sorted({space.name for schema in schemas for space in schema if _can_have_table(space)})
    return f"known spaces: {', '.join(known)}" if known else None


def _can_have_table(space: SpaceDefinition) -> bool:
    """Return True for a user space that keeps its data in the log and has a primary key."""
    if space.id < FIRST_USER_SPACE_ID or space.is_local or space.is_temporary or space.is_view:
        return False
    return space.primary_key is not None


def _space(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The changes of definitions between two positions, grouped by their effect on tables."""

    dropped: tuple[SpaceDefinition, ...] = ()
    renamed: tuple[tuple[SpaceDefinition, SpaceDefinition], ...] = ()
    altered: tuple[tuple[SpaceDefinition, SpaceDefinition], ...] = ()
    created: tuple[SpaceDefinition, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dropped or self.renamed or self.altered or self.created)


def changes_between(before: Spaces, after: Spaces) -> TableChanges:
    """Return the difference between two sets of mirrored spaces. A different id means a different space."""
    both = [(before[space_id], after[space_id]) for space_id in sorted(before.keys() & after.keys())]
    return TableChanges(
        tuple(before[space_id] for space_id in sorted(before.keys() - after.keys())),
        tuple((was, now) for was, now in both if was.name != now.name),
        tuple((was, now) for was, now in both if was.shape != now.shape),
        tuple(after[space_id] for space_id in sorted(after.keys() - before.keys())),
    )
