"""A Flowstone node in place of recorded masters sends their replicas the same rows in the same order.

The node starts on files of the recorded master. At the state of the JOIN it writes the master's rows as the recording
reaches them; with all files, it sends their rows, and each byte is as recorded. Actions that a lone master cannot take
(an election, waiting for acknowledgements of synchronous rows) end a conversation early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from flowstone.iproto.constants import Key, RequestType
from tests.conversations import masters, recording
from tests.conversations.client import Played, connect, play, play_on
from tests.conversations.recording import Conversation, Packet

JOINS = [
    ("2.6", "01-join-subscribe", "join-01", "master", 14),
    ("2.11", "01-join-subscribe", "join-01", "master", 14),
    ("3.8", "01-join-subscribe", "join-01", "master", 14),
    ("2.6", "03-anon-register", "anon-01", "master", 10),
    ("3.8", "03-anon-register", "anon-01", "master", 13),
    ("2.6", "04-mesh", "to-a-01", "a", 7),
    ("3.8", "04-mesh", "to-a-01", "a", 7),
    ("2.11", "05-election", "to-a-01", "a", 5),
    ("3.8", "05-election", "to-a-01", "a", 5),
]
"""Version, scenario, conversation, the master's name and its LSN at the JOIN."""

STREAMS = [
    ("2.6", "01-join-subscribe", "join-01", "master"),
    ("2.6", "01-join-subscribe", "join-02", "master"),
    ("2.11", "01-join-subscribe", "join-01", "master"),
    ("2.11", "01-join-subscribe", "join-03", "master"),
    ("3.8", "01-join-subscribe", "join-01", "master"),
    ("3.8", "01-join-subscribe", "join-03", "master"),
    ("2.6", "03-anon-register", "anon-01", "master"),
    ("2.6", "03-anon-register", "anon-02", "master"),
    ("3.8", "03-anon-register", "anon-05", "master"),
    ("2.6", "04-mesh", "to-a-01", "a"),
    ("3.8", "04-mesh", "to-a-01", "a"),
    ("3.8", "04-mesh", "to-b-03", "b"),
    ("2.11", "05-election", "to-a-01", "a"),
    ("2.11", "05-election", "to-b-03", "b"),
    ("3.8", "05-election", "to-a-01", "a"),
    ("3.8", "05-election", "to-b-03", "b"),
]

COPIES = (RequestType.JOIN, RequestType.FETCH_SNAPSHOT, RequestType.REGISTER)
SYNCHRONOUS_SPACE = 520


def names(cases: list[tuple]) -> list[str]:
    return [f"{version}-{scenario}-{name}" for version, scenario, name, *_ in cases]


def what_a_lone_master_does(conversation: Conversation) -> Conversation:
    """Remove everything after a promotion, an election, or the first synchronous row."""
    kept: list[Packet] = []
    raft_rows = 0
    for packet in conversation.packets:
        is_subscribed = any(other.type == RequestType.SUBSCRIBE for other in kept)
        if is_subscribed and packet.type == RequestType.RAFT:
            raft_rows += 1
            if raft_rows > 1:
                break
        if packet.lsn and packet.content(Key.SPACE_ID) == SYNCHRONOUS_SPACE:
            break
        kept.append(packet)
    return replace(conversation, packets=tuple(kept))


def compared(version: str, packets: list[Packet]) -> Iterator[object]:
    """Return kinds in order; rows without times; vclocks without the local rows that 3.8 adds."""
    for packet in packets:
        if packet.is_snapshot_row or packet.lsn:
            yield str(packet), packet.masked
        elif Key.VCLOCK in (packet.body or {}) and packet.type == RequestType.OK:
            vclock = packet.content(Key.VCLOCK)
            if version == "3.8":  # 3.8 keeps log consumers in a local space, whose rows count
                vclock.pop(0, None)
            yield packet.kind, sorted(packet.header), sorted(packet.body or {}), vclock
        else:
            yield packet.kind


@pytest.mark.parametrize(("version", "scenario", "name", "node", "lsn"), JOINS, ids=names(JOINS))
async def test_recorded_replica_gets_the_recorded_packets_in_order(
    version: str, scenario: str, name: str, node: str, lsn: int, tmp_path: Path
) -> None:
    directory = masters.copy_until(version, scenario, node, tmp_path / "data", lsn)
    conversation = what_a_lone_master_does(recording.load(version, scenario, name))
    async with masters.serving(directory) as running:
        played = await play(conversation, masters.port_of(running), before=masters.Originator(running))
    expected = [packet for packet in conversation.answers if not packet.is_heartbeat]
    assert list(compared(version, played.answers)) == list(compared(version, expected))
    check_heartbeats(played, conversation)


def check_heartbeats(played: Played, conversation: Conversation) -> None:
    recorded = next(packet for packet in conversation.answers if packet.is_heartbeat)
    assert played.heartbeats
    for number, heartbeat in enumerate(played.heartbeats, 1):
        assert heartbeat.field(Key.REPLICA_ID) == recorded.field(Key.REPLICA_ID)
        assert sorted(heartbeat.body or {}) == sorted(recorded.body or {})
        assert heartbeat.content(Key.VCLOCK_SYNC, number) == number


def only_the_subscription(conversation: Conversation) -> Conversation:
    """Return greeting, authentication and SUBSCRIBE with all that follows, without RAFT rows after the first.

    The recorded master was promoted while it sent; one promoted earlier needs to send its state only once.
    """
    kept: list[Packet] = []
    is_copying = is_subscribed = False
    for packet in conversation.packets:
        if not packet.from_server:
            is_copying = packet.type in COPIES
            is_subscribed |= packet.type == RequestType.SUBSCRIBE
        is_raft = packet.type == RequestType.RAFT and is_subscribed
        if not is_copying and not (is_raft and any(other.type == RequestType.RAFT for other in kept)):
            kept.append(packet)
    return replace(conversation, packets=tuple(kept))


@pytest.mark.parametrize(("version", "scenario", "name", "node"), STREAMS, ids=names(STREAMS))
async def test_rows_of_recorded_logs_are_sent_like_by_the_recorded_master(
    version: str, scenario: str, name: str, node: str, tmp_path: Path
) -> None:
    directory = masters.copy_files(version, scenario, node, tmp_path / "data", masters.ALL_LOGS)
    conversation = only_the_subscription(recording.load(version, scenario, name))
    async with masters.serving(directory) as running:
        played = await play(acknowledging_nothing(conversation), masters.port_of(running))
    expected = [packet for packet in conversation.answers if not packet.is_heartbeat]
    assert [packet.kind for packet in played.answers[: len(expected)]] == [packet.kind for packet in expected]
    rows = [packet for packet in expected if packet.lsn]
    assert [packet.payload for packet in played.answers if packet.lsn][: len(rows)] == [row.payload for row in rows]


async def test_anonymous_replica_cannot_register_on_a_second_connection_while_the_first_follows(
    tmp_path: Path,
) -> None:
    directory = masters.copy_until("3.8", "03-anon-register", "master", tmp_path / "data", 13)
    load = ("3.8", "03-anon-register")
    following, refused, registered = (recording.load(*load, name) for name in ("anon-01", "anon-03", "anon-05"))
    async with masters.serving(directory) as node:
        port, originator = masters.port_of(node), masters.Originator(node)
        async with connect(port) as first:
            await play_on(first, following, originator)
            played = await play(refused, port)
            assert [packet.kind for packet in played.answers] == [packet.kind for packet in refused.answers]
            assert played.answers[-1].content(Key.ERROR_24) == refused.answers[-1].content(Key.ERROR_24)
        played = await play(acknowledging_nothing(registered), port, before=originator)
    expected = [packet for packet in registered.answers if not packet.is_heartbeat]
    assert list(compared("3.8", played.answers)) == list(compared("3.8", expected))


def acknowledging_nothing(conversation: Conversation) -> Conversation:
    """Make its ACKs repeat the start of its subscription: a row acknowledged before it is sent is not sent, and the
    order of the two is not guaranteed."""
    subscribe = next(packet for packet in conversation.packets if packet.type == RequestType.SUBSCRIBE)
    body = {Key.VCLOCK.value: subscribe.content(Key.VCLOCK)}
    ack = Packet(False, msgpack.packb({Key.REQUEST_TYPE.value: 0}) + msgpack.packb(body))
    packets = [ack if not packet.from_server and packet.kind == "OK" else packet for packet in conversation.packets]
    return replace(conversation, packets=tuple(packets))


@pytest.mark.parametrize("version", ["2.11", "3.8"])
async def test_ballot_watcher_is_notified_of_a_registration(version: str, tmp_path: Path) -> None:
    directory = masters.copy_until(version, "01-join-subscribe", "master", tmp_path / "data", 14)
    joining = what_a_lone_master_does(recording.load(version, "01-join-subscribe", "join-01"))
    watching = recording.load(version, "01-join-subscribe", "join-02")
    async with masters.serving(directory) as node:
        port = masters.port_of(node)
        async with connect(port) as watcher:
            watcher.send(watching.requests[0].payload)
            await watcher.answers(1)
            watcher.send(watching.requests[1].payload)
            _, played = await asyncio.gather(watcher.answers(2), play(joining, port, before=masters.Originator(node)))
    events = watcher.played.answers
    assert [packet.kind for packet in events] == [packet.kind for packet in watching.answers]
    members = [packet.content(Key.EVENT_DATA)[Key.BALLOT.value][9] for packet in (events[-1], watching.answers[-1])]
    assert members[0] == members[1]
    assert played.heartbeats
