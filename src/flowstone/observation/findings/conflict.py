"""Finds the two tuples of a duplicate key: the row from the master, and the follower's tuple that blocks it.

A `LogSection` holds the rows that the follower lacks. The keys of these rows are looked up at the follower in log
order, one tuple at a time, through `Asking`; the rest is pure. Changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from flowstone.box.schema import IndexDefinition, SpaceDefinition
from flowstone.errors import FlowstoneError
from flowstone.history.secrets import USER_SPACES
from flowstone.iproto.constants import Key, RequestType, type_name
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.row import Row
from flowstone.observation.log_section import LogSection
from flowstone.observation.query import Asking
from flowstone.text.lua_rows import NoLuaForm, lua_value
from flowstone.text.yaml_rows import yaml_value

ASKED_MAX: Final = 500
"""Limit of rows whose keys are looked up; the conflict is among the first rows that the follower lacks."""

_PLAIN_NAME: Final = re.compile(r"[A-Za-z_]\w*")

_WITH_TUPLES: Final = (RequestType.INSERT, RequestType.REPLACE, RequestType.UPSERT)
TEXT_MAX: Final = 300
"""Limit of a tuple in a finding, in characters."""


class Conflict(NamedTuple):
    """The row that comes and the tuple there, as text; `remove` deletes the tuple: a Lua call, or empty.

    `removal` is the same as function and argument of `flowstone call`; None if JSON cannot represent it.
    """

    replica_id: int
    lsn: int
    comes: str
    there: str
    remove: str
    removal: tuple[str, str] | None = None

    @property
    def row(self) -> str:
        return f"{self.replica_id}:{self.lsn}"


async def find_conflict(follower: Asking, section: LogSection, space_name: str, index_name: str) -> Conflict | None:
    """Return the first row of the section whose key another tuple has at the follower; None if none is found."""
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
    """Return the key of a tuple; None if only the server can compute it."""
    if index.is_functional or any(part.path is not None or part.field >= len(values) for part in index.parts):
        return None
    return [values[part.field] for part in index.parts]


def _is_in_the_way(
    space: SpaceDefinition, index: IndexDefinition, row: Row, values: tuple[Any, ...], there: tuple[Any, ...]
) -> bool:
    """Return True if the tuple at the follower conflicts with the row.

    In the primary index only an INSERT conflicts; in another index every tuple with a different primary key does.
    """
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
        removal=_removal(space.name, key) if key is not None else None,
    )


def _removal(space: str, key: list[Any]) -> tuple[str, str] | None:
    if not _PLAIN_NAME.fullmatch(space) or not all(type(value) in (int, str, bool) for value in key):
        return None
    return f"box.space.{space}:delete", json.dumps(key, ensure_ascii=False)


def _text(values: tuple[Any, ...]) -> str:
    text = yaml_value(values)
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"
