"""The dashboard shows the findings of `flowstone explain`: it investigates after changes, without blocking the
polls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flowstone.iproto.slab import Slab
from flowstone.iproto.uri import parse_uri
from flowstone.observation.explanation import explain
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.investigation import Investigation
from flowstone.observation.log_section import _SectionSink
from flowstone.observation.query import Asking
from flowstone.observation.replica_set import Member, ReplicaSet, replica_sets
from flowstone.observation.report import Report, Unreachable
from flowstone.outside import Outside, production
from flowstone.web import deep_findings
from flowstone.web.deep_findings import ALONE_MAX, DEEPER_SECONDS, WATCHERS_MAX, DeepFindings
from flowstone.web.feed import Feed
from flowstone.web.feed_metrics import FeedMonitored
from flowstone.web.metrics import encode
from tests.node.upstream_server import USER, Upstream
from tests.observation.reports import SET, address, pair, report, upstream, uuid
from tests.real_tarantool import free_port
from tests.standing_clock import StandingClock
from tests.web.exposition import checked
from tests.web.test_feed import feeding, until
from tests.web.test_feed import pair as nodes

OTHER_SET = "5e700000-0000-4000-8000-000000000001"
DUPLICATE = {"status": "stopped", "message": "Duplicate key exists in unique index 'pk' in space 'ledger'"}
STOPPED, WELL = replica_sets(pair({1: 12}, {1: 10}, DUPLICATE)), replica_sets(pair({1: 12}, {1: 12}, {}))


def clocked() -> tuple[Outside, StandingClock]:
    clock = StandingClock()
    return replace(production(), clock=clock), clock


def way(member: Member) -> Asking:
    """Return a link to a server that is not queried."""
    assert member.address is not None
    return Asking(production(), parse_uri(member.address))


def never_followed(peer: str) -> Finding:
    """Return a finding that the report of instance 2 does not show."""
    return Finding(
        kind=Kind.UNREACHABLE,
        severity=Severity.STOPPED,
        member=uuid(2),
        label=address(2),
        what=f"{address(2)} does not follow {peer}",
        why="nobody answers there",
        advice="start it",
        replicaset=SET,
        peer=peer,
    )


Investigate = Callable[[Sequence[ReplicaSet], tuple[Finding, ...]], tuple[Finding, ...]]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Investigate]:
    """Fake investigations of the sets; each is answered by the last entry of the list."""
    made: list[Investigate] = [lambda sets, known: known]

    async def findings(self: Investigation, sets: Sequence[ReplicaSet]) -> tuple[Finding, ...]:
        return made[-1](sets, explain(sets))

    monkeypatch.setattr(Investigation, "findings", findings)
    return made


def deeper(sets: Sequence[ReplicaSet], known: tuple[Finding, ...]) -> tuple[Finding, ...]:
    return tuple(msgspec.structs.replace(one, why=f"deeper: {one.why}") for one in known)


# --- with real nodes ---


def both_tuples(feed: Feed) -> bool:
    told = [one.why for one in feed.state().findings if one.kind is Kind.DUPLICATE_KEY]
    return any('INSERT [7, "theirs"]' in why and '[7, "mine"]' in why for why in told)


async def test_duplicate_key_finding_has_both_tuples_and_its_reader_is_not_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, int]] = []
    take = _SectionSink.apply
    async with nodes(tmp_path) as (first, second):
        uris = [first.uri, f"{USER}@{second.address}"]
        async with feeding(*uris) as feed:

            async def take_while_somebody_looks(sink: _SectionSink, slab: Slab) -> None:
                (raw,) = await feed._observed.look()
                await feed._look()
                is_there = any(member.uuid == str(sink.instance_uuid) for member in raw.members)
                seen.append((is_there, len(feed.sets[0].members)))
                await take(sink, slab)

            monkeypatch.setattr(_SectionSink, "apply", take_while_somebody_looks)
            await until("the log", lambda: feed.state().sets[0].tail.status == "following")
            await second.space("fruit").insert((7, "mine"))
            await first.fruit.insert((7, "theirs"))
            await until("both tuples", lambda: both_tuples(feed))
            shown = checked(encode(await FeedMonitored(feed).metrics(), "")[0].decode())
            # The link that the duplicate key stopped, and the first node, which gets nothing from the second.
            assert shown.value("flowstone_findings", severity="stopped") == 2
    assert set(seen) == {(True, 2)}


async def test_unreachable_server_is_a_finding_until_it_is_no_longer_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_findings, "DEEPER_SECONDS", 0.2)
    silent = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    async with nodes(tmp_path) as (first, second), feeding(first.uri, f"{USER}@{second.address}") as feed:
        await second.reconfigure(replication_connect_timeout=0.1)
        await second.reconfigure(replication=[first.uri, *silent])
        await until("both servers", lambda: {one.peer for one in feed.state().findings} == set(silent))
        assert {one.member for one in feed.state().findings} == {second.info()["uuid"]}
        await second.reconfigure(replication=[first.uri])
        await until("that all is well", lambda: not feed.state().findings)


async def test_polls_continue_while_an_investigation_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = 0

    async def hang(self: Investigation, sets: Sequence[ReplicaSet]) -> tuple[Finding, ...]:
        nonlocal begun
        begun += 1
        return await asyncio.Future()

    monkeypatch.setattr(Investigation, "findings", hang)
    async with feeding(f"127.0.0.1:{free_port()}") as feed:
        await until("a deeper look", lambda: begun)
        points = len(feed.history(None).points)
        await until("three looks more", lambda: len(feed.history(None).points) >= points + 3)
        assert [one.kind for one in feed.state().findings] == [Kind.UNREACHABLE]
    assert begun == 1


async def test_deep_findings_send_no_login_to_another_server_at_the_address(tmp_path: Path) -> None:
    stranger = Upstream(tmp_path / "stranger")
    await stranger.start()
    try:
        found = DeepFindings(production())
        found.see(WELL, lambda member: Asking(production(), parse_uri(stranger.uri)))
        await found.look_deeper()
        assert stranger.node.statistics().connections_total > 0
        assert stranger.node.statistics().operations["AUTH"] == 0
    finally:
        await stranger.stop()


# --- timing ---


async def test_deep_findings_investigate_when_problems_change_and_otherwise_rarely(looks: list[Investigate]) -> None:
    outside, clock = clocked()
    found, count = DeepFindings(outside), 0

    def counted(sets: Sequence[ReplicaSet], known: tuple[Finding, ...]) -> tuple[Finding, ...]:
        nonlocal count
        count += 1
        return known

    looks.append(counted)

    async def looks_made(sets: tuple[ReplicaSet, ...]) -> int:
        before = count
        found.see(sets, way)
        await found.look_deeper()
        return count - before

    assert await looks_made(WELL) == 1
    assert await looks_made(WELL) == 0
    assert await looks_made(STOPPED) == 1
    clock.now += DEEPER_SECONDS - 1
    assert await looks_made(STOPPED) == 0
    clock.now += 1
    assert await looks_made(STOPPED) == 1
    assert await looks_made(WELL) == 1


# --- contents ---


async def test_deep_findings_replace_the_findings_of_reports(looks: list[Investigate]) -> None:
    found = DeepFindings(production())
    found.see(STOPPED, way)
    (shallow,) = found.findings
    looks.append(deeper)
    await found.look_deeper()
    (deep,) = found.findings
    assert deep == msgspec.structs.replace(shallow, why=f"deeper: {shallow.why}")
    found.see(WELL, way)
    assert found.findings == ()


async def test_lag_in_a_finding_is_current(looks: list[Investigate]) -> None:
    found = DeepFindings(production())
    looks.append(deeper)
    found.see(replica_sets(pair({1: 20}, {1: 10}, {"lag": 60.0})), way)
    await found.look_deeper()
    found.see(replica_sets(pair({1: 50}, {1: 10}, {"lag": 90.0})), way)
    (finding,) = found.findings
    assert finding.kind is Kind.BEHIND
    assert "by 40 rows" in finding.what
    assert finding.why.startswith("deeper: ")


async def test_finding_outside_of_reports_is_shown_while_its_member_is_not_following(
    looks: list[Investigate],
) -> None:
    def shown(*reports: Report | Unreachable) -> list[str | None]:
        found.see(replica_sets(reports), way)
        return [one.peer for one in found.findings if one.kind is Kind.UNREACHABLE and one.member == uuid(2)]

    def follower(**peers: Any) -> Report:
        return report(2, {1: 12}, {1: {"upstream": upstream(1)}} | {int(key[1:]): one for key, one in peers.items()})

    master, (outside, clock) = report(1, {1: 12}), clocked()
    found = DeepFindings(outside)
    assert shown(master, follower()) == []
    looks.append(lambda sets, known: (*known, never_followed(address(3)), never_followed("db4:3301")))
    await found.look_deeper()
    assert shown(master, follower()) == [address(3), "db4:3301"]
    assert shown(master, follower(_3={"upstream": upstream(3)})) == ["db4:3301"]
    assert shown(master) == []
    assert shown(master, follower()) == [address(3), "db4:3301"]
    looks.append(lambda sets, known: known)
    clock.now += DEEPER_SECONDS
    await found.look_deeper()
    assert shown(master, follower()) == []


# --- failures ---


async def test_error_is_logged_once_and_keeps_the_findings_of_the_poll(
    looks: list[Investigate], caplog: pytest.LogCaptureFixture
) -> None:
    outside, clock = clocked()
    found = DeepFindings(outside)
    found.see(STOPPED, way)
    (shallow,) = found.findings
    looks.append(lambda sets, known: (*deeper(sets, known), never_followed(address(3))))
    await found.look_deeper()
    assert len(found.findings) == 2

    def fail(sets: Sequence[ReplicaSet], known: tuple[Finding, ...]) -> tuple[Finding, ...]:
        raise ValueError("no such thing")

    looks.append(fail)
    with caplog.at_level(logging.WARNING, "flowstone.web"):
        for _ in range(3):
            clock.now += DEEPER_SECONDS
            await found.look_deeper()
            # A failed investigation does not mean that the server in `replication` is followed now.
            assert set(found.findings) == {shallow, never_followed(address(3))}
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
            f"cannot investigate replica set {SET}, showing findings from reports only"
        ]
        looks.append(deeper)
        clock.now += DEEPER_SECONDS
        await found.look_deeper()
        assert [one.why for one in found.findings] == [f"deeper: {shallow.why}"]
        looks.append(fail)
        clock.now += DEEPER_SECONDS
        await found.look_deeper()
        assert len(caplog.records) == 2


async def test_slow_set_does_not_delay_other_sets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def findings(self: Investigation, sets: Sequence[ReplicaSet]) -> tuple[Finding, ...]:
        if sets[0].uuid == SET:
            await asyncio.Future()
        return deeper(sets, explain(sets))

    monkeypatch.setattr(Investigation, "findings", findings)
    monkeypatch.setattr(deep_findings, "LIMIT_SECONDS", 0.05)
    gone = Unreachable(address="db8:3301", reason="Connection refused")
    (other,) = (msgspec.structs.replace(one, uuid=OTHER_SET) for one in replica_sets([gone]))
    found = DeepFindings(production())
    found.see((*STOPPED, other), way)
    await found.look_deeper()
    told = {one.replicaset: one.why.startswith("deeper: ") for one in found.findings}
    assert told == {SET: False, OTHER_SET: True}
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["timed out after 0.05 s"]


async def test_member_without_an_address_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """An example is the node that contains the dashboard, without a user."""
    found = DeepFindings(production())
    found.see(STOPPED, lambda member: None)
    await found.look_deeper()
    (finding,) = found.findings
    assert any(line.startswith("further query failed: ") for line in finding.evidence)
    assert caplog.records == []


async def test_deep_findings_limit_the_text_of_servers(looks: list[Investigate]) -> None:
    found = DeepFindings(production())
    found.see(WELL, way)
    looks.append(lambda sets, known: tuple(never_followed(f"db9:{port}") for port in range(10 * ALONE_MAX)))
    await found.look_deeper()
    assert len(found.findings) == ALONE_MAX


def test_names_of_log_consumers_expire() -> None:
    found = DeepFindings(production())
    names = [str(found._new_watcher()) for _ in range(3 * WATCHERS_MAX)]
    assert found.watchers == frozenset(names[-WATCHERS_MAX:])
