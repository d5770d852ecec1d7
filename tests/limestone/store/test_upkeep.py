"""A running store compacts on request, by call or by file, with open sessions, and loses nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flowstone.limestone.errors import WrongTime
from flowstone.limestone.format import catalog, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import WriteVersion
from flowstone.limestone.format.files import read_whole
from flowstone.limestone.settings import Settings
from flowstone.limestone.store import upkeep
from flowstone.limestone.store.blobs import BlobError
from flowstone.limestone.store.datastore import AsyncDatastore
from flowstone.limestone.store.recovery import recover
from flowstone.outside import Disk, production
from tests.limestone.crashes import DIRECTORY, crashed
from tests.limestone.programs import check_by_the_original
from tests.limestone.store.test_rotation import opened, started, write
from tests.limestone.world import outside_on

DISK = production().disk
AGAIN_EVERY = 7
"""The store continues after one in this many crashes."""


async def keys(store: AsyncDatastore) -> list[bytes]:
    return [row.key for row in (await store.snapshot()).cursor()]


async def reopened(path: Path) -> list[bytes]:
    store = AsyncDatastore(production(), Settings(str(path)))
    await store.ready()
    found = await keys(store)
    await store.shutdown()
    return found


async def test_compaction_keeps_sessions_that_are_open_meanwhile(tmp_path: Path) -> None:
    store, (one, other) = await opened(tmp_path, 2)
    await write(one, b"a")
    await other.begin_session()
    compacting = await started(store.compact())
    with pytest.raises(WrongTime, match="is running"):
        await store.compact()
    await store.switch_epoch(2)
    await one.begin_session()
    other.add_entry(1, b"late", b"v", (1, 2))
    await other.end_session()
    result = await compacting
    assert (result.rows, len(result.inputs), result.kept) == (2, 2, ())
    one.add_entry(0, b"newer", b"v", (2, 1))
    await one.end_session()
    await store.switch_epoch(3)
    assert await keys(store) == [b"a", b"newer", b"late"]
    await store.shutdown()
    listed = catalog.read(DISK, str(tmp_path))
    assert listed is not None
    assert (listed.compacted, listed.max_epoch_id) == (((names.COMPACTED, 1),), 1)
    assert await reopened(tmp_path) == [b"a", b"newer", b"late"]


async def test_compaction_of_an_empty_store_leaves_an_empty_catalog(tmp_path: Path) -> None:
    store, _ = await opened(tmp_path, 1)
    assert (await store.compact()).catalog == Catalog()
    await store.shutdown()


async def test_removed_key_stays_removed_after_a_compaction(tmp_path: Path) -> None:
    store, (channel,) = await opened(tmp_path, 1)
    await write(channel, b"a")
    compacting = await started(store.compact())
    await store.switch_epoch(2)
    await compacting
    await channel.begin_session()
    channel.remove_entry(0, b"a", (2, 1))
    await channel.end_session()
    await store.switch_epoch(3)
    assert await keys(store) == []
    await store.shutdown()
    assert await reopened(tmp_path) == []


async def test_request_file_starts_a_compaction_and_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.01)
    store, (channel,) = await opened(tmp_path, 1)
    await write(channel, b"a")
    wish = f"{tmp_path}/{upkeep.START_COMPACTION}"
    DISK.create(wish).close()
    async with asyncio.timeout(60):
        epoch = 2
        while DISK.kind(f"{tmp_path}/{names.COMPACTED}") is None:
            await store.switch_epoch(epoch)
            epoch += 1
            await asyncio.sleep(0.01)
    assert DISK.kind(wish) is None
    await store.shutdown()


async def test_failed_compaction_of_a_request_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.01)
    reported: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.set_result(context["message"]))
    store, _ = await opened(tmp_path, 1)
    (tmp_path / "pwal_0000.00000000000001.0").write_bytes(b"\x55")
    DISK.create(f"{tmp_path}/{upkeep.START_COMPACTION}").close()
    async with asyncio.timeout(60):
        assert "compaction of" in await reported
    await store.switch_epoch(2)
    await store.shutdown()


async def test_compaction_keeps_blobs_that_are_visible_or_pending(tmp_path: Path) -> None:
    store, (channel,) = await opened(tmp_path, 1)
    pool = store.blob_pool()
    old, new, waiting = [await pool.register_data(b"%d" % number) for number in range(3)]
    for minor, blob_id in enumerate((old, new)):
        await channel.begin_session()
        channel.add_entry(0, b"k", b"v", (1, minor), [blob_id])
        await channel.end_session()
    for epoch in (1, 3):
        if epoch == 3:
            store.switch_available_boundary_version(WriteVersion(3, 0))
        await write(channel, b"other")
        compacting = await started(store.compact())
        await store.switch_epoch(epoch + 1)
        await compacting
    assert [read_whole(DISK, store.blob_path(blob_id)) for blob_id in (new, waiting)] == [b"1", b"2"]
    await store.shutdown()


async def compacted_beside(store: AsyncDatastore, epoch: int) -> None:
    """Run a compaction that may delete blobs while epochs advance."""
    store.switch_available_boundary_version(WriteVersion(epoch, 0))
    compacting = await started(store.compact())
    await store.switch_epoch(epoch)
    await compacting


async def test_compaction_keeps_a_blob_of_an_open_session_when_no_file_is_rotated(tmp_path: Path) -> None:
    store, (channel,) = await opened(tmp_path, 1)
    pool = store.blob_pool()
    first, second = await pool.register_data(b"first"), await pool.register_data(b"second")
    await channel.begin_session()
    channel.add_entry(0, b"k", b"v", (1, 0), [second])
    await channel.end_session()
    rotating = await started(store.rotate())
    await store.switch_epoch(2)
    await rotating
    await channel.begin_session()
    channel.add_entry(0, b"l", b"v", (2, 0), [first])
    await compacted_beside(store, 3)
    await channel.end_session()
    assert read_whole(DISK, store.blob_path(first)) == b"first"
    await store.shutdown()


async def test_compaction_keeps_a_blob_of_an_aborted_session_in_its_pool(tmp_path: Path) -> None:
    store, (channel,) = await opened(tmp_path, 1)
    pool = store.blob_pool()
    first, second = await pool.register_data(b"first"), await pool.register_data(b"second")
    await channel.begin_session()
    channel.add_entry(0, b"l", b"v", (1, 0), [first])
    await channel.abort_session()
    await channel.begin_session()
    channel.add_entry(0, b"k", b"v", (1, 1), [second])
    await channel.end_session()
    await compacted_beside(store, 2)
    await channel.begin_session()
    channel.add_entry(0, b"l", b"v", (2, 0), [first])
    await pool.release()
    assert read_whole(DISK, store.blob_path(first)) == b"first"
    await channel.abort_session()
    with pytest.raises(BlobError):
        store.blob_path(first)  # no session can name the blob any more
    await store.shutdown()


async def until_rotating(store: AsyncDatastore, work: asyncio.Future[Any]) -> None:
    """Wait until the work is waiting for an epoch switch, or has ended."""
    for _ in range(100):
        if store._rotations or work.done():
            return
        await asyncio.sleep(0)
    raise AssertionError("no rotation is in progress")


@pytest.mark.timeout(3600)
def test_crash_during_a_compaction_or_backup_loses_no_reported_epoch() -> None:
    """Sessions continue during the work; the store reopens with whole epochs, and compacts."""
    told: list[int] = []

    async def program(disk: Disk) -> None:
        store = AsyncDatastore(outside_on(disk), Settings(DIRECTORY, spill=50))
        store.add_persistent_callback(told.append)
        channels = [await store.create_channel() for _ in range(2)]
        await store.ready()
        first = store.last_epoch + 1
        await store.switch_epoch(first)
        for channel in channels:
            await write(channel, b"%d" % first)
        compacting = await started(store.compact())
        await store.switch_epoch(first + 1)
        for channel in channels:
            await write(channel, b"%d" % (first + 1))
        await compacting
        backing_up = await started(store.begin_backup())
        await until_rotating(store, backing_up)
        await store.switch_epoch(first + 2)
        (await backing_up).notify_end_backup()
        await store.shutdown()

    def check(disk: Disk, expected: set[int]) -> None:
        found = recover(disk, DIRECTORY, repairs=False)
        check_by_the_original(disk, DIRECTORY, found)
        rows = found.snapshot.rows()
        epochs = [{int(row.key) for row in rows if row.storage_id == channel} for channel in (0, 1)]
        assert epochs[0] == epochs[1] >= expected

    crashes = crashed(lambda disk: told.clear(), lambda disk: asyncio.run(program(disk)))
    for number, (disk, _) in enumerate(crashes):
        expected = {epoch for epoch in (1, 2) if epoch <= max(told, default=0)}
        check(disk, expected)
        if number % AGAIN_EVERY == 0:
            told.clear()
            asyncio.run(program(disk))
            check(disk, expected | {told[-1] - 1, told[-1]})
