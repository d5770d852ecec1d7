"""The synchronous queue changes its owner between real servers and nodes: claimed, taken over, released.

Elections are off throughout; `test_elections.py` covers them.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.interop.cluster import Cluster
from tests.interop.compare import assert_converged, assert_same_log
from tests.interop.member import Member
from tests.interop.mesh import (
    LSN,
    OWNER,
    PLAIN,
    QUORUM_TIMEOUT,
    SYNCHRONOUS,
    TERM,
    TIMING,
    Mesh,
    Pending,
    define,
    demote,
    election,
    keys,
    promote,
    queue,
    refusal,
    verdicts,
    wait_until,
    write,
)
from tests.interop.versions import fits

has_promotion = fits(">=2.11")
BOTH_WAYS = pytest.mark.parametrize("kinds", [("real", "ours"), ("ours", "real")], ids=("real first", "ours first"))
CHAINS = pytest.mark.parametrize("kinds", [("real", "ours", "real"), ("ours", "real", "ours")], ids="-".join)
READ_ONLY, NOT_LEADER, UNCLAIMED = 7, 226, 227
NEVER = 31
"""A quorum that no set here can reach."""


@BOTH_WAYS
@has_promotion
def test_queue_is_claimed_taken_over_and_released(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = Mesh(cluster, kinds)
    one, two = mesh.members
    for member in mesh:
        assert refusal(partial(write, member, 1)) == UNCLAIMED
    for number, (owner, other) in enumerate(((one, two), (two, one), (one, two))):
        term = election(owner)["term"]
        promote(owner)
        assert mesh.wait_owner(owner) == term + 1
        assert {election(member)["term"] for member in mesh} == {term + 1}
        assert not owner.info()["ro"]
        assert (other.info()["ro"], other.info()["ro_reason"]) == (True, "synchro")
        for space in (SYNCHRONOUS, PLAIN):
            write(owner, number, space=space)
            assert refusal(partial(write, other, number, space=space)) == READ_ONLY
        mesh.wait_same(owner)
    demote(one)
    term = mesh.wait_owner(0)
    for member in mesh:
        assert not member.info()["ro"]
        assert refusal(partial(write, member, 9)) == UNCLAIMED
        write(member, 10 + member.id, space=PLAIN)
    assert verdicts(one)[-1] == ("DEMOTE", 1, {OWNER: 1, LSN: verdicts(one)[-2][2][LSN], TERM: term})
    assert_converged(*mesh)
    assert verdicts(one) == verdicts(two)
    assert_same_log(one, two, origins=[1, 2])


@BOTH_WAYS
@has_promotion
def test_redundant_promote_and_demote_change_nothing(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = Mesh(cluster, kinds)
    one, two = mesh.members
    demote(one)
    assert [election(member)["term"] for member in mesh] == [1, 1]
    promote(one)
    assert mesh.wait_owner(one) == 2
    promote(one)
    _demote_in_vain(two)
    assert mesh.wait_owner(one) == 2
    promote(two)
    assert mesh.wait_owner(two) == 3
    _demote_in_vain(one)
    assert mesh.wait_owner(two) == 3
    assert [election(member)["term"] for member in mesh] == [3, 3]
    assert [name for name, *_ in verdicts(one)] == ["PROMOTE", "PROMOTE"]


def _demote_in_vain(member: Member) -> None:
    """Check a DEMOTE without effect.

    Newer servers reject it, or learn that another member leads: they lead even with elections off.
    """
    if member.info()["version"].startswith("3.") or election(member)["leader"]:
        assert refusal(partial(demote, member)) == NOT_LEADER
    else:
        demote(member)


@BOTH_WAYS
@has_promotion
def test_promotion_confirms_rows_with_a_quorum_and_the_old_owner_answers_its_client(
    cluster: Cluster, kinds: tuple[str, ...]
) -> None:
    mesh = Mesh(cluster, kinds, replication_synchro_timeout=60)
    one, two = mesh.members
    promote(one)
    mesh.wait_owner(one)
    one.configure(replication_synchro_quorum=NEVER)
    two.configure(replication_synchro_timeout=0.1)
    pending = [Pending(one, number).wait_on(one) for number in range(3)]
    behind = Pending(one, 3, space=PLAIN)
    wait_until(two, "has all that waits", lambda member: queue(member)["len"] == 4)
    promote(two)
    assert [each.outcome() for each in (*pending, behind)] == [0, 0, 0, 0]
    mesh.wait_owner(two)
    mesh.wait_same(two)
    assert keys(one) == keys(two) == [0, 1, 2]
    assert_converged(*mesh)


@BOTH_WAYS
@has_promotion
def test_returning_owner_is_read_only_until_its_next_promotion(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = Mesh(cluster, kinds, replication_synchro_timeout=60)
    one, two = mesh.members
    promote(one)
    mesh.wait_owner(one)
    one.configure(replication_synchro_quorum=NEVER)
    Pending(one, 1).wait_on(one, two)
    term = queue(one)["term"]
    one.kill()
    one.start(replication_synchro_timeout=1)
    one.wait_follow(two)
    two.wait_follow(one)
    shown = queue(one)
    assert (shown["owner"], shown["term"], shown["len"]) == (one.id, term, 1)
    assert (one.info()["ro"], one.info()["ro_reason"]) == (True, "synchro")
    assert refusal(partial(write, one, 2)) == READ_ONLY
    promote(one)
    assert mesh.wait_owner(one) == term + 1
    write(one, 2)
    mesh.wait_same(one)
    assert keys(one) == keys(two) == [1, 2]
    assert queue(two)["len"] == 0
    assert_converged(*mesh)
    assert_same_log(one, two, origins=[1])


@CHAINS
@has_promotion
def test_chain_relays_verdicts_in_order(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    options = TIMING | {"replication_synchro_quorum": 1, "replication_synchro_timeout": 60}
    first: Member = getattr(cluster, kinds[0])("first", **options)
    define(first)
    middle: Member = getattr(cluster, kinds[1])("middle", replication=[first.uri], **options)
    first.configure(replication=[middle.uri])
    last: Member = getattr(cluster, kinds[2])("last", replication=[middle.uri], **options)
    middle.configure(replication=[first.uri, last.uri])
    for follower, upstream in ((middle, first), (middle, last), (first, middle), (last, middle)):
        follower.wait_follow(upstream)
    first.catch_up(last)
    promote(first)
    for number in range(5):
        write(first, number)
        write(first, number, space=PLAIN)
        first.configure(replication_synchro_quorum=NEVER, replication_synchro_timeout=0.05)
        assert refusal(partial(write, first, 100 + number)) == QUORUM_TIMEOUT
        first.configure(replication_synchro_quorum=1, replication_synchro_timeout=60)
        if number == 2:
            demote(first)
            promote(first)
    last.catch_up(first)
    for member in (middle, last):
        assert member.vclock() == first.vclock()
        assert_same_log(first, member, origins=[1])
        assert verdicts(member) == verdicts(first)
        assert keys(member) == keys(first) == list(range(5))
        assert queue(member)["owner"] == 1
        assert queue(member)["term"] == queue(first)["term"]
    promote(last)
    write(last, 200)
    first.catch_up(last)
    assert queue(first)["owner"] == queue(middle)["owner"] == last.id
    assert_converged(first, middle, last)
