"""The sink of appliers: rows are durable before they are acknowledged, stored once, and bounded in memory."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from flowstone.archive import archive_sink
from flowstone.archive.archive_sink import UNKNOWN_ID, Intake, LogSink, SnapshotSink
from flowstone.archive.store import ArchiveStore
from flowstone.iproto.constants import RaftKey, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.replication.vclock import VClock
from flowstone.xlog.block import FLUSH_THRESHOLD
from flowstone.xlog.errors import WriteFailed
from flowstone.xlog.transactions import make_transaction
from tests.archive.test_received_snapshot import SET, tuple_row
from tests.node.archived_rows import INSTANCE, new_disk, row, stream

NOBODY = UUID(int=0)


def new_intake(disk: Any) -> Intake:
    store = ArchiveStore.open(disk, "dir", UUID(INSTANCE), lambda: 1000.0)
    return Intake(disk.outside(), store)


async def begun(disk: Any) -> Intake:
    """Return an archive that starts at {1: 5}."""
    intake = new_intake(disk)
    sink = SnapshotSink(intake, NOBODY, lambda: UUID(INSTANCE))
    await sink.begin_snapshot(VClock({0: 3, 1: 5}), (2, 11, 9))
    await sink.meta(Row(RequestType.RAFT, body=pack({int(RaftKey.TERM): 1})))
    await sink.snapshot_rows(stream(tuple_row(272, ["cluster", str(SET)]), tuple_row(512, [1])))
    await sink.end_join(VClock({1: 5}))
    assert sink.snapshot is not None
    intake.store.begin_from(sink.snapshot, "")
    intake.begin_anew()
    return intake


def rows(*lsns: int) -> Any:
    return stream(*(make_transaction([row(lsn)]).rows[0] for lsn in lsns))


async def test_vclock_advances_when_rows_are_durable() -> None:
    disk = new_disk()
    intake = await begun(disk)
    told: list[VClock] = []
    intake.on_written.append(lambda: told.append(intake.vclock))
    await intake.take(rows(6, 7))
    assert intake.vclock == VClock({1: 5})
    assert intake.submitted == VClock({1: 7})
    await intake.drain()
    assert told[-1] == intake.vclock == VClock({1: 7})


async def test_rows_received_during_a_write_are_written_together() -> None:
    disk = new_disk()
    intake = await begun(disk)
    for lsn in range(6, 50):
        await intake.take(rows(lsn))
    before = disk.syncs
    await intake.drain()
    assert disk.syncs - before < 10
    assert intake.vclock == VClock({1: 49})


async def test_known_rows_are_skipped() -> None:
    intake = await begun(new_disk())
    await intake.take(rows(4, 5, 6))
    await intake.take(rows(5, 6))
    await intake.take(rows(6, 7))
    await intake.drain()
    assert intake.store.log is not None
    assert intake.store.log.row_count == 2
    assert intake.vclock == VClock({1: 7})


async def test_full_queue_makes_the_upstream_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_sink, "QUEUE_SIZE_MAX", 100)
    intake = await begun(new_disk())
    await intake.take(rows(*range(6, 60)))
    assert intake.vclock == VClock({1: 59})


async def test_rows_with_images_are_written_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_sink, "BATCH_SIZE_WITH_IMAGES", 100)
    intake = await begun(new_disk())
    sizes: list[int] = []

    def note(data: bytes) -> bytes:
        sizes.append(len(data))
        return data

    intake.store.on_rows = note
    for lsn in range(6, 30):
        await intake.take(rows(lsn))
    await intake.drain()
    assert len(sizes) >= 6
    assert intake.vclock == VClock({1: 29})


async def test_failed_write_ends_the_intake() -> None:
    disk = new_disk()
    intake = await begun(disk)
    disk.room = 10
    await intake.take(rows(6))
    with pytest.raises(WriteFailed, match="No space left"):
        await intake.drain()
    with pytest.raises(WriteFailed):
        await intake.take(rows(7))
    assert intake.vclock == VClock({1: 5})


async def test_rows_are_buffered_until_the_snapshot_position_is_known() -> None:
    intake = await begun(new_disk())
    intake.is_free.clear()
    waiting = asyncio.get_running_loop().create_task(intake.take(rows(6)))
    await asyncio.sleep(0)
    assert intake.submitted == VClock({1: 5})
    intake.is_free.set()
    await waiting
    await intake.drain()
    assert intake.vclock == VClock({1: 6})


async def test_incomplete_snapshot_leaves_no_files() -> None:
    disk = new_disk()
    intake = new_intake(disk)
    sink = SnapshotSink(intake, NOBODY, lambda: UUID(INSTANCE))
    await sink.begin_snapshot(VClock({1: 5}), (2, 6, 0))
    await sink.snapshot_rows(stream(tuple_row(512, [1])))
    await sink.abandon()
    assert disk.list_directory("dir") == ["manifest.json"]


async def test_join_delivers_the_snapshot_the_first_rows_and_the_id() -> None:
    intake = new_intake(new_disk())
    told: list[int] = []
    sink = LogSink(intake, is_anonymous=False, on_registered=lambda: told.append(intake.store.manifest.replica_id))
    assert sink.replicaset_uuid is None
    await sink.begin_snapshot(VClock({1: 5}), (2, 6, 0))
    await sink.snapshot_rows(stream(tuple_row(272, ["cluster", str(SET)]), tuple_row(320, [1, str(SET)])))
    await sink.begin_final(VClock({1: 6}))
    body = tuple_row(320, [2, INSTANCE]).body
    registration = Row(RequestType.INSERT, 1, lsn=6, timestamp=1.0, body=body)
    await sink.final_rows(stream(*make_transaction([registration]).rows))
    await sink.end_join(VClock({1: 6}))
    assert sink.vclock == VClock({1: 6})
    assert sink.replicaset_uuid == SET
    assert sink.replica_id == 2
    assert told == [2]
    assert sink.id_filter == ()


async def test_failed_join_leaves_no_files() -> None:
    disk = new_disk()
    sink = LogSink(new_intake(disk), is_anonymous=False, on_registered=lambda: None)
    await sink.begin_snapshot(VClock({1: 5}), (2, 11, 0))
    await sink.snapshot_rows(stream(tuple_row(272, ["cluster", str(SET)])))
    await sink.meta(Row(RequestType.RAFT, body=pack({int(RaftKey.TERM): 1, 99: "x" * FLUSH_THRESHOLD})))
    disk.broken.add("append")
    with pytest.raises(WriteFailed):
        await sink.begin_final(VClock({1: 6}))
    disk.broken.clear()
    await sink.abandon()
    assert disk.list_directory("dir") == ["manifest.json"]
    assert disk.open_paths == []


async def test_registered_sink_has_an_unknown_id_until_its_row_arrives() -> None:
    sink = LogSink(await begun(new_disk()), is_anonymous=False, on_registered=lambda: None)
    assert sink.replica_id == 0
    sink.register_known()
    assert sink.replica_id == UNKNOWN_ID


async def test_anonymous_sink_has_no_id_and_filters_local_rows() -> None:
    sink = LogSink(await begun(new_disk()), is_anonymous=True, on_registered=lambda: None)
    await sink.apply(rows(6))
    assert sink.replica_id == 0
    assert sink.id_filter == (0,)


async def test_highest_received_term_is_sent_again() -> None:
    sink = LogSink(await begun(new_disk()), is_anonymous=True, on_registered=lambda: None)
    for term in (3, 2):
        sink.raft(1, Row(RequestType.RAFT, body=pack({int(RaftKey.TERM): term})))
    assert sink.term == 3
