"""The documented defects of the original, each with a test that shows that Flowstone lacks it.

In the order of the list (docs/spec/limestone.md#original-defects).
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, Final

import pytest

from flowstone.limestone.format import names
from flowstone.limestone.format.entries import WriteVersion
from flowstone.limestone.format.epoch_file import record
from flowstone.limestone.format.messages import (
    Blob,
    ErrorCode,
    GroupCommit,
    LogChannelCreate,
    LogEntries,
    Message,
    SessionFlags,
)
from flowstone.limestone.format.wire_extensions import Frame, WireExtensionError
from flowstone.limestone.replica.log_file_channel import SPILL
from flowstone.limestone.settings import Settings
from flowstone.limestone.store import blobs
from flowstone.limestone.store import offline_directory as offline
from flowstone.limestone.store.channel import AsyncLogChannel
from flowstone.limestone.store.datastore import AsyncDatastore
from flowstone.limestone.store.recovery import recover
from flowstone.limestone.tools import repair
from flowstone.limestone.tools.offline_compaction import compact_offline
from flowstone.outside import production
from tests.limestone import original, recorded
from tests.limestone.peer import blob_session, row, session
from tests.limestone.running_replica import blob_files, markers, master_of, peer_of, rows, running, until
from tests.limestone.scripted_replica import scripted

OUTSIDE: Final = production()


class Store:
    """A ready store in its next epoch, its channels, and the epochs that the store has reported durable."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.store = AsyncDatastore(OUTSIDE, Settings(str(path), **options))
        self.told: list[int] = []
        self.channels: list[AsyncLogChannel] = []
        self.store.add_persistent_callback(self.told.append)

    async def start(self, channels: int = 1) -> Store:
        for _ in range(channels):
            self.channels.append(await self.store.create_channel())
        await self.store.ready()
        await self.store.switch_epoch(self.store.last_epoch + 1)
        return self

    @property
    def epoch(self) -> int:
        return self.store.status().current_epoch

    async def write(self, key: bytes, value: bytes, *blob_ids: int, channel: int = 0) -> None:
        """Write a session of one entry and switch to the next epoch."""
        log, epoch = self.channels[channel], self.epoch
        await log.begin_session()
        log.add_entry(1, key, value, WriteVersion(epoch, 1), blob_ids)
        await log.end_session()
        await self.store.switch_epoch(epoch + 1)

    async def remove(self, key: bytes) -> None:
        log, epoch = self.channels[0], self.epoch
        await log.begin_session()
        log.remove_entry(1, key, WriteVersion(epoch, 1))
        await log.end_session()
        await self.store.switch_epoch(epoch + 1)

    async def stop(self) -> None:
        await self.store.shutdown()


def real_rows(path: Path) -> list[tuple[bytes, bytes]]:
    """Return the rows that the original would show."""
    return [(entry.key, entry.value) for entry in original.rows(OUTSIDE.disk, str(path))]


def listing(path: Path) -> list[str]:
    return sorted(str(found) for found in path.rglob("*"))


# --- 1: markers of a replica ---


async def test_epoch_of_a_replica_counts_only_when_committed(tmp_path: Path) -> None:
    async with running(tmp_path / "live") as replica:
        master = master_of(replica)
        await master.begin()
        log = await master.open(0)
        await log.acknowledged(session(1, row("a", "1", 1)))
        await master.commit(1)
        await log.acknowledged(session(2, row("b", "2", 2)))
        assert markers(tmp_path / "live" / "pwal_0000") == [(2, 1), (3, 1), (2, 2), (3, 2)]
        assert rows(tmp_path / "live") == [(b"a", b"1")]


async def test_replica_killed_during_a_session_recovers_and_appends_to_an_intact_file(tmp_path: Path) -> None:
    """The original reports an unrepairable file, or loses data that it appends later."""
    live, left = tmp_path / "live", tmp_path / "left"
    async with running(live) as replica:
        master = master_of(replica)
        await master.begin()
        log = await master.open(0)
        await log.acknowledged(session(1, row("a", "1", 1)))
        await master.commit(1)
        size = (live / "pwal_0000").stat().st_size
        log.send(*(session(2, row("b", "x" * (SPILL // 2), 2, minor), flags=minor == 0) for minor in range(4)))
        await until(lambda: (live / "pwal_0000").stat().st_size > size)
        shutil.copytree(live, left)
    path = left / "pwal_0000"
    path.write_bytes(path.read_bytes()[:-7])
    async with running(left) as replica:
        assert rows(left) == [(b"a", b"1")]
        master = master_of(replica)
        await master.begin()
        log = await master.open(0)
        await log.acknowledged(session(3, row("c", "3", 3)))
        await master.commit(3)
    assert rows(left) == [(b"a", b"1"), (b"c", b"3")]


# --- 2: a group commit that overtakes the end of a session ---


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("session_close", ["default", "async"])
@pytest.mark.parametrize("group_commit", ["local_first", "replica_first", "concurrent"])
async def test_group_commit_never_overtakes_a_session_that_outlives_its_epoch(
    tmp_path: Path, group_commit: str, session_close: str, is_ours: bool
) -> None:
    heard: list[tuple[str, int]] = []
    async with scripted(is_ours=is_ours) as replica:
        options = {"group_commit": group_commit, "session_close": session_close, "compatible": not is_ours}
        master = Store(tmp_path, replicas=(replica.endpoint,), **options)

        def listen(message: Message | Frame) -> bytes:
            if isinstance(message, LogEntries) and message.flags & SessionFlags.END:
                heard.append(("end", len(master.told)))
            elif isinstance(message, GroupCommit):
                heard.append(("commit", len(master.told)))
            return b"?"

        replica.answers.append(listen)
        await master.start()
        log = master.channels[0]
        await log.begin_session()
        log.add_entry(1, b"k", b"v", WriteVersion(1, 1))
        await master.store.switch_epoch(2)
        await log.end_session()
        await master.store.until_durable(1)
        assert heard == [("end", 0), ("commit", 0)]
        assert master.told == [1]
        await master.stop()


# --- 3: online compaction and open sessions ---


async def test_online_compaction_keeps_sessions_of_a_newer_epoch(tmp_path: Path) -> None:
    store = await Store(tmp_path).start(channels=2)
    await store.write(b"a", b"1")
    log = store.channels[1]
    await log.begin_session()
    log.add_entry(1, b"b", b"2", WriteVersion(store.epoch, 1))
    compacting = asyncio.ensure_future(store.store.compact())
    await asyncio.sleep(0)
    await store.store.switch_epoch(store.epoch + 1)
    log.add_entry(1, b"c", b"3", WriteVersion(store.epoch, 1))
    await log.end_session()
    await store.write(b"d", b"4")
    await compacting
    await store.write(b"e", b"5", channel=1)
    await store.stop()
    assert rows(tmp_path) == [(b"a", b"1"), (b"b", b"2"), (b"c", b"3"), (b"d", b"4"), (b"e", b"5")]
    assert real_rows(tmp_path) == rows(tmp_path)
    assert (tmp_path / names.COMPACTED).exists()


# --- 4, 5: offline compaction ---


async def test_offline_compaction_keeps_blobs_and_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "data"
    store = await Store(path).start()
    pool = store.store.blob_pool()
    first = await pool.register_data(b"content")
    await store.write(b"a", b"1", first)
    await pool.release()
    await store.stop()
    compact_offline(OUTSIDE, str(path), keeps_backup=False)
    assert (path / names.blob(first)).read_bytes() == b"content"
    store = await Store(path).start()
    second = await store.store.blob_pool().register_data(b"other")
    assert second > first
    assert (path / names.blob(first)).read_bytes() == b"content"
    await store.stop()
    assert blobs.stored_ids(OUTSIDE.disk, str(path)) == [first, second]


async def test_key_removed_after_an_offline_compaction_stays_removed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    store = await Store(path).start()
    await store.write(b"a", b"1")
    await store.write(b"b", b"2")
    await store.stop()
    compact_offline(OUTSIDE, str(path), keeps_backup=False)
    store = await Store(path).start()
    await store.remove(b"a")
    await store.stop()
    assert rows(path) == real_rows(path) == [(b"b", b"2")]


def test_key_removed_after_offline_compaction_by_the_original_stays_removed(tmp_path: Path) -> None:
    path = Path(shutil.copytree(recorded.HERE / "quirk-offline-remove" / "dir", tmp_path / "data"))
    back = set(real_rows(path)) - set(rows(path))
    assert len(back) == 1


# --- 6: a torn epoch file ---


@pytest.mark.parametrize("size", range(1, 9))
async def test_torn_epoch_file_can_be_opened_and_repaired(size: int, tmp_path: Path) -> None:
    path, copy = tmp_path / "data", tmp_path / "copy"
    store = await Store(path).start()
    await store.write(b"a", b"1")
    await store.stop()
    (path / names.EPOCH).write_bytes((path / names.EPOCH).read_bytes() + record(2)[:size])
    shutil.copytree(path, copy)
    store = await Store(path).start()
    await store.write(b"b", b"2")
    await store.stop()
    assert rows(path) == [(b"a", b"1"), (b"b", b"2")]
    with offline.held(OUTSIDE.disk, str(copy)) as manifest:
        planned = repair.plan(OUTSIDE.disk, str(copy), 1)
        repair.execute(OUTSIDE, str(copy), manifest, planned, keeps_backup=False)
    assert (copy / names.EPOCH).read_bytes() == record(1)
    assert real_rows(copy) == [(b"a", b"1")]


# --- 7: messages that kill the original's replica ---


async def test_used_or_oversized_ids_are_rejected_and_the_replica_continues(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        master = master_of(replica)
        await master.begin()
        log = await master.open(0)
        for channel_id in (0, 10_000, 2**64 - 1):
            peer = await peer_of(replica)
            assert await peer.refused(LogChannelCreate(channel_id)) == ErrorCode.TOO_MANY_LOG_CHANNELS
        await log.acknowledged(session(1, row("a", "1", 1)))
        await master.commit(1)
    assert rows(tmp_path) == [(b"a", b"1")]


@pytest.mark.parametrize("flags", [0, SessionFlags.END, SessionFlags.FLUSH])
async def test_entries_outside_of_a_session_are_rejected_and_the_replica_continues(tmp_path: Path, flags: int) -> None:
    async with running(tmp_path) as replica:
        master = master_of(replica)
        await master.begin()
        log = await master.open(0)
        assert await log.refused(session(1, row("a", "1", 1), flags=flags)) == ErrorCode.LOG_CHANNEL_CONFUSED
        other = await master.open(1)
        await other.acknowledged(session(1, row("b", "2", 1)))
        await master.commit(1)
    assert rows(tmp_path) == [(b"b", b"2")]


async def test_peer_without_the_secret_cannot_write(tmp_path: Path) -> None:
    async with running(tmp_path, secret="sesame") as replica:
        before = listing(tmp_path)
        peer = await peer_of(replica)
        assert await peer.refused(LogChannelCreate(0)) == WireExtensionError.AUTHENTICATION_FAILED
        peer = await peer_of(replica)
        assert await peer.refused(blob_session(1, "k", Blob(7, b"content"))) == ErrorCode.UNEXPECTED_TYPE
        assert blob_files(tmp_path) == []
        assert listing(tmp_path) == before


# --- 8: a short mark at the end of a file ---


@pytest.mark.parametrize("size", range(1, 9))
async def test_short_marker_is_not_extended(size: int, tmp_path: Path) -> None:
    store = await Store(tmp_path).start()
    await store.write(b"a", b"1")
    await store.stop()
    path = tmp_path / "pwal_0000"
    path.write_bytes(path.read_bytes() + b"\x06\x05\0\0\0\0\0\0\0"[:size])
    store = await Store(tmp_path).start()
    await store.write(b"b", b"2")
    await store.stop()
    assert rows(tmp_path) == [(b"a", b"1"), (b"b", b"2")]
    assert not recover(OUTSIDE.disk, str(tmp_path), repairs=False).files[0].findings
