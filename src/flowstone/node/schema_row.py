"""Looks up rows of `_schema` by key: the version of the system spaces, the UUID and the name of the replica set.

Nothing here scans `_schema`: it also has a row for every `box.once` that ever ran.
"""

from __future__ import annotations

from typing import Any

from flowstone.box.box import Box
from flowstone.box.system import SCHEMA_ID
from flowstone.iproto.msgpack import unpack


def schema_row(box: Box, key: str) -> tuple[Any, ...]:
    """Return the fields after `key`; empty if `_schema` has no such row."""
    schema = box.spaces.get(SCHEMA_ID)
    primary = schema.primary if schema is not None else None
    raw = primary.get(primary.key.exact((key,))) if primary is not None else None
    return tuple(unpack(raw)[1:]) if raw is not None else ()


def schema_version(box: Box) -> tuple[int, ...]:
    """Return the version of the system spaces, such as (2, 11, 1); empty if `_schema` has none."""
    return schema_row(box, "version")
