"""Run one batch of a mirror as a Spark job: shuffle the changes of the log by key and fold them into table states.

The driver describes each table (`Target`). Executors look up old tuples where operations need them, each table at one
version, and return one row per key (or per change, for a history) and the number of changes. Changes that a table
already has are skipped by the table's vclock, so a batch may be repeated in full or in part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.system import INDEX_ID, SPACE_ID, TRUNCATE_ID
from flowstone.box.update.update import UpdateRules
from flowstone.columns.arrow_columns import MOMENT
from flowstone.columns.change_contract import ChangeContract, spark_ddl
from flowstone.iproto.msgpack import unpack
from flowstone.lake.masks import SpaceMask
from flowstone.lake.table_files import PinnedTable
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.change_frames import RAW_COLUMNS, SliceRows, changes_frame, snapshot_rows
from flowstone.spark.fold.key_fold import fold, keys_needing_old, keys_that_may_exist, tuples_before
from flowstone.spark.index.log_runs import SnapshotFile
from flowstone.spark.index.slice_bytes import SliceServer, Transport
from flowstone.spark.sources.change_batches import read_slice
from flowstone.spark.worker_errors import clear_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flowstone.spark.index.log import Log
    from flowstone.spark.index.log_index import ArchiveIndex

FOLDED_SCHEMA: Final = pa.schema(
    [
        pa.field("space_id", pa.int64(), nullable=False),
        pa.field("sort_key", pa.binary()),
        pa.field("tuple", pa.binary()),
        pa.field("masked", pa.binary()),
        pa.field("before", pa.binary()),
        pa.field("operation", pa.string()),
        pa.field("commit_version", pa.int64()),
        pa.field("commit_timestamp", MOMENT),
        pa.field("replica_id", pa.int32()),
        pa.field("lsn", pa.int64()),
    ]
)
"""The rows that executors return. In a row without a `sort_key`, `lsn` is the number of changes of the space.

`before` is the tuple before the change, masked if the space has masks; only for targets that keep changes."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

DRIVER_ROWS: Final = 1000
"""Batches with fewer rows are folded by the driver: even the smallest Spark job would take longer."""

SHUFFLE_ROWS: Final = 20_000
"""Batches with fewer rows are folded by one task: a shuffle would take longer."""


_TRUNCATION_COLUMNS: Final = (
    "_operation",
    "_commit_version",
    "_commit_timestamp",
    "_replica_id",
    "_lsn",
    "_space_id",
    "_key_msgpack",
)

_KEY_COLUMNS: Final = ("_lsn", "_space_id", "_tuple_msgpack", "_key_msgpack")


@dataclass(frozen=True, slots=True)
class Target:
    """The facts about a space with a table that executors need.

    The tuples in `old` (None if there are none) include all changes up to `applied`; the table in the lake includes
    all states up to `shown`. The two are equal unless masks keep the exact tuples out of the lake: then `applied` may
    lag `shown`, never lead it. `truncated` is the transaction version and the LSN of the last truncation in the
    batch, which discards all earlier changes of the table. `rules` are the UPSERT rules of the server that wrote the
    log. With `keeps_changes`, executors return every state with the tuple before it, also those before a truncation.
    """

    space: SpaceDefinition
    applied: VClock
    shown: VClock
    old: PinnedTable | None = None
    mask: SpaceMask | None = None
    every_state: bool = False
    truncated: tuple[int, int] | None = None
    rules: UpdateRules | None = None
    keeps_changes: bool = False


@dataclass(frozen=True, slots=True)
class FoldedTable:
    """The effect of a batch on one table: `states` as `fold` returns them, and `masked` tuples in the same order.

    `before` has the tuple before each state, masked if the space has masks, for a target that keeps changes.
    """

    states: pa.Table
    masked: pa.ChunkedArray
    change_count: int
    newest: int | None
    """Commit time of the newest change, in microseconds since 1970."""
    before: pa.ChunkedArray | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """The last truncation of a space in a batch: version and time of the transaction, LSN and origin of the row."""

    version: int
    lsn: int
    time: int
    replica_id: int | None = None

    def is_before(self, states: pa.Table) -> pa.Array:
        """Return a mask of the states, as `fold` returns them, that the truncation does not discard."""
        return _is_later((self.version, self.lsn), states["commit_version"], states["lsn"])


@dataclass(frozen=True, slots=True)
class Executors:
    """The session in which jobs run, and the transport of the log to executors."""

    spark: SparkSession
    partitions: int
    transport: Transport = "file"
    server: SliceServer | None = None
    """Serves the slices that are not sent with the task."""


class BatchJob(Protocol):
    """Reads a log for a mirror: the changes of a batch, and snapshots."""

    @property
    def log(self) -> Log: ...

    def run(self, start: VClock, end: VClock, targets: Mapping[int, Target], row_count: int) -> dict[int, FoldedTable]:
        """Return the changes after `start` up to `end`, folded, by space. `row_count` is their approximate number."""
        ...

    def load(self, snapshot: SnapshotFile, spaces: Collection[int]) -> SliceRows | DataFrame:
        """Return the rows of a snapshot: space id, sort key, tuple."""
        ...

    def truncations(self, start: VClock, end: VClock, spaces: Collection[int]) -> dict[int, Truncation]:
        """Return the last truncation of each of the spaces that is emptied between two positions."""
        ...

    def has_two_keys(self, start: VClock, end: VClock, space_id: int, emptied: Truncation | None) -> bool:
        """Return True if a transaction alters the primary key and changes rows under another definition of the key.

        `emptied` is the truncation of the space in this batch.
        """
        ...


@dataclass(frozen=True, slots=True)
class ArchiveJob:
    """Fulfils `BatchJob` for the logs of a replica set."""

    log: ArchiveIndex
    executors: Executors

    def run(self, start: VClock, end: VClock, targets: Mapping[int, Target], row_count: int) -> dict[int, FoldedTable]:
        if not targets:
            return {}
        if row_count < DRIVER_ROWS:
            return by_space(pa.Table.from_batches(self._fold_here(start, end, targets), FOLDED_SCHEMA))
        self._next_batch()
        frame = changes_frame(
            self.executors.spark,
            self.log,
            start,
            end,
            columns=RAW_COLUMNS,
            spaces=tuple(sorted(targets)),
            transport=self.executors.transport,
            server=self.executors.server,
        )
        if row_count < SHUFFLE_ROWS:
            frame = frame.coalesce(1)
        else:
            frame = frame.repartition(self.executors.partitions, "_space_id", "_sort_key")
        return by_space(frame.mapInArrow(partial(fold_partition, dict(targets)), spark_ddl(FOLDED_SCHEMA)).toArrow())

    def _fold_here(self, start: VClock, end: VClock, targets: Mapping[int, Target]) -> Iterator[pa.RecordBatch]:
        changes = self._changes(start, end, RAW_COLUMNS, sorted(targets), in_runs_of=targets)
        yield from fold_partition(targets, changes)

    def load(self, snapshot: SnapshotFile, spaces: Collection[int]) -> SliceRows:
        self._next_batch()
        return snapshot_rows(
            self.executors.spark,
            self.log,
            snapshot,
            columns=("_space_id", "_sort_key", "_tuple_msgpack"),
            spaces=tuple(spaces),
            transport=self.executors.transport,
            server=self.executors.server,
        )

    def _next_batch(self) -> None:
        if self.executors.server is not None:
            self.executors.server.next_batch()

    def truncations(self, start: VClock, end: VClock, spaces: Collection[int]) -> dict[int, Truncation]:
        """As in `BatchJob`. A space is also emptied if one transaction drops and recreates it or its primary key.

        The driver reads the log itself, because few runs of it have truncations.
        """
        found: dict[int, Truncation] = {}
        only = (*spaces, SPACE_ID, INDEX_ID)
        for batch in self._changes(start, end, _TRUNCATION_COLUMNS, only, in_runs_of=(TRUNCATE_ID,), show_system=True):
            is_definition = pc.is_in(batch["_space_id"], pa.array([SPACE_ID, INDEX_ID], pa.int32()))
            is_dropping = pc.and_(pc.equal(batch["_operation"], "delete"), is_definition)
            rows = batch.filter(pc.or_(pc.equal(batch["_operation"], "truncate"), is_dropping))
            times = rows["_commit_timestamp"].cast(pa.int64())
            names = ("_space_id", "_key_msgpack", "_commit_version", "_lsn", "_replica_id")
            columns = (rows[name].to_pylist() for name in names)
            for space_id, key, version, lsn, replica_id, time in zip(*columns, times.to_pylist(), strict=True):
                emptied = _dropped(space_id, unpack(key)) if space_id in (SPACE_ID, INDEX_ID) else space_id
                if emptied is not None and emptied in spaces:
                    found[emptied] = Truncation(version, lsn, time, replica_id)
        return found

    def has_two_keys(self, start: VClock, end: VClock, space_id: int, emptied: Truncation | None) -> bool:
        """As in `BatchJob`.

        If the transaction does not empty the space, the rows of the table have the former key, so any change conflicts.
        Otherwise only changes between the truncation and the new key conflict. The driver reads the log itself.
        """
        changed: list[int] = []
        defined = 0
        only = (space_id, INDEX_ID)
        for batch in self._changes(start, end, _KEY_COLUMNS, only, in_runs_of=only, show_system=True):
            for row in batch.to_pylist():
                if row["_space_id"] == space_id:
                    changed.append(row["_lsn"])
                elif unpack(row["_tuple_msgpack"] or row["_key_msgpack"])[:2] == (space_id, 0):
                    defined = row["_lsn"]
        if emptied is None:
            return bool(changed)
        return any(emptied.lsn < lsn < defined for lsn in changed)

    def _changes(
        self,
        start: VClock,
        end: VClock,
        columns: Sequence[str],
        only: Sequence[int],
        *,
        in_runs_of: Iterable[int],
        show_system: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the changes of the spaces `only`, read by the driver from the runs that have rows of `in_runs_of`."""
        contract = ChangeContract(
            self.log.replicaset_uuid, wanted=tuple(columns), show_system=show_system, only=tuple(only)
        )
        for part in self.log.slices(start, end, spaces=tuple(in_runs_of)):
            yield from read_slice(self.log.disk, part, start, end, contract)


def fold_partition(targets: Mapping[int, Target], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fold all changes of some keys into record batches of `FOLDED_SCHEMA`. Runs in executors."""
    with clear_errors():
        gathered = [batch for batch in batches if batch.num_rows]
        if not gathered:
            return
        changes = pa.Table.from_batches(gathered)
        for space_id in pc.unique(changes["_space_id"]).to_pylist():
            target = targets.get(space_id)
            if target is None:
                continue
            mine = changes.filter(pc.equal(changes["_space_id"], space_id))
            yield from _fold_space(target, mine)


def _fold_space(target: Target, changes: pa.Table) -> Iterator[pa.RecordBatch]:
    changes = changes.filter(pc.not_equal(changes["_operation"], "truncate"))
    changes = changes.filter(behind(target.applied, changes["_replica_id"], changes["_lsn"]))
    discarded = changes.slice(0, 0)
    if target.truncated is not None:
        is_later = _is_later(target.truncated, changes["_commit_version"], changes["_lsn"])
        discarded, changes = changes.filter(pc.invert(is_later)), changes.filter(is_later)
    if target.keeps_changes and discarded.num_rows:
        yield from _folded(target, discarded, target.old)
    if changes.num_rows:
        yield _tally(target.space.id, changes.filter(behind(target.shown, changes["_replica_id"], changes["_lsn"])))
        yield from _folded(target, changes, target.old if target.truncated is None else None)


def _is_later(place: tuple[int, int], versions: pa.ChunkedArray, lsns: pa.ChunkedArray) -> pa.Array:
    """Return a mask of the changes after a place: the version of a transaction, and the LSN of a row in it."""
    version, lsn = place
    within = pc.and_(pc.equal(versions, version), pc.greater(lsns, lsn))
    return pc.or_(pc.greater(versions, version), within)


def _folded(target: Target, changes: pa.Table, pinned: PinnedTable | None) -> Iterator[pa.RecordBatch]:
    """Fold changes over the tuples of a table; without a table there are none."""
    every_state = target.every_state or target.keeps_changes
    old = None
    if pinned is not None:
        wanted = keys_that_may_exist(changes) if target.keeps_changes else _keys_needing_old(target, changes)
        old = pinned.lookup(wanted) if len(wanted) else None
    states = fold(target.space, changes, old, every_state=every_state, rules=target.rules)
    if not states.num_rows:
        return
    count = states.num_rows
    tuples = states["tuple"].combine_chunks()
    before = tuples_before(states, old) if target.keeps_changes else pa.nulls(count, pa.binary())
    masked = pa.nulls(count, pa.binary())
    if target.mask is not None:
        before, masked = target.mask.tuples(before), target.mask.tuples(tuples)
    columns = {
        "space_id": pa.repeat(pa.scalar(target.space.id, pa.int64()), count),
        "masked": masked,
        "before": before,
    }
    columns |= {name: states[name].combine_chunks() for name in FOLDED_SCHEMA.names if name not in columns}
    yield pa.RecordBatch.from_arrays([columns[name] for name in FOLDED_SCHEMA.names], schema=FOLDED_SCHEMA)


def _keys_needing_old(target: Target, changes: pa.Table) -> pa.Array:
    """Return the keys whose tuples operations apply to."""
    return keys_needing_old(changes, last_only=not target.every_state)


def _tally(space_id: int, changes: pa.Table) -> pa.RecordBatch:
    newest = pc.max(changes["_commit_timestamp"]).cast(MOMENT) if changes.num_rows else pa.scalar(None, MOMENT)
    values: dict[str, Any] = {"space_id": space_id, "lsn": changes.num_rows, "commit_timestamp": newest}
    arrays = [pa.array([values.get(each.name)], each.type) for each in FOLDED_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=FOLDED_SCHEMA)


def by_space(found: pa.Table) -> dict[int, FoldedTable]:
    """Split the rows that executors returned by space."""
    found = found.cast(pa.schema([each.with_nullable(True) for each in FOLDED_SCHEMA]))
    result: dict[int, FoldedTable] = {}
    for space_id in sorted(pc.unique(found["space_id"]).to_pylist()):
        mine = found.filter(pc.equal(found["space_id"], space_id))
        is_state = mine["sort_key"].is_valid()
        states, tallies = mine.filter(is_state), mine.filter(pc.invert(is_state))
        newest = pc.max(tallies["commit_timestamp"]).cast(pa.timestamp("us"), safe=False)
        result[space_id] = FoldedTable(
            states.drop_columns(["space_id", "masked", "before"]),
            states["masked"],
            pc.sum(tallies["lsn"]).as_py() or 0,
            newest.value if newest.is_valid else None,
            states["before"],
        )
    return result


def shown_states(folded: FoldedTable, mask: SpaceMask | None) -> pa.Table:
    """Return the states with the tuples that the lake shows: masked ones if the space has masks."""
    if mask is None:
        return folded.states
    return folded.states.set_column(folded.states.schema.get_field_index("tuple"), "tuple", folded.masked)


def _dropped(system_space: int, key: tuple[int, ...]) -> int | None:
    """Return the space that loses its rows when this row of `_space` or `_index` is deleted, or None.

    Only the primary key's row of `_index` matters.
    """
    return key[0] if system_space == SPACE_ID or key[1] == 0 else None


def mask_rows(masks: Mapping[int, SpaceMask], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Mask the tuples of rows of a snapshot."""
    with clear_errors():
        for batch in batches:
            space_ids, keys, tuples = batch.columns
            for space_id in pc.unique(space_ids).to_pylist():
                chosen = pc.equal(space_ids, space_id)
                mine = tuples.filter(chosen)
                mask = masks.get(space_id)
                shown = mine if mask is None else mask.tuples(mine)
                yield pa.RecordBatch.from_arrays(
                    [space_ids.filter(chosen).cast(pa.int64()), keys.filter(chosen), shown],
                    names=["space_id", "sort_key", "tuple"],
                )


def at(time_us: int) -> datetime:
    """Convert microseconds since 1970 to a datetime."""
    return EPOCH + timedelta(microseconds=time_us)


def behind(vclock: VClock, replica_ids: pa.ChunkedArray, lsns: pa.ChunkedArray) -> pa.Array:
    """Return a mask of the rows that are after `vclock`."""
    origins = replica_ids.to_numpy().astype(np.int64)
    limits = np.zeros(int(origins.max()) + 1 if len(origins) else 1, np.int64)
    for replica_id, lsn in vclock:
        if replica_id < len(limits):
            limits[replica_id] = lsn
    return pa.array(lsns.to_numpy() > limits[origins])
