"""A connection before its first valid message: input is not trusted, and little of it is buffered."""

from __future__ import annotations

import asyncio

import pytest

from flowstone.limestone.errors import BadMessage
from flowstone.limestone.format.messages import Error, LogChannelCreate, SessionBegin, encode
from flowstone.limestone.replica.connection import OPENER_SIZE_MAX, READ_AHEAD_MAX, Refusal, ReplicaConnection


class FakeClient:
    peer = "10.0.0.1:5"
    queued = 0

    def __init__(self) -> None:
        self.sent = b""
        self.calls: list[str] = []

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.sent += data

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")


async def opened(data: bytes, size: int = 1 << 20) -> object:
    connection = ReplicaConnection(FakeClient())
    for at in range(0, len(data), size):
        connection.received(data[at : at + size])
    connection.closed()
    return await connection.opener()


@pytest.mark.parametrize("message", [SessionBegin(2, b"id", 7), LogChannelCreate(9, b"s" * 32)])
async def test_opener_is_returned_with_the_bytes_after_it(message: SessionBegin | LogChannelCreate) -> None:
    assert await opened(encode(message) + b"behind") == (message, b"behind")
    connection = ReplicaConnection(FakeClient())
    for byte in encode(message):
        connection.received(bytes([byte]))
    assert await connection.opener() == (message, b"")


async def test_disconnected_peer_opens_no_conversation() -> None:
    assert await opened(b"") is None
    assert await opened(encode(SessionBegin())[:-1]) is None


@pytest.mark.parametrize("kind", [0x03, 0x04, 0x11, 0x20, 0x21, 0x22, 0x30, 0x31])
async def test_unexpected_message_is_rejected_at_its_first_byte(kind: int) -> None:
    with pytest.raises(Refusal, match="Unexpected message type") as caught:
        await opened(bytes([kind]))
    assert caught.value.code == 1


@pytest.mark.parametrize("data", [b"\x00", b"\x02", b"\x40", b"\xff", b"\x10\x01" + bytes(8) + b"\x00\x01\x00\x00"])
async def test_invalid_or_oversized_opener_is_rejected(data: bytes) -> None:
    with pytest.raises(BadMessage):
        await opened(data)


async def test_fast_peer_is_throttled() -> None:
    client = FakeClient()
    connection = ReplicaConnection(client)
    connection.received(bytes(READ_AHEAD_MAX))
    assert client.calls == []
    connection.received(b"x")
    connection.received(b"x")
    assert client.calls == ["pause"]
    assert len(await connection.read()) == READ_AHEAD_MAX + 2
    assert client.calls == ["pause", "resume"]


async def test_peer_that_reads_no_answers_is_paused() -> None:
    client = FakeClient()
    connection = ReplicaConnection(client)
    connection.congested()
    connection.drained()
    assert client.calls == ["pause", "resume"]


async def test_rejected_peer_gets_the_reason_and_can_finish_its_message() -> None:
    client = FakeClient()
    connection = ReplicaConnection(client)
    refusing = asyncio.get_running_loop().create_task(connection.refuse(Refusal(13, "no")))
    await asyncio.sleep(0)
    assert client.sent == encode(Error(13, "no"))
    connection.received(bytes(100))
    await asyncio.sleep(0)
    assert client.calls == []
    assert not refusing.done()
    connection.closed()
    await refusing


async def test_rejected_peer_that_stays_connected_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.limestone.replica.connection.LINGER_SECONDS", 0.01)
    await ReplicaConnection(FakeClient()).refuse(Refusal(13, "no"))


def test_opener_with_a_token_is_within_the_size_limit() -> None:
    assert len(encode(LogChannelCreate(9, bytes(32)))) < OPENER_SIZE_MAX
