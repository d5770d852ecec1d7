"""The datastore: durability and its reports, restarts, directories of the original, failures, crashes."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from flowstone.limestone.errors import DamagedFile, DatastoreFailed, LimestoneError, WrongTime
from flowstone.limestone.format import names
from flowstone.limestone.format.entries import WriteVersion
from flowstone.limestone.format.files import read_whole
from flowstone.limestone.settings import Settings
from flowstone.limestone.store.blobs import BlobError
from flowstone.limestone.store.channel import AsyncLogChannel
from flowstone.limestone.store.datastore import AsyncDatastore, State
from flowstone.limestone.store.recovery import recover
from flowstone.outside import AlreadyLocked, Disk, production
from tests.limestone import recorded
from tests.limestone.crashes import DIRECTORY, crashed, fresh, mounted, one_failure
from tests.limestone.replay import add, replay, sessions
from tests.limestone.world import Inline, outside_on
from tests.simulation.disk import Loss, Storage

T = TypeVar("T")

REAL = recorded.HERE
AGAIN_EVERY = 7
"""The store continues after one in this many crashes."""


def made(path: Path | str) -> tuple[AsyncDatastore, list[int]]:
    store = AsyncDatastore(production(), Settings(str(path)))
    told: list[int] = []
    store.add_persistent_callback(told.append)
    return store, told


async def test_entries_are_durable_when_their_epoch_is_reported(tmp_path: Path) -> None:
    store, told = made(tmp_path)
    written: list[int] = []
    store.add_write_epoch_callback(written.append)
    channel = await store.create_channel()
    await store.ready()
    await store.switch_epoch(1)
    await channel.begin_session()
    channel.add_entry(1, b"k", b"v", (1, 1))
    await channel.end_session()
    assert told == []
    await store.switch_epoch(2)
    assert (told, written, store.durable_epoch) == ([1], [1], 1)
    await store.switch_epoch(4)
    assert (told, written) == ([1, 3], [1])
    await store.shutdown()
    await store.shutdown()
    again, _ = made(tmp_path)
    await again.ready()
    assert again.last_epoch == 1
    await again.shutdown()


async def test_calls_before_ready_and_after_shutdown_raise(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    channel = await store.create_channel()
    for early in (channel.begin_session(), store.switch_epoch(1)):
        with pytest.raises(WrongTime, match="is not ready"):
            await early
    await store.ready()
    for late in (store.ready(), store.create_channel()):
        with pytest.raises(WrongTime, match="is already ready"):
            await late
    with pytest.raises(WrongTime, match="call switch_epoch with 1"):
        await channel.begin_session()
    await store.switch_epoch(2)
    with pytest.raises(WrongTime, match="epochs must not decrease"):
        await store.switch_epoch(1)
    await store.shutdown()
    for later in (channel.begin_session(), store.switch_epoch(3), store.ready(), store.create_channel()):
        with pytest.raises(WrongTime, match="is shut down"):
            await later
    assert store.status().state is State.CLOSED


# --- directories of the original ---


@pytest.mark.parametrize(("name", "channels", "last"), [("basic", 2, 8), ("epochs", 1, 206)])
async def test_repeating_the_calls_of_a_recorded_directory_writes_the_same_files(
    tmp_path: Path, name: str, channels: int, last: int
) -> None:
    real = REAL / name / "master-dir"
    store, told = made(tmp_path / "d")
    made_channels = [await store.create_channel() for _ in range(channels)]
    await store.ready()
    for path in sorted(real.rglob("*.blob")):
        await store.blob_pool().register_data(path.read_bytes())
    await replay(store, made_channels, sessions(real), last)
    await store.shutdown()
    assert_same_files(tmp_path / "d", real)
    assert told == recorded_callbacks(name)


async def test_restart_continues_where_the_real_program_does(tmp_path: Path) -> None:
    before, real = REAL / "basic" / "master-dir", REAL / "restart" / "master-dir"
    shutil.copytree(before, tmp_path / "d")
    store, told = made(tmp_path / "d")
    channels = [await store.create_channel() for _ in range(2)]
    await store.ready()
    text = (REAL / "restart" / "master.out").read_text()
    assert f"ready last_epoch={store.last_epoch}\n" in text
    await replay(store, channels, sessions(real, after=before), 7)
    await store.shutdown()
    assert_same_files(tmp_path / "d", real)
    assert told == recorded_callbacks("restart")


async def test_session_can_outlive_its_epoch(tmp_path: Path) -> None:
    """The epochs are those of the recorded directory; in the original the replica gets them too early."""
    real = REAL / "late_end" / "master-dir"
    store, told = made(tmp_path / "d")
    channels = [await store.create_channel() for _ in range(2)]
    await store.ready()
    (_, _, late), (_, _, last) = sessions(real)
    await store.switch_epoch(1)
    await channels[0].begin_session()
    add(channels[0], late[0])
    await store.switch_epoch(2)
    await store.switch_epoch(3)
    assert told == []
    await channels[0].end_session()
    assert (told, store.durable_epoch) == ([2], 1)
    await channels[1].begin_session()
    add(channels[1], last[0])
    await channels[1].end_session()
    await store.switch_epoch(4)
    await store.shutdown()
    assert_same_files(tmp_path / "d", real)
    assert told == recorded_callbacks("late_end")


def recorded_callbacks(name: str) -> list[int]:
    lines = (REAL / name / "master.out").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("persistent_callback")]


def assert_same_files(ours: Path, real: Path) -> None:
    """Compare all files except blobs, which the recorded program registered earlier, and the identity in
    the manifest.
    """
    for path in real.iterdir():
        if path.is_file() and path.name != names.MANIFEST:
            assert (ours / path.name).read_bytes() == path.read_bytes(), path.name
    assert (ours / names.SNAPSHOT).read_bytes() == (real / names.SNAPSHOT).read_bytes()
    manifests = [(side / names.MANIFEST).read_text() for side in (ours, real)]
    assert len(manifests[0]) == len(manifests[1])
    assert json.loads(manifests[0]).keys() == json.loads(manifests[1]).keys()
    assert not {path.name for path in ours.iterdir() if path.is_file()} - {path.name for path in real.iterdir()}


# --- failures ---


async def written(store: AsyncDatastore, channels: int = 1) -> list[AsyncLogChannel]:
    """Return a store in epoch 2, with epoch 1 durable."""
    found = [await store.create_channel() for _ in range(channels)]
    await store.ready()
    await store.switch_epoch(1)
    for channel in found:
        await channel.begin_session()
        channel.add_entry(channel.id, b"k", b"first", (1, 1))
        await channel.end_session()
    await store.switch_epoch(2)
    return found


def simulated(settings: Settings) -> tuple[Storage, AsyncDatastore, list[int]]:
    machine, disk = fresh()
    store = AsyncDatastore(outside_on(disk), settings)
    told: list[int] = []
    store.add_persistent_callback(told.append)
    return machine, store, told


def rows_after(machine: Storage, loss: Loss) -> list[bytes]:
    machine.broken.clear()
    machine.crash(loss)
    return [row.value for row in recover(mounted(machine), DIRECTORY).snapshot.rows()]


@pytest.mark.parametrize("call", ["append", "sync", "truncate"])
async def test_failed_write_of_a_session_stops_the_store_and_is_never_reported_durable(call: str) -> None:
    machine, store, told = simulated(Settings(DIRECTORY, spill=60))
    one, other = await written(store, 2)
    await other.begin_session()
    other.add_entry(1, b"k", b"other", (2, 2))
    await one.begin_session()
    if call == "truncate":
        one.add_entry(0, b"k", b"spilled" * 10, (2, 1))
        one.add_entry(0, b"k", b"spilled" * 10, (2, 1))
    machine.broken.add(call)
    with pytest.raises(OSError, match="Input/output"):
        await (one.abort_session() if call == "truncate" else one.end_session())
    machine.broken.clear()
    for later in (
        store.switch_epoch(3), other.end_session(), other.abort_session(), one.begin_session(), store.snapshot(),
        store.rotate(), store.until_durable(2), store.compact(), store.ready(), store.create_channel(),
    ):  # fmt: skip
        with pytest.raises(DatastoreFailed, match=r"has stopped.*Input/output.*shut it down and open it again"):
            await later
    status = store.status()
    assert (status.state, status.informed_epoch) == (State.FAILED, 1)
    assert status.failure is not None
    await store.shutdown()
    assert told == [1]
    assert rows_after(machine, Loss.UNSYNCED) == [b"first", b"first"]


async def test_full_disk_is_reported_by_the_call_that_writes_the_buffer() -> None:
    machine, store, _ = simulated(Settings(DIRECTORY, spill=60))
    (channel,) = await written(store)
    await channel.begin_session()
    machine.room = 10
    with pytest.raises(OSError, match="No space left"):
        channel.add_entry(0, b"k", b"much" * 20, (2, 1))
    with pytest.raises(WrongTime, match="is ending"):
        channel.add_entry(0, b"k", b"v", (2, 1))
    with pytest.raises(DatastoreFailed, match="No space left"):
        await channel.end_session()
    assert rows_after(machine, Loss.NOTHING) == [b"first"]


async def test_unrecorded_epoch_is_not_reported() -> None:
    machine, store, told = simulated(Settings(DIRECTORY))
    (channel,) = await written(store)
    await channel.begin_session()
    channel.add_entry(0, b"k", b"second", (2, 1))
    await channel.end_session()
    waiting = asyncio.ensure_future(store.until_durable(2))
    await asyncio.sleep(0)
    machine.broken.add("sync")
    with pytest.raises(OSError, match="Input/output"):
        await store.switch_epoch(3)
    with pytest.raises(DatastoreFailed):
        await waiting
    assert told == [1]
    assert rows_after(machine, Loss.UNSYNCED) == [b"first"]


async def test_lock_is_released_if_recovery_fails(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    await store.ready()
    await store.shutdown()
    (tmp_path / "pwal_0000").write_bytes(b"\x55")
    again, _ = made(tmp_path)
    with pytest.raises(DamagedFile):
        await again.ready()
    assert again.status().state is State.FAILED
    with pytest.raises(DatastoreFailed, match="pwal_0000 is damaged"):
        await again.create_channel()
    await again.shutdown()
    (tmp_path / "pwal_0000").unlink()
    await made(tmp_path)[0].create_channel()


async def test_two_stores_do_not_share_a_directory(tmp_path: Path) -> None:
    async with made(tmp_path)[0] as store:
        await store.ready()
        with pytest.raises(AlreadyLocked):
            await made(tmp_path)[0].ready()


async def test_directory_in_use_is_not_restored(tmp_path: Path) -> None:
    async with made(tmp_path / "a")[0] as store:
        await written(store)
        backup = tmp_path / "backup"
        backup.mkdir()
        for entry in (await store.begin_backup(rotates=False)).entries:
            shutil.copy(entry.source, backup / entry.destination)
        with pytest.raises(AlreadyLocked):
            await made(tmp_path / "a")[0].restore(str(backup))
        assert [row.value for row in (await store.snapshot()).cursor()] == [b"first"]
    async with made(tmp_path / "a")[0] as other:
        await other.create_channel()
        with pytest.raises(LimestoneError, match="contains entries"):
            await other.restore(str(backup))
        await other.restore(str(backup), replaces=True)
        await other.ready()
        assert [row.value for row in (await other.snapshot()).cursor()] == [b"first"]


async def test_second_of_two_concurrent_calls_is_rejected(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    found = await asyncio.gather(
        store.create_channel(), store.create_channel(), store.ready(), store.ready(), store.create_channel(),
        return_exceptions=True,
    )  # fmt: skip
    assert [getattr(each, "id", None) for each in found] == [0, 1, None, None, None]
    assert [isinstance(each, WrongTime) for each in found] == [False, False, False, True, True]
    await store.shutdown()


async def test_store_can_be_shut_down_during_ready(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    getting_ready = asyncio.ensure_future(store.ready())
    await asyncio.sleep(0)
    await store.shutdown()
    with pytest.raises(WrongTime, match="is shut down"):
        await getting_ready
    assert store.status().state is State.CLOSED
    async with made(tmp_path)[0] as again:
        await again.ready()


@pytest.mark.parametrize("is_open", [False, True])
async def test_closed_store_has_no_open_file(is_open: bool) -> None:
    machine, disk = fresh()
    store = AsyncDatastore(outside_on(disk), Settings(DIRECTORY, spill=50))
    channel = await store.create_channel()
    await store.ready()
    await store.switch_epoch(1)
    await channel.begin_session()
    channel.add_entry(1, b"k", b"v" * 50, (1, 1))
    if not is_open:
        await channel.end_session()
    await store.shutdown()
    assert not machine.opened
    with pytest.raises(WrongTime, match="is shut down"):
        await channel.end_session()


async def compacted(disk: Disk) -> None:
    """Leave a directory with a compacted file and a log file."""
    store = AsyncDatastore(outside_on(disk), Settings(DIRECTORY))
    channel = await store.create_channel()
    await store.ready()
    for epoch in (1, 3):
        await store.switch_epoch(epoch)
        await channel.begin_session()
        channel.add_entry(1, b"%d" % epoch, b"v", (epoch, 1))
        await channel.end_session()
        if epoch == 1:
            compacting = asyncio.ensure_future(store.compact())
            await asyncio.sleep(0)
            await store.switch_epoch(2)
            await compacting
    await store.switch_epoch(4)
    await store.shutdown()


async def test_store_that_fails_at_any_disk_operation_leaves_no_file_open() -> None:
    for number in itertools.count(1):
        machine, disk = fresh()
        await compacted(disk)
        store, failure = AsyncDatastore(outside_on(disk), Settings(DIRECTORY)), None
        with one_failure(machine, number) as has_failed:
            try:
                await store.create_channel()
                channel = await store.create_channel()  # whose file does not exist
                await store.ready()
                await store.switch_epoch(5)
                await channel.begin_session()
                channel.add_entry(1, b"k", b"v", (5, 1))
                await channel.end_session()
                await store.switch_epoch(6)
                await store.snapshot()
            except (OSError, LimestoneError) as error:
                failure = error  # its traceback keeps all frames alive, so no file is closed by chance
        await store.shutdown()
        assert not machine.opened, (number, failure)
        if not has_failed():
            return


async def test_rotated_file_is_closed_with_the_store_despite_readers() -> None:
    machine, disk = fresh()
    store = AsyncDatastore(outside_on(disk), Settings(DIRECTORY, spill=50))
    channel = await store.create_channel()
    await store.ready()
    await store.switch_epoch(1)
    await channel.begin_session()
    channel.add_entry(1, b"k", b"v", (1, 1))
    await channel.end_session()
    file = next(each for each in machine.opened if each.path == channel.path)
    assert channel.put_aside("pwal_0000.aside") is not None
    assert file.read_at(0, 1)
    await store.shutdown()
    assert not machine.opened


class GatedWorkers(Inline):
    """Workers that return only while `gate` is set. `at_gate`: one has reached the closed gate."""

    def __init__(self) -> None:
        self.gate, self.at_gate = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def __call__(self, fn: Callable[..., T], *args: object) -> T:
        result = fn(*args)
        if not self.gate.is_set():
            self.at_gate.set()
            await self.gate.wait()
        return result


@pytest.mark.parametrize("turns", range(12))
async def test_snapshot_racing_shutdown_is_rejected_and_leaves_no_open_file(turns: int) -> None:
    """`turns`: iterations of the event loop from the call of `shutdown` until the snapshot's worker returns."""
    machine, disk = fresh()
    workers = GatedWorkers()
    store = AsyncDatastore(replace(outside_on(disk), blocking=workers), Settings(DIRECTORY))
    await written(store)
    workers.gate.clear()
    reading = asyncio.ensure_future(store.snapshot())
    await asyncio.wait_for(workers.at_gate.wait(), 10)
    closing = asyncio.ensure_future(store.shutdown())
    for _ in range(turns):
        await asyncio.sleep(0)
    workers.gate.set()
    await closing
    assert not machine.locked
    assert [file.path for file in machine.opened] == []
    with pytest.raises(WrongTime, match="is shut down"):
        await reading


async def test_cancelled_snapshot_racing_shutdown_reports_no_unhandled_error() -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    machine, disk = fresh()
    workers = GatedWorkers()
    store = AsyncDatastore(replace(outside_on(disk), blocking=workers), Settings(DIRECTORY))
    await written(store)
    workers.gate.clear()
    reading = asyncio.ensure_future(store.snapshot())
    await asyncio.wait_for(workers.at_gate.wait(), 10)
    reading.cancel()
    closing = asyncio.ensure_future(store.shutdown())
    await asyncio.sleep(0)
    workers.gate.set()
    await closing
    gc.collect()
    assert reported == []
    assert [file.path for file in machine.opened] == []


async def test_failing_callback_is_reported_and_does_not_stop_the_store(tmp_path: Path) -> None:
    store, told = made(tmp_path)
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    store.add_persistent_callback(lambda epoch: 1 // 0)
    store.add_persistent_callback(told.append)
    await store.ready()
    for epoch in (1, 2, 3):
        await store.switch_epoch(epoch)
    await store.shutdown()
    assert reported == ["callback of epoch 1 failed", "callback of epoch 2 failed"]
    assert told == [1, 1, 2, 2]


async def test_cancelled_caller_loses_no_epoch(tmp_path: Path) -> None:
    store, told = made(tmp_path)
    (channel,) = await written(store)
    await channel.begin_session()
    await channel.end_session()
    switching = asyncio.ensure_future(store.switch_epoch(3))
    await asyncio.sleep(0)
    switching.cancel()
    await store.until_durable(2)
    assert (told, store.durable_epoch) == ([1, 2], 2)
    await store.shutdown()


# --- content ---


async def test_snapshot_contains_the_durable_epoch(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    (channel,) = await written(store)
    before = await store.snapshot()
    await channel.begin_session()
    channel.add_entry(0, b"l", b"second", (2, 1))
    await channel.end_session()
    assert await store.snapshot() is before
    await channel.begin_session()
    channel.add_entry(0, b"m", b"later", (2, 2))
    await store.switch_epoch(3)
    assert [row.value for row in (await store.snapshot()).cursor()] == [b"first"]
    await channel.end_session()
    found = await store.snapshot()
    assert [row.key for row in found.cursor()] == [b"k", b"l", b"m"]
    row = found.find(0, b"l")
    assert row is not None
    assert (row.value, row.version) == (b"second", WriteVersion(2, 1))
    assert [row.key for row in found.scan(0, b"l", b"m")] == [b"l"]
    await store.shutdown()


async def test_blobs_are_registered_named_and_kept(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    (channel,) = await written(store)
    pool = store.blob_pool()
    named, forgotten = await pool.register_data(b"content"), await pool.register_data(b"nobody's")
    await channel.begin_session()
    channel.add_entry(0, b"b", b"v", (2, 1), [named])
    await channel.end_session()
    await pool.release()
    assert read_whole(production().disk, store.blob_path(named)) == b"content"
    with pytest.raises(BlobError, match=f"blob {forgotten} does not exist in"):
        store.blob_path(forgotten)
    await channel.begin_session()
    with pytest.raises(BlobError, match=f"blob {forgotten} does not exist in"):
        channel.add_entry(0, b"c", b"v", (2, 2), [forgotten])
    await channel.end_session()
    await store.switch_epoch(3)
    await store.shutdown()
    again, _ = made(tmp_path)
    await again.ready()
    assert [row.blob_ids for row in (await again.snapshot()).cursor()] == [(named,), ()]
    assert read_whole(production().disk, again.blob_path(named)) == b"content"
    assert await again.blob_pool().register_data(b"x") > named
    await again.shutdown()


# --- crashes ---


@pytest.mark.timeout(3600)
def test_crash_at_any_moment_keeps_reported_epochs_and_no_partial_state() -> None:
    """Two channels write sessions that end late, spill or are aborted; the store reopens and continues."""
    told: list[int] = []

    async def program(disk: Disk) -> None:
        store = AsyncDatastore(outside_on(disk), Settings(DIRECTORY, spill=50))
        store.add_persistent_callback(told.append)
        one, other = await store.create_channel(), await store.create_channel()
        await store.ready()
        for epoch in range(store.last_epoch + 1, store.last_epoch + 4):
            await store.switch_epoch(epoch)
            for channel in (one, other):
                if channel.epoch is not None:
                    await channel.end_session()
                await channel.begin_session()
                for minor in range(3):
                    channel.add_entry(channel.id, b"%d/%d" % (channel.epoch or 0, minor), b"v" * 20, (epoch, minor))
            if epoch % 3 == 2:
                await one.abort_session()
            else:
                await one.end_session()
        await store.shutdown()

    def prepare(disk: Disk) -> None:
        told.clear()

    for number, (disk, _) in enumerate(crashed(prepare, lambda disk: asyncio.run(program(disk)))):
        durable = max(told, default=0)
        found = rows_by_epoch(disk)
        expected = {(0, epoch) for epoch in range(1, durable + 1) if epoch % 3 != 2}
        expected |= {(1, epoch) for epoch in range(1, durable + 1)}
        assert expected <= found.keys()
        assert all(minors == {0, 1, 2} for minors in found.values())
        # A recorded epoch must be complete even if it was not reported.
        beyond = {epoch for _, epoch in found.keys() - expected}
        assert beyond <= {durable + 1, durable + 2}
        if number % AGAIN_EVERY:
            continue
        asyncio.run(program(disk))
        again = rows_by_epoch(disk)
        assert again.keys() >= found.keys()
        assert all(minors == {0, 1, 2} for minors in again.values())


def rows_by_epoch(disk: Disk) -> dict[tuple[int, int], set[int]]:
    """Return the entries present, by channel and epoch."""
    found: dict[tuple[int, int], set[int]] = {}
    if disk.kind(f"{DIRECTORY}/{names.EPOCH}") is not None:
        for row in recover(disk, DIRECTORY, repairs=False).snapshot.rows():
            epoch, minor = map(int, row.key.split(b"/"))
            found.setdefault((row.storage_id, epoch), set()).add(minor)
    return found
