"""Elections and the synchronous queue at a moment, as in a snapshot."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.row import Row
from flowstone.outside.disk import SystemDisk
from flowstone.replication.limbo.control_rows import Promote, RaftState
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.synchro_state import control_rows, rows_of_snapshot, states_at
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.writer import SnapWriter
from tests.node.archived_rows import INSTANCE, confirm, transaction
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import insert, whole

WAITS = 0x06


def promote(lsn: int, term: int, *, origin: int, former: int = 0, confirmed: int = 0) -> bytes:
    body = Promote(former, confirmed, term).encode()
    return transaction([Row(RequestType.RAFT_PROMOTE, origin, lsn=lsn, timestamp=100.0 + lsn, body=body)])


def written(directory: Path) -> ArchiveIndex:
    archive = WrittenArchive(SystemDisk(), str(directory))
    archive.define_orders()
    archive.write(promote(3, 2, origin=1))
    archive.write(
        whole(insert(4, 1, "a"), flags=WAITS), confirm(5, 4), whole(insert(6, 2, "b"), flags=WAITS), confirm(7, 6)
    )
    archive.write(promote(1, 3, origin=2, former=1, confirmed=6))
    archive.save()
    return ArchiveIndex.open(SystemDisk(), str(directory))


def test_queue_state_follows_confirmations_and_promotions(spark: SparkSession, tmp_path: Path) -> None:
    index = written(tmp_path / "archive")
    (snapshot,) = index.snapshots
    expected = {
        VClock({1: 2}): (1, Promote(0, 0, 0, VClock())),
        VClock({1: 5}): (2, Promote(1, 4, 2, VClock({1: 4}))),
        index.settled: (3, Promote(2, 0, 3, VClock({1: 6}))),
    }
    for position, (term, queue) in expected.items():
        states = states_at(spark, index, snapshot, position)
        assert (states.raft, states.queue) == (RaftState(term=term), queue)


def test_control_rows_keep_the_last_confirmation(tmp_path: Path) -> None:
    index = written(tmp_path / "archive")
    (snapshot,) = index.snapshots
    (part,) = index.slices(snapshot.vclock, index.settled)
    found = pa.Table.from_batches(control_rows(SystemDisk(), part, snapshot.vclock, index.settled))
    kinds = {(row["version"], row["lsn"]): row["type"] for row in found.to_pylist()}
    assert kinds[3, 3] == RequestType.RAFT_PROMOTE
    assert kinds[7, 7] == RequestType.RAFT_CONFIRM
    assert kinds[8, 1] == RequestType.RAFT_PROMOTE
    before = pa.Table.from_batches(control_rows(SystemDisk(), part, snapshot.vclock, VClock({1: 3})))
    assert before["lsn"].to_pylist() == [3]


def test_rows_of_a_snapshot_without_tuples_are_found(tmp_path: Path) -> None:
    meta = Meta(FileType.SNAP, INSTANCE, {1: 5}, version="2.11.9")
    with SnapWriter(SystemDisk(), str(tmp_path), meta, 1.0) as writer:
        writer.add_tuples(280, [b"\x91\x01"])
        writer.add_row(RequestType.RAFT, RaftState(term=7, vote=2).encode(), GROUP_LOCAL)
        writer.add_row(RequestType.RAFT_PROMOTE, Promote(2, 5, 7, VClock({2: 5})).encode())
        writer.add_tuples(512, [b"\x91\x01"])
    assert [row.type for row in rows_of_snapshot(SystemDisk(), writer.path)] == [30, 31]
