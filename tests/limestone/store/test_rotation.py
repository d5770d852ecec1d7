"""Log files are rotated at an epoch boundary: no session is lost, delayed, or in the wrong file."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flowstone.limestone.errors import WrongTime
from flowstone.limestone.format import names
from flowstone.limestone.format.snippets import snippets
from flowstone.limestone.settings import Settings
from flowstone.limestone.store.channel import AsyncLogChannel
from flowstone.limestone.store.datastore import AsyncDatastore
from flowstone.limestone.store.rotation import Rotated
from flowstone.outside import production

DISK = production().disk
T = TypeVar("T")


async def opened(path: Path, channels: int) -> tuple[AsyncDatastore, list[AsyncLogChannel]]:
    store = AsyncDatastore(production(), Settings(str(path)))
    made = [await store.create_channel() for _ in range(channels)]
    await store.ready()
    await store.switch_epoch(store.last_epoch + 1)
    return store, made


async def write(channel: AsyncLogChannel, key: bytes) -> None:
    await channel.begin_session()
    assert channel.epoch is not None
    channel.add_entry(channel.id, key, b"v", (channel.epoch, 1))
    await channel.end_session()


async def started(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # no task of a crashed process is awaited
    await asyncio.sleep(0)
    return task


def epochs(path: Path) -> dict[str, list[int]]:
    """Return the sessions of each log file, by channel name and whether it was rotated."""
    logs = [name for name in DISK.list_directory(str(path)) if names.is_pwal(name)]
    return {name: [snippet.epoch for snippet in snippets(DISK, f"{path}/{name}")] for name in logs}


async def test_rotation_splits_every_channel_at_the_same_epoch(tmp_path: Path) -> None:
    store, (idle, busy, unused) = await opened(tmp_path, 3)
    for channel in (idle, busy):
        await write(channel, b"a")
    await busy.begin_session()
    rotating = await started(store.rotate())
    await write(idle, b"b")
    await store.switch_epoch(2)
    await write(idle, b"c")
    await store.switch_epoch(3)
    assert not rotating.done()
    busy.add_entry(1, b"late", b"v", (1, 2))
    await busy.end_session()
    await write(busy, b"d")
    found = await rotating
    assert found.epoch == 1
    await store.switch_epoch(4)
    assert sorted(name.partition(".")[0] for name in found.names) == ["pwal_0000", "pwal_0001"]
    assert all(name.endswith(".0") and names.is_detached(name) for name in found.names)
    old, new = (
        {name: found for name, found in epochs(tmp_path).items() if names.is_detached(name) is wanted}
        for wanted in (True, False)
    )
    assert sorted(old.values()) == [[1, 1], [1, 1]]
    assert new == {"pwal_0000": [2], "pwal_0001": [3]}
    keys = [row.key for row in (await store.snapshot()).cursor()]
    assert sorted(keys) == [b"a", b"a", b"b", b"c", b"d", b"late"]
    assert unused.epoch is None
    await store.shutdown()


async def test_files_of_former_channels_are_rotated(tmp_path: Path) -> None:
    store, channels = await opened(tmp_path, 2)
    for channel in channels:
        await write(channel, b"a")
    await store.switch_epoch(2)
    await store.shutdown()
    again, _ = await opened(tmp_path, 1)
    rotating = await started(again.rotate())
    await again.switch_epoch(again.last_epoch + 2)
    assert len((await rotating).names) == 2
    assert all(map(names.is_detached, epochs(tmp_path)))
    await again.shutdown()


async def test_rotation_without_files_returns_at_once(tmp_path: Path) -> None:
    store, _ = await opened(tmp_path, 1)
    assert await store.rotate() == Rotated((), 0)
    await store.shutdown()


async def test_concurrent_rotations_both_complete(tmp_path: Path) -> None:
    store, (channel,) = await opened(tmp_path, 1)
    await write(channel, b"a")
    both = [await started(store.rotate()) for _ in range(2)]
    await store.switch_epoch(2)
    assert sorted([len((await each).names) for each in both]) == [0, 1]
    await store.shutdown()


async def test_rotation_fails_when_the_store_is_shut_down(tmp_path: Path) -> None:
    store, (channel,) = await opened(tmp_path, 1)
    await write(channel, b"a")
    rotating, durable = await started(store.rotate()), await started(store.until_durable(1))
    await store.shutdown()
    for waiting in (rotating, durable):
        with pytest.raises(WrongTime, match="is shut down"):
            await waiting
