"""Source `tarantool` as a stream: a snapshot of live replica sets, then their settled changes, exactly once.

Spark keeps the reader in a separate process. The reader runs one spool per replica set under `spoolLocation`, which
keeps the rows of reported offsets until Spark commits them. Executors receive slices and never connect to servers.
Imports pyspark.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from flowstone.archive import manifest as archive_manifest
from flowstone.archive.definitions_file import DefinitionsFile
from flowstone.archive.upstream_query import UpstreamFacts
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import SchemaTracker, UnknownSpace
from flowstone.columns.change_contract import ChangeContract
from flowstone.iproto.uri import Uri
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.index.slice_bytes import INLINE_BATCH_MAX, SliceServer, with_transport
from flowstone.spark.sources.change_batches import read_slice
from flowstone.spark.sources.offsets import INITIAL, Offset, Position
from flowstone.spark.sources.options import TarantoolOptions, WrongOption
from flowstone.spark.sources.spool_stream import (
    BatchLimits,
    SnapshotLost,
    StreamSlice,
    next_position,
    slices_between,
)
from flowstone.spark.sources.tarantool.driver_watch import watch_driver
from flowstone.spark.sources.tarantool.spool import Beginning, Spool, facts_of
from flowstone.spark.worker_errors import clear_errors

WAIT_SECONDS: Final = 0.1
"""Maximum wait for new rows before a reader reports that there are none."""

TARGET_SECONDS: Final = 0.5
COLLECT_SECONDS: Final = 1.0
"""Minimum interval between two garbage collections of the spools."""

STATE_NAME: Final = "reader.json"


@dataclass
class StreamPart(InputPartition):
    """The input of one task."""

    piece: StreamSlice


class _ReaderState(msgspec.Struct):
    """The last position of the query, stored in its spool: `schema` cannot read it from Spark's checkpoint."""

    position: dict[int, int]
    format: str = "flowstone-reader"


def stream_schema(options: TarantoolOptions) -> str:
    """Return the columns of the stream at the position where its query stopped; for a new query, the current
    columns."""
    _check(options)
    contracts = [_contract_of(options, facts_of(members)) for members in options.members]
    return _one(contracts).spark_schema


class TarantoolStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the settled changes of live replica sets. Offsets are settled positions, see `spark/sources/offsets.py`.

    Options: `uri` (required; `,` separates members of a replica set, any of which may be followed, `;` separates
    replica sets), `spoolLocation` (required: a directory that outlives the driver, for this query alone), `space`
    (typed columns of one space; by default all spaces, as JSON and MessagePack), `startingOffsets` (snapshot, the
    default; latest; a vclock), `maxRowsPerTrigger`, `maxBytesPerTrigger`, `failOnDataLoss` (true: the query fails if no
    member has the next rows any more; false: a new snapshot replaces them), `register` (true: the server keeps its
    logs for this reader), `transport` (auto, file, inline, tcp: see `slice_bytes`), `transportAddress` (where
    executors reach the reader), `columns`, `unsignedAs`, `decimalScale`, `stringsAs`, `showSystem`, `showSecrets`.

    Spark creates readers in several processes. Only the reader that Spark asks for offsets and partitions opens spools.
    """

    is_watching_driver: ClassVar[bool] = True

    def __init__(self, options: TarantoolOptions) -> None:
        self._options = options
        self._sets: _ReplicaSets | None = None
        self.targets: dict[str, VClock] | None = None
        """The end position of a run with trigger AvailableNow, by replica set."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for executors, without credentials: executors do not connect to servers."""
        return {"_options": replace(self._options, members=()), "_sets": None, "targets": None}

    # --- called by the driver ---

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return INITIAL.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        changes = self._options.changes
        if changes.max_rows is not None:
            return ReadMaxRows(changes.max_rows)
        if changes.max_bytes is not None:
            return ReadMaxBytes(changes.max_bytes)
        is_sent_along = self._options.transport in ("auto", "inline")
        return ReadMaxBytes(INLINE_BATCH_MAX) if is_sent_along else ReadAllAvailable()

    @clear_errors()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        _check(self._options)
        facts = [facts_of(members) for members in self._options.members]
        self.targets = {each.replicaset_uuid: each.ballot.vclock.without_zero() for each in facts}

    @clear_errors()
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        at = Offset.from_json(start)
        sets = self._opened(at)
        return sets.next_offset(at, self._limits(limit), self.targets).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the newest settled offset, which the progress of a query shows as the end of its source."""
        return self._sets.settled().to_json() if self._sets is not None else None

    @clear_errors()
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        first, last = Offset.from_json(start), Offset.from_json(end)
        return [StreamPart(piece) for piece in self._opened(first, last).slices(first, last)]

    @clear_errors()
    def commit(self, end: Mapping[str, Any]) -> None:
        if self._sets is not None:
            self._sets.commit(Offset.from_json(end))

    def stop(self) -> None:
        if self._sets is not None:
            self._sets.close()

    # --- called in executors ---

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, StreamPart)
        piece = partition.piece
        show_secrets = self._options.changes.show_secrets
        with clear_errors():
            yield from read_slice(
                production().disk, piece.part, piece.start, piece.end, piece.contract, show_secrets=show_secrets
            )

    def _opened(self, at: Offset, end: Offset | None = None) -> _ReplicaSets:
        """Return the spools. The first call opens them at `at`; `end` is the end of a batch that Spark replays."""
        if self._sets is None:
            _check(self._options)
            sets = _ReplicaSets(self._options)
            if self.is_watching_driver:
                watch_driver(sets.close)
            try:
                sets.open(at, end)
            except BaseException:
                sets.close()
                raise
            self._sets = sets
        return self._sets

    def _limits(self, limit: ReadLimit) -> BatchLimits:
        """Combine the limit from Spark with the option that `getDefaultReadLimit` did not report."""
        changes = self._options.changes
        if isinstance(limit, ReadMaxRows):
            return BatchLimits(limit.max_rows, changes.max_bytes)
        return BatchLimits(None, limit.max_bytes if isinstance(limit, ReadMaxBytes) else None)


class _ReplicaSet:
    """A replica set, its spool, and the columns of its changes."""

    def __init__(self, spool: Spool, contract: ChangeContract) -> None:
        self.spool = spool
        self.contract = contract
        self.saved: VClock | None = None


class _ReplicaSets:
    """All replica sets of a stream, by UUID, in the process that Spark asks for offsets."""

    def __init__(self, options: TarantoolOptions) -> None:
        self._options = options
        self._sets: dict[str, _ReplicaSet] = {}
        self._server: SliceServer | None = None
        self._collected_at = 0.0
        self._is_closed = False

    def open(self, at: Offset, end: Offset | None) -> None:
        options = self._options
        contracts = []
        for members in options.members:
            facts = facts_of(members)
            uuid = facts.replicaset_uuid
            if uuid in self._sets:
                raise WrongOption(
                    f"uri has replica set {uuid} twice: {members[0].address} also belongs to it",
                    hint="separate members of one replica set by commas",
                )
            contract = _contract_of(options, facts)
            contracts.append(contract)
            spool = self._spool(members, uuid, at.get(uuid), end.get(uuid) if end is not None else None)
            self._sets[uuid] = _ReplicaSet(spool, contract)
        _one(contracts)
        for uuid, position in at:
            if uuid not in self._sets:
                raise WrongOption(
                    f"checkpoint is at {position.vclock} of replica set {uuid}, but no server in uri belongs to it",
                    hint="add its members to uri, or use another checkpoint",
                )
        if options.transport in ("tcp", "auto"):
            self._server = SliceServer(options.transport_address)

    def _spool(self, members: Sequence[Uri], uuid: str, at: Position | None, end: Position | None) -> Spool:
        directory = _directory(self._options, uuid)
        begin = self._beginning(uuid)
        if at is None and end is not None and not isinstance(begin, VClock):
            # The first batch of a stream reads the snapshot at its end position, or it is empty and starts at its end.
            at = end if begin == "latest" else Position(end.vclock, chunk=0)
        in_snapshot = at is not None and at.chunk is not None
        if at is not None and in_snapshot:
            _check_snapshot(directory, at)
        elif at is not None:
            begin = at.vclock
        return Spool.open(
            members,
            directory,
            begin="snapshot" if in_snapshot else begin,
            is_anew=at is None and end is None,
            fail_on_data_loss=self._options.changes.fail_on_data_loss,
            register=self._options.register,
        )

    def _beginning(self, uuid: str) -> Beginning:
        """Return the start of a new stream according to `startingOffsets`."""
        starting = self._options.changes.starting
        if starting is None or isinstance(starting, str):
            return "latest" if starting == "latest" else "snapshot"
        given = starting.get(uuid, starting.get(None))
        if given is None:
            raise WrongOption(f"startingOffsets has no position for replica set {uuid}")
        return given

    # --- offsets ---

    def next_offset(self, at: Offset, limits: BatchLimits, targets: Mapping[str, VClock] | None) -> Offset:
        """Return the end of the batch after `at`. With `targets`, wait for rows that are certain to arrive."""
        share = limits.share(len(self._sets))
        while True:
            end = at
            is_due = False
            for uuid, each in self._sets.items():
                each.spool.check()
                index = each.spool.index
                target = targets.get(uuid) if targets is not None else None
                here = at.get(uuid) or self._first(index, uuid)
                self._save(each, here)
                position = here
                if at.get(uuid) is not None or self._beginning(uuid) != "latest":
                    over_gaps = not self._options.changes.fail_on_data_loss
                    position = next_position(index, here, share, each.contract, target=target, over_gaps=over_gaps)
                if target is not None and position == here and not target <= each.spool.position:
                    is_due = True
                if position != at.get(uuid):
                    end = end.moved(uuid, position)
            if end.positions != at.positions or not self._wait(is_due=is_due):
                return end

    def settled(self) -> Offset:
        """Return the newest settled offset."""
        return Offset({uuid: Position(each.spool.settled) for uuid, each in self._sets.items()})

    def _wait(self, *, is_due: bool) -> bool:
        """Wait briefly for more rows. Return True to check again: rows arrived, or are certain to arrive."""
        first = next(iter(self._sets.values())).spool
        return first.wait(TARGET_SECONDS if is_due else WAIT_SECONDS) or is_due

    def _first(self, index: ArchiveIndex, uuid: str) -> Position:
        """Return the initial position of a stream that has delivered nothing."""
        begin = self._beginning(uuid)
        if isinstance(begin, VClock):
            return Position(begin)
        if begin == "latest":
            return Position(index.earliest)
        if not index.snapshots:
            raise SnapshotLost(f"{index.directory}: the initial snapshot is missing", hint="delete the spool")
        return Position(index.snapshots[-1].vclock, chunk=0)

    def _save(self, each: _ReplicaSet, at: Position) -> None:
        if each.contract.space is not None and at.vclock != each.saved:
            each.saved = at.vclock
            _save_state(each.spool.directory, at.vclock)

    def slices(self, start: Offset, end: Offset) -> list[StreamSlice]:
        found: list[StreamSlice] = []
        for uuid, until in end:
            each = self._sets[uuid]
            index = self._reach(each, until)
            first = start.get(uuid)
            if first is None:
                begin = self._beginning(uuid)
                first = (
                    Position(begin) if isinstance(begin, VClock) else Position(until.vclock, chunk=_first_chunk(begin))
                )
            found += slices_between(index, first, until, each.contract)
        if self._server is not None:
            self._server.next_batch()
        parts = with_transport([piece.part for piece in found], self._options.transport, self._server)
        return [replace(piece, part=part) for piece, part in zip(found, parts, strict=True)]

    def _reach(self, each: _ReplicaSet, until: Position) -> ArchiveIndex:
        """Wait until the index reaches `until`, and return it. A spool that was lost has to receive the rows again."""
        while not until.vclock <= (index := each.spool.index).settled:
            each.spool.check()
            each.spool.wait(TARGET_SECONDS)
        return index

    def commit(self, end: Offset) -> None:
        """Let the spools drop the rows up to `end`, which Spark does not request again."""
        if time.monotonic() - self._collected_at < COLLECT_SECONDS:
            return
        self._collected_at = time.monotonic()
        for uuid, position in end:
            if position.chunk is None and uuid in self._sets:
                self._sets[uuid].spool.collect(position.vclock)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for each in self._sets.values():
            each.spool.close()


def _first_chunk(begin: Beginning) -> int | None:
    return 0 if begin == "snapshot" else None


def _check(options: TarantoolOptions) -> None:
    changes = options.changes
    if changes.images != "ops":
        is_message = changes.envelope != "none"
        what = f"envelope={changes.envelope}" if is_message else f"images={changes.images}"
        raise WrongOption(
            f"{what} does not apply to a live server: its log has no images",
            hint="read an archive written with --images, or use `flowstone mirror`",
        )
    if changes.starting == "earliest":
        raise WrongOption(
            "startingOffsets=earliest does not apply to a live server", hint="use snapshot, latest or a vclock"
        )


def _contract_of(options: TarantoolOptions, facts: UpstreamFacts) -> ChangeContract:
    changes = options.changes
    space = _space_of(options, facts, changes.space) if changes.space is not None else None
    uuid = facts.replicaset_uuid
    return ChangeContract(uuid, space, changes.columns, changes.wanted, changes.show_system, changes.images)


def _space_of(options: TarantoolOptions, facts: UpstreamFacts, wanted: int | str) -> SpaceDefinition:
    """Return the definition of the space for the next batch, right after the position where the query stopped."""
    directory = _directory(options, facts.replicaset_uuid)
    position = _saved_state(directory)
    if position is not None:
        index = ArchiveIndex.open(production().disk, directory)
        if index.earliest <= position and position <= index.settled:
            found = _definition_after(index, position, wanted)
            if found is None:
                raise UnknownSpace(f"no space {wanted!r} at {position}, where the query stopped")
            return found
    tracker = SchemaTracker()
    DefinitionsFile({}, "", "", facts.definitions).apply_to(tracker)
    return tracker.schema.space(wanted)


def _definition_after(index: ArchiveIndex, position: VClock, wanted: int | str) -> SpaceDefinition | None:
    found = index.definition_at(position, wanted)
    if found is None:
        return None
    change = next(iter(index.format_changes(found.id, position, index.settled)), None)
    return change.space if change is not None and change.before == position else found


def _one(contracts: Sequence[ChangeContract]) -> ChangeContract:
    """Check that all replica sets have the same columns, and return the first contract."""
    for other in contracts[1:]:
        if other.schema != contracts[0].schema:
            raise WrongOption(
                f"columns of the space differ between replica sets {other.replicaset_uuid} and"
                f" {contracts[0].replicaset_uuid}",
                hint="use the same format everywhere, or read each replica set separately",
            )
    return contracts[0]


def _directory(options: TarantoolOptions, uuid: str) -> str:
    assert options.spool_location is not None
    return posixpath.join(options.spool_location, uuid)


def _check_snapshot(directory: str, at: Position) -> None:
    """Raise SnapshotLost if the snapshot that the stream is inside of is gone: no other snapshot can continue it."""
    manifest = archive_manifest.load(production().disk, directory)
    known = manifest.snapshots if manifest is not None else []
    if not any(VClock(snapshot.vclock) == at.vclock for snapshot in known):
        raise SnapshotLost(
            f"{directory}: snapshot at {at.vclock} was deleted after {at.chunk} of its chunks were delivered",
            hint="no other snapshot can continue it; delete the checkpoint and the query's output, and start again",
        )


def _save_state(directory: str, position: VClock) -> None:
    disk = production().disk
    path = posixpath.join(directory, STATE_NAME)
    with suppress(FileNotFoundError):
        disk.unlink(path + ".new")
    with disk.create(path + ".new") as file:
        file.append(msgspec.json.encode(_ReaderState(position.to_mapping())))
    disk.rename(path + ".new", path)


def _saved_state(directory: str) -> VClock | None:
    disk = production().disk
    path = posixpath.join(directory, STATE_NAME)
    if disk.kind(path) is None or archive_manifest.load(disk, directory) is None:
        return None
    with disk.open(path) as file:
        data = file.read_at(0, file.size())
    try:
        return VClock(msgspec.json.decode(data, type=_ReaderState).position)
    except (ValueError, RecursionError):
        return None  # truncated by a power loss: use the current format
