"""A replica under the message orders of the original's master: acknowledged data survives a kill.

The original sends the GROUP_COMMIT of an epoch while sessions of the epoch are open, and waits for the answer before it
ends them (docs/spec/limestone.md#stored-and-propagated). The original's replica records such an epoch immediately, and
our replica does too.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flowstone.limestone.format import epoch_file
from flowstone.limestone.format.messages import Blob, GroupCommit
from flowstone.limestone.replica.replica import Replica
from flowstone.limestone.store.recovery import recover
from tests.limestone.peer import Master, Peer, blob_session, row, session
from tests.limestone.running_replica import OUTSIDE, markers, master_of, rows, running, until

BEGIN, END = 1, 6
SESSIONS = 99


@asynccontextmanager
async def following(path: Path, channels: int, *, compatible: bool = False) -> AsyncIterator[tuple[Master, list[Peer]]]:
    async with running(path, compatible=compatible) as replica:
        master = master_of(replica)
        logs = [await master.open(number) for number in range(channels)]
        await master.begin()
        yield master, logs


def killed(path: Path) -> Path:
    """Return a copy of the directory as kill -9 would leave it now."""
    return Path(shutil.copytree(path, path.parent / "killed"))


def durable(path: Path) -> int:
    return epoch_file.read(OUTSIDE.disk, str(path)).durable


async def overlap(master: Master, logs: list[Peer]) -> None:
    """Send one session per epoch, each ending only after the group commits of its epoch and of the next one.

    Every group commit and every session except the last is acknowledged.
    """
    for epoch in range(1, SESSIONS + 2):
        logs[epoch % 3].send(session(epoch, row(f"k{epoch:03}", "v", epoch), flags=BEGIN))
        await master.commit(epoch)
        if epoch > 1:
            await logs[(epoch - 1) % 3].acknowledged(session(epoch - 1, flags=END))


EXPECTED = [(f"k{epoch:03}".encode(), b"v") for epoch in range(1, SESSIONS + 1)]


@pytest.mark.parametrize("compatible", [False, True])
async def test_acknowledged_epochs_survive_kill_when_sessions_overlap(tmp_path: Path, compatible: bool) -> None:
    path = tmp_path / "replica"
    async with following(path, 3, compatible=compatible) as (master, logs):
        await overlap(master, logs)
        left = killed(path)
        assert (durable(left), rows(left)) == (SESSIONS + 1, EXPECTED)
    async with running(left, compatible=compatible) as restarted:
        assert restarted.status().durable_epoch == SESSIONS + 1
    assert rows(left) == EXPECTED


async def test_acknowledged_epochs_survive_closed_connections_and_shutdown(tmp_path: Path) -> None:
    path = tmp_path / "replica"
    async with running(path) as replica:
        master = master_of(replica)
        logs = [await master.open(number) for number in range(3)]
        await master.begin()
        await overlap(master, logs)
        await master.close()
        await until(lambda: replica.status().master is None)
        assert (replica.status().durable_epoch, rows(path)) == (SESSIONS + 1, EXPECTED)
    assert (durable(path), rows(path)) == (SESSIONS + 1, EXPECTED)


async def test_epoch_is_recorded_before_its_group_commit_is_acknowledged(tmp_path: Path) -> None:
    """The master then reports the epoch to its clients, so acknowledged sessions of the epoch must count."""
    path = tmp_path / "replica"
    async with following(path, 2) as (master, (whole, late)):
        await whole.acknowledged(session(1, row("a", "1", 1)))
        late.send(session(1, row("b", "1", 1), flags=BEGIN))
        await master.commit(1)
        assert rows(killed(path)) == [(b"a", b"1")]
        await late.acknowledged(session(1, flags=END))
        assert rows(path) == [(b"a", b"1"), (b"b", b"1")]
        assert markers(path / "pwal_0001") == [(2, 1), (3, 1)]


async def test_open_session_that_was_spilled_does_not_count_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowstone.limestone.replica.conversations.SPILL", 0)
    path = tmp_path / "replica"
    async with following(path, 1) as (master, (log,)):
        log.send(session(1, row("a", "1", 1), flags=BEGIN))
        await until(lambda: (path / "pwal_0000").exists() and (path / "pwal_0000").stat().st_size > 9)
        assert markers(path / "pwal_0000") == [(2, 1)]
        await master.commit(1)
        left = killed(path)
        assert markers(left / "pwal_0000") == [(6, 1)]
        assert rows(left) == []
        log.send(session(1, row("b", "1", 1), flags=0))
        await log.acknowledged(session(1, flags=END))
        assert markers(path / "pwal_0000") == [(2, 1), (3, 1)]
    assert rows(path) == [(b"a", b"1"), (b"b", b"1")]


async def test_second_session_of_an_epoch_is_open_at_its_group_commit(tmp_path: Path) -> None:
    """The original does not wait for a channel that has already finished a session of the epoch."""
    async with following(tmp_path, 1) as (master, (log,)):
        await log.acknowledged(session(1, row("a", "1", 1)))
        log.send(session(1, row("b", "1", 1), flags=BEGIN))
        await master.commit(1)
        log.send(session(1, row("c", "1", 1), flags=0))
        await log.acknowledged(session(1, flags=END))
        assert [key for key, _ in rows(tmp_path)] == [b"a", b"b", b"c"]


async def test_session_that_ended_before_the_group_commit_is_synced_before_the_answer(tmp_path: Path) -> None:
    """As with REPLICATION_ASYNC_SESSION_CLOSE, neither answer is awaited before the other is requested."""
    path = tmp_path / "replica"
    async with following(path, 3) as (master, logs):
        for epoch in range(1, 31):
            for number, log in enumerate(logs):
                log.send(blob_session(epoch, f"{number}-{epoch:02}", Blob(10 * epoch + number, bytes(5000))))
            await master.commit(epoch)
            assert durable(path) == epoch
            for log in logs:
                assert await log.receive() == ()
        left = killed(path)
    assert len(rows(left)) == 90


async def test_session_that_never_ends_leaves_nothing_in_a_recorded_epoch(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        master = master_of(replica)
        whole, broken = await master.open(0), await master.open(1)
        await master.begin()
        await whole.acknowledged(session(1, row("a", "1", 1)))
        broken.send(session(1, row("b", "1", 1), flags=BEGIN))
        await master.commit(1)
        await broken.close()
        await until(lambda: replica.status().channels == 1)
        assert await master.control.refused(GroupCommit(2)) == 201
    assert rows(tmp_path) == [(b"a", b"1")]
    assert recover(OUTSIDE.disk, str(tmp_path), repairs=False).durable_epoch == 1


async def test_consecutive_masters_keep_acknowledged_epochs(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        for life in range(5):
            await _one_life(replica, 10 * life)
    expected = [b"k%02d" % (10 * life + at) for life in range(5) for at in range(1, 4)]
    assert [key for key, _ in rows(tmp_path)] == expected


async def _one_life(replica: Replica, base: int) -> None:
    master = master_of(replica)
    logs = [await master.open(number) for number in range(3)]
    await master.begin()
    for number, log in enumerate(logs, base + 1):
        log.send(session(number, row(f"k{number:02}", "v", number), flags=BEGIN))
    await master.commit(base + 3)
    for number, log in enumerate(logs, base + 1):
        await log.acknowledged(session(number, flags=END))
    logs[0].send(session(base + 4, row("never", "v", base + 4), flags=BEGIN))
    await master.close()
    await until(lambda: replica.status().master is None)
