"""Tests `flowstone archive` against a real server: the archive is complete and durable, and a server started from it
has the same data.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowstone.archive import archive as archive_module
from flowstone.archive import events as events
from flowstone.archive.archive import Archive
from flowstone.archive.archive_sink import SnapshotSink
from flowstone.archive.block_index import read_blocks
from flowstone.archive.events import ArchiveEvent
from flowstone.archive.manifest import ArchiveManifest, NotAnArchive, load
from flowstone.archive.refusals import ArchiveRefused, UpstreamLostTail
from flowstone.errors import FlowstoneError
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from tests.interop.versions import ANY, parameters
from tests.node.archived_server import RealServer
from tests.node.fault_disk import FaultDisk

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("tarantool")]


@pytest.fixture(params=parameters(ANY))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealServer]:
    with RealServer(tmp_path / "master", binary=request.param.path) as running:
        yield running


@pytest.fixture(params=parameters("<3.3"))
def forgetful_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealServer]:
    """A server that keeps no logs for anonymous replicas."""
    with RealServer(tmp_path / "master", binary=request.param.path) as running:
        yield running


def manifest_of(directory: Path) -> ArchiveManifest:
    found = load(production().disk, str(directory))
    assert found is not None
    return found


async def archived_once(server: RealServer, directory: Path, **options: Any) -> list[ArchiveEvent]:
    told: list[ArchiveEvent] = []
    await Archive(server.uri, directory, on_event=told.append, **options).run(once=True)
    return told


@asynccontextmanager
async def archiving(
    server: RealServer, directory: Path, **options: Any
) -> AsyncIterator[tuple[Archive, list[ArchiveEvent]]]:
    told: list[ArchiveEvent] = []
    archive = Archive(server.uri, directory, on_event=told.append, **options)
    async with archive:
        yield archive, told


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what it waits for is in another process
            await asyncio.sleep(0.02)


def has_been_left(told: list[ArchiveEvent], since: int) -> bool:
    return any(isinstance(event, events.Disconnected) for event in told[since:])


def assert_equal(server: RealServer, directory: Path, tmp_path: Path) -> None:
    """Check that a real server recovers the data of the archived one from the archive."""
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    dump, vclock, log = server.recovered(copy)
    assert vclock == server.vclock()
    assert dump == server.dump()
    assert " E>" not in log
    assert " F>" not in log


async def test_server_started_from_the_archive_has_the_same_data(server: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    server.eval("fill(1, 500)")
    await archived_once(server, directory)
    server.eval(
        "fill(400, 3000) box.space.t:update(7, {{'=', 2, 'seven'}}) box.space.t:upsert({8, 'x'}, {{'=', 2, 'eight'}})"
        " box.begin() box.space.t:delete(1) box.space.t:insert{5000, 'y'} box.commit()"
        " local s = box.schema.space.create('later') s:create_index('pk') s:insert{1} s:truncate() s:insert{2}"
    )
    told = await archived_once(server, directory)
    assert any(isinstance(event, events.CaughtUp) for event in told)
    assert_equal(server, directory, tmp_path)
    manifest = manifest_of(directory)
    assert manifest.position == manifest.settled == server.vclock()
    assert [snapshot.reason for snapshot in manifest.snapshots] == ["first"]
    assert manifest.gaps == []


async def test_rows_keep_the_time_of_the_server(server: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    await archived_once(server, directory)
    server.eval("fill(1, 10)")
    (wrote,) = server.eval("return require('clock').time()")
    await asyncio.sleep(0)
    await archived_once(server, directory)
    (log,) = directory.glob("*.xlog")
    blocks = read_blocks(production().disk, str(log))
    assert blocks is not None
    assert blocks.runs[-1].last_timestamp <= wrote


async def test_archive_follows_and_resumes_after_the_server_is_killed(server: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    async with archiving(server, directory, replication_timeout=0.1) as (archive, told):
        for number in range(3):
            server.eval("fill(...)", number * 1000, number * 1000 + 999)
            await until(lambda: archive.position == VClock(server.vclock()))
            before = len(told)
            server.kill()
            await until(partial(has_been_left, told, before))
            server.start()
        server.eval("fill(1, 10)")
        await until(lambda: archive.position == VClock(server.vclock()))
    assert_equal(server, directory, tmp_path)
    assert isinstance(told[-1], events.Stopped)


async def test_interval_snapshot_starts_a_log_file(server: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    server.eval(
        "local fiber = require('fiber')"
        " fiber.create(function() local i = 0 while true do i = i + 1 fill(i, i + 5) fiber.sleep(0.001) end end)"
    )
    async with archiving(server, directory, snapshot_interval=0.3) as (_, told):
        await until(lambda: sum(isinstance(event, events.Snapshotted) for event in told) >= 4)
    snapshots = {path.stem for path in directory.glob("*.snap")}
    logs = {path.stem for path in directory.glob("*.xlog")}
    assert snapshots <= logs
    assert not [event for event in told if isinstance(event, events.SnapshotFailed)]
    server.stop()
    server.start()
    await archived_once(server, directory)
    assert_equal(server, directory, tmp_path)


async def test_rows_collected_by_the_server_are_reported_as_a_gap(forgetful_server: RealServer, tmp_path: Path) -> None:
    server = forgetful_server
    directory = tmp_path / "archive"
    server.eval("fill(1, 100)")
    await archived_once(server, directory)
    before = manifest_of(directory).position
    server.eval(
        "box.cfg{checkpoint_count=1} fill(101, 200) box.snapshot() fill(201, 300) box.snapshot() fill(301, 310)"
    )
    told = await archived_once(server, directory)
    (gap,) = [event for event in told if isinstance(event, events.GapFound)]
    assert gap.missing == ((1, before[1] + 1, server.vclock()[1]),)
    manifest = manifest_of(directory)
    assert [each.missing for each in manifest.gaps] == [gap.missing]
    assert [snapshot.reason for snapshot in manifest.snapshots] == ["first", "gap"]
    server.eval("fill(311, 400)")
    told = await archived_once(server, directory)
    assert not [event for event in told if isinstance(event, events.GapFound)]
    assert_equal(server, directory, tmp_path)


async def test_gap_that_opens_during_a_disconnect_is_reported(forgetful_server: RealServer, tmp_path: Path) -> None:
    server = forgetful_server
    directory = tmp_path / "archive"
    async with archiving(server, directory, replication_timeout=0.1) as (archive, told):
        await until(lambda: any(isinstance(event, events.Connected) for event in told))
        before = len(told)
        server.kill()
        await until(partial(has_been_left, told, before))
        server.setup += (
            "box.cfg{checkpoint_count=1} fill(1, 100) box.snapshot() fill(1, 100) box.snapshot() fill(1, 10)\n"
        )
        server.start()
        await until(lambda: any(isinstance(event, events.GapFound) for event in told))
        await until(lambda: archive.position == VClock(server.vclock()))
    assert_equal(server, directory, tmp_path)


async def test_server_that_lost_its_tail_is_rejected_with_the_lost_rows(server: RealServer, tmp_path: Path) -> None:
    directory, backup = tmp_path / "archive", tmp_path / "backup"
    server.eval("fill(1, 100)")
    server.stop()
    shutil.copytree(server.directory, backup)
    server.start()
    server.eval("fill(101, 150)")
    await archived_once(server, directory)
    ours = server.vclock()[1]
    server.stop()
    shutil.rmtree(server.directory)
    shutil.copytree(backup, server.directory)
    server.start()
    theirs = server.vclock()[1]
    with pytest.raises(UpstreamLostTail, match=f"LSN {theirs + 1} to {ours} of replica 1") as caught:
        await archived_once(server, directory)
    assert caught.value.missing == ((1, theirs + 1, ours),)


async def test_synchronous_transactions_are_settled_by_their_verdict(server: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    await archived_once(server, directory)
    server.eval(
        "claim() local s = box.schema.space.create('sync', {is_sync=true}) s:create_index('pk') s:insert{1}"
        " box.cfg{replication_synchro_quorum=2, replication_synchro_timeout=0.05} pcall(s.insert, s, {2})"
        " box.cfg{replication_synchro_quorum=1} s:insert{3}"
    )
    await archived_once(server, directory)
    manifest = manifest_of(directory)
    assert manifest.settled == manifest.position == server.vclock()
    (log,) = directory.glob("*.xlog")
    blocks = read_blocks(production().disk, str(log))
    assert blocks is not None
    assert len([span for run in blocks.runs for span in run.rolled_back]) == 1
    assert_equal(server, directory, tmp_path)


async def test_pending_transaction_is_not_settled(server: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    server.eval("claim() box.schema.space.create('sync', {is_sync=true}):create_index('pk')")
    settled = server.vclock()
    await archived_once(server, directory)
    server.eval(
        "box.cfg{replication_synchro_quorum=3, replication_synchro_timeout=1000}"
        " require('fiber').create(function() box.space.sync:insert{4} end)"
    )
    await archived_once(server, directory)
    manifest = manifest_of(directory)
    assert manifest.settled == settled
    assert manifest.position == {1: settled[1] + 1}
    assert manifest.pending_transactions == 1


async def test_registered_archive_has_an_id_and_the_server_keeps_its_logs(server: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    server.eval("fill(1, 100)")
    told = await archived_once(server, directory, register=True)
    (registered,) = [event for event in told if isinstance(event, events.Registered)]
    assert server.eval("return box.space._cluster:count()") == [2]
    assert registered.replica_id == 2
    assert "quorum" in str(registered)
    server.eval(
        "box.cfg{checkpoint_count=1} fill(101, 200) box.snapshot() fill(201, 300) box.snapshot() fill(301, 310)"
    )
    told = await archived_once(server, directory)
    assert not [event for event in told if isinstance(event, events.GapFound)]
    assert manifest_of(directory).replica_id == 2
    assert_equal(server, directory, tmp_path)


async def test_anonymous_archive_can_register_later(server: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    server.eval("fill(1, 100)")
    await archived_once(server, directory)
    server.eval("fill(101, 200)")
    async with archiving(server, directory, register=True) as (archive, told):
        await until(lambda: any(isinstance(event, events.Registered) for event in told))
        server.eval("fill(201, 300)")
        await until(lambda: archive.position == VClock(server.vclock()))
    assert server.eval("return box.space._cluster:count()") == [2]
    await archived_once(server, directory, register=True)
    assert_equal(server, directory, tmp_path)


async def test_registration_is_found_again_when_its_row_was_not_received(server: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    await archived_once(server, directory)
    server.eval("box.space._cluster:insert{2, ...}", manifest_of(directory).replica_uuid)
    await archived_once(server, directory, register=True)
    assert manifest_of(directory).replica_id == 2


@pytest.mark.parametrize(
    ("user", "message", "hint"),
    [
        ("replicator:wrong", "replicator", "check the user and the password"),
        ("stranger:secret", "stranger", "check the user and the password"),
        ("nobody:secret", "denied", "box.schema.user.grant"),
    ],
)
async def test_missing_rights_are_explained(
    server: RealServer, tmp_path: Path, user: str, message: str, hint: str
) -> None:
    with pytest.raises(ArchiveRefused, match=message) as caught:
        await Archive(f"{user}@{server.address}", tmp_path / "archive").run()
    assert caught.value.hint is not None
    assert hint in caught.value.hint
    assert server.address in caught.value.message


async def test_server_of_another_replica_set_is_rejected(server: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    await archived_once(server, directory)
    with RealServer(tmp_path / "other", binary=server.binary) as other:
        with pytest.raises(ArchiveRefused, match="another replica set") as caught:
            await archived_once(other, directory)
        assert str(manifest_of(directory).replicaset_uuid) in caught.value.message


async def test_unreachable_server_is_retried_unless_once(server: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    server.stop()
    with pytest.raises(FlowstoneError, match=f"cannot connect to {server.address}"):
        await archived_once(server, directory)
    async with archiving(server, directory, replication_timeout=0.05) as (_, told):
        await until(lambda: any(isinstance(event, events.Disconnected) for event in told))
        server.start()
        await until(lambda: any(isinstance(event, events.Connected) for event in told))


async def test_registration_beyond_the_member_limit_is_rejected(server: RealServer, tmp_path: Path) -> None:
    server.eval("for i = 2, 31 do box.space._cluster:insert{i, require('uuid').str()} end")
    with pytest.raises(ArchiveRefused, match="Replica count limit") as caught:
        await archived_once(server, tmp_path / "archive", register=True)
    assert caught.value.hint is not None
    assert "without registering" in caught.value.hint


async def test_silent_server_times_out_during_a_snapshot(
    server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "STALL_SECONDS", 0.3)
    real = SnapshotSink.begin_snapshot

    async def stop_the_server(sink: SnapshotSink, *given: Any) -> None:
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        await real(sink, *given)

    async def lose_rows(sink: SnapshotSink, slab: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(SnapshotSink, "begin_snapshot", stop_the_server)
    monkeypatch.setattr(SnapshotSink, "snapshot_rows", lose_rows)
    try:
        with pytest.raises(FlowstoneError, match=r"sent nothing for .* during a snapshot"):
            await archived_once(server, tmp_path / "archive")
    finally:
        assert server.process is not None
        server.process.send_signal(signal.SIGCONT)
    assert list((tmp_path / "archive").glob("*.snap*")) == []


async def test_directory_without_an_archive_is_not_changed(server: RealServer, tmp_path: Path) -> None:
    await archived_once(server, tmp_path / "archive")
    shutil.copytree(tmp_path / "archive", tmp_path / "other")
    (tmp_path / "other" / "manifest.json").unlink()
    with pytest.raises(NotAnArchive, match="is not an archive"):
        await archived_once(server, tmp_path / "other")


async def test_two_archives_cannot_share_a_directory(server: RealServer, tmp_path: Path) -> None:
    async with archiving(server, tmp_path / "archive") as (_, told):
        await until(lambda: any(isinstance(event, events.Connected) for event in told))
        with pytest.raises(FlowstoneError, match="another archive"):
            await archived_once(server, tmp_path / "archive")


async def test_manifest_follows_the_log(server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "SAVE_INTERVAL", 0.05)
    directory = tmp_path / "archive"
    async with archiving(server, directory) as (_, told):
        await until(lambda: any(isinstance(event, events.Connected) for event in told))
        server.eval("fill(1, 100)")
        wanted = {str(number): lsn for number, lsn in server.vclock().items()}
        await until(lambda: json.loads((directory / "manifest.json").read_text())["settled"] == wanted)
        (log,) = directory.glob("*.xlog")
        blocks = read_blocks(production().disk, str(log))
        assert blocks is not None
        assert blocks.runs[-1].vclock == server.vclock()


async def test_manifest_records_until_when_no_row_was_written(
    server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "SAVE_INTERVAL", 0.05)
    monkeypatch.setattr(archive_module, "KNOWN_INTERVAL", 0.1)
    directory = tmp_path / "archive"

    def known_until() -> float:
        return manifest_of(directory).known_until

    def is_known(time: float) -> bool:
        return known_until() > time

    server.eval("fill(1, 100)")
    (asked,) = server.eval("return require('clock').time()")
    await archived_once(server, directory)
    assert asked <= known_until() <= time.time()
    async with archiving(server, directory):
        for _ in range(2):  # heartbeats alone have acknowledged this position
            (now,) = server.eval("return require('clock').time()")
            await until(partial(is_known, now))
    ended = known_until()
    assert ended <= time.time()
    server.kill()
    # An unreachable upstream reports no position.
    async with archiving(server, directory, replication_timeout=0.1) as (_, told):
        await until(lambda: sum(isinstance(event, events.Progress) for event in told) > 3)
    assert known_until() == ended


async def test_full_disk_stops_the_archive_at_every_step(server: RealServer) -> None:
    disk = FaultDisk()
    disk.room = 10  # The manifest does not fit: the archive neither drops nor reopens a connection because of that.
    with pytest.raises(ArchiveRefused, match=r"manifest.*No space left") as caught:
        await Archive(server.uri, "dir", outside=disk.outside()).run()
    assert caught.value.hint == "free space and start the archive again"
    disk = FaultDisk()
    await Archive(server.uri, "dir", outside=disk.outside()).run(once=True)
    disk = disk.after_death()
    server.eval("fill(1, 100)")
    disk.room = 10
    with pytest.raises(ArchiveRefused, match=r"xlog.*No space left") as caught:
        await Archive(server.uri, "dir", outside=disk.outside()).run()
    assert caught.value.hint == "free space and start the archive again"


async def test_new_archive_reports_its_registration(server: RealServer, tmp_path: Path) -> None:
    told = await archived_once(server, tmp_path / "anonymous")
    assert told[0] == events.Opened(str(tmp_path / "anonymous"), {}, {})
    told = await archived_once(server, tmp_path / "registered", register=True)
    assert told[0] == events.Opened(str(tmp_path / "registered"), {}, {})
    assert sum(isinstance(event, events.Opened) for event in told) == 1
    refused: list[ArchiveEvent] = []
    with pytest.raises(ArchiveRefused):
        await Archive(f"nobody:secret@{server.address}", tmp_path / "refused", on_event=refused.append).run()
    assert refused == []
    assert list((tmp_path / "refused").iterdir()) == []
