"""Source `xlog`: settled changes from log directories, as a batch or as a stream, and past states.

Imports pyspark. Readers are created in one process and used in others. Only the process that plans has the directories
open; it reads on as the logs grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from flowstone.box.system import TRUNCATE_ID
from flowstone.columns.change_contract import ChangeContract
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import SLICE_SIZE, ArchiveIndex
from flowstone.spark.sources.change_batches import FormatChanged, read_slice
from flowstone.spark.sources.offsets import INITIAL, Offset, Position
from flowstone.spark.sources.options import WrongOption, XlogOptions, xlog_options
from flowstone.spark.sources.spool_stream import BatchLimits, StreamSlice, next_position, slices_between
from flowstone.spark.sources.xlog.log_directories import (
    LogDirectories,
    ReplicaSetLogs,
    contracts_of_batch,
    contracts_of_stream,
)
from flowstone.spark.worker_errors import clear_errors

if TYPE_CHECKING:
    from flowstone.spark.sources.xlog.past_state import StatePart

SLICE_SIZE_MIN = 512 * 1024
SLICES_WANTED = 16
"""Number of partitions that a small batch is divided into, unless they would fall below `SLICE_SIZE_MIN`."""


@dataclass
class ChangePart(InputPartition):
    """The input of one task that reads changes."""

    piece: StreamSlice


@dataclass
class StateOfKeys(InputPartition):
    """The input of one task that reads a state."""

    part: StatePart


class XlogSource(DataSource):
    """Settled changes, or the state at a moment, from directories that `flowstone archive` or a server writes.

    `path` lists the directories, separated by commas: archives or logs of one or more replica sets. Options:

    - `mode`: changes (default) or state. `asOf` sets the moment of a state: a time with its zone, a vclock or an LSN;
      by default the newest settled position. A state has the columns of the space, see `state_contract`.
    - `space` (a name or an id): typed columns of one space; by default all spaces as JSON and MessagePack. A batch has
      the columns of the format in force at its end; rows written under an earlier format fill the columns of the fields
      that still exist. A stream has a fixed schema: it ends before the format changes, and resumes with the new format
      when it is restarted. The same happens if the space is dropped and recreated under its name, because this is a
      different space.
    - `schemaAt`: the position at which a stream resumes, given as the directory of its checkpoint (recommended for
      every stream) or as an offset. The stream then has the columns of this position instead of the current columns.
    - `columns`, `images` (ops, post, full), `unsignedAs`, `decimalScale`, `stringsAs`, `showSystem`, `showSecrets`.
    - `startingOffsets`: earliest (default), latest, a vclock, or `{"<replica set UUID>": vclock}`. A stream also takes
      snapshot: its first batches are the rows of the newest snapshot. `endingOffsets` (batch only): latest or vclocks.
    - `maxRowsPerTrigger`, `maxBytesPerTrigger`: size limits of a stream's batches, which have whole transactions.
    - `failOnDataLoss`: true (default): missing rows fail the query; false: the query continues after them, a stream
      with the snapshot at this position, if any.
    """

    @classmethod
    def name(cls) -> str:
        return "xlog"

    @clear_errors()
    def schema(self) -> str:
        # Spark does not say whether the schema is for a stream. Only a stream has `schemaAt`.
        options = xlog_options(self.options, streaming=None)
        directories = _opened(options)
        if options.mode == "state":
            from flowstone.spark.sources.xlog.past_state import (
                state_contracts,  # only states need the modules that fold
            )

            return next(iter(state_contracts(directories, options).values())).spark_schema
        is_stream = options.schema_at is not None
        contracts = (contracts_of_stream if is_stream else contracts_of_batch)(directories, options)
        return next(iter(contracts.values())).spark_schema

    @clear_errors()
    def reader(self, schema: Any) -> DataSourceReader:
        options = xlog_options(self.options)
        return StateReader(options) if options.mode == "state" else XlogReader(options)

    @clear_errors()
    def streamReader(self, schema: Any) -> XlogStreamReader:  # noqa: N802
        return XlogStreamReader(xlog_options(self.options, streaming=True), _types(schema))


class _Reading:
    """The part of change readers that runs in executors."""

    def __init__(self, options: XlogOptions) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if type(partition) is InputPartition:  # Spark creates one empty task for a plan without tasks
            return
        assert isinstance(partition, ChangePart)
        piece = partition.piece
        show_secrets = self._options.changes.show_secrets
        with clear_errors():
            yield from read_slice(
                production().disk, piece.part, piece.start, piece.end, piece.contract, show_secrets=show_secrets
            )


class XlogReader(_Reading, DataSourceReader):
    """Reads the changes between two positions."""

    @clear_errors()
    def partitions(self) -> Sequence[InputPartition]:
        directories = _opened(self._options)
        contracts = contracts_of_batch(directories, self._options)
        return [part for logs in directories for part in self._parts(logs, contracts[logs.replicaset_uuid])]

    def _parts(self, logs: ReplicaSetLogs, contract: ChangeContract) -> Iterator[ChangePart]:
        changes = self._options.changes
        start = logs.earliest if changes.starting is None else logs.offset_of(changes.starting, "startingOffsets")
        end = logs.settled if changes.ending is None else logs.offset_of(changes.ending, "endingOffsets")
        if not start <= end:
            raise WrongOption(
                f"batch starts at {start}, but ends at {end}", hint="endingOffsets must not precede startingOffsets"
            )
        position = start
        # If a replica set has several logs, one may have the start of the range and another the end.
        while position != end:
            index = logs.between(position, end)
            if len(logs.indexes) > 1 and index.first_gap(position, end) is not None:
                index = logs.furthest_from(Position(position))
            until = index.cut_before_gap(position).common(end)
            if until == position or not position <= until:
                until = end
            yield from self._slices(index, position, until, contract)
            position = until

    def _slices(
        self, index: ArchiveIndex, start: VClock, end: VClock, contract: ChangeContract
    ) -> Iterator[ChangePart]:
        if self._options.changes.images != "ops":
            index.check_images(start)
        # Truncations are logged as rows of another space.
        spaces = () if contract.space is None else (contract.space.id, TRUNCATE_ID)
        size = max(SLICE_SIZE_MIN, min(SLICE_SIZE, index.size_between(start, end) // SLICES_WANTED))
        stretches = [(start, end)] if self._options.changes.fail_on_data_loss else index.stretches(start, end)
        for first, last in stretches:
            for part in index.slices(first, last, size=size, spaces=spaces):
                yield ChangePart(StreamSlice(part, first, last, contract))


class StateReader(DataSourceReader):
    """Reads the rows of a space at a settled moment."""

    def __init__(self, options: XlogOptions) -> None:
        self._options = options

    @clear_errors()
    def partitions(self) -> Sequence[InputPartition]:
        from flowstone.spark.sources.xlog.past_state import plan_state

        return [StateOfKeys(part) for part in plan_state(_opened(self._options), self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from flowstone.spark.sources.xlog.past_state import read_state

        assert isinstance(partition, StateOfKeys)
        with clear_errors():
            yield from read_state(production().disk, partition.part, show_secrets=self._options.changes.show_secrets)


class XlogStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads changes as they are written and settled. Offsets are settled positions, see `spark/sources/offsets.py`."""

    def __init__(self, options: XlogOptions, types: Sequence[tuple[str, str]]) -> None:
        super().__init__(options)
        self._types = types
        """Names and types of the columns that were reported to Spark."""

    _directories: LogDirectories | None = None
    _contracts: dict[str, ChangeContract] | None = None
    _targets: dict[str, VClock] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_types": self._types}

    @clear_errors()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._targets = {logs.replicaset_uuid: logs.settled for logs in self._refreshed()}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return INITIAL.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        changes = self._options.changes
        if changes.max_rows is not None:
            return ReadMaxRows(changes.max_rows)
        return ReadMaxBytes(changes.max_bytes) if changes.max_bytes is not None else ReadAllAvailable()

    @clear_errors()
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        directories = self._refreshed()
        at = self._checked(Offset.from_json(start), directories)
        share = self._limits(limit).share(len(directories.sets))
        end = at
        for logs in directories:
            uuid = logs.replicaset_uuid
            position = self._next(logs, at.get(uuid), share)
            if position != at.get(uuid):
                end = end.moved(uuid, position)
        return end.to_json()

    @clear_errors()
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        directories = self._refreshed()
        first = self._checked(Offset.from_json(start), directories)
        found: list[InputPartition] = []
        for uuid, until in self._checked(Offset.from_json(end), directories):
            logs = directories.sets[uuid]
            at = first.get(uuid) or self._first(logs, until)
            index = self._serving(logs, at, until)
            found += [ChangePart(piece) for piece in slices_between(index, at, until, self._contract(uuid))]
        return found

    def _next(self, logs: ReplicaSetLogs, at: Position | None, limits: BatchLimits) -> Position:
        changes = self._options.changes
        uuid = logs.replicaset_uuid
        if at is None and changes.starting == "latest":
            return Position(logs.settled)  # the first batch is empty; it records where the stream begins
        at = at or self._first(logs, None)
        index = logs.furthest_from(at)
        if changes.images != "ops":
            index.check_images(at.vclock)
        return next_position(
            index,
            at,
            limits,
            self._contract(uuid),
            target=self._targets.get(uuid) if self._targets is not None else None,
            over_gaps=not changes.fail_on_data_loss,
        )

    def _first(self, logs: ReplicaSetLogs, until: Position | None) -> Position:
        """Return the initial position of a stream. `until` is the end of its first batch, if known."""
        starting = self._options.changes.starting
        if starting == "snapshot":
            return Position(until.vclock if until is not None else logs.newest_snapshot(), chunk=0)
        if starting == "latest" and until is not None:
            return until
        return Position(logs.earliest if starting is None else logs.offset_of(starting, "startingOffsets"))

    def _serving(self, logs: ReplicaSetLogs, at: Position, until: Position) -> ArchiveIndex:
        return logs.furthest_from(at) if at.chunk is not None else logs.between(at.vclock, until.vclock)

    def _refreshed(self) -> LogDirectories:
        if self._directories is None:
            self._directories = _opened(self._options)
        else:
            self._directories.refresh()
        return self._directories

    def _contract(self, uuid: str) -> ChangeContract:
        if self._contracts is None:
            assert self._directories is not None
            self._contracts = contracts_of_stream(self._directories, self._options)
            if self._contracts[uuid].spark_types != list(self._types):
                raise FormatChanged(
                    f"format of space {self._options.changes.space!r} changed while the query was starting",
                    hint="start the query again",
                )
        return self._contracts[uuid]

    def _limits(self, limit: ReadLimit) -> BatchLimits:
        """Combine the limit from Spark with the option that `getDefaultReadLimit` did not report."""
        if isinstance(limit, ReadMaxRows):
            return BatchLimits(limit.max_rows, self._options.changes.max_bytes)
        return BatchLimits(None, limit.max_bytes if isinstance(limit, ReadMaxBytes) else None)

    @staticmethod
    def _checked(offset: Offset, directories: LogDirectories) -> Offset:
        for uuid, position in offset:
            if uuid not in directories.sets:
                raise WrongOption(
                    f"checkpoint is at {position.vclock} of replica set {uuid}, but path has no log of it",
                    hint="add its directory to path, or use another checkpoint",
                )
        return offset


def _types(schema: Any) -> list[tuple[str, str]]:
    """Return the names and types of a Spark schema, in the form that contracts use."""
    return [(each.name, each.dataType.simpleString()) for each in schema.fields]


def _opened(options: XlogOptions) -> LogDirectories:
    return LogDirectories.open(production().disk, options.paths)
