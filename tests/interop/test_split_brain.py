"""Nodes and real servers alike distinguish contradictory histories from those that only look contradictory.

Each case separates two members, lets each continue alone, and reconnects them. A mixed pair must behave like a pair of
real servers, whichever side the node is on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from tests.interop.cluster import Cluster
from tests.interop.compare import assert_same_data
from tests.interop.member import Member, eventually
from tests.interop.mesh import (
    PLAIN,
    QUORUM_TIMEOUT,
    SYNCHRONOUS,
    Mesh,
    Pending,
    demote,
    keys,
    promote,
    queue,
    write,
)
from tests.interop.versions import fits

NEVER = 31
"""A quorum that no set here can reach."""


@dataclass(frozen=True)
class Parted:
    """The owner of the queue, the other member, and the proxies between them. The quorum is one."""

    owner: Member
    other: Member
    mesh: Mesh

    def part(self) -> None:
        self.mesh.wait_same(self.owner, self.other)
        self.mesh.isolate(self.owner)

    def wait_in_both(self) -> Pending:
        """A transaction of the owner that is pending on both."""
        self.mesh.configure(self.owner, replication_synchro_quorum=NEVER)
        return Pending(self.owner, 100).wait_on(self.owner, self.other)

    def confirm(self, pending: Pending) -> None:
        self.owner.configure(replication_synchro_quorum=1)
        assert pending.outcome() == 0

    def roll_back(self, pending: Pending) -> None:
        self.owner.configure(replication_synchro_timeout=0.01)
        assert pending.outcome() == QUORUM_TIMEOUT
        self.owner.configure(replication_synchro_timeout=60, replication_synchro_quorum=1)


Case = Callable[[Parted], None]


def asynchronous_write_of_an_old_term(pair: Parted) -> None:
    pair.part()
    promote(pair.other)
    write(pair.owner, 1, space=PLAIN)


def confirmation_of_an_old_term(pair: Parted) -> None:
    pair.part()
    promote(pair.other)
    write(pair.owner, 1)


def rollback_of_what_the_other_confirmed(pair: Parted) -> None:
    pending = pair.wait_in_both()
    pair.part()
    promote(pair.other)
    pair.roll_back(pending)


def both_promoted_in_one_term(pair: Parted) -> None:
    demote(pair.owner)
    pair.part()
    promote(pair.other)
    promote(pair.owner)


def promoted_and_demoted_in_one_term(pair: Parted) -> None:
    pair.part()
    promote(pair.other)
    demote(pair.owner)


def promoted_without_what_was_confirmed(pair: Parted) -> None:
    pair.part()
    write(pair.owner, 1)
    promote(pair.other)


def promoted_with_what_was_rolled_back(pair: Parted) -> None:
    pending = pair.wait_in_both()
    pair.part()
    pair.roll_back(pending)
    promote(pair.other)


def promoted_with_what_was_rolled_back_and_something_else_waits(pair: Parted) -> None:
    pending = pair.wait_in_both()
    pair.part()
    pair.roll_back(pending)
    promote(pair.other)
    pair.owner.configure(replication_synchro_quorum=NEVER)
    Pending(pair.owner, 101).wait_on(pair.owner)


def confirmed_by_both(pair: Parted) -> None:
    pending = pair.wait_in_both()
    pair.part()
    pair.confirm(pending)
    promote(pair.other)


def rolled_back_by_its_owner_alone(pair: Parted) -> None:
    pair.part()
    promote(pair.other)
    pair.owner.configure(replication_synchro_quorum=NEVER)
    pair.roll_back(Pending(pair.owner, 100).wait_on(pair.owner))


def plain_write_when_the_queue_was_given_back(pair: Parted) -> None:
    demote(pair.owner)
    pair.mesh.wait_owner(0)
    pair.part()
    write(pair.other, 1, space=PLAIN)
    write(pair.owner, 2, space=PLAIN)


CONTRADICTIONS: list[Case] = [
    asynchronous_write_of_an_old_term,
    confirmation_of_an_old_term,
    rollback_of_what_the_other_confirmed,
    both_promoted_in_one_term,
    promoted_and_demoted_in_one_term,
    promoted_without_what_was_confirmed,
    promoted_with_what_was_rolled_back,
    promoted_with_what_was_rolled_back_and_something_else_waits,
]
HARMLESS: list[Case] = [
    confirmed_by_both,
    rolled_back_by_its_owner_alone,
    plain_write_when_the_queue_was_given_back,
]
SEEN_BY_ONE: list[Case] = [asynchronous_write_of_an_old_term]
"""The deposed owner finds nothing wrong with the other's history."""


def _pair(cluster: Cluster, owner_kind: str) -> Parted:
    other_kind = "ours" if owner_kind == "real" else "real"
    mesh = Mesh(cluster, (owner_kind, other_kind), replication_synchro_quorum=1, replication_synchro_timeout=60)
    owner, other = mesh.members
    other.configure(replication_synchro_timeout=0.1)  # a promotion waits twice as long for verdicts of the old owner
    promote(owner)
    mesh.wait_owner(owner)
    write(owner, 0)
    write(owner, 0, space=PLAIN)
    return Parted(owner, other, mesh)


def _is_split(member: Member, of: Member) -> bool:
    upstream = member.upstream(of)
    return upstream.get("status") == "stopped" and "Split-Brain discovered" in upstream["message"]


def _data(member: Member) -> tuple[list[bytes], list[bytes]]:
    return member.tuples(SYNCHRONOUS), member.tuples(PLAIN)


OWNER_KIND = pytest.mark.parametrize("owner_kind", ["real", "ours"])


@OWNER_KIND
@pytest.mark.parametrize("case", CONTRADICTIONS, ids=lambda case: case.__name__)
@fits(">=2.11")
def test_contradictory_histories_stop_replication_and_change_nothing(
    cluster: Cluster, case: Case, owner_kind: str
) -> None:
    pair = _pair(cluster, owner_kind)
    case(pair)
    both = ((pair.owner, pair.other), (pair.other, pair.owner))
    before = [_data(member) for member, _ in both]
    pair.mesh.rejoin(pair.owner)
    for member, of in both:
        if member is pair.other or case not in SEEN_BY_ONE:
            eventually(f"{member} sees that {of} lived another life", partial(_is_split, member, of))
            assert member.info()["status"] == "running"
        else:
            member.wait_follow(of)
    assert [_data(member) for member, _ in both] == before
    own = pair.other.options["replication"]
    pair.other.configure(replication=[])
    pair.other.configure(replication=own)
    eventually("trying again ends the same way", partial(_is_split, pair.other, pair.owner))


@OWNER_KIND
@pytest.mark.parametrize("case", HARMLESS, ids=lambda case: case.__name__)
@fits(">=2.11")
def test_histories_that_only_look_contradictory_converge(cluster: Cluster, case: Case, owner_kind: str) -> None:
    pair = _pair(cluster, owner_kind)
    case(pair)
    pair.mesh.rejoin(pair.owner)
    pair.other.wait_follow(pair.owner)
    pair.owner.wait_follow(pair.other)
    pair.mesh.wait_same(pair.owner, pair.other)
    assert queue(pair.owner)["owner"] == queue(pair.other)["owner"]
    assert_same_data(pair.owner, pair.other)
    assert (100 in keys(pair.other)) == (case is confirmed_by_both)


@pytest.mark.parametrize("kinds", [("real", "ours", "real"), ("ours", "real", "ours")], ids="-".join)
@fits(">=2.11")
def test_old_confirm_of_confirmed_rows_is_harmless(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = Mesh(cluster, kinds, replication_synchro_quorum=1, replication_synchro_timeout=0.1)
    old, *others = mesh.members
    promote(old)
    mesh.wait_owner(old)
    mesh.configure(old, replication_synchro_quorum=NEVER, replication_synchro_timeout=60)
    pending = Pending(old, 100).wait_on(*mesh)
    mesh.isolate(old)
    mesh.configure(old, replication_synchro_quorum=1)
    assert pending.outcome() == 0
    for number in range(4):
        owner = others[number % 2]
        promote(owner)
        mesh.wait_owner(owner, *others)
        write(owner, number)
        others[0].catch_up(others[1])
        others[1].catch_up(others[0])
    for member in others:
        member.snapshot()
        member.restart(replication_connect_timeout=1)
    mesh.rejoin(old)
    for member in mesh:
        member.wait_follow(*mesh.others(member))
    mesh.wait_same(*mesh)
    assert_same_data(*mesh)
    assert keys(old) == [0, 1, 2, 3, 100]
