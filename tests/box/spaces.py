"""Boxes with spaces of many shapes, for tests."""

from __future__ import annotations

from typing import Any

from flowstone.box.box import Box
from flowstone.box.definitions import SpaceDefinition, read_index, read_space, with_indexes
from flowstone.box.dialect import Dialect
from flowstone.box.engine.space import EngineSpace

Index = dict[str, Any]


def definition(
    space_id: int = 512,
    *indexes: Index,
    name: str | None = None,
    fields: str = "",
    flags: dict[str, Any] | None = None,
    field_count: int = 0,
    engine: str = "memtx",
) -> SpaceDefinition:
    """Define a space; `fields` is like `id:unsigned note:string?`; `indexes` are results of `on`, primary first."""
    format = []
    for field in fields.split():
        field_name, _, type = field.partition(":")
        format.append({"name": field_name, "type": type.rstrip("?"), "is_nullable": type.endswith("?")})
    space = read_space((space_id, 1, name or f"s{space_id}", engine, field_count, flags or {}, tuple(format)))
    rows = [
        (space_id, number, index["name"] or f"i{number}", index["type"], {"unique": index["unique"]}, index["parts"])
        for number, index in enumerate(indexes)
    ]
    return with_indexes(space, [read_index(row, space.fields) for row in rows])


def on(parts: str, *, unique: bool = True, type: str = "tree", name: str | None = None) -> Index:
    """Define an index; `parts` has the form `0:unsigned 2:string? 3[*].a:string`, with fields from 0."""
    made = []
    for part in parts.split():
        place, _, kind = part.rpartition(":")
        digits = place[: len(place) - len(place.lstrip("0123456789"))]
        made.append({"field": int(digits), "type": kind.rstrip("?"), "is_nullable": kind.endswith("?")})
        if digits != place:
            made[-1]["path"] = place[len(digits) :]
    return {"name": name, "type": type, "unique": unique, "parts": tuple(made)}


def put(box: Box, defined: SpaceDefinition) -> EngineSpace:
    """Create an empty space."""
    space = EngineSpace(defined, box.collations, box.views)
    box.put_space(space)
    return space


def box_with(*definitions: SpaceDefinition) -> Box:
    box = Box(Dialect.V2_6)
    for defined in definitions:
        put(box, defined)
    return box
