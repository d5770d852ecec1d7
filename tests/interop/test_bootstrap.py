"""Bootstraps of replica sets of real servers and nodes: the leader, the joins, and a single resulting set."""

from __future__ import annotations

from itertools import permutations

import pytest

from flowstone.iproto.msgpack import unpack
from tests.interop.cluster import LATE, Cluster
from tests.interop.compare import assert_converged
from tests.interop.member import Member, eventually, wait_ready
from tests.interop.versions import fits

CLUSTER = 320
SMALL, MIDDLE, LARGE = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "123")


def _ids(member: Member) -> dict[str, int]:
    """Return ids by UUID."""
    return {uuid: number for number, uuid, *_ in map(unpack, member.tuples(CLUSTER))}


def _registered(booted: Member, late: list[Member]) -> list[Member]:
    ids = _ids(booted)
    return [member for member in late if member.options["instance_uuid"] in ids]


def _start_mesh(members: list[Member], *, uris: list[str] | None = None) -> None:
    for member in members:
        member.launch(replication=uris or [one.uri for one in members], **LATE)
    wait_ready(*members)


def _assert_one_set(members: list[Member], *, besides: tuple[Member, ...] = ()) -> None:
    for member in members:
        member.wait_follow(*(other for other in members if other is not member and other not in besides))
    assert_converged(*members)


def test_members_without_users_bootstrap_a_mesh(cluster: Cluster) -> None:
    members = [cluster.real("one", start=False), cluster.ours("two", start=False), cluster.real("three", start=False)]
    _set_dialect(cluster, members)
    _start_mesh(members, uris=[member.address for member in members])
    _assert_one_set(members)
    assert sorted(_ids(members[0]).values()) == [1, 2, 3]


def _set_dialect(cluster: Cluster, members: list[Member]) -> None:
    """Set the dialect of a node that may become the bootstrap leader; newer nodes start with their own rules."""
    for member in members:
        if cluster.binary.dialect != "2.6":
            member.options["bootstrap_strategy"] = "auto"
        if member.kind == "flowstone":
            member.options["dialect"] = cluster.binary.dialect


@pytest.mark.parametrize("order", list(permutations((SMALL, MIDDLE, LARGE)))[::2], ids=("small", "middle", "large"))
def test_smallest_uuid_bootstraps_a_set_that_all_others_join(cluster: Cluster, order: tuple[str, ...]) -> None:
    ours = cluster.ours("ours", start=False, instance_uuid=order[0])
    reals = [cluster.real(f"real{number}", start=False, instance_uuid=order[number]) for number in (1, 2)]
    members = [ours, *reals]
    _set_dialect(cluster, members)
    _start_mesh(members)
    _assert_one_set(members)
    ids = _ids(ours)
    assert ids[SMALL] == 1
    if cluster.binary.dialect == "2.6":  # registers all connected members in the order of their UUIDs
        assert ids == {SMALL: 1, MIDDLE: 2, LARGE: 3}


@pytest.mark.parametrize("is_ours_read_only", [True, False])
def test_read_only_member_does_not_lead_despite_its_smaller_uuid(cluster: Cluster, is_ours_read_only: bool) -> None:
    uuids = (SMALL, LARGE) if is_ours_read_only else (LARGE, SMALL)
    ours = cluster.ours("ours", start=False, instance_uuid=uuids[0], read_only=is_ours_read_only)
    real = cluster.real("real", start=False, instance_uuid=uuids[1], read_only=not is_ours_read_only)
    _set_dialect(cluster, [ours, real])
    _start_mesh([ours, real])
    _assert_one_set([ours, real])
    assert _ids(ours)[LARGE] == 1
    third = cluster.real("third", replication=[ours.uri, real.uri])
    third.wait_follow(ours, real)
    assert_converged(ours, real, third)


@pytest.mark.parametrize("booted_kind", ["real", "ours"])
def test_late_empty_members_join_the_bootstrapped_one(cluster: Cluster, booted_kind: str) -> None:
    booted: Member = getattr(cluster, booted_kind)("booted", instance_uuid=SMALL)
    late = [
        cluster.ours("ours", start=False, instance_uuid=LARGE, replication_connect_timeout=5),
        cluster.real("real", start=False, instance_uuid=MIDDLE, replication_connect_timeout=15),
    ]
    _set_dialect(cluster, late)
    uris = [booted.uri, *(member.uri for member in late)]
    if cluster.binary.dialect == "2.6":
        # A real 2.6 may choose a member that has just joined and is still read-only, so start them one by one. It also
        # stops an applier for good if its upstream does not know it yet (ER_UNKNOWN_REPLICA in applier_f), so it
        # follows the other late member only once that one has its registration.
        for member in late:
            member.start(replication=[booted.uri, member.uri])
            member.wait_writable()
        eventually("third member is registered at the second", lambda: len(_ids(late[0])) == 3)
        for member in late:
            member.configure(replication=uris)
    else:
        for member in late:
            member.launch(replication=uris)
    # One of them joins the bootstrapped member; the other one may join that one, and then remains unknown to the
    # bootstrapped member, and not ready, until the bootstrapped member follows the one that registered it.
    first = eventually("a late member is registered", lambda: _registered(booted, late))[0]
    booted.configure(replication=[booted.uri, first.uri])
    wait_ready(*late)
    booted.configure(replication=uris)
    _assert_one_set([booted, *late])
    assert _ids(booted)[SMALL] == 1
    assert sorted(_ids(booted).values()) == [1, 2, 3]


def test_stopped_mesh_restarts(cluster: Cluster) -> None:
    members = [cluster.real("one", start=False), cluster.ours("two", start=False), cluster.real("three", start=False)]
    _set_dialect(cluster, members)
    _start_mesh(members)
    before = _ids(members[0])
    for member in members:
        member.stop()
    for member in members:
        member.launch()
    wait_ready(*members)
    _assert_one_set(members)
    for member in members:
        member.wait_writable()
    assert _ids(members[1]) == before


def test_members_listed_twice_and_the_node_itself_are_connected_once(cluster: Cluster) -> None:
    real = cluster.real("real")
    ours = cluster.ours("ours", start=False)
    ours.start(replication=[real.uri, ours.uri])
    ours.wait_follow(real)
    assert not ours.upstream(ours)
    ours.wait_writable()
    if cluster.binary.dialect == "2.6":
        with pytest.raises(Exception, match="duplicate connection to the same replica"):
            ours.configure(replication=[real.uri, f"replicator:secret@localhost:{real.port}"])
    real.configure(replication=[ours.uri])
    real.wait_follow(ours)
    assert_converged(real, ours)


@fits(">=2.11")
def test_real_candidate_leads_and_a_voter_node_joins_it(cluster: Cluster) -> None:
    candidate = cluster.real(
        "candidate", start=False, instance_uuid=LARGE, election_mode="candidate", replication_synchro_quorum=1
    )
    ours = cluster.ours("ours", start=False, instance_uuid=SMALL)
    _set_dialect(cluster, [candidate, ours])
    for member in (candidate, ours):
        member.launch(replication=[candidate.uri, ours.uri])
    wait_ready(candidate, ours)
    assert _ids(ours)[LARGE] == 1
    eventually("the candidate leads", lambda: candidate.info()["election"]["state"] == "leader")
    candidate.wait_writable()
    assert_converged(candidate, ours)
