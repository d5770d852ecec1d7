"""A Flowstone node in place of recorded replicas: the same requests, and the same data at the end.

A server replays the recorded masters byte for byte. The expected data is read from the files that the recorded replica
left: the same rows in the same log, the same data.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import flowstone
from flowstone.iproto.constants import Key, RaftKey, RequestType
from flowstone.outside import production
from tests.conversations import masters, recording, replicas, server
from tests.conversations.client import play
from tests.conversations.recording import Conversation, Packet
from tests.conversations.test_master import only_the_subscription

MAIN = RequestType.AUTH
"""Present in every conversation except a watcher's."""

FOLLOWER = 1

OUR_OWN = (Key.SERVER_VERSION, Key.FEATURES, Key.VERSION)
"""Values that identify the client."""

GC_CONSUMERS = 388
"""Local to each instance of 3.8, except its definition."""


def load_all(version: str, scenario: str, prefix: str) -> list[Conversation]:
    names = [name for name in recording.names(version, scenario) if name.startswith(prefix)]
    return [recording.load(version, scenario, name) for name in names]


def requests_shown(requests: Sequence[Packet]) -> list[str]:
    """Return kinds, keys and values, without those that depend on the client and its history.

    Releases differ in when they repeat, on a later connection, that their own rows are not wanted back; 3.8 subscribed
    with the vclock from before its registration. A scramble may be sent as text or as bytes.
    """
    is_copy = any(packet.type in (RequestType.JOIN, RequestType.FETCH_SNAPSHOT) for packet in requests)
    masked = OUR_OWN if is_copy else (*OUR_OWN, Key.VCLOCK)
    shown = []
    for packet in requests:
        fields = {}
        for key in packet.body or {}:
            value = packet.content(key)
            if key == Key.TUPLE:
                value = [v if isinstance(v, bytes) else v.encode(errors="surrogateescape") for v in value]
            if key != Key.ID_FILTER or is_copy:
                fields[Key(key).name] = "*" if key in masked else value
        shown.append(f"{packet.kind} {sorted(packet.header)} {fields}")
    return shown


def check_acknowledgements(heard: server.Heard, recorded: Sequence[Packet]) -> None:
    """Check for the same keys, never a decrease, and as much acknowledged at the end; the frequency is up to the
    applier."""
    assert {tuple(ack.body or ()) for ack in heard.acks} <= {tuple(ack.body or ()) for ack in recorded}
    positions = [ack.content(Key.VCLOCK) for ack in heard.acks]
    for earlier, later in itertools.pairwise(positions):
        assert all(later.get(replica_id, 0) >= lsn for replica_id, lsn in earlier.items())
    assert recorded[-1].content(Key.VCLOCK) in positions
    assert heard.acks[-1].content(Key.TERM) == recorded[-1].content(Key.TERM)


def check_client_side(played: server.RecordedServer, *conversations: Conversation) -> None:
    for conversation in conversations:
        heard = played.heard[conversation.name]
        requests = [packet for packet in conversation.requests if not server.is_ack(packet)]
        assert requests_shown(heard.requests) == requests_shown(requests), conversation.name
        acks = [packet for packet in conversation.requests if server.is_ack(packet)]
        if acks:
            check_acknowledgements(heard, acks)


# --- join, follow, restart ---------------------------------------------------------------------------------

JOINED = [
    ("2.6", "join-01", "join-02"),
    ("2.11", "join-01", "join-03"),
    ("3.8", "join-01", "join-03"),
]
FIRST_SNAPSHOT = "00000000000000000015.snap"
VINYL_SPACE = 513
NOT_IN_SNAPSHOTS = frozenset({VINYL_SPACE, GC_CONSUMERS})
"""Real servers keep vinyl in separate files."""

REPLICA_UUID = "11111111-0000-4000-8000-000000000002"


@pytest.mark.parametrize(("version", "first", "second"), JOINED, ids=[version for version, *_ in JOINED])
async def test_node_joins_follows_and_reconnects_like_the_recorded_replica(
    version: str, first: str, second: str, tmp_path: Path
) -> None:
    conversations = load_all(version, "01-join-subscribe", "join-")
    outside = replicas.outside_at(conversations[0])
    async with server.serving(conversations) as upstream:
        for name in (first, second):
            async with replicas.following(tmp_path / "data", upstream, outside, REPLICA_UUID) as node:
                await upstream.finished(name)
                data = replicas.tuples(node.box, besides=frozenset({GC_CONSUMERS}))
    recorded = replicas.recorded_files(version, "01-join-subscribe", "replica")
    snapshots = [directory / FIRST_SNAPSHOT for directory in (tmp_path / "data", recorded)]
    ours, theirs = (replicas.snapshot_tuples(path, besides=NOT_IN_SNAPSHOTS) for path in snapshots)
    assert ours == theirs
    assert replicas.logged_rows(tmp_path / "data") == replicas.logged_rows(recorded)
    copied = masters.copy_files(version, "01-join-subscribe", "replica", tmp_path / "recorded", "*.xlog", "*.snap")
    async with masters.serving(copied) as other:
        assert data == replicas.tuples(other.box, besides=frozenset({GC_CONSUMERS}))
    check_client_side(upstream, *conversations)


# --- anonymous, then registered ------------------------------------------------------------------------------

ANONYMOUS_UUID = "11111111-0000-4000-8000-000000000003"


@pytest.mark.parametrize(
    ("version", "following", "registered"), [("2.6", "anon-01", "anon-02"), ("3.8", "anon-01", "anon-05")]
)
async def test_anonymous_node_follows_and_registers_like_the_recorded_replica(
    version: str, following: str, registered: str, tmp_path: Path
) -> None:
    conversations = load_all(version, "03-anon-register", "anon-")
    outside = replicas.outside_at(recording.load(version, "03-anon-register", following))
    options = {"read_only": True, "replication_anon": True}
    async with (
        server.serving(conversations) as upstream,
        replicas.following(tmp_path / "data", upstream, outside, ANONYMOUS_UUID, **options) as node,
    ):
        await upstream.finished(following)
        await node.reconfigure(replication_anon=False)
        await upstream.finished(registered)
        await node.reconfigure(read_only=False)
        await replicas.write_own_rows(node, replicas.recorded_files(version, "03-anon-register", "replica"))
        data = replicas.tuples(node.box, besides=frozenset({GC_CONSUMERS}))
    recorded = replicas.recorded_files(version, "03-anon-register", "replica")
    assert replicas.logged_rows(tmp_path / "data") == replicas.logged_rows(recorded)
    copied = masters.copy_files(version, "03-anon-register", "replica", tmp_path / "recorded", "*.xlog", "*.snap")
    async with masters.serving(copied) as other:
        assert data == replicas.tuples(other.box, besides=frozenset({GC_CONSUMERS}))
    check_client_side(upstream, *conversations)


# --- two writers --------------------------------------------------------------------------------------------

FIRST_ROW_OF_A = 9
"""The first row of a with two members; the row before registers the other one."""

MESH = [("2.6", ("to-a-01",), "to-b-02"), ("3.8", ("to-a-01", "to-a-02"), "to-b-03")]


@pytest.mark.parametrize(("version", "to_a", "to_b"), MESH, ids=[version for version, *_ in MESH])
async def test_writing_node_in_a_mesh_exchanges_the_recorded_rows(
    version: str, to_a: tuple[str, ...], to_b: str, tmp_path: Path
) -> None:
    conversations = [recording.load(version, "04-mesh", name) for name in to_a]
    back = only_the_subscription(recording.load(version, "04-mesh", to_b))
    outside = replicas.outside_at(conversations[0])
    async with (
        server.serving(conversations) as upstream,
        replicas.following(tmp_path / "data", upstream, outside, REPLICA_UUID) as node,
    ):
        await replicas.until(lambda: not node.info()["ro"])
        played = await play(back, masters.port_of(node), before=masters.Originator(node, 2))
        await upstream.finished(*to_a)
        data = replicas.tuples(node.box, besides=frozenset({GC_CONSUMERS}))
    expected = [packet.kind for packet in back.answers if not packet.is_heartbeat]
    assert [packet.kind for packet in played.answers] == expected
    recorded = replicas.recorded_files(version, "04-mesh", "b")
    assert sorted(replicas.logged_rows(tmp_path / "data")) == sorted(replicas.logged_rows(recorded))
    copied = masters.copy_files(version, "04-mesh", "b", tmp_path / "recorded", "*.xlog", "*.snap")
    async with masters.serving(copied) as other:
        assert data == replicas.tuples(other.box, besides=frozenset({GC_CONSUMERS}))
    check_client_side(upstream, *conversations)


@pytest.mark.parametrize(
    ("version", "to_b"), [("2.6", ("to-b-02",)), ("3.8", ("to-b-03", "to-b-04"))], ids=["2.6", "3.8"]
)
async def test_node_follows_its_replica_like_the_recorded_master_of_a_mesh(
    version: str, to_b: tuple[str, ...], tmp_path: Path
) -> None:
    joining = recording.load(version, "04-mesh", "to-a-01")
    conversations = [recording.load(version, "04-mesh", name) for name in to_b]
    directory = masters.copy_until(version, "04-mesh", "a", tmp_path / "data", FIRST_ROW_OF_A - 2)
    outside = replicas.outside_at(joining)
    async with server.serving(conversations) as upstream, masters.serving(directory, outside=outside) as node:
        upstream.hold = replicas.own_rows_of(node, 1)
        originator = masters.Originator(node)

        async def follow_first(packet: Packet) -> None:
            if packet.lsn == FIRST_ROW_OF_A:
                await node.reconfigure(replication=[f"replicator:secret@127.0.0.1:{upstream.port}"])
            await originator(packet)

        played = await play(joining, masters.port_of(node), before=follow_first)
        await upstream.finished(*to_b)
        data = replicas.tuples(node.box, besides=frozenset({GC_CONSUMERS}))
    expected = [packet.kind for packet in joining.answers if not packet.is_heartbeat]
    assert [packet.kind for packet in played.answers] == expected
    recorded = replicas.recorded_files(version, "04-mesh", "a")
    assert sorted(replicas.logged_rows(directory)) == sorted(replicas.logged_rows(recorded))
    copied = masters.copy_files(version, "04-mesh", "a", tmp_path / "recorded", "*.xlog", "*.snap")
    async with masters.serving(copied) as other:
        assert data == replicas.tuples(other.box, besides=frozenset({GC_CONSUMERS}))
    check_client_side(upstream, *conversations)


# --- an election, seen by a follower -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.11", "3.8"])
async def test_node_follows_an_elected_leader_that_writes_synchronously(version: str, tmp_path: Path) -> None:
    """The recording is used until the recorded follower was elected itself."""
    recorded = [recording.load(version, "05-election", name) for name in ("to-a-01", "to-a-02")]
    first_term = replace(recorded[0], packets=tuple(itertools.takewhile(_still_leads, recorded[0].packets)))
    outside = replicas.outside_at(first_term)
    async with (
        server.serving([first_term, recorded[1]]) as upstream,
        replicas.following(tmp_path / "data", upstream, outside, REPLICA_UUID) as node,
    ):
        await upstream.finished(first_term.name)
        data = sorted(node.box.space("s").tuples())
    ours = replicas.logged_rows(tmp_path / "data")
    theirs = replicas.logged_rows(replicas.recorded_files(version, "05-election", "b"))
    assert ours == theirs[: len(ours)]
    assert (ours[-1][0], data) == (RequestType.RAFT_CONFIRM, [b"\x92\x01\xa4by a"])
    check_client_side(upstream, first_term)


def _still_leads(packet: Packet) -> bool:
    """Hold until the leader of term 2 announces that it no longer leads."""
    if not packet.from_server or packet.type != RequestType.RAFT:
        return True
    has_resigned = packet.content(RaftKey.TERM) == 2 and packet.content(RaftKey.STATE) == FOLLOWER
    return not has_resigned


# --- rejected ------------------------------------------------------------------------------------------------

REFUSED = {
    "err-badpass": "replicator:wrong@",
    "err-nouser": "ghost:x@",
    "err-guest": "",
    "err-nogrant": "nobody:nopw@",
    "err-romaster": "replicator:secret@",
}
"""The credentials of the recorded replicas."""


def refusals(version: str, prefix: str) -> tuple[list[Conversation], str, str]:
    """Return the conversations, the UUID of the rejected instance, and the reason."""
    conversations = load_all(version, "07-errors", prefix)
    packets = conversations[0].packets
    uuids = [packet.content(Key.INSTANCE_UUID) for packet in packets if packet.content(Key.INSTANCE_UUID)]
    return conversations, uuids[0] if uuids else REPLICA_UUID, packets[-1].content(Key.ERROR_24)


@pytest.mark.parametrize("version", ["2.6", "3.8"])
@pytest.mark.parametrize("name", REFUSED)
async def test_rejected_node_sends_the_recorded_requests_and_reports_the_reason(
    version: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conversations, instance_uuid, reason = refusals(version, name)
    async with server.serving(conversations) as upstream:
        uri = f"{REFUSED[name]}127.0.0.1:{upstream.port}"
        node = flowstone.Node(tmp_path / "data", replication=[uri], instance_uuid=instance_uuid)
        starting = asyncio.create_task(node.start())
        await replicas.until(lambda: reason in caplog.text)
        starting.cancel()  # the node may be admitted later, so it retries
        with pytest.raises(asyncio.CancelledError):
            await starting
        await upstream.finished(*(conversation.name for conversation in conversations))
    check_client_side(upstream, *conversations)


@pytest.mark.parametrize("version", ["2.6", "3.8"])
async def test_node_of_another_replica_set_stops_and_reports_the_reason(
    version: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conversations, instance_uuid, reason = refusals(version, "err-replicaset")
    masters.copy_files(version, "07-errors", "err-replicaset", tmp_path / "data")
    async with (
        server.serving(conversations) as upstream,
        replicas.following(tmp_path / "data", upstream, production(), instance_uuid) as node,
    ):
        await upstream.finished(*(conversation.name for conversation in conversations))
        assert node.info()["status"] == "orphan"
    assert (
        len([record for record in caplog.records if "is stopped" in record.message and reason in record.message]) == 1
    )
    check_client_side(upstream, *conversations)
