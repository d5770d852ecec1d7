"""A master's conversations byte for byte, and the handling of sessions and epochs when replicas are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowstone.limestone.format import entries, messages
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import EntryType, Marker
from flowstone.limestone.format.messages import Error, GroupCommit, LogEntries, SessionBegin
from flowstone.limestone.format.wire_extensions import Prepare
from flowstone.limestone.master.propagation import Propagation, QuorumLost
from flowstone.limestone.settings import Settings
from flowstone.outside import production
from tests.limestone import recorded
from tests.limestone.master.test_replica_link import Files, Master, keys_heard, running
from tests.limestone.scripted_replica import ScriptedReplica, eventually, scripted


def sessions(path: Path) -> Iterator[tuple[int, bytes]]:
    """Return epoch and entries of each session of a log file."""
    data = path.read_bytes()
    epoch, start = 0, 0
    for offset, token in entries.walk(lambda at, size: data[at : at + size], len(data)):
        if isinstance(token, Marker) and token.type is EntryType.MARKER_BEGIN:
            epoch, start = token.epoch, offset + 9
        elif isinstance(token, Marker):
            yield epoch, data[start:offset]


async def propagated(directory: Path, replica: ScriptedReplica, session_close: str = "default") -> None:
    """Return what the master of a recorded directory wrote, channel by channel, then its epochs."""
    settings = Settings(str(directory), (replica.endpoint,), compatible=True, session_close=session_close)  # type: ignore[arg-type]
    propagation = Propagation(production(), settings, Files(directory))
    await propagation.open_channel(0)
    await propagation.open_channel(1)
    await propagation.start(0)
    for channel_id in (0, 1):
        for epoch, data in sessions(directory / f"pwal_{channel_id:04d}"):
            await propagation.end_session(channel_id, epoch, lambda data=data: (data,))  # type: ignore[misc]
    for record in entries.decode_all((directory / "epoch").read_bytes(), "epoch"):
        assert isinstance(record, Marker)
        await propagation.group_commit(record.epoch)
    await propagation.close()


@pytest.mark.parametrize("name", ["basic", "late_end"])
async def test_every_connection_carries_the_recorded_bytes(name: str) -> None:
    async with scripted() as replica:
        await propagated(recorded.HERE / name / "master-dir", replica)
        wire = recorded.HERE / name / "wire"
        assert [bytes(connection.received) for connection in replica.connections] == [
            (wire / f"conn{number}.m2r.bin").read_bytes() for number in range(3)
        ]


async def test_end_has_the_epoch_of_the_previous_session_with_asynchronous_close() -> None:
    async with scripted() as replica:
        await propagated(recorded.HERE / "basic" / "master-dir", replica, "async")
        for channel_id in (0, 1):
            heard = replica.connections[channel_id].messages
            begun = [m.epoch for m in heard if isinstance(m, LogEntries) and m.flags == 1]
            ended = [m.epoch for m in heard if isinstance(m, LogEntries) and m.flags == 6]
            assert ended == [0, *begun[:-1]]


async def test_epochs_without_replicas_are_acknowledged_at_once(tmp_path: Path) -> None:
    async with running(Master(tmp_path)) as master:
        await master.put(1, b"a")
        await master.commit(1)
        assert not master.propagation.status().degraded


async def test_quorum_of_one_in_two_continues_with_either(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as first, scripted(is_ours=True) as second:
        master = Master(tmp_path, first, second, quorum=1)
        async with running(master):
            await master.put(1, b"a")
            await master.commit(1)
            await eventually(lambda: first.durable_epoch == second.durable_epoch == 1)
            await first.vanish()
            await master.put(2, b"b")
            await master.commit(2)
            assert second.durable_epoch == 2
            status = master.propagation.status()
            assert (status.live, status.degraded) == (1, False)


async def test_slow_replica_is_not_awaited_and_gets_each_epoch_with_its_sessions(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as quick, scripted(is_ours=True) as slow:
        master = Master(tmp_path, quick, slow, quorum=1)
        async with running(master):
            await eventually(lambda: master.propagation.status().live == 2)
            holding = [True]
            slow.answers.append(lambda message: b"" if isinstance(message, LogEntries) and holding else b"?")
            await master.put(1, b"a")
            await master.commit(1)
            await eventually(lambda: (1, b"a") in keys_heard(slow))
            await asyncio.sleep(0.02)
            assert quick.heard_of(GroupCommit) == [GroupCommit(1)]
            assert slow.heard_of(GroupCommit) == []
            holding.clear()
            channel = next(connection for connection in slow.connections if connection.channel_id == 0)
            channel.writer.write(messages.ACK)
            await eventually(lambda: slow.heard_of(GroupCommit) == [GroupCommit(1)])


async def test_start_waits_only_for_the_quorum(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as quick, scripted(is_ours=True) as slow:
        slow.answers.append(lambda message: b"" if isinstance(message, Prepare) else b"?")
        master = Master(tmp_path, quick, slow, quorum=1)
        async with running(master):
            await master.put(1, b"a")
            assert [replica.state for replica in master.propagation.status().replicas] == ["live", "connecting"]


async def test_policy_block_waits_until_the_replica_returns(tmp_path: Path) -> None:
    replica = ScriptedReplica(is_ours=True)
    await replica.listen()
    await replica.vanish()
    async with running(Master(tmp_path, replica)) as master:
        ending = asyncio.ensure_future(master.put(1, b"a"))
        await asyncio.sleep(0.05)
        assert not ending.done()
        assert master.propagation.status().degraded
        await replica.listen()
        await ending
        assert keys_heard(replica) == [(1, b"a")]
    await replica.vanish()


@pytest.mark.parametrize(
    ("on_lost", "consequence"), [("block", "wait for it"), ("degrade", "continue without"), ("fail", "fail until")]
)
async def test_unreachable_replica_is_reported_once(
    tmp_path: Path, on_lost: str, consequence: str, caplog: pytest.LogCaptureFixture
) -> None:
    replica = ScriptedReplica(is_ours=True)
    await replica.listen()
    await replica.vanish()
    master = Master(tmp_path, replica, on_lost=on_lost)
    if on_lost == "fail":
        with pytest.raises(QuorumLost):
            await master.propagation.start(0)
    else:
        await master.propagation.start(0)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    await asyncio.sleep(0.5)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == told
    assert len(told) == 1
    assert str(replica.endpoint) in told[0]
    assert consequence in told[0]
    caplog.clear()
    await replica.listen()
    await eventually(lambda: "is up to date" in caplog.text)
    await master.propagation.close()
    await replica.vanish()


async def test_lost_replica_is_reported_as_covered_when_the_quorum_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        scripted(is_ours=True) as one,
        scripted(is_ours=True) as other,
        running(Master(tmp_path, one, other, quorum=1)) as master,
    ):
        await eventually(lambda: master.propagation.status().live == 2)
        await other.vanish()
        await eventually(lambda: "is available without it" in caplog.text)


async def test_policy_degrade_continues_and_reports(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica, running(Master(tmp_path, replica, on_lost="degrade")) as master:
        await master.put(1, b"a")
        await replica.vanish()
        await master.put(2, b"b")
        await master.commit(2)
        await eventually(lambda: master.error is not None)
        status = master.propagation.status()
        assert status.degraded
        assert str(replica.endpoint) in str(status.replicas[0].error)


async def test_policy_fail_raises(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica, running(Master(tmp_path, replica, on_lost="fail")) as master:
        await master.put(1, b"a")
        await replica.vanish()
        await eventually(lambda: master.error is not None)
        with pytest.raises(QuorumLost, match="cannot replicate session of epoch 2: 1 of 1"):
            await master.put(2, b"b")
        with pytest.raises(QuorumLost, match=r"cannot replicate epoch 2.*lost.*degrade"):
            await master.commit(2)


async def test_policy_fail_raises_for_waiters_when_the_replica_is_lost(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica, running(Master(tmp_path, replica, on_lost="fail")) as master:
        await eventually(lambda: master.state == "live")
        replica.answers.append(lambda message: None if isinstance(message, LogEntries) else b"?")
        with pytest.raises(QuorumLost):
            await master.put(1, b"a")


@pytest.mark.parametrize("on_lost", ["fail", "block"])
async def test_store_does_not_start_without_a_reachable_replica(tmp_path: Path, on_lost: str) -> None:
    async with scripted() as replica:
        replica.answers.append(lambda message: None if isinstance(message, SessionBegin) else b"?")
        with pytest.raises(QuorumLost, match="cannot start"):
            async with running(Master(tmp_path, replica, on_lost=on_lost, compatible=True)):
                pass


async def test_compatible_master_raises_when_a_log_channel_cannot_be_opened(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path), (Endpoint("127.0.0.1", 1),), compatible=True)
    propagation = Propagation(production(), settings, Files(tmp_path))
    with pytest.raises(QuorumLost, match="cannot open log channel 0"):
        await propagation.open_channel(0)
    await propagation.close()


async def test_lost_compatible_replica_is_not_awaited(tmp_path: Path) -> None:
    async with scripted() as replica, running(Master(tmp_path, replica, compatible=True)) as master:
        await master.put(1, b"a")
        await replica.vanish()
        with pytest.raises(QuorumLost, match="no replica can return"):
            await master.put(2, b"b")


def refused(message: object) -> bytes:
    return messages.encode(Error(1, "no")) if isinstance(message, GroupCommit) else b"?"


async def test_sessions_continue_after_a_rejected_group_commit_as_in_the_original(tmp_path: Path) -> None:
    async with scripted() as replica:
        replica.answers.append(refused)
        async with running(Master(tmp_path, replica, compatible=True, on_lost="degrade")) as master:
            await master.put(1, b"a")
            await master.commit(1)
            await master.put(2, b"b")
            await master.commit(2)
            assert keys_heard(replica) == [(1, b"a"), (2, b"b")]
            assert replica.heard_of(GroupCommit) == [GroupCommit(1)]


@pytest.mark.parametrize("on_lost", ["fail", "block"])
async def test_rejected_group_commit_is_an_error_unless_degraded(tmp_path: Path, on_lost: str) -> None:
    async with scripted() as replica:
        replica.answers.append(refused)
        async with running(Master(tmp_path, replica, compatible=True, on_lost=on_lost)) as master:
            await master.put(1, b"a")
            with pytest.raises(QuorumLost):
                await master.commit(1)


async def test_waiters_fail_when_the_store_is_closed(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica:
        replica.answers.append(lambda message: b"" if isinstance(message, LogEntries) else b"?")
        async with running(Master(tmp_path, replica)) as master:
            ending = asyncio.ensure_future(master.put(1, b"a"))
            await eventually(lambda: keys_heard(replica))
        with pytest.raises(QuorumLost, match="closed"):
            await ending


async def test_channel_can_be_opened_while_running(tmp_path: Path) -> None:
    async with scripted(is_ours=True) as replica, running(Master(tmp_path, replica)) as master:
        await master.propagation.open_channel(1)
        await master.put(1, b"a", 1)
        assert keys_heard(replica, 1) == [(1, b"a")]
