"""The two tuples of a duplicate key: the row that comes from the master, and what is in its way at the follower.

Pure but for `Asking`, through which the follower is asked for one tuple at a time. Which rows come is in a
`LogSection`; which of them conflicts is found by asking the follower for the key of each, in the order of the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from flowstone.box.schema import IndexDefinition, SpaceDefinition
from flowstone.errors import FlowstoneError
from flowstone.history.secrets import USER_SPACES
from flowstone.history.text_lua import NoLuaForm, lua_value
from flowstone.history.text_yaml import yaml_value
from flowstone.iproto.constants import Key, RequestType, type_name
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.row import Row
from flowstone.observation.asking import Asking
from flowstone.observation.log_section import LogSection

ASKED_MAX: Final = 500
"""Rows whose keys are looked up; the conflict is among the first that the follower lacks."""

_WITH_TUPLES: Final = (RequestType.INSERT, RequestType.REPLACE, RequestType.UPSERT)
TEXT_MAX: Final = 300


class Conflict(NamedTuple):
    """A row and what is in its way, in words; `remove` is a call in Lua that takes the latter away."""

    replica_id: int
    lsn: int
    comes: str
    there: str
    remove: str

    @property
    def row(self) -> str:
        return f"{self.replica_id}:{self.lsn}"


async def find_conflict(follower: Asking, section: LogSection, space_name: str, index_name: str) -> Conflict | None:
    """The first row of the section whose key somebody else has at the follower; None where none is found."""
    space = section.schema.get(space_name)
    index = next((one for one in space.indexes if one.name == index_name), None) if space is not None else None
    if space is None or index is None or space.id in USER_SPACES:
        return None
    for number, (row, values) in enumerate(_rows(section, space)):
        if number >= ASKED_MAX:
            return None
        key = _key(index, values)
        there = await follower.get(space.id, index.id, key) if key is not None else None
        if there is not None and _is_in_the_way(space, index, row, values, there):
            return _told(space, row, values, there)
    return None


def _rows(section: LogSection, space: SpaceDefinition) -> Iterator[tuple[Row, tuple[Any, ...]]]:
    for transaction in section.transactions:
        for row in transaction.rows:
            if row.type not in _WITH_TUPLES:
                continue
            try:
                body = unpack_body(row.body)
            except FlowstoneError:
                continue
            values = body.get(Key.TUPLE)
            if body.get(Key.SPACE_ID) == space.id and isinstance(values, tuple):
                yield row, values


def _key(index: IndexDefinition, values: tuple[Any, ...]) -> list[Any] | None:
    """None for keys that only the server can compute."""
    if index.is_functional or any(part.path is not None or part.field >= len(values) for part in index.parts):
        return None
    return [values[part.field] for part in index.parts]


def _is_in_the_way(
    space: SpaceDefinition, index: IndexDefinition, row: Row, values: tuple[Any, ...], there: tuple[Any, ...]
) -> bool:
    """By the primary key only INSERT finds anything in its way, by another one whoever is a different tuple."""
    primary = space.primary_key
    if primary is None or index.id == primary.id:
        return row.type == RequestType.INSERT
    return _key(primary, values) != _key(primary, there)


def _told(space: SpaceDefinition, row: Row, values: tuple[Any, ...], there: tuple[Any, ...]) -> Conflict:
    primary = space.primary_key
    key = _key(primary, there) if primary is not None else None
    try:
        fields = ", ".join(map(lua_value, key or ()))
        remove = f"box.space[{lua_value(space.name)}]:delete({{{fields}}})" if key is not None else ""
    except NoLuaForm:
        remove = ""
    return Conflict(
        replica_id=row.replica_id,
        lsn=row.lsn,
        comes=f"{type_name(row.type)} {_text(values)}",
        there=_text(there),
        remove=remove,
    )


def _text(values: tuple[Any, ...]) -> str:
    text = yaml_value(values)
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"
