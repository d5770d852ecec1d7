"""One connection to a replica: messages are in order, and the first error ends the connection, with its reason."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from flowstone.limestone.format import entries, messages
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import WriteVersion, put
from flowstone.limestone.format.messages import (
    ACK,
    PLACEHOLDER_SECRET,
    CommonAck,
    Error,
    GroupCommit,
    LogChannelCreate,
    LogEntries,
    SessionBegin,
)
from flowstone.limestone.format.wire_extensions import Action, Prepare
from flowstone.limestone.master import conversation as module
from flowstone.limestone.master import ended_session
from flowstone.limestone.master.conversation import AuthenticationFailed, Conversation, ReplicaAddress, ReplicaLost
from flowstone.limestone.master.ended_session import KEPT_MAX, EndedSession, WireForm
from flowstone.outside import production
from tests.limestone.scripted_replica import ScriptedReplica, eventually, scripted

FORM = WireForm(production().disk, ".")


def session(key: bytes, epoch: int = 1, value: bytes = b"v") -> EndedSession:
    data = entries.encode(put(1, key, value, WriteVersion(epoch, 0)))
    return EndedSession(FORM, 0, epoch, lambda: (data,))


@asynccontextmanager
async def talking(replica: ScriptedReplica) -> AsyncIterator[Conversation]:
    conversation = Conversation(production(), ReplicaAddress(replica.endpoint))
    try:
        yield conversation
    finally:
        await conversation.close()


async def reason(conversation: Conversation) -> str:
    async with asyncio.timeout(10):
        return (await asyncio.shield(conversation.lost)).reason


async def test_sessions_and_epochs_are_acknowledged_in_order() -> None:
    async with scripted() as replica, talking(replica) as conversation:
        assert await conversation.begin() == PLACEHOLDER_SECRET
        done: list[object] = []
        first, second = session(b"a"), session(b"b")
        channel = conversation.channel(0)
        channel.send(first, lambda: done.append(first))
        channel.send(second, lambda: done.append(second))
        await eventually(lambda: len(done) == 2)
        conversation.group_commit(1, lambda: done.append(1), done.append)
        await eventually(lambda: len(done) == 3)
        assert done == [first, second, 1]
        assert first.acknowledged == second.acknowledged == [conversation]
        assert channel.unacknowledged == 0
        assert replica.connections[0].messages == [SessionBegin(), GroupCommit(1)]
        assert [type(message) for message in replica.connections[1].messages] == [
            LogChannelCreate,
            LogEntries,
            LogEntries,
        ]


async def test_long_session_is_sent_in_pieces_before_the_next_one() -> None:
    async with scripted() as replica, talking(replica) as conversation:
        long, short = session(b"a", value=bytes(KEPT_MAX)), session(b"b")
        assert long.kept is None
        done: list[object] = []
        channel = conversation.channel(3)
        await channel.opened
        channel.send(long, lambda: done.append(long))
        channel.send(short, lambda: done.append(short))
        await eventually(lambda: len(done) == 2)
        assert done == [long, short]
        keys = [message.entries[0].key for message in replica.heard if isinstance(message, LogEntries)]
        assert keys == [b"a", b"b"]


async def test_missing_entries_end_the_conversation() -> None:
    data = entries.encode(put(1, b"k", bytes(KEPT_MAX), WriteVersion(1, 0)))
    asked: list[int] = []

    def parts() -> list[bytes]:
        asked.append(1)
        if len(asked) > 1:
            raise FileNotFoundError("pwal_0000")
        return [data]

    gone = EndedSession(FORM, 0, 1, parts)
    async with scripted() as replica, talking(replica) as conversation:
        conversation.channel(0).send(gone, pytest.fail)
        assert "cannot read back session" in await reason(conversation)


async def test_refused_connection_is_reported_as_a_lost_replica() -> None:
    replica = ScriptedReplica()
    await replica.listen()
    await replica.vanish()
    async with talking(replica) as conversation:
        with pytest.raises(ReplicaLost, match=f"tcp://127.0.0.1:{replica.port} is lost"):
            await conversation.begin()


@pytest.mark.parametrize(
    ("kind", "answer", "expected"),
    [
        (SessionBegin, messages.encode(Error(13, "Unsupported protocol version: 2")), "error 13, 'Unsupported"),
        (SessionBegin, ACK, "unexpected answer to SESSION_BEGIN: CommonAck"),
        (SessionBegin, None, "connection closed by the replica"),
        (SessionBegin, b"\x77", "unknown message type 0x77"),
    ],
)
async def test_rejection_by_the_replica_ends_the_conversation(kind: type, answer: bytes | None, expected: str) -> None:
    async with scripted() as replica, talking(replica) as conversation:
        replica.answers.append(lambda message: answer if isinstance(message, kind) else b"?")
        with pytest.raises(ReplicaLost) as lost:
            await conversation.begin()
        assert expected in str(lost.value)
        assert expected in await reason(conversation)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (messages.encode(Error(20, "Too many log channels")), "LOG_CHANNEL_CREATE rejected: error 20"),
        (None, "connection closed by the replica"),
        (ACK + ACK, "unexpected CommonAck: no request is pending"),
    ],
)
async def test_rejected_log_channel_ends_the_conversation(answer: bytes | None, expected: str) -> None:
    async with scripted() as replica, talking(replica) as conversation:
        await conversation.begin()
        replica.answers.append(lambda message: answer if isinstance(message, LogChannelCreate) else b"?")
        await conversation.channel(0).opened
        assert expected in await reason(conversation)


async def test_rejected_session_ends_the_conversation() -> None:
    async with scripted() as replica, talking(replica) as conversation:
        await conversation.begin()
        refusal = messages.encode(Error(1, "Unexpected message type"))
        replica.answers.append(lambda message: refusal if isinstance(message, LogEntries) else b"?")
        conversation.channel(0).send(session(b"a"), pytest.fail)
        assert "session end rejected: error 1" in await reason(conversation)


async def test_authentication_error_is_reported_as_such() -> None:
    async with scripted(is_ours=True) as replica, talking(replica) as conversation:
        await conversation.begin()
        refusal = messages.encode(Error(200, "who are you"))
        replica.answers.append(lambda message: refusal if isinstance(message, Prepare) else b"?")
        with pytest.raises(AuthenticationFailed, match="same secret"):
            await conversation.exchange(Prepare(Action.RESUME, 1))


async def test_frame_is_answered_with_an_acknowledgement() -> None:
    async with scripted(is_ours=True) as replica, talking(replica) as conversation:
        await conversation.begin()
        assert await conversation.exchange(Prepare(Action.RESUME, 1)) == CommonAck()


async def test_missing_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    async with scripted() as replica, talking(replica) as conversation:
        replica.answers.append(lambda message: b"" if isinstance(message, SessionBegin) else b"?")
        with pytest.raises(ReplicaLost, match=r"no answer within 0\.05 s"):
            await conversation.begin()


async def test_lagging_replica_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNACKNOWLEDGED_MAX", 1 << 20)
    async with scripted() as replica, talking(replica) as conversation:
        replica.answers.append(lambda message: b"" if isinstance(message, LogEntries) else b"?")
        channel = conversation.channel(0)
        await channel.opened
        for _ in range(20):
            channel.send(session(b"a", value=bytes(100_000)), pytest.fail)
        assert "1 MiB unacknowledged" in await reason(conversation)


async def test_sessions_too_long_to_keep_count_as_unacknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_session, "KEPT_MAX", 100_000)
    monkeypatch.setattr(module, "UNACKNOWLEDGED_MAX", 1 << 20)
    async with scripted() as replica, talking(replica) as conversation:
        replica.answers.append(lambda message: b"" if isinstance(message, LogEntries) else b"?")
        channel = conversation.channel(0)
        await channel.opened
        for _ in range(20):
            long = session(b"a", value=bytes(200_000))
            assert long.kept is None
            channel.send(long, pytest.fail)
        assert "1 MiB unacknowledged" in await reason(conversation)


@pytest.mark.parametrize("size", [1, 1000, 100_000])
async def test_backlog_counts_the_memory_of_sessions(size: int) -> None:
    """Small sessions take many times their wire size in memory."""
    async with scripted() as replica, talking(replica) as conversation:
        replica.answers.append(lambda message: b"" if isinstance(message, LogEntries) else b"?")
        channel = conversation.channel(0)
        await channel.opened
        tracemalloc.start()
        try:
            for _ in range(300):
                channel.send(session(b"a", value=bytes(size)), pytest.fail)
            assert tracemalloc.get_traced_memory()[0] <= channel.unacknowledged
        finally:
            tracemalloc.stop()


async def test_conversation_works_over_ipv6() -> None:
    replica = ScriptedReplica()
    try:
        server = await asyncio.start_server(replica._serve, "::1", 0)
    except OSError:
        pytest.skip("IPv6 is not available")
    port = server.sockets[0].getsockname()[1]
    conversation = Conversation(production(), ReplicaAddress(Endpoint.parse(f"tcp://[::1]:{port}")))
    assert await conversation.begin() == PLACEHOLDER_SECRET
    await conversation.close()
    server.close()


async def test_conversation_can_be_closed_twice_without_errors() -> None:
    async with scripted() as replica, talking(replica) as conversation:
        await conversation.begin()
        await conversation.channel(0).opened
        await conversation.close()
        await eventually(lambda: all(connection.writer.is_closing() for connection in replica.connections))
        assert replica.heard == [SessionBegin(), LogChannelCreate(0)]
