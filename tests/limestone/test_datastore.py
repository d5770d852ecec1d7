"""The datastore: what is durable and when it is told, restarts, directories of the real program, failures, crashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.limestone.datastore import AsyncDatastore, State
from flowstone.limestone.errors import WrongTime
from flowstone.limestone.settings import Settings
from flowstone.outside import production
from tests.limestone import recorded

REAL = recorded.HERE


def made(path: Path | str) -> tuple[AsyncDatastore, list[int]]:
    store = AsyncDatastore(production(), Settings(str(path)))
    told: list[int] = []
    store.add_persistent_callback(told.append)
    return store, told


async def test_what_a_session_added_is_durable_when_its_epoch_is_told(tmp_path: Path) -> None:
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


async def test_calls_before_ready_and_after_shutdown_say_so(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    channel = await store.create_channel()
    for early in (channel.begin_session(), store.switch_epoch(1)):
        with pytest.raises(WrongTime, match="is not ready"):
            await early
    await store.ready()
    for late in (store.ready(), store.create_channel()):
        with pytest.raises(WrongTime, match="comes too late"):
            await late
    with pytest.raises(WrongTime, match="call switch_epoch with 1"):
        await channel.begin_session()
    await store.switch_epoch(2)
    with pytest.raises(WrongTime, match="epochs only ever grow"):
        await store.switch_epoch(1)
    await store.shutdown()
    for later in (channel.begin_session(), store.switch_epoch(3), store.ready(), store.create_channel()):
        with pytest.raises(WrongTime, match="is shut down"):
            await later
    assert store.status().state is State.CLOSED
