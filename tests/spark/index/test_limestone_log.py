"""A Limestone directory as the log of a mirror: positions, batches that end at compaction, lost data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowstone.limestone.format.entries import put
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.limestone_log import LimestoneLog
from flowstone.spark.index.limestone_spaces import position_of, space_id_of
from flowstone.spark.index.log_index import DataLoss
from tests.spark.limestone_directories import UUID, WrittenDirectory, clear, version


@pytest.fixture
def directory(tmp_path: Path) -> WrittenDirectory:
    directory = WrittenDirectory(tmp_path / "d")
    for epoch in range(1, 7):
        directory.session(0, epoch, *(put(epoch, b"%d" % key, b"", version(epoch)) for key in range(5)))
    directory.durable(6)
    return directory


def end_of(log: LimestoneLog, start: VClock) -> VClock:
    return log.plan(start, max_rows=1000, max_bytes=1 << 20).end


def test_positions_are_epochs(directory: WrittenDirectory) -> None:
    log = LimestoneLog.open(production().disk, directory.path)
    assert (log.settled, log.earliest, log.replicaset_uuid) == (position_of(6), position_of(0), UUID)
    assert [each.vclock for each in log.snapshots] == [position_of(6)]
    plan = log.plan(position_of(0), max_rows=12, max_bytes=1 << 20)
    assert (plan.start, plan.end, plan.row_count) == (position_of(0), position_of(2), 10)
    names = [space.name for space in log.schema_at(position_of(3)).schema if space.id >= 512]
    assert names == ["storage_1", "storage_2", "storage_3"]
    directory.session(0, 7, clear(2, 7), put(9, b"new", b"", version(7)))
    directory.durable(7)
    log.refresh()
    assert log.emptied(position_of(6), position_of(7)) == {space_id_of(2)}
    assert log.emptied(position_of(5), position_of(6)) == set()
    assert log.time_at(log.settled) == log.time_of(log.snapshots[0]) == 0


def test_batch_ends_at_the_end_of_a_compaction(directory: WrittenDirectory) -> None:
    detached = directory.rotate(0)
    directory.compact(detached, epoch=6)
    directory.session(0, 7, put(9, b"new", b"", version(7)))
    directory.durable(7)
    log = LimestoneLog.open(production().disk, directory.path)
    assert end_of(log, position_of(3)) == position_of(6)
    assert end_of(log, position_of(6)) == position_of(7)
    os.unlink(f"{directory.path}/{detached}")
    log.refresh()
    with pytest.raises(DataLoss, match="changes after epoch 3 were removed by compaction"):
        end_of(log, position_of(3))
    assert end_of(log, position_of(6)) == position_of(7)
