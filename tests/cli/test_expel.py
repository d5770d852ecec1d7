"""`flowstone expel`: a member leaves, by the hand of whoever can write, after it was told what that means."""

from __future__ import annotations

import json

import pytest

from flowstone.observation.finding import Kind
from tests.cli.conftest import Command
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.member import Member, eventually
from tests.interop.mesh import QUORUM_TIMEOUT, Mesh, Pending, keys, promote, write
from tests.interop.versions import fits
from tests.observation.situations import assert_well, found


@not_for_stand_ins
def test_a_dead_member_is_expelled_at_the_leader_and_who_was_asked_only_by_force(
    nodes: Cluster, flowstone: Command
) -> None:
    mesh = Mesh(nodes, ("ours",) * 3, direct=True)
    mesh.set_modes("candidate", "voter", "voter")
    leader, other, dead = mesh.members
    assert mesh.wait_leader() is leader
    dead_id, dead_uuid = dead.id, dead.uuid
    dead.kill()

    refused = flowstone("expel", "--yes", other.address, str(leader.id))
    assert (refused.code, refused.text) == (1, "")
    (line,) = refused.complaints
    assert line.startswith(f"flowstone: no other member of {set_uuid(leader)} can be written to; promote another one")
    assert line.endswith("nobody can delete its own row")
    refused = flowstone("expel", "--yes", other.address, str(other.id))
    (line,) = refused.complaints
    assert line.startswith(f"flowstone: {other.address} is the member that was asked itself; give --force")

    found = flowstone("expel", "--yes", "--json", other.address, dead_uuid)
    assert found.code == 0
    shown = json.loads(found.text)
    assert (shown["id"], shown["uuid"], shown["was_alive"], shown["lost"]) == (dead_id, dead_uuid, False, {})
    assert (shown["members_left"], shown["alive_left"], shown["quorum_left"]) == (2, 2, 2)
    assert shown["deleted_at"] == leader.address
    assert any("a quorum is left" in line for line in found.errors)
    eventually("it is gone everywhere", lambda: not any(dead_id in member.replication() for member in (leader, other)))

    found = flowstone("expel", "--yes", "--force", other.address, str(other.id))
    assert (found.code, found.text) == (
        0,
        f"replica {other.id} ({other.address}) is no member of {set_uuid(leader)} any more\n",
    )
    assert any("it runs: it will follow nobody any more" in line for line in found.errors)


@not_for_stand_ins
@pytest.mark.parametrize("gone", ["leader", "follower"])
def test_the_last_of_two_gets_out_of_a_lost_quorum_by_what_it_is_advised(
    nodes: Cluster, flowstone: Command, gone: str
) -> None:
    mesh = Mesh(nodes, ("ours",) * 2, direct=True)
    mesh.set_modes("candidate")
    leader = mesh.wait_leader()
    (follower,) = mesh.others(leader)
    dead, survivor = (leader, follower) if gone == "leader" else (follower, leader)
    dead_id = dead.id
    write(leader, 1)
    mesh.wait_same(leader)
    dead.kill()
    advice = found(Kind.QUORUM_LOST, survivor).advice
    lowered, expelled, raised = (
        "replication_synchro_quorum = 1",
        f"flowstone expel {survivor.address} {dead_id}",
        "N / 2",
    )
    assert "Only if gone for good" in advice
    assert advice.index(lowered) < advice.index("until it is elected") < advice.index(expelled) < advice.index(raised)

    eventually("it resigns", lambda: survivor.info()["ro"])
    refused = flowstone("expel", "--yes", survivor.address, str(dead_id))
    (line,) = refused.complaints
    assert (refused.code, survivor.info()["ro"]) == (1, True)
    assert line.endswith(advice)
    assert "its own row" not in line

    mesh.configure(survivor, replication_synchro_quorum=1)
    mesh.wait_leader(survivor)
    done = flowstone("expel", "--yes", survivor.address, str(dead_id))
    assert done.code == 0, done.errors
    mesh.configure(survivor, replication_synchro_quorum="N / 2 + 1", replication=[])
    write(survivor, 2)
    assert keys(survivor) == [1, 2]
    assert_well(survivor)


@not_for_stand_ins
def test_where_the_row_waits_behind_a_queue_without_a_quorum_the_order_is_told(
    nodes: Cluster, flowstone: Command
) -> None:
    mesh = Mesh(nodes, ("ours",) * 2, direct=True, replication_synchro_timeout=3)
    owner, dead = mesh.members
    promote(owner)
    mesh.wait_owner(owner)
    dead_id = dead.id
    dead.kill()
    pending = Pending(owner, 1).wait_on(owner)
    refused = flowstone("expel", "--yes", owner.address, str(dead_id))
    assert (refused.code, pending.outcome()) == (1, QUORUM_TIMEOUT)
    assert "Only if gone for good, so that nobody can start it again, in this order: lower" in refused.complaints[-1]
    assert dead_id in owner.replication()


def set_uuid(member: Member) -> str:
    return str(member.info()["cluster"]["uuid"])


@fits("2.6")
def test_a_replica_of_a_real_server_is_expelled_by_its_id(cluster: Cluster, flowstone: Command) -> None:
    master = cluster.real("master")
    cluster.real("replica", replication=[master.uri])
    refused = flowstone("expel", "--yes", master.address, "7")
    assert refused.code == 2
    assert "7 is no member" in refused.complaints[0]
    unasked = flowstone("expel", master.address, "2")
    assert (unasked.code, 2 in master.replication()) == (2, True)
    found = flowstone("expel", "--yes", master.address, "2")
    assert (found.code, found.text) == (0, f"replica 2 is no member of {set_uuid(master)} any more\n")
    assert 2 not in master.replication()
