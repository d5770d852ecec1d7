"""A store with a replica: conversations and files of the original, every order of group commit, lost replicas."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import get_args

import pytest

from flowstone.limestone.errors import DatastoreFailed
from flowstone.limestone.format import epoch_file, names
from flowstone.limestone.format.messages import ACK, GroupCommit, LogEntries
from flowstone.limestone.master.propagation import QuorumLost
from flowstone.limestone.replica.replica import Replica
from flowstone.limestone.settings import GroupCommit as Order
from flowstone.limestone.settings import Settings
from flowstone.limestone.store.blocking import Datastore, LogChannel
from flowstone.limestone.store.datastore import AsyncDatastore, State
from flowstone.limestone.store.recovery import recover
from flowstone.outside import production
from flowstone.outside.loop_thread import LoopThread
from tests.limestone import recorded
from tests.limestone.replay import add, replay, sessions
from tests.limestone.running_replica import LOCAL, running
from tests.limestone.scripted_replica import ScriptedReplica, eventually, scripted

OUTSIDE = production()
ORDERS = get_args(Order)
BASIC = recorded.HERE / "basic"


async def with_recorded_blobs(store: AsyncDatastore) -> None:
    """Make the pool return the ids of the recording."""
    pool = store.blob_pool()
    for number, path in enumerate(sorted((BASIC / "master-dir").rglob("*.blob")), 1):
        assert await pool.register_data(path.read_bytes()) == number


async def replayed_basic(settings: Settings) -> None:
    async with AsyncDatastore(OUTSIDE, settings) as store:
        channels = [await store.create_channel() for _ in range(2)]
        await store.ready()
        await with_recorded_blobs(store)
        await replay(store, channels, sessions(BASIC / "master-dir"), 8)


# --- as the original ---


async def test_calls_of_a_recorded_master_send_the_recorded_conversation(tmp_path: Path) -> None:
    async with scripted() as replica:
        await replayed_basic(Settings(str(tmp_path), (replica.endpoint,), compatible=True))
        heard = [bytes(connection.received) for connection in replica.connections]
        assert heard == [(BASIC / "wire" / f"conn{number}.m2r.bin").read_bytes() for number in range(3)]


async def test_session_that_outlives_its_epoch_is_sent_before_the_group_commit(tmp_path: Path) -> None:
    """Each connection has its recorded bytes; the original sends GROUP_COMMIT before that end."""
    real = recorded.HERE / "late_end"
    (_, _, late), (_, _, last) = sessions(real / "master-dir")
    async with scripted() as replica:
        order: list[type] = []

        def note(message: object) -> bytes:
            if isinstance(message, GroupCommit) or (isinstance(message, LogEntries) and message.flags & 6):
                order.append(type(message))
            return b"?"

        replica.answers.append(note)
        settings = Settings(str(tmp_path), (replica.endpoint,), compatible=True)
        async with AsyncDatastore(OUTSIDE, settings) as store:
            one, other = await store.create_channel(), await store.create_channel()
            await store.ready()
            await store.switch_epoch(1)
            await one.begin_session()
            add(one, late[0])
            await store.switch_epoch(2)
            await store.switch_epoch(3)
            await one.end_session()
            await other.begin_session()
            add(other, last[0])
            await other.end_session()
            await store.switch_epoch(4)
        heard = [bytes(connection.received) for connection in replica.connections]
        assert heard == [(real / "wire" / f"conn{number}.m2r.bin").read_bytes() for number in range(3)]
        assert order == [LogEntries, GroupCommit] * 2


async def test_compatible_pair_writes_both_recorded_directories(tmp_path: Path) -> None:
    async with running(tmp_path / "replica", compatible=True) as replica:
        await replayed_basic(Settings(str(tmp_path / "master"), (replica.endpoint,), compatible=True))
    for side in ("master", "replica"):
        for path in (BASIC / f"{side}-dir").rglob("*"):
            if path.is_file() and path.name != names.MANIFEST:
                ours = tmp_path / side / path.relative_to(BASIC / f"{side}-dir")
                assert ours.read_bytes() == path.read_bytes(), ours


# --- differences from the original ---


@pytest.mark.parametrize("order", ORDERS)
async def test_reported_epoch_is_durable_on_both_sides_in_every_order(tmp_path: Path, order: Order) -> None:
    async with running(tmp_path / "replica") as replica:
        settings = Settings(str(tmp_path / "master"), (replica.endpoint,), group_commit=order)
        store = AsyncDatastore(OUTSIDE, settings)
        told: list[int] = []

        def check(epoch: int) -> None:
            for side in ("master", "replica"):
                found = recover(OUTSIDE.disk, str(tmp_path / side), repairs=False)
                assert [row.version.major for row in found.snapshot.rows()] == list(range(1, epoch + 1))
                assert epoch_file.read(OUTSIDE.disk, str(tmp_path / side)).durable == epoch
            told.append(epoch)

        store.add_persistent_callback(check)
        failed: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        channels = [await store.create_channel() for _ in range(2)]
        await store.ready()
        for epoch in range(1, 8):
            await store.switch_epoch(epoch)
            channel = channels[epoch % 2]
            await channel.begin_session()
            channel.add_entry(1, b"%d" % epoch, b"v" * 100, (epoch, 1))
            await channel.end_session()
        await store.switch_epoch(8)
        assert (told, failed) == (list(range(1, 8)), [])
        await store.shutdown()
    for name in ("pwal_0000", "pwal_0001"):
        assert (tmp_path / "master" / name).read_bytes() == (tmp_path / "replica" / name).read_bytes()


async def test_aborted_session_is_never_sent(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        async with AsyncDatastore(OUTSIDE, Settings(str(tmp_path), (replica.endpoint,), spill=50)) as store:
            channel = await store.create_channel()
            await store.ready()
            await store.switch_epoch(1)
            await channel.begin_session()
            for minor in range(5):
                channel.add_entry(1, b"gone", b"v" * 30, (1, minor))
            await channel.abort_session()
            await channel.begin_session()
            for minor in range(5):
                channel.add_entry(1, b"kept", b"v" * 30, (1, minor))
            await channel.end_session()
            await store.switch_epoch(2)
        received = b"".join(bytes(connection.received) for connection in replica.connections)
        assert (received.count(b"kept"), received.count(b"gone")) == (5, 0)


def no_answer_to_sessions(message: object) -> bytes:
    return b"" if isinstance(message, LogEntries) else b"?"


async def opened(replica: ScriptedReplica, path: Path, on_lost: str) -> tuple[AsyncDatastore, list[int]]:
    store = AsyncDatastore(OUTSIDE, Settings(str(path), (replica.endpoint,), on_lost=on_lost))  # type: ignore[arg-type]
    told: list[int] = []
    store.add_persistent_callback(told.append)
    return store, told


async def test_epoch_without_an_acknowledgement_of_the_replica_is_not_reported(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        store, told = await opened(replica, tmp_path, "block")
        channel = await store.create_channel()
        await store.ready()
        await store.switch_epoch(1)
        replica.answers.append(no_answer_to_sessions)
        await channel.begin_session()
        ending = asyncio.ensure_future(channel.end_session())
        await eventually(lambda: replica.heard_of(LogEntries))
        await store.switch_epoch(2)
        assert not ending.done()
        assert (told, replica.heard_of(GroupCommit)) == ([], [])
        await store.shutdown()
        with pytest.raises(QuorumLost):
            await ending
        assert told == []


async def test_store_with_policy_fail_stops_when_it_loses_its_replica(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        store, told = await opened(replica, tmp_path, "fail")
        channel = await store.create_channel()
        await store.ready()
        await store.switch_epoch(1)
        await channel.begin_session()
        await channel.end_session()
        await store.switch_epoch(2)
        await channel.begin_session()
        await replica.vanish()
        with pytest.raises(QuorumLost):
            await channel.end_session()
        with pytest.raises(DatastoreFailed, match="must acknowledge it"):
            await store.switch_epoch(3)
        assert (store.status().state, told) == (State.FAILED, [1])
        await store.shutdown()


async def test_degraded_store_reports_its_state(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        store, told = await opened(replica, tmp_path, "degrade")
        channel = await store.create_channel()
        await store.ready()
        await store.switch_epoch(1)
        await replica.vanish()
        await channel.begin_session()
        await channel.end_session()
        await store.switch_epoch(2)
        status = store.status().replication
        assert status is not None
        assert (told, status.degraded) == ([1], True)
        await store.shutdown()


async def test_restarted_store_reports_no_epoch_before_the_replica_has_the_existing_data(tmp_path: Path) -> None:
    store = AsyncDatastore(OUTSIDE, Settings(str(tmp_path)))
    channel = await store.create_channel()
    await store.ready()
    await store.switch_epoch(1)
    await channel.begin_session()
    channel.add_entry(1, b"k", b"v", (1, 1))
    await channel.end_session()
    await store.switch_epoch(2)
    await store.shutdown()
    before = (tmp_path / names.EPOCH).read_bytes()
    async with scripted(is_ours=True) as replica:
        replica.answers.append(lambda message: b"" if isinstance(message, GroupCommit) else b"?")
        again, told = await opened(replica, tmp_path, "block")
        await again.ready()
        switching = asyncio.ensure_future(again.switch_epoch(5))
        await eventually(lambda: replica.heard_of(GroupCommit))
        assert replica.heard_of(GroupCommit) == [GroupCommit(1)]
        assert told == []
        replica.answers.clear()
        for connection in replica.connections:
            connection.writer.write(ACK)
        await switching
        assert told == [4]
        await again.shutdown()
    assert (tmp_path / names.EPOCH).read_bytes() == before + epoch_file.record(1)


# --- threads ---


def test_replica_has_every_epoch_reported_to_writing_threads(tmp_path: Path) -> None:
    thread = LoopThread("replica")
    told: list[int] = []

    async def started() -> Replica:
        replica = Replica(OUTSIDE, str(tmp_path / "replica"), LOCAL)
        await replica.start()
        return replica

    def write(channel: LogChannel) -> None:
        for number in range(20):
            channel.begin_session()
            channel.add_entries(channel.id, [b"%d/%d" % (number, i) for i in range(50)], [b"v" * 20] * 50, (number, 0))
            channel.end_session()

    try:
        replica = thread.run(started())
        with Datastore(str(tmp_path / "master"), replicas=(replica.endpoint,), spill=1000) as store:
            store.add_persistent_callback(told.append)
            channels = [store.create_channel() for _ in range(3)]
            store.ready()
            store.switch_epoch(1)
            writers = [threading.Thread(target=write, args=(channel,)) for channel in channels]
            for writer in writers:
                writer.start()
            epoch = 1
            while any(writer.is_alive() for writer in writers):
                epoch += 1
                store.switch_epoch(epoch)
            store.switch_epoch(epoch + 1)
            store.until_durable(epoch)
        thread.run(replica.stop())
    finally:
        thread.close()
    assert told == sorted(set(told))
    assert told[-1] == epoch
    both = [recover(OUTSIDE.disk, str(tmp_path / side)).snapshot.rows() for side in ("master", "replica")]
    assert len(both[0]) == 3 * 20 * 50
    assert both[0] == both[1]
