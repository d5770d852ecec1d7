"""Peers checked against `_cluster`: members count; others are followed up to their first own row, or not at all."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

import pytest

from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.replication.applier.lost_tail import TailLost
from flowstone.replication.membership.membership import (
    LOSSES_MAX,
    NotAMember,
    Standing,
    VClockLags,
    expelled,
    not_anonymous,
    unregistered,
    unused_id,
)
from flowstone.replication.row_stream import slab_of_rows
from flowstone.replication.vclock import VClock

PEER, OTHER = UUID(int=7), UUID(int=8)
OURS = VClock({1: 10, 2: 5})
RAFT = Row(RequestType.RAFT.value)


class Cluster(dict[int, UUID]):
    """`_cluster`, by ids."""

    def has(self, replica_id: int, uuid: UUID) -> bool:
        return self.get(replica_id) == uuid

    def has_id(self, replica_id: int) -> bool:
        return replica_id in self

    def is_intact(self, uuid: UUID) -> bool:
        return uuid == PEER


def slab(*rows: tuple[int, int], **other: Any) -> Slab:
    """Return transactions of one row each: originator and LSN."""
    body = pack({Key.SPACE_ID.value: 512, Key.TUPLE.value: (1,)})
    kind, flags = RequestType.REPLACE.value, Flag.COMMIT.value
    packed = (Row(kind, number, 0, lsn, 1.5, lsn, flags, body=body).encode() for number, lsn in rows)
    return slab_of_rows(b"".join(packed), "peer")


def followed(cluster: Cluster, replica_id: int, theirs: VClock) -> Standing:
    standing = Standing("peer", members=cluster)
    standing.subscribed(PEER, replica_id, theirs, OURS)
    return standing


@pytest.mark.parametrize(
    ("taken", "used", "expected"),
    [
        ((1,), (1,), 2),
        ((1, 3), (1, 3), 2),
        ((1, 3), (1, 2, 3), 4),
        ((1,), range(1, 32), 2),
        (range(1, 31), (31,), 31),
        (range(1, 32), (), 32),
    ],
)
def test_new_member_gets_the_smallest_unused_id_if_there_is_one(
    taken: Collection[int], used: Collection[int], expected: int
) -> None:
    assert unused_id(taken, used) == expected


def test_rows_and_elections_of_a_member_count() -> None:
    standing = followed(Cluster({1: OTHER, 2: PEER}), 2, OURS)
    standing.hear(RAFT)
    standing.check()
    assert not standing.is_new
    assert standing.heard() is RAFT
    assert standing.heard() is None
    assert standing.member_id == 2
    rows = slab((2, 6), (7, 1))
    assert standing.split(rows, OURS) == (rows, None)


@pytest.mark.parametrize("cluster", [Cluster({1: OTHER}), Cluster({1: OTHER, 2: OTHER})], ids=["no one", "another"])
def test_peer_that_is_not_a_member_and_has_no_new_rows_is_rejected(cluster: Cluster) -> None:
    with pytest.raises(NotAMember, match=f"_cluster does not have {PEER} as 2") as refused:
        followed(cluster, 2, VClock({1: 10, 2: 500}))
    assert refused.value.hint is not None


def test_peer_that_may_bring_its_registration_is_followed_up_to_its_first_own_row() -> None:
    cluster = Cluster({1: OTHER})
    standing = followed(cluster, 2, VClock({1: 11, 2: 7}))
    standing.hear(RAFT)
    standing.check()
    assert not standing.is_new
    assert standing.heard() is None
    assert standing.member_id == 0
    first, rest = standing.split(slab((1, 11), (2, 5), (2, 6), (2, 7)), OURS)
    assert (len(first), rest is not None and len(rest)) == (2, 2)
    assert rest is not None
    with pytest.raises(NotAMember):
        standing.split(rest, OURS)
    cluster[2] = PEER
    assert standing.admit(rest, OURS, 1) == (rest, None)
    assert standing.is_new
    assert standing.heard() is RAFT
    assert standing.member_id == 2


def test_peer_that_is_not_a_member_does_not_bring_rows_of_others_that_are_not() -> None:
    standing = followed(Cluster({1: OTHER}), 2, VClock({1: 11, 4: 1}))
    with pytest.raises(NotAMember):
        standing.split(slab((4, 1)), OURS)


def test_member_expelled_while_followed_is_rejected_from_then_on() -> None:
    cluster = Cluster({1: OTHER, 2: PEER})
    standing = followed(cluster, 2, OURS)
    standing.check()
    cluster[2] = OTHER
    standing.hear(RAFT)
    with pytest.raises(NotAMember):
        standing.check()


def test_instance_that_knows_no_members_follows_any_peer() -> None:
    standing = Standing("peer")
    standing.subscribed(PEER, 2, OURS, OURS)
    rows = slab((2, 6))
    assert standing.split(rows, OURS) == (rows, None)


def test_peer_that_lost_its_rows_is_rejected_if_it_never_requests_them() -> None:
    standing = Standing("peer", may_regain=lambda uuid: False)
    for attempt in range(LOSSES_MAX + 1):
        with pytest.raises(TailLost) as lost:
            standing.subscribed(PEER, 2, VClock({1: 10, 2: 3}), OURS)
        assert lost.value.may_come_back == (attempt < LOSSES_MAX)
    standing.start()
    standing.acknowledged(2, VClock({2: 5}))
    standing.subscribed(PEER, 2, OURS, OURS)


def test_peer_whose_vclock_lags_its_relay_is_followed_once_it_has_caught_up() -> None:
    standing = Standing("peer", members=Cluster({2: PEER}), may_regain=lambda uuid: False)
    with pytest.raises(VClockLags):
        standing.subscribed(PEER, 2, VClock({1: 10, 2: 4}), OURS)
    standing.subscribed(PEER, 2, VClock({1: 10, 2: 9}), OURS)


def test_error_for_an_expelled_instance_has_advice() -> None:
    assert expelled(3).code == 128
    assert unregistered(PEER, OTHER, was_member=True).code == 62
    for error in (expelled(3), unregistered(PEER, OTHER, was_member=True), not_anonymous(PEER)):
        assert "flowstone rebootstrap" in str(error)
        assert "with replication_anon" not in str(error)
    assert "flowstone rebootstrap" in expelled(3).message, "clients get no hints"


def test_error_for_a_possible_anonymous_replica_names_the_option() -> None:
    assert "start it with replication_anon" in str(unregistered(PEER, OTHER, was_member=False).hint)
