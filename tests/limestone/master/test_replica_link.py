"""The link to one replica: resume, seed, loss and reconnection.

A replica of the original is accepted once; without the shared secret, no replica is accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flowstone.limestone.format import entries, messages
from flowstone.limestone.format import wire_extensions as extensions
from flowstone.limestone.format.entries import Marker, WriteVersion, put
from flowstone.limestone.format.messages import Error, GroupCommit, LogChannelCreate, LogEntries, SessionBegin
from flowstone.limestone.format.wire_extensions import Action, Hello, Prepare
from flowstone.limestone.master import replica_link
from flowstone.limestone.master.conversation import AuthenticationFailed
from flowstone.limestone.master.propagation import Propagation
from flowstone.limestone.settings import Settings
from flowstone.outside import production
from tests.limestone.scripted_replica import NONCE, TOKEN, ScriptedReplica, eventually, scripted

MASTER = "0e1f2a3b-0000-4000-8000-00000000000a"
SECRET = "open sesame"


class Files:
    """A store that consists only of its files: `append` does what a channel does before it notifies others."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory)
        self.instance_uuid = MASTER
        self.durable_epoch = 0
        self._directory = directory

    def finished_sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self._directory.glob("pwal_????")}

    def append(self, channel_id: int, epoch: int, key: bytes, value: bytes = b"v") -> bytes:
        data = entries.encode(put(1, key, value, WriteVersion(epoch, 0)))
        begin, end = (entries.encode(Marker(entries.EntryType(kind), epoch)) for kind in (2, 3))
        with open(self._directory / f"pwal_{channel_id:04d}", "ab") as file:
            file.write(begin + data + end)
        return data


class Master:
    """Propagation with its files; each session has one key."""

    def __init__(self, directory: Path, *replicas: ScriptedReplica, **settings: object) -> None:
        self.files = Files(directory)
        endpoints = tuple(replica.endpoint for replica in replicas)
        self.settings = Settings(str(directory), endpoints, **settings)  # type: ignore[arg-type]
        self.propagation = Propagation(production(), self.settings, self.files)

    async def put(self, epoch: int, key: bytes, channel_id: int = 0, value: bytes = b"v") -> None:
        data = self.files.append(channel_id, epoch, key, value)
        await self.propagation.end_session(channel_id, epoch, lambda: (data,))

    async def commit(self, epoch: int) -> None:
        self.files.durable_epoch = epoch
        await self.propagation.group_commit(epoch)

    @property
    def state(self) -> str:
        return self.propagation.status().replicas[0].state

    @property
    def error(self) -> str | None:
        return self.propagation.status().replicas[0].error


@asynccontextmanager
async def running(master: Master, *, channels: int = 1, last_epoch: int = 0) -> AsyncIterator[Master]:
    try:
        for channel_id in range(channels):
            await master.propagation.open_channel(channel_id)
        master.files.durable_epoch = last_epoch
        await master.propagation.start(last_epoch)
        yield master
    finally:
        await master.propagation.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_link, "RETRY_SECONDS_MAX", 0.1)


def keys_heard(replica: ScriptedReplica, channel_id: int | None = None) -> list[tuple[int, bytes]]:
    return [
        (message.epoch, entry.key)
        for connection in replica.connections
        for message in connection.messages
        if isinstance(message, LogEntries) and channel_id in (None, connection.channel_id)
        for entry in message.entries
    ]


async def test_replica_of_ours_is_prepared_on_its_control_channel_before_log_channels_open(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica, running(Master(tmp_path, replica), channels=2) as master:
        await eventually(lambda: master.state == "live")
        assert [type(message) for message in replica.connections[0].messages] == [SessionBegin, Hello, Prepare]
        await eventually(lambda: len(replica.heard_of(LogChannelCreate)) == 2)
        assert replica.heard_of(LogChannelCreate) == [LogChannelCreate(0, TOKEN), LogChannelCreate(1, TOKEN)]


async def test_former_replica_resumes_after_its_durable_epoch(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        replica.follows, replica.durable_epoch = MASTER, 2
        master = Master(tmp_path, replica)
        for epoch in (1, 2, 3, 4):
            master.files.append(epoch % 2, epoch, b"%d" % epoch)
        async with running(master, channels=2, last_epoch=4):
            await eventually(lambda: replica.durable_epoch == 4)
            assert replica.heard_of(Prepare) == [Prepare(Action.RESUME, 2)]
            assert sorted(keys_heard(replica, 9999)) == [(3, b"3"), (4, b"4")]
            assert replica.heard_of(GroupCommit) == [GroupCommit(4)]
            assert master.state == "live"


async def test_replica_without_history_is_seeded_while_sessions_continue(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        replica.follows, replica.durable_epoch = None, 0
        master = Master(tmp_path, replica)
        for number in range(200):
            master.files.append(0, 1 + number // 10, b"old%d" % number)
        async with running(master, last_epoch=20):
            for number in range(50):
                await master.put(21, b"new%d" % number)
            await master.commit(21)
            assert replica.heard_of(Prepare) == [Prepare(Action.SEED, 20)]
            expected = {(1 + number // 10, b"old%d" % number) for number in range(200)}
            assert {*keys_heard(replica)} == expected | {(21, b"new%d" % number) for number in range(50)}
            assert replica.durable_epoch == 21


@pytest.mark.parametrize(
    ("value_size", "count", "in_flight_max"),
    [(10, 12, 8), ((4 << 20) - 1000, 12, 2), ((4 << 20) + 1000, 12, 5), (11 << 20, 5, 2), (30 << 20, 3, 1)],
)
async def test_catch_up_waits_for_a_slow_replica_when_too_much_memory_is_in_flight(
    tmp_path: Path, value_size: int, count: int, in_flight_max: int
) -> None:
    """Otherwise the backlog of the catch-up would end this connection and every later one."""
    async with scripted(is_ours=True) as replica:
        replica.answers.append(lambda message: b"" if isinstance(message, LogEntries) else b"?")
        master = Master(tmp_path, replica, on_lost="degrade")
        for number in range(count):
            master.files.append(0, 1 + number, b"%d" % number, bytes(value_size))
        async with running(master, last_epoch=count):
            in_flight: list[int] = []

            def is_lost_or_has(acknowledged: int) -> bool:
                in_flight.append(master.propagation.status().replicas[0].unacknowledged_sessions)
                expected = min(in_flight_max, count - acknowledged)
                has_sent = in_flight[-1] >= expected and len(keys_heard(replica)) > acknowledged
                return has_sent or master.state == "lost"

            for acknowledged in range(count):
                await eventually(lambda: is_lost_or_has(acknowledged))  # noqa: B023, called before the next round
                assert master.error is None
                seeding = next(connection for connection in replica.connections if connection.channel_id == 9999)
                seeding.writer.write(messages.ACK)
            await eventually(lambda: master.state == "live")
            assert max(in_flight) == in_flight_max


async def test_session_counts_only_when_the_replica_has_all_earlier_ones(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        held: list[bytes] = []
        replica.answers.append(
            lambda message: b"" if isinstance(message, LogEntries) and message.epoch == 1 and not held else b"?"
        )
        master = Master(tmp_path, replica)
        master.files.append(0, 1, b"old")
        async with running(master, last_epoch=1):
            ending = asyncio.ensure_future(master.put(2, b"new"))
            await eventually(lambda: (2, b"new") in keys_heard(replica, 0))
            await asyncio.sleep(0.05)
            assert master.state == "catching up"
            assert not ending.done()
            assert replica.heard_of(GroupCommit) == []
            held.append(b"go")
            seeding = next(connection for connection in replica.connections if connection.channel_id == 9999)
            seeding.writer.write(messages.ACK)
            await ending
            assert master.state == "live"


async def test_lost_replica_is_reconnected_and_gets_the_missed_sessions(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica, running(Master(tmp_path, replica)) as master:
        await master.put(1, b"a")
        await master.commit(1)
        replica.follows = MASTER
        await replica.vanish()
        await eventually(lambda: master.state in ("lost", "connecting"))
        ending = asyncio.ensure_future(master.put(2, b"b"))
        await asyncio.sleep(0.05)
        assert not ending.done()
        replica.connections.clear()
        await replica.listen()
        await ending
        await master.commit(2)
        assert keys_heard(replica) == [(2, b"b")]
        assert replica.heard_of(Prepare) == [Prepare(Action.RESUME, 1)]
        assert replica.heard_of(GroupCommit) == [GroupCommit(2)]


async def test_replica_one_epoch_ahead_is_reset(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        replica.follows, replica.durable_epoch = MASTER, 2
        master = Master(tmp_path, replica)
        master.files.append(0, 1, b"a")
        invalidated = entries.encode(Marker(entries.EntryType.MARKER_INVALIDATED_BEGIN, 2))
        log = tmp_path / "pwal_0000"
        log.write_bytes(log.read_bytes() + invalidated + entries.encode(put(1, b"b", b"", WriteVersion(2, 0))))
        async with running(master, last_epoch=2):
            await eventually(lambda: replica.heard_of(GroupCommit) == [GroupCommit(2)])
            assert replica.heard_of(Prepare) == [Prepare(Action.RESUME, 1)]
            assert keys_heard(replica) == []


async def test_original_replica_is_accepted_once_and_not_after_a_loss(tmp_path: Path) -> None:
    async with scripted() as replica:
        master = Master(tmp_path, replica, on_lost="degrade")
        async with running(master, channels=2, last_epoch=5):
            assert master.state == "live"
            await master.put(6, b"a")
            await master.commit(6)
            assert replica.heard_of(LogChannelCreate) == [LogChannelCreate(0), LogChannelCreate(1)]
            assert replica.heard_of(GroupCommit) == [GroupCommit(6)]
            await replica.vanish()
            await eventually(lambda: master.state == "gone")
            replica.connections.clear()
            await replica.listen()
            await master.put(7, b"b")
            assert replica.connections == []


async def test_late_original_replica_that_missed_sessions_is_rejected(tmp_path: Path) -> None:
    replica = ScriptedReplica()
    await replica.listen()
    await replica.vanish()
    async with running(Master(tmp_path, replica, on_lost="degrade")) as master:
        await master.put(1, b"a")
        await master.put(1, b"b")
        await replica.listen()
        await eventually(lambda: master.state == "gone")
        assert "missed sessions" in str(master.error)
        assert replica.heard_of(LogChannelCreate) == []
    await replica.vanish()


async def test_late_original_replica_that_missed_nothing_is_accepted(tmp_path: Path) -> None:
    replica = ScriptedReplica()
    await replica.listen()
    await replica.vanish()
    async with running(Master(tmp_path, replica)) as master:
        ending = asyncio.ensure_future(master.put(1, b"a"))
        await asyncio.sleep(0.02)
        await replica.listen()
        await ending
        assert keys_heard(replica) == [(1, b"a")]
    await replica.vanish()


async def test_late_original_replica_records_the_current_epoch(tmp_path: Path) -> None:
    replica = ScriptedReplica()
    await replica.listen()
    await replica.vanish()
    async with running(Master(tmp_path, replica, on_lost="degrade"), last_epoch=3) as master:
        await master.put(4, b"a")
        await master.commit(4)
        await replica.listen()
        await eventually(lambda: replica.heard_of(GroupCommit) == [GroupCommit(4)])
        assert keys_heard(replica) == [(4, b"a")]
    await replica.vanish()


async def test_unexpected_error_is_reported_and_the_replica_reconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
    broken = [True]

    def sizes(files: Files) -> dict[str, int]:
        if broken:
            broken.clear()
            raise RuntimeError("a bug")
        return {}

    monkeypatch.setattr(Files, "finished_sizes", sizes)
    async with scripted(is_ours=True) as replica, running(Master(tmp_path, replica)) as master:
        await eventually(lambda: master.state == "live")
        assert told == [f"link to replica {replica.endpoint} failed"]


async def test_replica_that_cannot_be_reset_is_seeded(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        replica.follows, replica.durable_epoch = MASTER, 1
        refusal = messages.encode(Error(201, "seed this replica again"))
        replica.answers.append(
            lambda m: refusal if isinstance(m, Prepare) and m.action is Action.RESUME else b"?",
        )
        async with running(Master(tmp_path, replica), last_epoch=2) as master:
            await eventually(lambda: master.state == "live")
            assert replica.heard_of(Prepare) == [Prepare(Action.RESUME, 1), Prepare(Action.SEED, 2)]


async def test_master_and_replica_prove_the_shared_secret(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        replica.proof = lambda hello: extensions.replica_proof(SECRET.encode(), hello.nonce, NONCE)
        async with running(Master(tmp_path, replica, secret=SECRET)) as master:
            await eventually(lambda: master.state == "live")
            hello = replica.heard_of(Hello)[0]
            assert isinstance(hello, Hello)
            assert hello.proof == extensions.master_proof(SECRET.encode(), hello.nonce, NONCE)


@pytest.mark.parametrize("is_ours", [True, False])
async def test_replica_without_the_secret_gets_no_data(tmp_path: Path, is_ours: bool) -> None:
    async with scripted(is_ours=is_ours) as replica:
        replica.proof = lambda hello: extensions.replica_proof(b"guess", hello.nonce, NONCE)
        with pytest.raises(AuthenticationFailed) as failed:
            async with running(Master(tmp_path, replica, secret=SECRET)):
                pass
        assert replica.heard_of(LogChannelCreate, Prepare) == []
        assert SECRET not in str(failed.value)
        assert SECRET not in repr(failed.value)


async def test_replica_with_another_secret_is_reported_at_the_start(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        replica.answers.append(
            lambda message: messages.encode(Error(200, "no proof")) if isinstance(message, Hello) else b"?"
        )
        with pytest.raises(AuthenticationFailed):
            async with running(Master(tmp_path, replica)):
                pass
        async with running(Master(tmp_path, replica, on_lost="degrade")) as master:
            await master.put(1, b"a")
            assert master.propagation.status().degraded


@pytest.mark.parametrize("kind", [LogEntries, GroupCommit])
async def test_silent_replica_is_disconnected_after_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    monkeypatch.setattr(replica_link, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(replica_link, "SILENCE_SECONDS", 0.1)
    async with scripted(is_ours=True) as replica:
        silent = [True]
        replica.answers.append(lambda message: b"" if isinstance(message, kind) and silent else b"?")
        async with running(Master(tmp_path, replica)) as master:
            await eventually(lambda: master.state == "live")

            async def write() -> None:
                await master.put(1, b"a")
                await master.commit(1)

            writing = asyncio.ensure_future(write())
            await eventually(lambda: master.error is not None and "acknowledged for" in master.error)
            silent.clear()
            await writing
            assert master.state == "live"
