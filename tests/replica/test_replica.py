"""A replica inside a program: the upstream's data, and the loss of the upstream."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from flowstone.iproto import errors
from flowstone.iproto.uri import parse_uri
from flowstone.node.changes import SettledChange
from flowstone.outside import production
from flowstone.replica.replica import CannotFollow, NotReached, Replica, ReplicaSink, UpstreamCut
from flowstone.replica.settled_box import FollowedSpaces
from flowstone.replication.applier.protocol import ApplierProtocol
from flowstone.replication.messages import Ballot, encode_vclock_reply
from flowstone.replication.vclock import VClock, VClockError
from tests.node.fake_server import peer
from tests.node.upstream.test_applier import ScriptedMaster, ShortClock
from tests.node.upstream_server import Upstream
from tests.replica.test_settled_box import ORDERS, snapshot_of

SECONDS = 20.0


@pytest_asyncio.fixture
async def upstream(tmp_path: Path) -> AsyncIterator[Upstream]:
    server = Upstream(tmp_path / "upstream")
    await server.start()
    yield server
    await server.stop()


Make = Callable[..., Replica]


@pytest_asyncio.fixture
async def replica_of(upstream: Upstream) -> AsyncIterator[Make]:
    """Creates replicas that end with the test."""
    made: list[Replica] = []

    def make(uri: str = "", **options: Any) -> Replica:
        options = {"replication_timeout": 0.2} | options
        made.append(Replica(production(), parse_uri(uri or upstream.uri), **options))
        return made[-1]

    yield make
    for replica in made:
        await replica.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await production().clock.sleep(0.01)


def status(replica: Replica) -> str:
    return str(replica.info()["upstream"]["status"])


async def test_replica_shows_existing_and_later_rows_of_the_upstream(upstream: Upstream, replica_of: Make) -> None:
    await upstream.fruit.insert((1, "fig"))
    replica = replica_of()
    await replica.start()
    fruit = replica.space("fruit")
    assert fruit.get(1) == (1, "fig")
    await upstream.fruit.insert((2, "date"))
    await replica.wait_for(upstream.vclock, timeout=SECONDS)
    assert fruit.index("by_name").select("date") == [(2, "date")]
    assert (len(fruit), fruit.count(), [each["name"] for each in fruit]) == (2, 2, ["fig", "date"])
    assert replica.vclock == VClock(upstream.vclock)
    await until(lambda: status(replica) == "follow")
    assert replica.info()["upstream"]["lag"] < SECONDS


async def test_error_of_a_rejected_write_names_the_upstream(upstream: Upstream, replica_of: Make) -> None:
    replica = replica_of()
    await replica.start()
    for attempt in (
        replica.space("fruit").insert((1, "fig")),
        replica.space("fruit").delete(1),
        replica.space("fruit").truncate(),
    ):
        with pytest.raises(errors.Readonly, match=f"read-only replica.*write to {upstream.address}"):
            await attempt


async def test_changes_are_delivered_in_order_with_old_and_new_tuples(upstream: Upstream, replica_of: Make) -> None:
    told: list[SettledChange] = []
    replica = replica_of(on_change=[told.extend])
    await replica.start()
    await upstream.fruit.insert((1, "fig"))
    await upstream.fruit.update(1, [("=", "name", "date")])

    @replica.on_change
    def broken(changes: list[SettledChange]) -> None:
        raise ZeroDivisionError

    await upstream.fruit.delete(1)
    await replica.wait_for(upstream.vclock, timeout=SECONDS)
    assert [(change.type, change.key, change.old, change.new) for change in told] == [
        ("INSERT", (1,), None, (1, "fig")),
        ("UPDATE", (1,), (1, "fig"), (1, "date")),
        ("DELETE", (1,), (1, "date"), None),
    ]
    assert [(change.replica_id, change.lsn) for change in told] == [(1, told[0].lsn + n) for n in range(3)]


async def test_trigger_set_later_receives_only_later_changes(upstream: Upstream, replica_of: Make) -> None:
    replica = replica_of()
    await replica.start()
    await upstream.fruit.insert((1, "fig"))
    await replica.wait_for(upstream.vclock, timeout=SECONDS)
    told: list[SettledChange] = []
    replica.on_change(told.extend)
    await upstream.fruit.insert((2, "date"))
    await replica.wait_for(upstream.vclock, timeout=SECONDS)
    assert [change.new for change in told] == [(2, "date")]


async def test_space_that_was_not_selected_is_unknown(upstream: Upstream, replica_of: Make) -> None:
    vegetables = await upstream.node.create_space("vegetables")
    await vegetables.create_index("primary")
    replica = replica_of(spaces=["fruit"])
    await replica.start()
    with pytest.raises(errors.NoSuchSpace, match=r"'vegetables' is not followed.*spaces="):
        replica.space("vegetables")
    with pytest.raises(errors.NoSuchSpace, match="'minerals' does not exist"):
        replica.space("minerals")
    await vegetables.insert((1,))
    await upstream.fruit.insert((1, "fig"))
    await replica.wait_for(upstream.vclock, timeout=SECONDS)
    assert replica.space("fruit").get(1) == (1, "fig")


async def test_space_renamed_to_a_selected_name_is_replicated_completely(upstream: Upstream, replica_of: Make) -> None:
    minerals = await upstream.node.create_space("minerals")
    await minerals.create_index("primary")
    resyncs: list[tuple[VClock, VClock]] = []
    replica = replica_of(spaces=["stones"], on_resync=[lambda before, after: resyncs.append((before, after))])
    await replica.start()
    await minerals.insert((1, "calcite"))
    await minerals.rename("stones")
    await minerals.insert((2, "gypsum"))
    await replica.wait_for(upstream.vclock, timeout=SECONDS)
    assert replica.space("stones").select() == [(1, "calcite"), (2, "gypsum")]
    assert len(resyncs) == 1


async def test_wait_for_a_position_times_out(upstream: Upstream, replica_of: Make) -> None:
    replica = replica_of()
    await replica.start()
    with pytest.raises(NotReached, match=r"position \{1: 999\} not reached within 0.05 s: replica is at \{1:"):
        await replica.wait_for({0: 5, 1: 999}, timeout=0.05)
    waiting = asyncio.ensure_future(replica.wait_for(VClock({1: 999})))
    await asyncio.sleep(0)
    await replica.stop()
    with pytest.raises(CannotFollow, match="is no longer followed: the replica was stopped"):
        await waiting
    await replica.wait_for(replica.vclock)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("replicator:wrong@{}", "Incorrect password supplied for user 'replicator'; check"),
        ("{}", "Read access to universe '' is denied for user 'guest'; no user was given: write user:password@"),
        ("127.0.0.1:1", "connection refused"),
    ],
)
async def test_error_that_stops_the_replica_is_raised(
    upstream: Upstream, replica_of: Make, uri: str, message: str
) -> None:
    replica = replica_of(uri.format(upstream.address))
    with pytest.raises(CannotFollow, match=f"cannot follow 127.0.0.1:.*{message}"):
        await replica.start()
    with pytest.raises(CannotFollow, match=r"no data from .* yet"):
        replica.space("fruit")


async def test_silent_server_times_out(replica_of: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        replica = replica_of(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.1)
        with pytest.raises(CannotFollow, match=r"no data within 0\.1 s.*connect_timeout"):
            await replica.start()


async def test_replica_resumes_when_the_upstream_returns(upstream: Upstream, replica_of: Make) -> None:
    told: list[SettledChange] = []
    replica = replica_of(on_change=[told.extend])
    await replica.start()
    await upstream.fruit.insert((1, "fig"))
    await upstream.stop()
    await until(lambda: status(replica) == "disconnected")
    assert upstream.address in replica.info()["upstream"]["message"]
    await upstream.start()
    await upstream.fruit.insert((2, "date"))
    await replica.wait_for(upstream.vclock, timeout=SECONDS)
    assert [change.new for change in told] == [(1, "fig"), (2, "date")]


@pytest.mark.parametrize("is_seen_before", [True, False])
async def test_new_snapshot_replaces_data_after_the_logs_are_lost(
    upstream: Upstream,
    replica_of: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_seen_before: bool,
) -> None:
    """The loss is visible in the ballot, or the upstream reports it when rows are requested."""
    if not is_seen_before:
        prepare = ReplicaSink.prepare
        monkeypatch.setattr(ReplicaSink, "prepare", lambda follower, ballot: prepare(follower, None))
    resyncs: list[tuple[VClock, VClock]] = []
    replica = replica_of()
    await replica.start()
    replica.on_resync(lambda before, after: resyncs.append((before, after)))
    fruit, before = replica.space("fruit"), replica.vclock
    # Meanwhile the upstream runs on another port, unknown to the replica.
    address = upstream.address
    await upstream.stop()
    upstream.address = "127.0.0.1:0"
    await upstream.start()
    await upstream.lose_logs()
    await upstream.stop()
    upstream.address = address
    await upstream.start()
    await replica.wait_for(upstream.vclock, timeout=SECONDS)
    assert fruit.get(100) == (100, "new")
    assert fruit.get(101) == (101, "newer")
    assert resyncs == [(before, replica.vclock)]
    assert f"snapshot at {replica.vclock} replaces the data at {before}" in caplog.text
    assert ("Missing .xlog file" in caplog.text) is not is_seen_before
    await upstream.fruit.insert((102, "newest"))
    await replica.wait_for(upstream.vclock, timeout=SECONDS)
    assert fruit.get(102) == (102, "newest")


async def test_error_about_an_upstream_that_lost_its_tail_names_the_rows(
    upstream: Upstream, replica_of: Make, tmp_path: Path
) -> None:
    await upstream.stop()
    upstream.keep_copy(tmp_path / "copy")
    await upstream.start()
    replica = replica_of()
    await replica.start()
    first = upstream.vclock[1] + 1
    await upstream.fruit.insert((1, "fig"))
    await upstream.fruit.insert((2, "date"))
    await replica.wait_for(upstream.vclock, timeout=SECONDS)
    await upstream.stop()
    upstream.set_back(tmp_path / "copy")
    await upstream.start()
    with pytest.raises(CannotFollow, match=f"has lost rows {first}…{first + 1} of replica 1") as caught:
        await replica.wait_for({1: 999}, timeout=SECONDS)
    assert isinstance(caught.value.__cause__, UpstreamCut)
    assert status(replica) == "stopped"
    assert replica.space("fruit").get(2) == (2, "date")


async def test_server_that_sends_no_snapshot_times_out(replica_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    master = ScriptedMaster(FETCH_SNAPSHOT=[encode_vclock_reply(VClock({1: 5}))])
    async with peer(master.talk) as uri:
        replica = replica_of(uri, connect_timeout=0.3)
        with pytest.raises(CannotFollow, match=r"no data within 0\.3 s"):
            await replica.start()
    assert "retrying" not in caplog.text


async def test_upstream_without_logs_after_its_snapshots_is_retried_with_backoff(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ShortClock(0.001)  # not 0: a busy loop starves the upstream, which starts in this process
    replica = Replica(replace(production(), clock=clock), parse_uri(upstream.uri), replication_timeout=0.2)
    await replica.start()
    await until(lambda: status(replica) == "follow")

    def refuse(*_: object, **__: object) -> None:
        raise errors.XlogGap("Missing .xlog file between LSN 5 and 9")

    monkeypatch.setattr(ApplierProtocol, "subscribe", refuse)
    await upstream.stop()
    await upstream.start()
    await until(lambda: [pause for pause in clock.pauses if pause > 10])
    await replica.stop()
    assert {0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8} <= {round(pause, 6) for pause in clock.pauses}


# --- as seen by the applier ---


def follower() -> ReplicaSink:
    made = ReplicaSink(parse_uri("127.0.0.1:3301"), UUID(int=7), FollowedSpaces(None), None)
    made.meet((2, 6, 0))
    return made


async def test_replica_has_no_data_until_a_snapshot_is_complete() -> None:
    sink = follower()
    assert (sink.replicaset_uuid, sink.vclock, sink.id_filter, sink.is_anonymous) == (None, VClock(), (0,), True)
    assert sink.version_id == 2 << 16 | 6 << 8


async def followed(vclock: VClock) -> ReplicaSink:
    """Return a replica after a snapshot."""
    sink = follower()
    await sink.begin_snapshot(vclock, (2, 6, 0))
    assert sink._snapshot is not None
    sink._snapshot = snapshot_of((ORDERS, (1, "tea")), (272, ("cluster", str(UUID(int=5)))), vclock=vclock)
    await sink.end_join(vclock)
    sink.prepare(None)
    return sink


def _reason(sink: ReplicaSink) -> str:
    return sink.snapshot_reason


async def test_snapshot_is_requested_if_the_upstream_has_only_newer_logs() -> None:
    sink = await followed(VClock({1: 10}))
    assert sink.replicaset_uuid == UUID(int=5)
    assert sink.prepare(Ballot(gc_vclock=VClock({1: 10}))) is None
    assert not _reason(sink)
    deleted = sink.prepare(Ballot(gc_vclock=VClock({1: 11})))
    assert deleted is not None
    assert deleted.message == "its oldest log starts at {1: 11}"


async def test_snapshot_is_requested_from_an_upstream_of_another_dialect() -> None:
    sink = await followed(VClock({1: 10}))
    sink.meet((2, 6, 0))
    assert not _reason(sink)
    sink.meet((2, 11, 9))
    assert _reason(sink) == "version changed from 2.6.0 to 2.11.9"


async def test_snapshot_from_before_the_position_or_of_another_set_is_rejected() -> None:
    sink = await followed(VClock({1: 10, 2: 5}))
    with pytest.raises(UpstreamCut, match=r"has lost rows 9…10 of replica 1, 1…5 of replica 2: its vclock is \{1: 8\}"):
        await sink.begin_snapshot(VClock({1: 8}), (2, 6, 0))
    later = VClock({1: 11, 2: 5})
    await sink.begin_snapshot(later, (2, 6, 0))
    sink._snapshot = snapshot_of((272, ("cluster", str(UUID(int=6)))), vclock=later)
    with pytest.raises(errors.ReplicasetUuidMismatch):
        await sink.end_join(later)


async def test_missing_space_is_logged_once(
    upstream: Upstream, replica_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    replica = replica_of(spaces=["fruit", "zzz", 4711])
    await replica.start()
    warnings = [record.message for record in caplog.records if "has no space" in record.message]
    assert warnings == [f"{upstream.address} has no space 'zzz', 4711; will follow it once created"]


@pytest.mark.parametrize("given", ["x", None, 7, {"1": 5}, {1: "5"}, [1]])
async def test_wait_for_an_invalid_vclock_is_rejected(replica_of: Make, given: Any) -> None:
    replica = replica_of()
    await replica.start()
    with pytest.raises(VClockError, match=r"is not a vclock; write it as \{replica id: LSN\}"):
        await replica.wait_for(given)


async def test_failing_trigger_is_named_in_the_log(
    upstream: Upstream, replica_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def sum_up(changes: list[SettledChange]) -> None:
        raise ZeroDivisionError

    replica = replica_of(on_change=[sum_up])
    await replica.start()
    await upstream.fruit.insert((1, "fig"))
    await until(lambda: "ZeroDivisionError" in caplog.text)
    assert "on_change trigger test_failing_trigger_is_named_in_the_log.<locals>.sum_up failed" in caplog.text
