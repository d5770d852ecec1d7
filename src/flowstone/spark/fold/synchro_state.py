"""The state of elections and of the synchronous queue at a settled moment of a log.

Snapshots of servers since 2.6.1 keep this state in two rows besides the tuples. It is rebuilt from the snapshot before
the moment and the control rows after it, which executors find in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.columns.change_contract import spark_ddl
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row
from flowstone.node.wal.checkpoint import SynchroStates
from flowstone.node.wal.replay import Synchro
from flowstone.outside import production
from flowstone.outside.disk import Disk
from flowstone.replication.limbo.control_rows import Confirm, RaftState, decode_control
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.change_frames import slice_size
from flowstone.spark.index.log_index import ArchiveIndex, Slice
from flowstone.spark.index.log_runs import SnapshotFile
from flowstone.spark.index.slice_bytes import Transport, open_slice, with_transport
from flowstone.spark.sources.stream_order import BatchWindow, rows_between, stamp
from flowstone.spark.worker_errors import clear_errors
from flowstone.xlog.reader import LogFile
from flowstone.xlog.transactions import CONTROL_TYPES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONTROL: Final = pa.schema(
    [
        pa.field("version", pa.int64(), nullable=False),
        pa.field("lsn", pa.int64(), nullable=False),
        pa.field("replica_id", pa.int32(), nullable=False),
        pa.field("type", pa.int32(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
    ]
)

_TYPES: Final = np.array(sorted(CONTROL_TYPES), np.int64)


def states_at(
    spark: SparkSession,
    index: ArchiveIndex,
    snapshot: SnapshotFile,
    position: VClock,
    *,
    transport: Transport = "file",
) -> SynchroStates:
    """Return the term, the vote and the owner of the queue, as a snapshot at `position` would have them."""
    synchro = Synchro()
    for row in rows_of_snapshot(index.disk, snapshot.path):
        synchro.follow(row, in_snapshot=True)
    size = slice_size(spark, index.size_between(snapshot.vclock, position))
    slices = index.slices(snapshot.vclock, position, size=size)
    if slices:
        slices = with_transport(slices, transport)
        schema = pa.schema([pa.field("number", pa.int32(), nullable=False)])
        numbers = [pa.record_batch([pa.array([number], pa.int32())], schema=schema) for number in range(len(slices))]
        frame = spark.createDataFrame(pa.Table.from_batches(numbers, schema))

        def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with clear_errors():
                for batch in batches:
                    for number in batch.column(0).to_pylist():
                        yield from control_rows(production().disk, slices[number], snapshot.vclock, position)

        found = frame.mapInArrow(read, spark_ddl(CONTROL)).toArrow()
        for row in found.sort_by([("version", "ascending"), ("lsn", "ascending")]).to_pylist():
            synchro.follow(Row(row["type"], row["replica_id"], lsn=row["lsn"], body=row["body"]))
    # A PROMOTE implies its term, even if the log has no Raft row for this term.
    raft = synchro.raft
    if synchro.term > raft.term:
        raft = RaftState(term=synchro.term)
    return SynchroStates(raft, synchro.promote())


def rows_of_snapshot(disk: Disk, path: str) -> Iterator[Row]:
    """Yield the control rows of a snapshot, which precede the first user space."""
    with LogFile.open(disk, path) as log:
        for slab in log.slabs():
            yield from slab.rows(np.flatnonzero(np.isin(slab.cells[scan.TYPE], _TYPES)))
            if (slab.cells[scan.SPACE_ID] >= FIRST_USER_SPACE_ID).any():
                return


def control_rows(disk: Disk, part: Slice, start: VClock, end: VClock) -> Iterator[pa.RecordBatch]:
    """Yield the control rows of a slice. Of the CONFIRM rows in a slab only the last one of each owner is kept."""
    place = part.before
    with open_slice(disk, part) as log:
        for slab in log.slabs(part.offset, part.end):
            stamps, place = stamp(slab.cells, place, part.path)
            is_control = np.isin(slab.cells[scan.TYPE], _TYPES)
            if not is_control.any():
                continue
            rows = np.flatnonzero(is_control & rows_between(slab.cells, BatchWindow(start, end, ())))
            kept: dict[object, tuple[int, Row]] = {}
            for number, row in zip(rows.tolist(), slab.rows(rows), strict=True):
                verdict = decode_control(row.type, row.body) if row.type == RequestType.RAFT_CONFIRM else None
                kept[verdict.owner_id if isinstance(verdict, Confirm) else ("row", number)] = number, row
            if kept:
                yield _batch([(int(stamps.versions[number]), row) for number, row in kept.values()])


def _batch(rows: list[tuple[int, Row]]) -> pa.RecordBatch:
    columns = [
        [version for version, _ in rows],
        [row.lsn for _, row in rows],
        [row.replica_id for _, row in rows],
        [int(row.type) for _, row in rows],
        [row.body for _, row in rows],
    ]
    return pa.record_batch(
        [pa.array(column, each.type) for column, each in zip(columns, CONTROL, strict=True)], schema=CONTROL
    )
