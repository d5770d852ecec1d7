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


def test_members_are_found_by_id_and_uuid_and_leaving_ones_are_returned() -> None:
    found = MemberSet()
    assert found.set_members([(2, B), (1, A)]) == {}
    assert (found.members, found.ids) == ({1: A, 2: B}, {A: 1, B: 2})
    assert found.set_members([(1, A), (3, C)]) == {B: 2}


def test_at_most_31_upstreams_are_allowed() -> None:
    with_upstreams(UPSTREAMS_MAX, 0)
    with pytest.raises(errors.Cfg, match="too many replicas"):
        with_upstreams(UPSTREAMS_MAX + 1, 0)


def test_upstream_has_a_uuid_after_its_first_answer() -> None:
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
def test_intermediate_states_do_not_change_the_quorum(state: ApplierState) -> None:
    found = with_upstreams(1, 1)
    found.follow(found.upstreams[0], ApplierState.CONNECTED, A)
    found.follow(found.upstreams[0], state, A)
    assert found.upstreams[0].progress is SyncProgress.CONNECTED


def test_instance_is_an_orphan_until_enough_upstreams_are_synced() -> None:
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


def test_catch_up_counts_the_instance_itself_and_followed_peers() -> None:
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
def test_peer_that_is_not_a_member_counts_neither_for_the_quorum_nor_as_synced(
    state: ApplierState, quorum: int
) -> None:
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


def test_wait_ends_if_too_few_upstreams_are_reachable() -> None:
    found = with_upstreams(2, 2)
    found.follow(found.upstreams[0], ApplierState.FOLLOW, A)
    assert not found.may_sync
    found.follow(found.upstreams[1], ApplierState.LOADING, None)
    assert found.may_sync
    found.follow(found.upstreams[1], ApplierState.STOPPED, None)
    assert not found.may_sync


def test_quorum_of_zero_is_reached_immediately() -> None:
    assert with_upstreams(2, 0).is_synced


def test_quorum_of_connections_at_startup() -> None:
    assert (connect_quorum(3, None), connect_quorum(3, 2), connect_quorum(3, 9)) == (3, 2, 3)
    assert (connect_quorum_of_birth(3, False), connect_quorum_of_birth(4, False)) == (2, 3)
    assert connect_quorum_of_birth(3, True) == 1
