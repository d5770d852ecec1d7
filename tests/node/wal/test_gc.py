"""Garbage collection deletes files that no replica needs, and keeps the others."""

from __future__ import annotations

import uuid

import pytest

from flowstone.iproto import errors
from flowstone.node.wal.gc import GarbageCollector
from flowstone.replication.vclock import VClock
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.writer import LogWriter, SnapWriter
from tests.node.fault_disk import FaultDisk

UUID = "11111111-0000-4000-8000-000000000001"


def directory(snapshots: list[int], logs: list[int]) -> FaultDisk:
    """Files of instance 1 at these LSNs."""
    disk = FaultDisk()
    door = disk.outside().disk
    for lsn in snapshots:
        SnapWriter(door, "data", Meta(FileType.SNAP, UUID, {1: lsn}), 1.0).finish()
    for lsn in logs:
        LogWriter.create(door, "data", Meta(FileType.XLOG, UUID, {1: lsn})).close()
    return disk


def collector(disk: FaultDisk, count: int = 2) -> GarbageCollector:
    return GarbageCollector(disk.outside(), "data", "data", checkpoint_count=count)


def left(disk: FaultDisk) -> tuple[list[int], list[int]]:
    names = disk.list_directory("data")
    snapshots = [int(name[:20]) for name in names if name.endswith(".snap")]
    return snapshots, [int(name[:20]) for name in names if name.endswith(".xlog")]


async def test_gc_keeps_checkpoint_count_snapshots_and_the_logs_after_them() -> None:
    disk = directory([0, 10, 20, 30], [0, 5, 10, 15, 20, 25, 30])
    gc = collector(disk)
    assert gc.vclock == VClock()
    await gc.collect()
    assert left(disk) == ([20, 30], [20, 25, 30])
    assert gc.vclock == VClock({1: 20})
    gc.checkpoint_count = 1
    await gc.collect()
    assert left(disk) == ([30], [30])


async def test_log_with_the_position_of_a_checkpoint_is_kept() -> None:
    disk = directory([0, 12, 30], [0, 10, 20])
    await collector(disk).collect()
    assert left(disk) == ([12, 30], [10, 20])


async def test_the_last_checkpoint_and_the_last_log_are_never_deleted() -> None:
    disk = directory([0], [0])
    await collector(disk, 1).collect()
    assert left(disk) == ([0], [0])


async def test_new_checkpoint_replaces_the_oldest() -> None:
    disk = directory([0, 10], [0, 10])
    gc = collector(disk)
    SnapWriter(disk.outside().disk, "data", Meta(FileType.SNAP, UUID, {1: 20}), 1.0).finish()
    gc.add_checkpoint(VClock({1: 20}))
    gc.add_checkpoint(VClock({1: 20}))
    await gc.collect()
    assert left(disk) == ([10, 20], [10])


async def test_a_backup_keeps_its_checkpoint_and_all_after_it() -> None:
    disk = directory([0, 10, 20, 30], [0, 10, 20, 30])
    gc = collector(disk, 4)
    assert gc.start_backup(2) == [f"data/{10:020}.snap"]
    gc.checkpoint_count = 1
    await gc.collect()
    assert left(disk) == ([10, 20, 30], [10, 20, 30])
    with pytest.raises(errors.TarantoolError, match="Backup is already in progress") as caught:
        gc.start_backup()
    assert caught.value.code == 129
    gc.stop_backup()
    gc.stop_backup()
    await gc.collect()
    assert left(disk) == ([30], [30])
    assert gc.start_backup() == [f"data/{30:020}.snap"]


def test_backup_of_a_missing_checkpoint_is_rejected() -> None:
    with pytest.raises(errors.TarantoolError, match="Can't find snapshot") as caught:
        collector(directory([0], [])).start_backup(1)
    assert caught.value.code == 93


async def test_logs_are_kept_for_the_slowest_consumer() -> None:
    disk = directory([0, 30, 40], [0, 10, 20, 30, 40])
    gc = collector(disk)
    slow = gc.add_consumer("replica 2", VClock({1: 15}))
    fast = gc.add_consumer("replica 3", VClock({1: 45}))
    await gc.collect()
    assert left(disk) == ([30, 40], [10, 20, 30, 40])
    slow.vclock = VClock({1: 40})
    await gc.collect()
    assert left(disk) == ([30, 40], [30, 40])
    gc.remove_consumer(slow)
    gc.remove_consumer(slow)
    assert gc.consumers == [fast]


async def test_logs_are_not_kept_for_a_consumer_that_lacks_only_local_rows() -> None:
    disk = FaultDisk()
    door = disk.outside().disk
    SnapWriter(door, "data", Meta(FileType.SNAP, UUID, {0: 5, 1: 5}), 1.0).finish()
    for vclock in ({}, {0: 5, 1: 5}):
        LogWriter.create(door, "data", Meta(FileType.XLOG, UUID, vclock)).close()
    gc = collector(disk)
    gc.add_consumer("replica 2", VClock({1: 9}))
    await gc.collect()
    assert left(disk) == ([10], [10])


async def test_failed_deletion_is_reported_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    disk = directory([0, 10, 20], [0, 10, 20])
    gc = collector(disk)
    disk.broken.add("unlink")
    await gc.collect()
    assert "cannot delete" in caplog.text
    disk.broken.clear()
    await gc.collect()
    assert left(disk) == ([10, 20], [10, 20])


async def test_info_equals_box_info_gc() -> None:
    gc = collector(directory([0, 10], [0, 10]))
    gc.add_consumer("replica 2", VClock({1: 4}))
    gc.start_backup(1)
    assert gc.info() == {
        "is_paused": False,
        "vclock": {},
        "signature": 0,
        "checkpoints": [
            {"references": ["backup"], "vclock": {}, "signature": 0},
            {"references": [], "vclock": {1: 10}, "signature": 10},
        ],
        "consumers": [{"name": "replica 2", "vclock": {1: 4}, "signature": 4}],
    }


async def test_logs_kept_for_one_consumer_are_deleted_when_it_advances() -> None:
    disk = directory([10, 20, 30], [0, 5, 10, 15, 20, 25, 30])
    gc = collector(disk, count=1)
    slow, slower = gc.add_consumer("slow", VClock({1: 12})), gc.add_consumer("slower", VClock({1: 7, 2: 9}))
    await gc.collect()
    assert left(disk)[1] == [5, 10, 15, 20, 25, 30]
    gc.advance(slow, VClock({1: 29}))
    assert gc._collection is None, "the other consumer still needs them"
    gc.advance(slower, VClock({1: 16, 2: 9}))
    assert gc._collection is not None
    await gc._collection
    assert left(disk)[1] == [15, 20, 25, 30]


async def test_gc_deletes_nothing_while_waiting_for_members() -> None:
    disk = directory([10, 20, 30], [10, 20, 30])
    gc = collector(disk, count=1)
    members = [uuid.UUID(int=1), uuid.UUID(int=2)]
    gc.pause(members)
    await gc.collect()
    gc.came_back(members[0])
    gc.came_back(uuid.UUID(int=3))
    assert gc.is_paused
    assert left(disk) == ([10, 20, 30], [10, 20, 30])
    gc.came_back(members[1])
    assert gc._collection is not None
    await gc._collection
    assert left(disk) == ([30], [30])


async def test_wait_for_members_is_limited() -> None:
    disk = directory([10, 20, 30], [10, 20, 30])
    gc = collector(disk, count=1)
    gc.pause([uuid.UUID(int=1)])
    gc.resume()
    assert gc._collection is not None
    await gc._collection
    assert left(disk) == ([30], [30])


async def test_releasing_many_logs_costs_one_listing_and_one_header_each() -> None:
    """Otherwise catching up over many logs is quadratic: each ACK at the end of a log starts a collection."""
    count = 100
    disk = directory([1000], list(range(0, 10 * count, 10)))
    gc = collector(disk, 1)
    consumer = gc.add_consumer("replica", VClock({1: 0}))
    await gc.collect()
    listings, opened = disk.count("list_directory"), disk.count("open")
    for lsn in range(10, 10 * count, 10):
        gc.advance(consumer, VClock({1: lsn}))
        await gc.close()
        assert gc.vclock == VClock({1: lsn})
    assert left(disk) == ([1000], [990])
    assert disk.count("list_directory") - listings <= 3
    assert disk.count("open") - opened <= 2 * count


async def test_log_that_could_not_be_deleted_is_deleted_by_the_next_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = directory([0, 20], [0, 10, 20, 30])
    gc = collector(disk, 1)
    with monkeypatch.context() as patched:
        patched.setattr(disk, "unlink", refuse)
        await gc.collect()
    assert left(disk) == ([0, 20], [0, 10, 20, 30])
    await gc.collect()
    assert left(disk) == ([20], [20, 30])


def refuse(path: str) -> None:
    raise PermissionError(13, "Permission denied", path)
