"""Spaces, tuples and changes for the tests of lakes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import msgpack
import pyarrow as pa

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.columns.arrow_columns import MOMENT
from flowstone.columns.sort_keys import sort_keys
from flowstone.lake.table import LakeTable, Moment
from flowstone.replication.vclock import VClock

UUID = "11111111-2222-4333-8444-555555555555"
OTHER_UUID = "99999999-2222-4333-8444-555555555555"
START = datetime(2026, 1, 1, tzinfo=UTC)


def space(*fields: tuple[str, str], name: str = "orders", number: int = 512, key: int = 0) -> SpaceDefinition:
    """Return a space whose primary key is one field."""
    part = IndexPart(key, fields[key][1] if len(fields) > key else "unsigned")
    index = IndexDefinition(number, 0, "pk", "tree", True, (part,))
    return SpaceDefinition(
        number, name, fields=tuple(FieldDefinition(*each, is_nullable=True) for each in fields), indexes=(index,)
    )


ORDERS = space(("id", "unsigned"), ("name", "string"), ("amount", "number"))


def at(lsn: int, **others: int) -> VClock:
    return VClock({1: lsn, **{int(name[1:]): value for name, value in others.items()}})


def moment(number: int) -> Moment:
    return Moment(number, START + timedelta(seconds=number))


def packed(*values: Any) -> bytes:
    return msgpack.packb(list(values))


@cache
def key_of(number: int, definition: SpaceDefinition = ORDERS) -> bytes:
    return sort_keys(definition, pa.array([packed(number)])).to_pylist()[0]


def folded(changes: Mapping[int, bytes | None], definition: SpaceDefinition = ORDERS) -> pa.Table:
    """Return the folded states of tuples by their key number; None means deleted."""
    return pa.table(
        {
            "sort_key": pa.array([key_of(number, definition) for number in changes], pa.binary()),
            "tuple": pa.array(list(changes.values()), pa.binary()),
        }
    )


def states(*rows: tuple[int, bytes | None, int]) -> pa.Table:
    """Return the states of `fold(every_state=True)` for (number, tuple or None, version and LSN)."""
    return pa.table(
        {
            "sort_key": pa.array([key_of(number) for number, _, _ in rows], pa.binary()),
            "tuple": pa.array([each for _, each, _ in rows], pa.binary()),
            "operation": pa.array(["delete" if each is None else "replace" for _, each, _ in rows], pa.string()),
            "commit_version": pa.array([version for _, _, version in rows], pa.int64()),
            "commit_timestamp": pa.array([moment(version).timestamp for _, _, version in rows], MOMENT),
            "replica_id": pa.array([1 for _ in rows], pa.int32()),
            "lsn": pa.array([version for _, _, version in rows], pa.int64()),
        }
    )


def tuples_in(table: LakeTable, uuid: str = UUID) -> dict[bytes, bytes]:
    """Return all rows of a replica set, by sort key, through Parquet."""
    found: dict[bytes, bytes] = {}
    for batch in table.pin(uuid).scan():
        for key, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            assert key not in found
            found[key] = value
    return found
