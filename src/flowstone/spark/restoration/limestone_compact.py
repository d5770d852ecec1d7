"""The rows of a Limestone directory as a compacted file, sorted by Spark: for directories too large for one machine.

Executors read pieces of the log, a shuffle by key ranges brings the entries of a key together in file order, and each
task writes its range; the driver concatenates the ranges. The file is byte for byte the one that
`limestone/store/compaction.py` writes in a single process.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flowstone.columns.arrow_columns import span_column
from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import copying
from flowstone.limestone.format.entries import EntryType, Marker, encode
from flowstone.limestone.format.entry_table import AT, END, KEY_AT, KEY_END, TYPE, Bytes
from flowstone.limestone.store.compaction import CompactedContent, Writer
from flowstone.limestone.store.winner_kernels import zero_versions
from flowstone.outside import production
from flowstone.outside.disk import Disk
from flowstone.spark.collect import rows_of
from flowstone.spark.fold.limestone_fold import partitions, slice_size, work_frame
from flowstone.spark.index.limestone_index import LimestoneIndex, PieceSlice
from flowstone.spark.index.limestone_pieces import Version
from flowstone.spark.index.limestone_walk import EntryChunk
from flowstone.spark.sources.limestone.entry_columns import newest, place_column
from flowstone.spark.sources.limestone.entry_reader import Rows, chunks_of, counted, points, surviving
from flowstone.spark.worker_errors import clear_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENTRIES_DDL: Final = "sort BINARY, place BINARY, entry BINARY"
"""`sort` is the storage and the key in file order; `entry` has the bytes of a put, and is null for a remove."""

RANGES_DDL: Final = "number INT, path STRING, storages MAP<BIGINT, BIGINT>, blob_ids ARRAY<BIGINT>"
_RANGES: Final = pa.schema(
    [
        pa.field("number", pa.int32()),
        pa.field("path", pa.string()),
        pa.field("storages", pa.map_(pa.int64(), pa.int64())),
        pa.field("blob_ids", pa.list_(pa.int64())),
    ]
)
_STORAGE_SIZE: Final = 8


@dataclass(frozen=True)
class SortedRows:
    """The written rows: their number by storage, and the blobs that they reference."""

    rows: dict[int, int] = field(default_factory=dict)
    blob_ids: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        return sum(self.rows.values())


def writer(spark: SparkSession) -> Writer:
    """Return the `write` argument of `compact_offline` and `execute`."""

    def write(disk: Disk, directory: str, inputs: Sequence[str], epoch: int, path: str) -> CompactedContent:
        index = LimestoneIndex.open(disk, directory, durable=epoch)
        if index.input_names(epoch) != sorted(inputs):
            raise LimestoneError(
                f"log files of {directory} changed during compaction",
                hint="stop other processes that write to the directory",
            )
        found = write_sorted(spark, index, epoch, path)
        return CompactedContent(found.count, index.max_blob_id, found.blob_ids)

    return write


def write_sorted(spark: SparkSession, index: LimestoneIndex, epoch: int, path: str) -> SortedRows:
    """Write the state at an epoch durably, as a compacted file at a new path.

    Executors write beside this path. They need access to both that location and the data directory.
    """
    size = slice_size(spark, sum(part.size for part in index.state_slices(epoch)))
    slices = index.state_slices(epoch, size=size)
    clears = index.clears(epoch, with_detached=epoch < index.horizon)
    frame = work_frame(spark, len(slices), _Reading(slices, clears, epoch), ENTRIES_DDL)
    count = partitions(spark, sum(part.size for part in slices))
    beside = f"{path}.{uuid.uuid4().hex}"
    try:
        ranges = rows_of(frame.repartitionByRange(count, "sort").mapInArrow(_Sorting(beside), RANGES_DDL))
        return _put_together(index.disk, path, sorted(ranges, key=lambda each: int(each["number"])))
    finally:
        directory, name = os.path.split(beside)
        for each in os.listdir(directory):
            if each.startswith(name):
                os.unlink(os.path.join(directory, each))


def _put_together(disk: Disk, path: str, ranges: Sequence[dict[str, Any]]) -> SortedRows:
    rows: dict[int, int] = {}
    blob_ids: set[int] = set()
    with disk.create(path) as file:
        file.append(encode(Marker(EntryType.MARKER_BEGIN, 0)))
        for each in ranges:
            with disk.open(each["path"]) as part:
                copying.copy_range(part, file, 0, part.size())
            for storage_id, count in each["storages"]:
                unsigned = storage_id % (1 << 64)
                rows[unsigned] = rows.get(unsigned, 0) + count
            blob_ids.update(blob_id % (1 << 64) for blob_id in each["blob_ids"])
        file.sync()
    return SortedRows(rows, frozenset(blob_ids))


# --- executor functions -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """Reads the entries of a slice, by its number."""

    slices: Sequence[PieceSlice]
    clears: Mapping[int, Version]
    epoch: int

    def __call__(self, number: int) -> Iterator[pa.RecordBatch]:
        part = self.slices[number]
        for chunk in chunks_of(production().disk, part):
            rows = points(chunk, counted(chunk, -1, min(self.epoch, part.limit)))
            rows = surviving(chunk, rows, self.clears, is_compacted=part.is_compacted)
            if len(rows):
                yield entry_batch(chunk, rows, part)


def entry_batch(chunk: EntryChunk, rows: Rows, part: PieceSlice) -> pa.RecordBatch:
    """Return entries with their sort columns.

    In an entry, the storage id directly precedes the key, so both together are the sort order.
    """
    lines = {line: chunk.table[line, rows].astype(np.int64) for line in (AT, END, KEY_AT, KEY_END)}
    is_gone = chunk.table[TYPE, rows] == np.uint64(EntryType.REMOVE)
    columns = [
        span_column(chunk.buf, lines[KEY_AT] - _STORAGE_SIZE, lines[KEY_END]),
        place_column(chunk, rows, part.number, is_compacted=part.is_compacted),
        span_column(chunk.buf, np.where(is_gone, -1, lines[AT]), lines[END]),
    ]
    return pa.RecordBatch.from_arrays(columns, names=["sort", "place", "entry"])


@dataclass(frozen=True)
class _Sorting:
    """Writes the surviving rows of a key range to a file, in order; writes nothing if none survive."""

    path: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        with clear_errors():
            context = TaskContext.get()
            assert context is not None
            found = winners(batches)
            if not found.num_rows:
                return
            # A retried task writes another file: its first attempt may still be writing.
            path = f"{self.path}.{context.partitionId()}.{context.taskAttemptId()}"
            data, offsets = rows_in_order(found)
            with production().disk.create(path) as file:
                file.append(data.data)
            row = {
                "number": context.partitionId(),
                "path": path,
                "storages": list(_storages(found).items()),
                "blob_ids": blob_ids_in(data, offsets).view(np.int64).tolist(),
            }
            yield pa.RecordBatch.from_pylist([row], schema=_RANGES)


def winners(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """Return the surviving rows of entries, in file order."""
    schema = pa.schema([pa.field(name, pa.binary()) for name in ("sort", "place", "entry")])
    whole = pa.Table.from_batches([batch.cast(schema) for batch in batches], schema).combine_chunks()
    found = newest(whole, ("sort",))
    found = found.filter(found["entry"].is_valid())
    return found.take(pc.sort_indices(found["sort"])).combine_chunks()


def rows_in_order(found: pa.Table) -> tuple[Bytes, Rows]:
    """Return the bytes of the rows with zeroed versions, and their start offsets followed by the end."""
    column = found["entry"].combine_chunks()
    _, edges, buffer = column.buffers()
    offsets = np.frombuffer(edges, np.int32, len(column) + 1, 4 * column.offset).astype(np.int64)
    data = np.frombuffer(buffer, np.uint8)[offsets[0] : offsets[-1]].copy()
    offsets -= offsets[0]
    zero_versions(data, offsets[:-1], _numbers(data, offsets[:-1] + 1))
    return data, offsets


def _numbers(data: Bytes, places: Rows) -> Rows:
    """Return the 4-byte little-endian numbers at `places`."""
    found: Rows = np.zeros(len(places), np.int64)
    for place in range(4):
        found |= data[places + place].astype(np.int64) << (8 * place)
    return found


def _storages(found: pa.Table) -> dict[int, int]:
    counts = pc.binary_slice(found["sort"].combine_chunks(), 0, _STORAGE_SIZE).value_counts()
    return {int.from_bytes(each["values"].as_py(), "little", signed=True): each["counts"].as_py() for each in counts}


def blob_ids_in(data: Bytes, offsets: Rows) -> NDArray[np.uint64]:
    """Return the ids of the blobs that puts reference."""
    starts, ends = offsets[:-1], offsets[1:]
    chosen = data[starts] == EntryType.NORMAL_WITH_BLOB
    starts, ends = starts[chosen], ends[chosen]
    if not len(starts):
        return np.zeros(0, np.uint64)
    # Layout: type, two lengths, storage, key, version, value, number of blobs, blob ids.
    first = starts + 37 + _numbers(data, starts + 1) + _numbers(data, starts + 5)
    raw = span_column(data, first, ends)
    return np.frombuffer(raw.buffers()[2], np.uint64) if raw.nbytes else np.zeros(0, np.uint64)
