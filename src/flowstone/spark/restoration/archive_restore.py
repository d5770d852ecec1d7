"""Write the state of a settled moment to files: a `.snap` that Tarantool starts from, Delta tables, or Parquet.

Executors rebuild the state in snapshot order and encode it to blocks; the driver writes the system spaces, appends the
blocks unchanged, and syncs. The output is written next to its destination and renamed once it is complete.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa

from flowstone.archive.archive_log import version_of
from flowstone.archive.past_state import rebuild
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.dialect import Dialect, from_greeting
from flowstone.box.system import FIRST_USER_SPACE_ID, SEQUENCE_DATA_ID, SEQUENCE_ID
from flowstone.columns.change_contract import spark_ddl
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.node.wal.checkpoint import SynchroStates
from flowstone.outside.disk import DIRECTORY_MODE, AlreadyLocked, Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.collect import rows_of
from flowstone.spark.fold.sequence_state import sequence_rows
from flowstone.spark.fold.state_frames import STATE, Plans, state_frame, state_plans
from flowstone.spark.fold.synchro_state import states_at
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.index.slice_bytes import Transport
from flowstone.spark.sources.state_contract import StateContract
from flowstone.spark.worker_errors import clear_errors
from flowstone.xlog.block import FLUSH_THRESHOLD, encode_block, new_compressor
from flowstone.xlog.block_table import FIXHEADER_SIZE
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.reader import LogFile
from flowstone.xlog.snapshot_rows import tuple_rows
from flowstone.xlog.writer import SnapWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Format = Literal["snap", "delta", "parquet", "limestone"]
"""`limestone` is only for the state of a Limestone directory: see `limestone_restore.py`."""

FORMATS: Final[tuple[Format, ...]] = ("snap", "delta", "parquet")

IN_MEMORY_SIZE_MAX: Final = 96 << 20
"""Bytes of snapshot and log up to which a state is rebuilt in memory. One million rows are some 15 MB in files, and 350
MB in memory. Beyond six times as many, the parallel executors of Spark are faster than one core."""

INPROGRESS: Final = ".inprogress"
MICROSECONDS: Final = 1e6

BLOCKS: Final = pa.schema(
    [pa.field("blocks", pa.binary(), nullable=False), pa.field("row_count", pa.int64(), nullable=False)]
)
BLOCKS_SIZE: Final = 1 << 20
"""Approximate bytes of encoded blocks that the driver receives as one row."""

ROW_SIZE: Final = 32
"""Approximate bytes of a row besides its tuple."""

STOPS_AT_SYNCHRONOUS: Final = (2, 6, 0)

Tell = Callable[[str], object]


class OutputTaken(FlowstoneError):
    """The output path is not empty, not usable, or being written by another process."""


class VinylSpaces(FlowstoneError):
    """A snapshot was requested that would include vinyl spaces, whose tuples snapshots do not hold."""


@dataclass(frozen=True, slots=True)
class RestoredSpace:
    id: int
    name: str
    row_count: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore. `files` has a path per format: the snapshot file, or the directory of tables."""

    position: VClock
    instance_uuid: str
    replicaset_uuid: str
    spaces: tuple[RestoredSpace, ...]
    files: dict[Format, str]
    notes: tuple[str, ...]
    seconds: float

    @property
    def row_count(self) -> int:
        return sum(space.row_count for space in self.spaces)


def check_output(out: str) -> None:
    """Raise OutputTaken unless `out` is a new or an empty directory."""
    if not os.path.lexists(out):
        return
    if not os.path.isdir(out):
        raise OutputTaken(f"{out} is not a directory", hint="specify a new or empty directory")
    if os.path.islink(out) or os.path.ismount(out):
        what = "a symbolic link" if os.path.islink(out) else "a mount point"
        raise OutputTaken(f"{out} is {what} and cannot be replaced by a rename", hint="specify a subdirectory of it")
    if os.listdir(out):
        raise OutputTaken(f"{out} is not empty", hint="specify a new or empty directory")


def restore_archive(
    spark: SparkSession,
    index: ArchiveIndex,
    position: VClock,
    out: str,
    *,
    formats: Sequence[Format] = ("snap",),
    transport: Transport = "file",
    tell: Tell = lambda what: None,
) -> Restored:
    """Write the state at a settled `position` to the directory `out`, which must be new or empty.

    A single format is written to `out` itself, several formats to a subdirectory each. Raise NotSettled or DataLoss if
    the state cannot be rebuilt. A failed restore leaves no files.
    """
    begun = time.monotonic()
    check_output(out)
    with destination(index.disk, out) as directory:
        places = {each: directory if len(formats) == 1 else os.path.join(directory, each) for each in formats}
        job = _Job(spark, index, position, transport, tell)
        with job.prepared("snap" in formats):
            files = {each: job.write(each, places[each]) for each in formats}
        tell("syncing")
        sync_all(directory)
        spaces = job.spaces()
    named = {each: out + path.removeprefix(directory) for each, path in files.items()}
    uuids = job.meta.instance_uuid, index.replicaset_uuid
    return Restored(position, *uuids, spaces, named, tuple(job.notes), time.monotonic() - begun)


def fits_in_memory(index: ArchiveIndex, position: VClock) -> bool:
    """Return True if the state is small enough for `restore_in_memory`."""
    snapshot = index.snapshot_at(position)
    return snapshot.size + index.size_between(snapshot.vclock, position) <= IN_MEMORY_SIZE_MAX


def restore_in_memory(index: ArchiveIndex, position: VClock, out: str, *, tell: Tell = lambda what: None) -> Restored:
    """Write the state at `position` as a snapshot, as `restore_archive` does, without Spark.

    Raises:
        CannotRebuild: The logs do not lead to the position.
        FlowstoneError: A row cannot be applied; Spark may be able to, because it builds no secondary indexes.
    """
    begun = time.monotonic()
    check_output(out)
    snapshot = index.snapshot_at(position)
    tell("rebuilding the state")
    state = rebuild(index.disk, index.directory, snapshot.path, position)
    _refuse_vinyl(state.definitions())
    with destination(index.disk, out) as directory:
        tell("writing the snapshot")
        path, counts = state.write(index.disk, directory, index.time_at(position) / MICROSECONDS)
        sync_all(directory)
    spaces = tuple(
        RestoredSpace(each.id, each.name, counts.get(each.id, 0))
        for each in state.definitions()
        if _is_users(each.id) or counts.get(each.id)
    )
    synchronous = [each.name for each in state.definitions() if each.is_sync and counts.get(each.id)]
    notes = tuple(_synchronous_notes(synchronous, state.meta.version))
    files: dict[Format, str] = {"snap": out + path.removeprefix(directory)}
    return Restored(
        position, state.meta.instance_uuid, index.replicaset_uuid, spaces, files, notes, time.monotonic() - begun
    )


@contextmanager
def destination(disk: Disk, out: str) -> Iterator[str]:
    """Yield a directory next to `out`, renamed to `out` when the block succeeds and removed when it fails."""
    out = os.path.abspath(out)
    unfinished = out + INPROGRESS
    os.makedirs(unfinished, mode=DIRECTORY_MODE, exist_ok=True)
    try:
        lock = disk.lock(unfinished)
    except AlreadyLocked as error:
        raise OutputTaken(
            f"{out} is in use by another process", hint="wait for the other process, or stop it"
        ) from error
    with lock:
        try:
            # Remove the files of a killed run.
            for left in Path(unfinished).iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield unfinished
            os.rename(unfinished, out)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    disk.sync_directory(os.path.dirname(out))


def sync_all(directory: str) -> None:
    """Sync all files, including files that executors wrote, and all directories, so that they survive a power loss."""
    for path, _, names in os.walk(directory):
        for name in [*names, ""]:
            descriptor = os.open(os.path.join(path, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@dataclass
class _Job:
    """One restore. Inside `prepared` the ordered state is kept on the disks of executors."""

    spark: SparkSession
    index: ArchiveIndex
    position: VClock
    transport: Transport
    tell: Tell
    plans: Plans = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _frame: DataFrame | None = None
    _counts: dict[tuple[int, int], int] = field(default_factory=dict)  # rows by partition and space
    _kept: list[DataFrame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.snapshot = self.index.snapshot_at(self.position)
        with LogFile.open(self.index.disk, self.snapshot.path) as log:
            self.meta = log.meta

    @contextmanager
    def prepared(self, as_snapshot: bool) -> Iterator[None]:
        from pyspark.sql import functions

        self.tell("reading definitions")
        self.plans = state_plans(self.spark, self.index, self.snapshot, self.position, transport=self.transport)
        if as_snapshot:
            _refuse_vinyl([plan.space for plan in self.plans.values()])
        self.tell("rebuilding the state")
        ordered = state_frame(
            self.spark, self.index, self.position, transport=self.transport, is_ordered=True, plans=self.plans
        )
        self._frame = self._keep(ordered)
        try:
            partition = functions.spark_partition_id().alias("partition")
            counts = rows_of(self._frame.groupBy(partition, "space_id").count())
            self._counts = {(row["partition"], row["space_id"]): row["count"] for row in counts}
            yield
        finally:
            for frame in self._kept:
                frame.unpersist()

    def _keep(self, frame: DataFrame) -> DataFrame:
        """Keep a computed frame on the disks of executors until the job ends."""
        from pyspark import StorageLevel

        self._kept.append(frame.persist(StorageLevel.DISK_ONLY))
        return self._kept[-1]

    @property
    def frame(self) -> DataFrame:
        assert self._frame is not None
        return self._frame

    def spaces(self) -> tuple[RestoredSpace, ...]:
        totals: dict[int, int] = {}
        for (_, space_id), count in self._counts.items():
            totals[space_id] = totals.get(space_id, 0) + count
        return tuple(
            RestoredSpace(space_id, plan.space.name, totals.get(space_id, 0))
            for space_id, plan in self.plans.items()
            if space_id >= FIRST_USER_SPACE_ID or totals.get(space_id)
        )

    def write(self, format: Format, directory: str) -> str:
        self.index.disk.make_directory(directory)
        if format == "snap":
            return self._write_snapshot(directory)
        return self._write_delta(directory) if format == "delta" else self._write_parquet(directory)

    # --- a snapshot ---

    def _write_snapshot(self, directory: str) -> str:
        from pyspark.sql import functions

        dialect = from_greeting(_release(self.meta.version))
        self._note_synchronous()
        timestamp = self.index.time_at(self.position) / MICROSECONDS
        meta = Meta(FileType.SNAP, self.meta.instance_uuid, self.position.to_mapping(), version=self.meta.version)
        self.tell("writing system spaces")
        states = None
        if dialect is not Dialect.V2_6:
            states = states_at(self.spark, self.index, self.snapshot, self.position, transport=self.transport)
        system = self._system_rows()
        with SnapWriter(self.index.disk, directory, meta, timestamp) as writer:
            for space_id, tuples in system.items():
                writer.add_tuples(space_id, tuples, self._group_id(space_id))
            _add_states(writer, dialect, states)
            self.tell("encoding")
            local = frozenset(space_id for space_id in self.plans if self._group_id(space_id))
            encode = partial(encode_partition, self._offsets(writer.row_count), local, timestamp)
            users = self.frame.filter(functions.col("space_id") >= FIRST_USER_SPACE_ID)
            encoded = self._keep(users.mapInArrow(encode, spark_ddl(BLOCKS)))
            encoded.count()  # all executors encode in parallel; the loop below fetches partitions one by one
            self.tell("writing the snapshot")
            expected = writer.row_count + sum(count for (_, space), count in self._counts.items() if _is_users(space))
            for row in encoded.toLocalIterator(prefetchPartitions=True):
                writer.add_blocks(bytes(row["blocks"]), row["row_count"])
            if writer.row_count != expected:
                raise AssertionError(f"{writer.row_count} of {expected} rows were encoded")
        return writer.path

    def _note_synchronous(self) -> None:
        names = [space.name for space in self.spaces() if space.row_count and self.plans[space.id].space.is_sync]
        self.notes += _synchronous_notes(names, self.meta.version)

    def _group_id(self, space_id: int) -> int:
        return GROUP_LOCAL if self.plans[space_id].space.is_local else 0

    def _offsets(self, first: int) -> dict[int, int]:
        """Return the row number at which the user rows of each partition start."""
        counts: dict[int, int] = {}
        for (partition, space_id), count in self._counts.items():
            if _is_users(space_id):
                counts[partition] = counts.get(partition, 0) + count
        offsets = {}
        for partition in sorted(counts):
            offsets[partition] = first
            first += counts[partition]
        return offsets

    def _system_rows(self) -> dict[int, list[bytes]]:
        """Return the tuples of system spaces by space. They are few enough for the driver."""
        from pyspark.sql import functions

        rows = self.frame.filter(functions.col("space_id") < FIRST_USER_SPACE_ID).toArrow()
        found: dict[int, list[bytes]] = {}
        for row in rows.sort_by([("space_id", "ascending"), ("sort_key", "ascending")]).to_pylist():
            found.setdefault(row["space_id"], []).append(row["tuple"])
        sequences, logged = (
            [unpack(raw) for raw in found.get(space_id, ())] for space_id in (SEQUENCE_ID, SEQUENCE_DATA_ID)
        )
        if sequences:
            numbers = sequence_rows(
                self.spark, self.index, self.snapshot, self.position, sequences, logged, transport=self.transport
            )
            found[SEQUENCE_DATA_ID] = [pack(row) for row in numbers]
        return dict(sorted(found.items()))

    # --- tables ---

    def _users_spaces(self) -> list[SpaceDefinition]:
        return [plan.space for space_id, plan in self.plans.items() if _is_users(space_id)]

    def _write_delta(self, directory: str) -> str:
        from flowstone.lake.table import Moment
        from flowstone.spark.lake import Lake

        self.tell("writing Delta tables")
        moment = Moment(
            self.position.signature, datetime.fromtimestamp(self.index.time_at(self.position) / MICROSECONDS, UTC)
        )
        lake = Lake.open(directory, spark=self.spark)
        lake.load(self.frame, self._users_spaces(), self.index.replicaset_uuid, self.position, moment=moment)
        return directory

    def _write_parquet(self, directory: str) -> str:
        from pyspark.sql import functions

        from flowstone.spark.lake import directory_of

        for space in self._users_spaces():
            self.tell(f"writing {space.name} as Parquet")
            contract = StateContract(self.index.replicaset_uuid, space)
            rows = self.frame.filter(functions.col("space_id") == space.id)
            path = Path(directory, directory_of(space.name)).as_uri()
            rows.mapInArrow(partial(typed_rows, contract), contract.spark_schema).write.parquet(path)
        return directory


def _synchronous_notes(names: Sequence[str], version: str) -> list[str]:
    """Return a note about the synchronous spaces `names` that have tuples, if the server cannot start from them."""
    if not names or _release(version) > STOPS_AT_SYNCHRONOUS:
        return []
    cannot = f"Tarantool {'.'.join(map(str, STOPS_AT_SYNCHRONOUS))} cannot start from a snapshot, not even its own"
    return [f"{', '.join(names)}: {cannot}, with tuples of synchronous spaces; newer versions can"]


def _refuse_vinyl(spaces: Iterable[SpaceDefinition]) -> None:
    names = [space.name for space in spaces if space.engine == "vinyl"]
    if names:
        raise VinylSpaces(
            f"cannot restore spaces {', '.join(names)} to a snapshot: a snapshot cannot contain vinyl data, "
            "and a server could not start from it",
            hint="use --format delta or parquet, which support vinyl",
        )


def _add_states(writer: SnapWriter, dialect: Dialect, states: SynchroStates | None) -> None:
    """Write the Raft and synchronous queue rows, which belong between system spaces and user spaces."""
    if states is None:
        return
    for kind in dialect.snapshot_states:
        if kind is RequestType.RAFT:
            writer.add_row(kind, states.raft.encode(), GROUP_LOCAL)
        else:
            writer.add_row(kind, states.queue.encode())


def _release(version: str) -> tuple[int, int, int]:
    major, minor, patch = (*version_of(version), 0, 0, 0)[:3]
    return major, minor, patch


def _is_users(space_id: int) -> bool:
    return space_id >= FIRST_USER_SPACE_ID


# --- encoding, in executors ---------------------------------------------------------------------------------------


def encode_partition(
    offsets: dict[int, int], local: frozenset[int], timestamp: float, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Encode the ordered tuples (STATE) of a partition as snapshot blocks. `offsets` has the first row numbers."""
    from pyspark import TaskContext

    with clear_errors():
        context = TaskContext.get()
        assert context is not None
        yield from encode_tuples(offsets.get(context.partitionId(), 0), local, timestamp, batches)


def encode_tuples(
    number: int, local: frozenset[int], timestamp: float, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Encode ordered tuples (STATE) as snapshot blocks, with rows numbered from `number`."""
    compressor = new_compressor()
    rows: list[bytes] = []
    blocks: list[bytes] = []
    size = count = 0  # bytes of rows not in a block yet; number of rows not yielded yet

    def close_block() -> None:
        nonlocal size
        blocks.extend(encode_block(rows, compressor))
        rows.clear()
        size = 0

    for space_id, tuples in _by_space(batches):
        for buf, offsets in _pieces(tuples):
            group_id = GROUP_LOCAL if space_id in local else 0
            rows.append(tuple_rows(buf, offsets, space_id, group_id=group_id, number=number, timestamp=timestamp))
            number += len(offsets) - 1
            count += len(offsets) - 1
            size += len(rows[-1])
            if size >= FLUSH_THRESHOLD - FIXHEADER_SIZE:
                close_block()
                if sum(map(len, blocks)) >= BLOCKS_SIZE:
                    yield pa.record_batch([[b"".join(blocks)], [count]], schema=BLOCKS)
                    blocks, count = [], 0
    if rows:
        close_block()
    if blocks:
        yield pa.record_batch([[b"".join(blocks)], [count]], schema=BLOCKS)


def _by_space(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.Array]]:
    for batch in batches:
        space_ids = batch["space_id"].to_numpy()
        edges = [0, *(np.flatnonzero(np.diff(space_ids)) + 1).tolist(), len(space_ids)]
        for start, stop in pairwise(edges):
            if start < stop:
                yield int(space_ids[start]), batch["tuple"].slice(start, stop - start)


def _pieces(tuples: pa.Array) -> Iterator[tuple[Any, Any]]:
    """Yield the bytes and offsets of groups of tuples, each about the size of a block."""
    wide = tuples.cast(pa.large_binary())
    _, offset_buffer, data = wide.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64, len(wide) + 1, 8 * wide.offset)
    buf = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    sizes = offsets - offsets[0] + ROW_SIZE * np.arange(len(offsets))
    start = 0
    while start < len(wide):
        stop = int(np.searchsorted(sizes, sizes[start] + FLUSH_THRESHOLD))
        stop = min(max(stop, start + 1), len(wide))
        yield buf, offsets[start : stop + 1]
        start = stop


def typed_rows(contract: StateContract, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with clear_errors():
        for batch in batches:
            if batch.num_rows:
                yield contract.of_tuples(batch[STATE.get_field_index("tuple")])
