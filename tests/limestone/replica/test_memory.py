"""All connections of a replica together use bounded memory, whatever their number."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from flowstone.limestone.format.messages import encode
from flowstone.limestone.replica import memory as replica_memory
from flowstone.limestone.replica.memory import LARGE_MESSAGE, LARGE_MESSAGES_MAX, SHARE_MIN, Memory
from tests.limestone.peer import row, session
from tests.limestone.running_replica import master_of, rows, running, until

CHANNELS = 40
BEGIN, END = 1, 6


def test_share_shrinks_with_the_connections() -> None:
    count = 0
    memory = Memory(lambda: count)
    assert memory.share(64 << 20, 1 << 20) == 1 << 20
    count = 640
    assert memory.share(64 << 20, 1 << 20) == (64 << 20) // 640
    count = 10_000
    assert memory.share(64 << 20, 1 << 20) == SHARE_MIN
    count = 1000
    assert count * memory.share(replica_memory.BUFFERED_TOTAL, 1 << 20) <= replica_memory.BUFFERED_TOTAL


async def test_open_sessions_of_many_channels_are_spilled_to_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = CHANNELS * SHARE_MIN
    monkeypatch.setattr("flowstone.limestone.replica.conversations.BUFFERED_TOTAL", total)
    async with running(tmp_path) as replica:
        master = master_of(replica)
        await master.begin()
        logs = [await master.open(number) for number in range(CHANNELS)]
        for number, log in enumerate(logs):
            log.send(session(1, row(f"k{number:02}", "", 1), flags=BEGIN))
            for minor in range(10):
                log.send(session(1, row(f"k{number:02}", "v" * 5000, 1, minor), flags=0))
        channels = [replica.directory.channel(number) for number in range(CHANNELS)]
        await until(lambda: all((tmp_path / channel.name).exists() for channel in channels))
        await until(lambda: all((tmp_path / channel.name).stat().st_size > SHARE_MIN for channel in channels))
        assert sum(channel.buffered for channel in channels) <= total
        for log in logs:
            await log.acknowledged(session(1, flags=END))
        await master.commit(1)
    assert rows(tmp_path) == [(f"k{number:02}".encode(), b"v" * 5000) for number in range(CHANNELS)]


async def test_large_messages_of_many_channels_take_turns(tmp_path: Path) -> None:
    """More channels are receiving a large message than there are slots; all of them finish."""
    count = LARGE_MESSAGES_MAX + 8
    async with running(tmp_path) as replica:
        master = master_of(replica)
        await master.begin()
        logs = [await master.open(number) for number in range(count)]
        messages = [encode(session(1, row(f"k{n:02}", "v" * 4 * LARGE_MESSAGE, 1))) for n in range(count)]
        for log, message in zip(logs, messages, strict=True):
            log.send(message[: 2 * LARGE_MESSAGE])
        await until(replica.memory.large_messages.locked)
        for log, message in zip(logs, messages, strict=True):
            log.send(message[2 * LARGE_MESSAGE :])
        for log in logs:
            assert await log.receive() == ()
        await master.commit(1)
        assert not replica.memory.large_messages.locked()
    assert len(rows(tmp_path)) == count


async def test_huge_messages_of_many_channels_are_received_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge, count = 2 * LARGE_MESSAGE, 3
    monkeypatch.setattr("flowstone.limestone.replica.conversations.HUGE_MESSAGE", huge)
    async with running(tmp_path) as replica:
        place = replica.memory.huge_messages = CountedPlace(1)
        master = master_of(replica)
        await master.begin()
        logs = [await master.open(number) for number in range(count)]
        messages = [encode(session(1, row(f"k{n:02}", "v" * 4 * huge, 1))) for n in range(count)]
        for log, message in zip(logs, messages, strict=True):
            log.send(message[: 2 * huge])
        await until(lambda: place.requests == count)
        assert place.locked()
        for log, message in zip(reversed(logs), reversed(messages), strict=True):
            log.send(message[2 * huge :])
        for log in logs:
            assert await log.receive() == ()
        await master.commit(1)
        assert not place.locked()
    assert len(rows(tmp_path)) == count


class CountedPlace(asyncio.Semaphore):
    requests = 0

    async def acquire(self) -> Literal[True]:
        self.requests += 1
        return await super().acquire()
