"""The directories that a query of source `xlog` names, grouped by replica set.

Several directories may belong to one replica set: successive archives, or the logs of several members. Each batch is
then read from the directory that has its rows. Does not depend on Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import UnknownSpace
from flowstone.columns.change_contract import ChangeContract
from flowstone.columns.debezium_contract import DebeziumContract
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.index.directory_index import UNKNOWN_REPLICASET
from flowstone.spark.index.log_index import ArchiveIndex, DataLoss, NotSettled
from flowstone.spark.sources.checkpoints import position_of
from flowstone.spark.sources.offsets import Offset, Position
from flowstone.spark.sources.options import AsOf, ChangeOptions, SchemaAt, Starting, WrongOption, XlogOptions


@dataclass(frozen=True)
class ReplicaSetLogs:
    """The directories of one replica set."""

    replicaset_uuid: str
    indexes: tuple[ArchiveIndex, ...]

    @property
    def settled(self) -> VClock:
        """The furthest settled position of all directories."""
        return self.furthest.settled

    @property
    def furthest(self) -> ArchiveIndex:
        return max(self.indexes, key=lambda index: index.settled.signature)

    @property
    def earliest(self) -> VClock:
        return min((index.earliest for index in self.indexes), key=lambda vclock: vclock.signature)

    def furthest_from(self, at: Position) -> ArchiveIndex:
        """Return the directory that gets furthest from a position; the first one if none has the next rows."""
        if at.chunk is not None:
            return self.with_snapshot(at.vclock)
        return max(self.indexes, key=lambda index: index.cut_before_gap(at.vclock).signature)

    def between(self, start: VClock, end: VClock) -> ArchiveIndex:
        """Return a directory with all rows between two positions, else the first one that is settled there."""
        settled = [index for index in self.indexes if end <= index.settled]
        whole = [index for index in settled if index.first_gap(start, end) is None]
        return (whole or settled or self.indexes)[0]

    def with_snapshot(self, vclock: VClock) -> ArchiveIndex:
        """Return the directory with the snapshot of a position; chunks of other snapshots have other boundaries."""
        found = [index for index in self.indexes if any(each.vclock == vclock for each in index.snapshots)]
        return (found or self.indexes)[0]

    def newest_snapshot(self) -> VClock:
        snapshots = [each.vclock for index in self.indexes for each in index.snapshots if each.vclock <= index.settled]
        if not snapshots:
            raise DataLoss(f"{self.furthest.directory}: no snapshot to start from", hint="use startingOffsets=earliest")
        return max(snapshots, key=lambda vclock: vclock.signature)

    def resolve(self, as_of: AsOf | None) -> tuple[ArchiveIndex, VClock]:
        """Return the settled position of a moment (by default now), and a directory that has the state there."""
        if as_of is None:
            index = self.furthest
            index.snapshot_at(index.settled)
            return index, index.settled
        refused: list[DataLoss | NotSettled] = []
        # A directory that may have ended before the moment comes last, and is skipped if another one is ahead of it.
        asked = [each for each in self.indexes if each.doubt(as_of) is None or each is self.furthest]
        for index in sorted(asked, key=lambda each: each.doubt(as_of) is not None):
            try:
                position = index.resolve(as_of)
                index.snapshot_at(position)
                return index, position
            except (DataLoss, NotSettled) as error:
                refused.append(error)
        raise refused[0]

    def offset_of(self, given: Starting, option: str) -> VClock:
        """Return the position that `startingOffsets` or `endingOffsets` names."""
        if isinstance(given, str):
            return self.settled if given == "latest" else self.earliest
        position = given.get(self.replicaset_uuid, given.get(None))
        if position is None:
            raise WrongOption(
                f"{option} has no position for replica set {self.replicaset_uuid}, which the logs belong to"
            )
        return position


@dataclass(frozen=True)
class LogDirectories:
    """All directories of a query, by replica set UUID."""

    sets: dict[str, ReplicaSetLogs]

    @classmethod
    def open(cls, disk: Disk, paths: Sequence[str]) -> LogDirectories:
        found: dict[str, list[ArchiveIndex]] = {}
        for path in paths:
            index = ArchiveIndex.open(disk, path)
            found.setdefault(index.replicaset_uuid, []).append(index)
        if len(found.get(UNKNOWN_REPLICASET, ())) > 1:
            first, second, *_ = found[UNKNOWN_REPLICASET]
            raise WrongOption(
                f"cannot tell which replica sets {first.directory} and {second.directory} belong to",
                hint="put the snapshots into the directories, or read each directory separately",
            )
        return cls({uuid: ReplicaSetLogs(uuid, tuple(indexes)) for uuid, indexes in found.items()})

    def __iter__(self) -> Iterator[ReplicaSetLogs]:
        return iter(self.sets.values())

    def refresh(self) -> None:
        for logs in self:
            for index in logs.indexes:
                index.refresh()


def contracts_of_stream(directories: LogDirectories, options: XlogOptions) -> dict[str, ChangeContract]:
    """Return the columns of a stream at the position where it resumes, if known; otherwise the current columns."""
    at = options.schema_at
    offset = position_of(at.checkpoint) if at is not None and at.checkpoint is not None else Offset()
    found = {}
    for logs in directories:
        position = _position(logs, at, offset)
        definition = None
        if options.changes.space is not None and position is not None:
            index = logs.furthest_from(Position(position))
            definition = index.definition_after(position, options.changes.space)
        found[logs.replicaset_uuid] = _contract(logs, options.changes, logs.settled, definition)
    check_alike({uuid: contract.schema for uuid, contract in found.items()})
    return found


def contracts_of_batch(directories: LogDirectories, options: XlogOptions) -> dict[str, ChangeContract]:
    """Return the columns of a batch, as of its end. Rows of former formats show the fields that still exist."""
    found = {}
    for logs in directories:
        ending = options.changes.ending
        end = logs.settled if ending is None else logs.offset_of(ending, "endingOffsets")
        found[logs.replicaset_uuid] = _contract(logs, options.changes, end, None, follows_format=True)
    check_alike({uuid: contract.schema for uuid, contract in found.items()})
    return found


def _position(logs: ReplicaSetLogs, at: SchemaAt | None, offset: Offset) -> VClock | None:
    if at is None:
        return None
    if at.checkpoint is not None:
        position = offset.get(logs.replicaset_uuid)
        return position.vclock if position is not None else None
    return at.positions.get(logs.replicaset_uuid, at.positions.get(None))


def _contract(
    logs: ReplicaSetLogs,
    options: ChangeOptions,
    end: VClock,
    definition: SpaceDefinition | None,
    *,
    follows_format: bool = False,
) -> ChangeContract:
    space = definition
    if options.space is not None and space is None:
        space = logs.between(end, end).last_definition(end, options.space)
        if space is None:
            raise UnknownSpace(f"no space {options.space!r} in {logs.furthest.directory}")
    if options.envelope == "debezium":
        only = None if space is None else (space.id,)
        uuid, system = logs.replicaset_uuid, options.show_system
        return DebeziumContract(uuid, show_system=system, images="full", only=only, prefix=options.topic_prefix)
    return ChangeContract(
        logs.replicaset_uuid,
        space,
        options.columns,
        options.wanted,
        options.show_system,
        options.images,
        follows_format=follows_format,
    )


def check_alike(schemas: Mapping[str, pa.Schema]) -> None:
    """Raise WrongOption unless all replica sets of a query have the same columns."""
    first_uuid, first = next(iter(schemas.items()))
    for uuid, schema in schemas.items():
        if schema != first:
            raise WrongOption(
                f"columns of the space differ between replica sets {uuid} and {first_uuid}",
                hint="use the same format everywhere, or read each replica set separately",
            )
