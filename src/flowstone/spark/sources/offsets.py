"""Offsets of streams: settled positions, one per replica set, as the JSON that Spark keeps in its checkpoint.

Pure. The form is `{"<replica set UUID>": {"<replica id>": lsn}}`, with `stamps` and `snapshots` beside the UUIDs if
they are not empty. Spark compares offsets as text, so equal offsets have equal texts. `{}` is the position before
any row or snapshot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from flowstone.errors import FlowstoneError
from flowstone.replication.vclock import VClock, VClockError

STAMPS, SNAPSHOTS = "stamps", "snapshots"
"""Keys beside the UUIDs: the greatest commit time so far, in microseconds; the snapshot chunks delivered so far."""

_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FORM: Final = 'use {"1": 500}, or {"<replica set UUID>": {"1": 500}} for several replica sets'

Named = Literal["earliest", "latest", "snapshot"]


class WrongOffset(FlowstoneError):
    """A value is not an offset, or not an offset of this stream."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a stream in the log of one replica set: all rows up to `vclock` were delivered.

    `stamp` is the greatest commit time so far; later transactions never get an earlier one. `chunk` is the number of
    chunks delivered so far if the stream is inside the snapshot at `vclock`, else None.
    """

    vclock: VClock
    stamp: int = 0
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Offset:
    """The positions in the logs of all replica sets of a stream, by UUID."""

    positions: Mapping[str, Position] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Position]]:
        return iter(sorted(self.positions.items()))

    def get(self, replicaset_uuid: str) -> Position | None:
        """Return the position in a replica set, or None if none of its rows was delivered yet."""
        return self.positions.get(replicaset_uuid)

    def moved(self, replicaset_uuid: str, position: Position) -> Offset:
        """Return this offset with a new position for one replica set."""
        return Offset({**self.positions, replicaset_uuid: position})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that a reader passes to Spark. The order of keys depends only on the offset."""
        found: dict[str, Any] = {uuid: _lsns(position.vclock) for uuid, position in self}
        stamps = {uuid: position.stamp for uuid, position in self if position.stamp}
        chunks = {uuid: position.chunk for uuid, position in self if position.chunk is not None}
        return found | ({STAMPS: stamps} if stamps else {}) | ({SNAPSHOTS: chunks} if chunks else {})

    @classmethod
    def from_json(cls, value: object) -> Offset:
        """Parse the JSON that Spark passes back. Raise WrongOffset if it is malformed."""
        members = _mapping(value)
        stamps = _numbers(members.pop(STAMPS, {}), STAMPS)
        chunks = _numbers(members.pop(SNAPSHOTS, {}), SNAPSHOTS)
        found = {uuid: Position(_vclock(lsns), stamps.get(uuid, 0), chunks.get(uuid)) for uuid, lsns in members.items()}
        for uuid in (*members, *stamps, *chunks):
            if not _UUID.fullmatch(uuid) or uuid not in found:
                raise WrongOffset(
                    f"{uuid!r} in an offset is not a replica set UUID", hint="the checkpoint belongs to another source"
                )
        return cls(found)


INITIAL: Final = Offset()
"""The offset before any row. `initialOffset` always returns it."""


def parse_offsets(text: str) -> Named | dict[str | None, VClock]:
    """Parse `startingOffsets` or `endingOffsets`: a name, or vclocks by replica set UUID.

    The key None means the only replica set of the source.
    """
    text = text.strip()
    for name in ("earliest", "latest", "snapshot"):
        if text.lower() == name:
            return name
    try:
        members = _mapping(json.loads(text))
    except ValueError:
        raise WrongOffset(
            f"invalid offset {text!r}", hint=f"use earliest, latest, snapshot, or a vclock; {_FORM}"
        ) from None
    members.pop(STAMPS, None)
    if SNAPSHOTS in members:
        raise WrongOffset(f"offset {text!r} is inside a snapshot", hint="start from snapshot, or after it")
    if all(isinstance(value, Mapping) for value in members.values()) and members:
        for uuid in members:
            if not _UUID.fullmatch(uuid):
                raise WrongOffset(f"{uuid!r} is not a replica set UUID", hint=_FORM)
        return {uuid: _vclock(lsns) for uuid, lsns in members.items()}
    return {None: _vclock(members)}


def _lsns(vclock: VClock) -> dict[str, int]:
    return {str(replica_id): lsn for replica_id, lsn in vclock}


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise WrongOffset(f"invalid offset {value!r}", hint=_FORM)
    return dict(value)


def _numbers(value: object, what: str) -> dict[str, int]:
    members = _mapping(value)
    for number in members.values():
        if type(number) is not int or number < 0:
            raise WrongOffset(f"{number!r} in {what} of an offset is not a number", hint="the checkpoint is damaged")
    return members


def _vclock(value: object) -> VClock:
    members = _mapping(value)
    try:
        lsns = {int(replica_id): lsn for replica_id, lsn in members.items() if _is_lsn(replica_id, lsn)}
        return VClock(lsns)
    except VClockError as error:
        raise WrongOffset(f"{members} is not a vclock: {error.message}", hint=_FORM) from None


def _is_lsn(replica_id: str, lsn: object) -> bool:
    if not (replica_id.isascii() and replica_id.isdecimal()) or type(lsn) is not int:
        raise WrongOffset(f"{replica_id!r}: {lsn!r} is not a component of a vclock", hint=_FORM)
    return True
