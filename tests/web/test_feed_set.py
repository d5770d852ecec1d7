"""The memory of a replica set between two polls: rates, elections, points of history, and their limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from flowstone.observation.live_transaction import LiveTransaction, TransactionStatus
from flowstone.observation.replica_set import Link, Member, ReplicaSet
from flowstone.observation.report import Election, Report
from flowstone.outside import production
from flowstone.web.feed_set import BATCH_MAX, ELECTIONS_MAX, POINT_LINKS_MAX, POINTS_MAX, WatchedSet
from tests.standing_clock import StandingClock

UUID = "11111111-2222-4333-8444-555555555555"


def watched(clock: StandingClock) -> WatchedSet:
    return WatchedSet(replace(production(), clock=clock), UUID, lambda: None)


def member(number: int, lsns: dict[int, int], *, election_mode: str = "candidate", **options: Any) -> Member:
    report = Report(
        address=f"db{number}:3301",
        package="Tarantool",
        version="2.11.0",
        id=number,
        uuid=str(number),
        status="running",
        ro=number != 1,
        vclock=lsns,
        election=Election(state="follower"),
        cfg={"election_mode": election_mode} if election_mode else None,
    )
    return Member(uuid=str(number), id=number, address=report.address, report=report, vclock=lsns, **options)


def link(follower: int, master: int, **options: Any) -> Link:
    return Link(follower=str(follower), master=str(master), status="follow", **options)


def test_rates_cover_the_last_seconds() -> None:
    clock = StandingClock()
    one = watched(clock)
    for lsn in (0, 100, 200, 300, 1300):
        members = (member(1, {1: lsn}), member(2, {1: lsn // 2}))
        one.look(ReplicaSet(uuid=UUID, members=members, links=(link(2, 1),)), [], clock.now)
        clock.now += 1
    state = one.state()
    assert state.rows_per_second == {"1": 400.0, "2": 200.0}
    assert state.links[0].rows_per_second == 200.0


def test_row_is_counted_on_the_link_from_its_originator() -> None:
    """In a mesh any member may send any rows; in a chain there is only one path."""
    clock = StandingClock()
    one = watched(clock)
    for lsn in (0, 30):
        # 3 follows 1 and 2; rows of 4, which is not queried, arrive through either.
        members = (member(1, {1: lsn}), member(2, {2: 2 * lsn}), member(3, {1: lsn, 2: 2 * lsn, 4: lsn}))
        one.look(ReplicaSet(uuid=UUID, members=members, links=(link(3, 1), link(3, 2))), [], clock.now)
        clock.now += 1
    rates = {each.master: each.rows_per_second for each in one.state().links}
    assert rates == {"1": 60.0, "2": 90.0}


def test_election_is_reported_once_for_all_members() -> None:
    clock = StandingClock()
    one = watched(clock)

    def look(term: int, leader: int) -> None:
        one.look(ReplicaSet(uuid=UUID, members=(member(1, {}), member(2, {})), term=term, leader=leader), [], clock.now)
        clock.now += 1

    look(2, 1)
    look(2, 1)
    look(2, 0)
    one._note_leader(3, 2, clock.now)
    look(3, 2)
    look(4, 0)
    look(5, 0)
    found = [(event.kind, event.term, event.leader_label) for event in one.state().elections]
    assert found == [
        ("leader", 2, "db1:3301"),
        ("no_leader", 2, None),
        ("leader", 3, "db2:3301"),
        ("no_leader", 4, None),
        ("term", 5, None),
    ]


def test_promotion_without_elections_is_reported_without_a_missing_leader() -> None:
    """Members of 2.11 nevertheless have a term."""
    one, members = watched(StandingClock()), (member(1, {}, election_mode="off"), member(2, {}, election_mode="off"))
    for at, term in ((100.0, 1), (101.0, 2)):
        one.look(ReplicaSet(uuid=UUID, members=members, term=term), [], at)
    assert one.state().elections == ()
    one._note_leader(3, 1, 102.0)
    one.look(ReplicaSet(uuid=UUID, members=members, term=3), [], 103.0)
    one._note_leader(4, 0, 104.0)
    assert [(event.at, event.kind) for event in one.state().elections] == [(102.0, "leader"), (104.0, "off")]


def test_switching_elections_off_and_on_is_reported() -> None:
    one, mode = watched(StandingClock()), {True: "candidate", False: "off"}
    for at, leader, elect in ((1.0, 1, True), (2.0, 0, False), (3.0, 0, False), (4.0, 0, True), (5.0, 1, True)):
        members = (member(1, {}, election_mode=mode[elect]),)
        one.look(ReplicaSet(uuid=UUID, members=members, term=2, leader=leader), [], at)
    told = [(event.at, event.kind) for event in one.state().elections]
    assert told == [(1.0, "leader"), (2.0, "off"), (4.0, "term"), (5.0, "leader")]


def test_leader_is_reported_missing_without_options_only_if_there_was_one() -> None:
    one, members = watched(StandingClock()), (member(1, {}, election_mode=""), member(2, {}, election_mode=""))
    for at, leader in ((1.0, 0), (2.0, 1), (3.0, 0)):
        one.look(ReplicaSet(uuid=UUID, members=members, term=2, leader=leader), [], at)
    assert [(event.at, event.kind) for event in one.state().elections] == [(2.0, "leader"), (3.0, "no_leader")]


def test_past_events_of_the_log_precede_observed_events() -> None:
    clock = StandingClock()
    one = watched(clock)
    one.look(ReplicaSet(uuid=UUID, members=(member(1, {}), member(2, {})), term=4, leader=1), [], clock.now)
    one._note_leader(3, 2, 500.0)
    one._note_leader(4, 1, 600.0)
    found = [(event.at, event.term, event.leader) for event in one.state().elections]
    assert found == [(500.0, 3, 2), (600.0, 4, 1)]


def test_reports_from_before_an_election_precede_it() -> None:
    one, members = watched(StandingClock()), (member(1, {}), member(2, {}))
    one.look(ReplicaSet(uuid=UUID, members=members, term=2, leader=1), [], 1000.0)
    one._note_leader(3, 2, 1001.5)  # the election happens while the slowest report is pending
    one.look(ReplicaSet(uuid=UUID, members=members, term=3, leader=0), [], 1001.0)
    one.look(ReplicaSet(uuid=UUID, members=members, term=3, leader=2), [], 1002.0)
    assert [event.kind for event in one.state().elections] == ["leader", "no_leader", "leader"]


def test_leader_that_returns_in_its_term_is_reported_again() -> None:
    one, members = watched(StandingClock()), (member(1, {}), member(2, {}))
    for at, leader in ((100.0, 1), (110.0, 0), (111.0, 1), (112.0, 1), (120.0, 0), (130.0, 1)):
        one.look(ReplicaSet(uuid=UUID, members=members, term=3, leader=leader), [], at)
    one._note_leader(3, 1, 99.0)  # the log has the time of the election
    told = [(event.at, event.kind) for event in one.state().elections]
    times = {"leader": (99.0, 111.0, 130.0), "no_leader": (110.0, 120.0)}
    assert told == sorted((at, kind) for kind, moments in times.items() for at in moments)


def test_feed_set_bounds_its_memory() -> None:
    clock = StandingClock()
    one = watched(clock)
    links = tuple(link(2, 1, lag_lsn=lsn) for lsn in range(POINT_LINKS_MAX + 50))
    for term in range(1, POINTS_MAX + 100):
        one.look(
            ReplicaSet(uuid=UUID, members=(member(1, {}),), term=term, links=links if term < 3 else ()), [], clock.now
        )
        clock.now += 1
    points = one.history().points
    assert len(points) == POINTS_MAX
    assert len(one.state().elections) == ELECTIONS_MAX
    assert len(one._samples) < 10


def test_links_with_the_greatest_lag_are_kept_when_there_are_many() -> None:
    one = watched(StandingClock())
    links = tuple(link(2, 1, lag_lsn=lsn) for lsn in range(POINT_LINKS_MAX + 50))
    one.look(ReplicaSet(uuid=UUID, members=(member(1, {}),), links=links), [], 1000.0)
    point = msgspec.json.decode(one.history().points[0])
    assert min(each["lag_lsn"] for each in point["links"]) == 50


async def test_late_reports_are_counted() -> None:
    one = watched(StandingClock())
    one.look(ReplicaSet(uuid=UUID), [], 1000.0)
    one.follow()
    assert one.take_batch() is None
    shown = [
        LiveTransaction(
            replicaset_uuid=UUID, replica_id=1, lsn=lsn, tsn=lsn, at=1, status=TransactionStatus.WAITING, rows=()
        )
        for lsn in range(BATCH_MAX + 7)
    ]
    for each in shown:
        one._shown(each)
    shown[-1].status = TransactionStatus.SETTLED
    one._shown(shown[-1])
    batch = one.take_batch()
    assert batch is not None
    assert (len(batch.transactions), batch.skipped) == (BATCH_MAX, 7)
    assert batch.transactions[-1].status is TransactionStatus.SETTLED
    assert one.take_batch() is None
    await one.stop()
