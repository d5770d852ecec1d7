"""The replica set: changing members, identified upstreams, and the sync quorum."""

from __future__ import annotations

from uuid import UUID

import pytest

from flowstone.iproto import errors
from flowstone.replication.applier.states import ApplierState
from flowstone.replication.membership.replica_set import (
    UPSTREAMS_MAX,
    DuplicateConnection,
    MemberSet,
    SyncProgress,
    Upstream,
    connect_quorum,
    connect_quorum_of_birth,
)

A, B, C = UUID(int=1), UUID(int=2), UUID(int=3)


def with_upstreams(count: int, quorum: int) -> MemberSet:
    found = MemberSet()
    found.set_upstreams([Upstream(f"host{number}:3301") for number in range(count)])
    found.quorum_max = quorum
    return found


def test_members_are_known_by_id_and_by_uuid_and_those_that_leave_are_named() -> None:
    found = MemberSet()
    assert found.set_members([(2, B), (1, A)]) == {}
    assert (found.members, found.ids) == ({1: A, 2: B}, {A: 1, B: 2})
    assert found.set_members([(1, A), (3, C)]) == {B: 2}


def test_a_vclock_has_room_for_31_upstreams() -> None:
    with_upstreams(UPSTREAMS_MAX, 0)
    with pytest.raises(errors.Cfg, match="too many replicas"):
        with_upstreams(UPSTREAMS_MAX + 1, 0)


def test_an_upstream_has_a_uuid_once_it_has_answered() -> None:
    found = with_upstreams(2, 2)
    first = found.upstreams[0]
    found.follow(first, ApplierState.CONNECT, None)
    assert (first.uuid, first.progress) == (None, SyncProgress.DISCONNECTED)
    found.follow(first, ApplierState.CONNECTED, A)
    assert (first.uuid, first.progress) == (A, SyncProgress.CONNECTED)
    assert found.upstream_of(A) is first
    assert found.upstream_of(B) is None


def test_two_addresses_of_one_instance_are_an_error() -> None:
    found = with_upstreams(2, 2)
    found.follow(found.upstreams[0], ApplierState.CONNECTED, A)
    with pytest.raises(DuplicateConnection, match="addr1 host1:3301, addr2 host0:3301"):
        found.follow(found.upstreams[1], ApplierState.CONNECTED, A)


def test_an_instance_may_move_to_another_address() -> None:
    found = with_upstreams(2, 2)
    found.follow(found.upstreams[0], ApplierState.CONNECTED, A)
    found.follow(found.upstreams[0], ApplierState.DISCONNECTED, A)
    found.follow(found.upstreams[1], ApplierState.CONNECTED, A)
    assert found.upstreams[1].uuid == A


@pytest.mark.parametrize("state", [ApplierState.AUTH, ApplierState.READY, ApplierState.SYNC])
def test_states_between_change_nothing_for_the_quorum(state: ApplierState) -> None:
    found = with_upstreams(1, 1)
    found.follow(found.upstreams[0], ApplierState.CONNECTED, A)
    found.follow(found.upstreams[0], state, A)
    assert found.upstreams[0].progress is SyncProgress.CONNECTED


def test_enough_upstreams_must_follow_before_the_instance_is_no_orphan() -> None:
    found = with_upstreams(3, 2)
    for upstream, uuid in zip(found.upstreams, (A, B, C), strict=True):
        found.follow(upstream, ApplierState.CONNECTED, uuid)
    assert (found.is_synced, found.may_sync) == (False, True)
    assert found.count(SyncProgress.CONNECTED, SyncProgress.SYNCED) == 3
    found.follow(found.upstreams[0], ApplierState.OFF, A)
    found.follow(found.upstreams[1], ApplierState.FOLLOW, B)
    assert not found.is_synced  # a switched-off upstream does not count as synced
    found.follow(found.upstreams[2], ApplierState.FOLLOW, C)
    assert found.is_synced


def test_catch_up_is_complete_with_ourselves_and_with_followed_peers() -> None:
    found = with_upstreams(3, 3)
    found.follow(found.upstreams[0], ApplierState.OFF, A, own_uuid=A)
    found.follow(found.upstreams[1], ApplierState.CONNECTED, B, own_uuid=A)
    with pytest.raises(DuplicateConnection):
        found.follow(found.upstreams[2], ApplierState.CONNECTED, B, own_uuid=A)
    found.follow(found.upstreams[2], ApplierState.STOPPED, B, own_uuid=A)
    assert not found.is_synced
    found.follow(found.upstreams[1], ApplierState.FOLLOW, B, own_uuid=A)
    assert found.is_synced


@pytest.mark.parametrize("state", [ApplierState.LOADING, ApplierState.STOPPED, ApplierState.FOLLOW])
@pytest.mark.parametrize("quorum", [1, 2])
def test_stranger_counts_neither_for_the_quorum_nor_as_synced(state: ApplierState, quorum: int) -> None:
    found = with_upstreams(2, quorum)
    member, stranger = found.upstreams
    found.follow(member, ApplierState.CONNECTED, A)
    found.follow(stranger, ApplierState.CONNECTED, B)
    stranger.is_stranger = True
    found.follow(stranger, state, B)
    assert (found.quorum, found.is_synced, found.may_sync) == (1, False, True)
    found.follow(member, ApplierState.FOLLOW, A)
    assert found.is_synced
    found.follow(stranger, ApplierState.CONNECT, B)
    assert found.quorum == quorum


def test_upstream_that_is_not_awaited_may_take_the_place_of_another() -> None:
    found = with_upstreams(2, 2)
    found.upstreams[0].is_awaited = False
    assert found.quorum == 1
    found.follow(found.upstreams[0], ApplierState.FOLLOW, A)
    assert found.is_synced


def test_waiting_is_vain_where_too_few_can_be_reached() -> None:
    found = with_upstreams(2, 2)
    found.follow(found.upstreams[0], ApplierState.FOLLOW, A)
    assert not found.may_sync
    found.follow(found.upstreams[1], ApplierState.LOADING, None)
    assert found.may_sync
    found.follow(found.upstreams[1], ApplierState.STOPPED, None)
    assert not found.may_sync


def test_a_quorum_of_nobody_is_there_at_once() -> None:
    assert with_upstreams(2, 0).is_synced


def test_the_quorum_of_a_start() -> None:
    assert (connect_quorum(3, None), connect_quorum(3, 2), connect_quorum(3, 9)) == (3, 2, 3)
    assert (connect_quorum_of_birth(3, False), connect_quorum_of_birth(4, False)) == (2, 3)
    assert connect_quorum_of_birth(3, True) == 1
