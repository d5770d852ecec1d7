"""The choice of the leader and of members to read from, with members whose reports the tests make up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowstone.client.connection import Connection
from flowstone.client.member import REFUSED_SECONDS, PoolMember
from flowstone.client.pool import Pool, checked_place
from flowstone.errors import FlowstoneError, LocalProtocolError
from flowstone.iproto.errors import Readonly
from flowstone.iproto.uri import parse_members
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from tests.standing_clock import StandingClock

CONNECTED: Any = object()


class Reports:
    """A pool of three members that are not connected to anything."""

    def __init__(self) -> None:
        self.clock = StandingClock()
        self.leaders: list[PoolMember | None] = []
        self.pool = Pool(
            replace(production(), clock=self.clock),
            parse_members("db1:1,db2:2,db3:3"),
            timeout=5,
            on_leader=lambda: self.leaders.append(self.pool.leader),
        )
        self.one, self.two, self.three = self.pool.members

    def report(self, member: PoolMember, *, writable: bool = False, term: int = 0, lsn: int = 0) -> None:
        connection: Connection = CONNECTED
        member.connection, member.error = connection, None
        member.is_read_only, member.term = not writable, term
        member.vclock, member.asked = VClock({1: lsn}), self.clock.now
        self.pool._note(member)

    def lose(self, member: PoolMember) -> None:
        member.connection, member.error, member.is_read_only = None, FlowstoneError("cut"), True
        self.pool._note(member)


def test_leader_is_the_writable_member() -> None:
    seen = Reports()
    seen.report(seen.one)
    assert seen.pool.choose("leader") is None
    seen.report(seen.two, writable=True)
    assert seen.pool.choose("leader") is seen.two
    seen.lose(seen.two)
    assert seen.pool.choose("leader") is None
    assert seen.leaders == [seen.two, None]


def test_leader_of_the_newest_term_is_chosen_when_two_are_writable() -> None:
    seen = Reports()
    seen.report(seen.one, writable=True, term=4)
    seen.report(seen.two, writable=True, term=5)
    seen.report(seen.one, writable=True, term=4)
    assert seen.pool.leader is seen.two


def test_leader_stays_when_others_are_writable_too() -> None:
    seen = Reports()
    seen.report(seen.two, writable=True)
    seen.report(seen.one, writable=True)
    assert seen.pool.leader is seen.two


def test_member_that_refuses_comes_after_others() -> None:
    seen = Reports()
    seen.report(seen.one, writable=True)
    seen.report(seen.two, writable=True)
    seen.one.refuse(Readonly("no"))
    seen.report(seen.one, writable=True)  # it says so, but has just refused
    assert seen.pool.leader is seen.two
    seen.two.refuse(Readonly("no"))
    seen.lose(seen.two)
    seen.clock.now += 2 * REFUSED_SECONDS
    seen.report(seen.one, writable=True)
    assert seen.pool.leader is seen.one


def test_reads_are_shared_by_all_connected_members() -> None:
    seen = Reports()
    for member in (seen.one, seen.two):
        seen.report(member)
    assert {seen.pool.choose("any") for _ in range(6)} == {seen.one, seen.two}


def test_reads_avoid_members_that_lag() -> None:
    seen = Reports()
    seen.report(seen.one, writable=True, lsn=10)
    seen.report(seen.two, lsn=10)
    seen.report(seen.three, lsn=9)
    assert {seen.pool.choose(1.0) for _ in range(9)} == {seen.one, seen.two}
    seen.clock.now += 2
    seen.report(seen.one, writable=True, lsn=20)
    seen.report(seen.two, lsn=19)
    seen.report(seen.three, lsn=20)
    assert {seen.pool.choose(1.0) for _ in range(9)} == {seen.one, seen.three}
    assert {seen.pool.choose(3.0) for _ in range(9)} == {seen.one, seen.two, seen.three}
    seen.clock.now += 2
    assert {seen.pool.choose(1.0) for _ in range(9)} == {seen.one}  # nothing newer is known


def test_positions_of_a_former_leader_prove_nothing() -> None:
    seen = Reports()
    seen.report(seen.one, writable=True, term=1, lsn=10)
    seen.report(seen.two, writable=True, term=2, lsn=30)
    seen.report(seen.three, lsn=10)
    assert {seen.pool.choose(60.0) for _ in range(9)} == {seen.two}


def test_missing_leader_is_explained() -> None:
    seen = Reports()
    seen.report(seen.one)
    seen.lose(seen.two)
    seen.three.refuse(Readonly("Can't modify data"))
    seen.report(seen.three)
    text = str(seen.pool.missing("leader"))
    assert text.startswith("no member accepts writes: db1:1: is read-only; db2:2: cut; db3:3: Can't modify data")


@pytest.mark.parametrize("place", ["followers", None, -0.5, float("nan"), True])
def test_wrong_place_is_rejected(place: Any) -> None:
    with pytest.raises(LocalProtocolError, match="read_from is"):
        checked_place(place)
    assert checked_place(2) == 2.0
