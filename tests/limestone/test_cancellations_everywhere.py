"""Callers that are cancelled, time out or press Ctrl-C while a worker is at any disk operation.

The worker keeps its guard until it has ended, so that later calls do not collide with it, and the directory is released
afterwards.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from flowstone.limestone.errors import WrongTime
from flowstone.limestone.format import catalog, manifest, names
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import WriteVersion
from flowstone.limestone.format.files import read_whole
from flowstone.limestone.replica.replica import Replica
from flowstone.limestone.settings import Settings
from flowstone.limestone.store.backup import Backup
from flowstone.limestone.store.blocking import Datastore
from flowstone.limestone.store.channel import AsyncLogChannel
from flowstone.limestone.store.datastore import AsyncDatastore, State
from flowstone.outside import AlreadyLocked, production
from tests.conftest import FULL
from tests.limestone import original
from tests.limestone.stoppable_disk import DEADLINE_SECONDS, StoppableDisk, cancelled, is_waiting
from tests.limestone.store.test_rotation import started, write

DISK = production().disk
NUMBERS = partial(count, 1, 1 if FULL else 4)
"""The operations at which a worker is stopped, as long as there are any."""
Call = Callable[[AsyncDatastore, Path], Coroutine[Any, Any, Any]]


class Store:
    """A store with a row and a blob in the durable epoch 1, and another blob, on a disk that can be stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.disk = StoppableDisk()
        self.store = AsyncDatastore(self.disk.outside(), Settings(str(path), spill=50))
        self.channel: AsyncLogChannel
        self.early = self.named = 0

    async def open(self) -> None:
        self.channel = await self.store.create_channel()
        await self.store.ready()
        await self.store.switch_epoch(self.store.last_epoch + 1)
        pool = self.store.blob_pool()
        self.early, self.named = [await pool.register_data(data) for data in (b"early", b"named")]
        await self.put(b"k", self.named)
        await self.store.switch_epoch(2)

    async def put(self, key: bytes, blob_id: int) -> None:
        await self.channel.begin_session()
        assert self.channel.epoch is not None
        self.channel.add_entry(0, key, b"v", (self.channel.epoch, 1), [blob_id])
        await self.channel.end_session()

    async def keys(self) -> list[bytes]:
        return [row.key for row in (await self.store.snapshot()).cursor()]


async def reopened(path: Path) -> list[bytes]:
    """Reopen the store; the original must see the same before and after."""
    seen = [row.key for row in original.rows(DISK, str(path))]
    store = AsyncDatastore(production(), Settings(str(path)))
    await store.ready()
    found = [row.key for row in (await store.snapshot()).cursor()]
    await store.shutdown()
    assert found == seen == [row.key for row in original.rows(DISK, str(path))]
    return found


@pytest.mark.parametrize("is_repeated", [False, True])
async def test_cancelled_compaction_excludes_other_work_until_its_worker_ends(
    tmp_path: Path, is_repeated: bool
) -> None:
    """Otherwise a second compaction would start from an empty catalog, and a blob that a row names by now could be
    deleted.
    """
    for number in NUMBERS():
        path = tmp_path / str(number)
        made = Store(path)
        store = made.store
        await made.open()
        store.switch_available_boundary_version(WriteVersion(9, 0))
        made.disk.stop_at(number, unless=names.EPOCH)
        compacting = await started(store.compact())
        await store.switch_epoch(3)
        if not await made.disk.until_stopped(compacting):
            await store.shutdown()
            break
        await cancelled(compacting)
        await made.put(b"l", made.early)
        await store.switch_epoch(4)
        if is_repeated:
            again = await started(store.compact())
            await store.switch_epoch(5)
            with suppress(WrongTime):
                await again
        made.disk.may_go_on.set()
        with suppress(asyncio.CancelledError):
            await compacting
        await store.shutdown()
        listed = catalog.read(DISK, str(path))
        assert listed is not None
        if number > 1:  # the first operation belongs to the rotation, and a compaction cancelled there never starts
            assert (listed.compacted, listed.max_blob_id) == (((names.COMPACTED, 1),), made.named), number
        assert read_whole(DISK, f"{path}/{names.blob(made.early)}") == b"early", number
        assert await reopened(path) == [b"k", b"l"]
    assert number > 15


async def test_compaction_can_be_repeated_after_the_cancelled_one_has_ended(tmp_path: Path) -> None:
    made = Store(tmp_path)
    await made.open()
    made.disk.stop_at(5, unless=names.EPOCH)
    compacting = await started(made.store.compact())
    await made.store.switch_epoch(3)
    assert await made.disk.until_stopped(compacting)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await compacting
    with pytest.raises(WrongTime, match="is running"):
        await made.store.compact()
    made.disk.may_go_on.set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            with suppress(WrongTime):
                await made.store.compact()
                break
            await asyncio.sleep(0)
    await made.store.shutdown()


async def test_compaction_cancelled_while_it_waits_for_an_epoch_ends_at_once(tmp_path: Path) -> None:
    made = Store(tmp_path)
    await made.open()
    compacting = await started(made.store.compact())
    compacting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await compacting
    compacting = await started(made.store.compact())
    await made.store.switch_epoch(3)
    assert (await compacting).rows == 1
    await made.store.shutdown()


async def test_snapshot_waits_for_the_worker_of_a_cancelled_snapshot(tmp_path: Path) -> None:
    made = Store(tmp_path)
    store, epoch = made.store, 2
    await made.open()
    for number in count(1):
        await write(made.channel, b"%02d" % number)
        epoch += 1
        await store.switch_epoch(epoch)
        made.disk.stop_at(number)
        reading = await started(store.snapshot())
        if not await made.disk.until_stopped(reading):
            break
        await cancelled(reading)
        again = await started(made.keys())
        assert await is_waiting(again), number
        made.disk.may_go_on.set()
        assert await again == [b"%02d" % each for each in range(1, number + 1)] + [b"k"]
    assert number > 5
    await store.shutdown()


# --- cancelled calls before a shutdown ---


async def compact(store: AsyncDatastore, _: Path) -> None:
    compacting = await started(store.compact())
    await store.switch_epoch(3)
    await compacting


async def snapshot(store: AsyncDatastore, _: Path) -> None:
    await write(store._channels[0], b"l")
    await store.switch_epoch(3)
    await store.snapshot()


async def begin_backup(store: AsyncDatastore, _: Path) -> None:
    beginning = await started(store.begin_backup())
    for epoch in count(3):
        await store.switch_epoch(epoch)
        if beginning.done():
            break
        await asyncio.sleep(0)
    (await beginning).notify_end_backup()


async def register(store: AsyncDatastore, path: Path) -> None:
    source = path.parent / "source"
    source.write_bytes(b"content")
    pool = store.blob_pool()
    await pool.duplicate_data(await pool.register_data(b"content"))
    await pool.register_file(str(source))
    await pool.register_file(str(source), is_temporary=True)
    await pool.release()


async def abort(store: AsyncDatastore, _: Path) -> None:
    channel = store._channels[0]
    pool = store.blob_pool()
    blob_id = await pool.register_data(b"content")
    await channel.begin_session()
    channel.add_entry(0, bytes(100), b"v", (1, 1), [blob_id])
    await pool.release()
    await channel.abort_session()


async def epochs(store: AsyncDatastore, _: Path) -> None:
    for epoch in range(3, 6):
        await store.switch_epoch(epoch)
        await write(store._channels[0], b"%d" % epoch)


async def create_channel(store: AsyncDatastore, _: Path) -> None:
    await store.create_channel()


async def ready(store: AsyncDatastore, _: Path) -> None:
    await store.ready()


async def restore(store: AsyncDatastore, path: Path) -> None:
    await store.restore(str(path.parent / "backup"), replaces=True)


async def ends_with_the_store(path: Path, disk: StoppableDisk, store: AsyncDatastore, call: Call, number: int) -> bool:
    """Return True if the call completed before that operation."""
    disk.stop_at(number)
    work = await started(call(store, path))
    if not await disk.until_stopped(work):
        await work
        await store.shutdown()
        return True
    await cancelled(work)
    ending = await started(store.shutdown())
    has_waited = await is_waiting(ending)
    disk.may_go_on.set()
    await ending
    with suppress(asyncio.CancelledError):
        await work
    assert has_waited, f"shutdown completed while a worker was at operation {number}"
    manifest.lock(DISK, str(path)).release()
    return False


@pytest.mark.parametrize("call", [compact, snapshot, begin_backup, register, abort, epochs])
async def test_shutdown_waits_for_the_worker_of_a_cancelled_call(call: Call, tmp_path: Path) -> None:
    for number in NUMBERS():
        made = Store(tmp_path / str(number))
        await made.open()
        if await ends_with_the_store(made.path, made.disk, made.store, call, number):
            break
        assert b"k" in await reopened(made.path)
    assert number > 1


@pytest.mark.parametrize("call", [create_channel, ready, restore])
async def test_shutdown_waits_for_the_worker_of_a_call_before_ready(call: Call, tmp_path: Path) -> None:
    first = Store(tmp_path / "backup")
    await first.open()
    await first.store.shutdown()
    for number in NUMBERS():
        path = tmp_path / str(number)
        shutil.copytree(first.path, path)
        disk = StoppableDisk()
        store = AsyncDatastore(disk.outside(), Settings(str(path)))
        if await ends_with_the_store(path, disk, store, call, number):
            break
        assert await reopened(path) == [b"k"]
    assert number > 1


async def test_restore_waits_for_the_worker_of_a_cancelled_restore(tmp_path: Path) -> None:
    first = Store(tmp_path / "backup")
    await first.open()
    await first.store.shutdown()
    for number in NUMBERS():
        path, disk = tmp_path / str(number), StoppableDisk()
        store = AsyncDatastore(disk.outside(), Settings(str(path)))
        disk.stop_at(number)
        restoring = await started(restore(store, path))
        if not await disk.until_stopped(restoring):
            break
        await cancelled(restoring)
        again = await started(restore(store, path))
        assert await is_waiting(again), number
        disk.may_go_on.set()
        await again
        await store.ready()
        assert [row.key for row in (await store.snapshot()).cursor()] == [b"k"]
        await store.shutdown()
    assert number > 5
    await store.shutdown()


async def test_channel_can_be_created_after_a_cancelled_attempt(tmp_path: Path) -> None:
    for number in NUMBERS():
        path, disk = tmp_path / str(number), StoppableDisk()
        store = AsyncDatastore(disk.outside(), Settings(str(path)))
        disk.stop_at(number)
        creating = await started(store.create_channel())
        if not await disk.until_stopped(creating):
            break
        await cancelled(creating)
        disk.may_go_on.set()
        channel = await store.create_channel()
        assert channel.id == 0
        await store.shutdown()
    assert number > 5
    await store.shutdown()


async def test_cancelled_shutdown_continues_and_can_be_awaited(tmp_path: Path) -> None:
    made = Store(tmp_path)
    await made.open()
    made.disk.stop_at(3)
    work = await started(snapshot(made.store, tmp_path))
    assert await made.disk.until_stopped(work)
    ending = await started(made.store.shutdown())
    await cancelled(ending)
    ending = await started(made.store.shutdown())
    assert await is_waiting(ending)
    with pytest.raises(AlreadyLocked):
        manifest.lock(DISK, str(tmp_path))
    made.disk.may_go_on.set()
    await ending
    manifest.lock(DISK, str(tmp_path)).release()


async def test_replica_waits_for_the_worker_of_a_cancelled_compaction(tmp_path: Path) -> None:
    first = Store(tmp_path / "first")
    await first.open()
    await first.store.shutdown()
    for number in NUMBERS():
        path, disk = tmp_path / str(number), StoppableDisk()
        shutil.copytree(first.path, path)
        replica = Replica(disk.outside(), str(path), Endpoint("127.0.0.1", 0))
        await replica.start()
        disk.stop_at(number)
        compacting = await started(replica.compact())
        if not await disk.until_stopped(compacting):
            break
        await cancelled(compacting)
        stopping = await started(replica.stop())
        await cancelled(stopping)
        stopping = await started(replica.stop())
        assert await is_waiting(stopping)
        disk.may_go_on.set()
        await stopping
        assert await reopened(path) == [b"k"]
    assert number > 5
    await replica.stop()


# --- backups ---


async def test_backup_waits_for_the_worker_of_a_compaction(tmp_path: Path) -> None:
    """Otherwise the list of the backup would precede the compaction, and the copied catalog would follow it."""
    path = tmp_path / "data"
    for number in (2, 6, 12):
        made = Store(path / str(number))
        await made.open()
        made.disk.stop_at(number, unless=names.EPOCH)
        compacting = await started(made.store.compact())
        await made.store.switch_epoch(3)
        assert await made.disk.until_stopped(compacting)
        beginning = await started(made.store.begin_backup(rotates=False))
        assert await is_waiting(beginning)
        made.disk.may_go_on.set()
        await compacting
        target = tmp_path / f"backup {number}"
        copied(await beginning, target)
        await made.store.shutdown()
        restored = tmp_path / f"restored {number}"
        store = AsyncDatastore(production(), Settings(str(restored)))
        await store.restore(str(target))
        await store.shutdown()
        assert await reopened(restored) == [b"k"]


async def test_compaction_fails_if_a_backup_was_opened_while_it_waited(tmp_path: Path) -> None:
    made = Store(tmp_path)
    await made.open()
    compacting = await started(made.store.compact())
    with await made.store.begin_backup(rotates=False):
        await made.store.switch_epoch(3)
        with pytest.raises(WrongTime, match=r"backup of .* is open"):
            await compacting
    assert DISK.kind(f"{tmp_path}/{names.COMPACTED}") is None
    await made.store.shutdown()


def copied(taken: Backup, target: Path) -> None:
    target.mkdir()
    with taken:
        for entry in taken.entries:
            shutil.copy(entry.source, target / entry.destination)


# --- Ctrl-C ---


@contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Press Ctrl-C when the condition becomes true, which must happen inside the block."""

    def press() -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def threaded(tmp_path: Path) -> Iterator[tuple[Datastore, StoppableDisk]]:
    """A store with a row in epoch 1; the current epoch is 2."""
    disk = StoppableDisk()
    with Datastore(str(tmp_path), outside=disk.outside()) as store:
        channel = store.create_channel()
        store.ready()
        store.switch_epoch(1)
        channel.begin_session()
        channel.add_entry(0, b"k", b"v", (1, 1))
        channel.end_session()
        store.switch_epoch(2)
        yield store, disk
        disk.may_go_on.set()
    manifest.lock(DISK, str(tmp_path)).release()


def test_ctrl_c_does_not_interrupt_a_compaction(threaded: tuple[Datastore, StoppableDisk], tmp_path: Path) -> None:
    store, disk = threaded
    epochs = iter(range(3, 1000))
    done = threading.Event()

    def switch() -> None:
        while not done.wait(0.001):
            store.switch_epoch(next(epochs))

    switching = threading.Thread(target=switch)
    switching.start()
    disk.stop_at(12, unless=names.EPOCH)
    with interrupted_when(disk.stopped.is_set):
        store.compact()
    with pytest.raises(WrongTime, match="is running"):
        store.compact()
    disk.may_go_on.set()
    done.set()
    switching.join()
    store.shutdown()
    assert [row.key for row in original.rows(DISK, str(tmp_path))] == [b"k"]


def test_shutdown_interrupted_by_ctrl_c_can_be_completed_later(threaded: tuple[Datastore, StoppableDisk]) -> None:
    store, disk = threaded
    disk.stop_at(3)
    with interrupted_when(disk.stopped.is_set):
        store.snapshot()
    with interrupted_when(lambda: store.status().state is State.CLOSED):
        store.shutdown()
    with pytest.raises(AlreadyLocked):
        manifest.lock(DISK, store._store.settings.path)


def test_begin_backup_interrupted_by_ctrl_c_leaves_no_open_backup(threaded: tuple[Datastore, StoppableDisk]) -> None:
    store, disk = threaded
    disk.stop_at(1)
    with interrupted_when(disk.stopped.is_set):
        store.begin_backup(rotates=False)
    disk.may_go_on.set()
    # The loop ends the backup when the worker is done; a snapshot may be ready earlier.
    deadline = time.monotonic() + DEADLINE_SECONDS
    while store._store._upkeep.open_backups:  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        store.snapshot()
