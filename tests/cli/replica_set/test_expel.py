"""`flowstone expel`: removes a member through a writable member, after a confirmation that lists the effects."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from threading import Event, Thread

import pytest

from flowstone.box.system import CLUSTER_ID
from flowstone.iproto.msgpack import unpack
from flowstone.observation.findings.finding import Kind
from tests.cli.conftest import Command, Terminal
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.member import Member, eventually
from tests.interop.mesh import PLAIN, QUORUM_TIMEOUT, Mesh, Pending, keys, promote, queue, write
from tests.interop.versions import fits
from tests.observation.situations import assert_well, found
from tests.real_tarantool import free_port


@not_for_stand_ins
def test_dead_member_is_expelled_at_the_leader_and_a_reachable_one_only_by_force(
    nodes: Cluster, flowstone: Command
) -> None:
    mesh = Mesh(nodes, ("ours",) * 3, direct=True, replication_timeout=1.5)  # no other member may be considered dead
    mesh.set_modes("candidate", "voter", "voter")
    leader, other, dead = mesh.members
    assert mesh.wait_leader() is leader
    dead_id, dead_uuid = dead.id, dead.uuid
    dead.kill()

    refused = flowstone("expel", "--yes", other.address, str(leader.id))
    assert (refused.code, refused.text) == (1, "")
    (line,) = refused.errors
    assert line.startswith(f"flowstone: no other member of {set_uuid(leader)} is writable; promote another member")
    assert line.endswith("a member cannot delete its own row")
    refused = flowstone("expel", "--yes", other.address, str(other.id))
    (line,) = refused.errors
    itself = other.address
    assert line == (
        f"flowstone: {itself} is the member at the given URI itself and no quorum is left without {itself}: "
        "1 of 2 other members are alive, 2 are needed; use --force to expel it anyway"
    )

    found = flowstone("expel", "--yes", "--json", other.address, dead_uuid)
    assert found.code == 0
    shown = json.loads(found.text)
    assert (shown["id"], shown["uuid"], shown["was_alive"], shown["lost"]) == (dead_id, dead_uuid, False, {})
    assert (shown["members_left"], shown["alive_left"], shown["quorum_left"]) == (2, 2, 2)
    assert shown["deleted_at"] == leader.address
    assert any("a quorum is left" in line for line in found.errors)
    eventually("it is gone everywhere", lambda: not any(dead_id in member.replication() for member in (leader, other)))

    number = other.id  # it has none afterwards
    found = flowstone("expel", "--yes", "--force", other.address, str(number))
    assert (found.code, found.text) == (
        0,
        f"replica {number} ({other.address}) is no longer a member of {set_uuid(leader)}\n",
    )
    assert any("it is running: it will" in line for line in found.errors)


@not_for_stand_ins
@pytest.mark.parametrize("gone", ["leader", "follower"])
def test_advice_recovers_the_last_of_two_members_from_a_lost_quorum(
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
    eventually("it resigns", lambda: survivor.info()["ro"])  # before that it still counts as elected
    advice = found(Kind.QUORUM_LOST, survivor).advice
    lowered, expelled, raised = (
        f"`flowstone config {survivor.address} replication_synchro_quorum=1`",
        f"`flowstone expel {survivor.address} {dead_id}`",
        f"`flowstone config {survivor.address} 'replication_synchro_quorum=N / 2 + 1'`",
    )
    assert "Only if gone for good" in advice
    assert advice.index(lowered) < advice.index("until it is elected") < advice.index(expelled) < advice.index(raised)

    refused = flowstone("expel", "--yes", survivor.address, str(dead_id))
    (line,) = refused.errors
    assert (refused.code, survivor.info()["ro"]) == (1, True)
    assert line.endswith(advice)
    assert "its own row" not in line

    lower = flowstone("config", "--yes", survivor.address, "replication_synchro_quorum=1")
    assert lower.code == 0, lower.errors
    mesh.wait_leader(survivor)
    done = flowstone("expel", "--yes", survivor.address, str(dead_id))
    assert done.code == 0, done.errors
    restore = flowstone("config", "--yes", survivor.address, "replication_synchro_quorum=N / 2 + 1", "replication=")
    assert restore.code == 0, restore.errors
    write(survivor, 2)
    assert keys(survivor) == [1, 2]
    assert_well(survivor)


@not_for_stand_ins
def test_advice_lists_the_order_of_steps_when_the_queue_has_no_quorum(nodes: Cluster, flowstone: Command) -> None:
    mesh = Mesh(nodes, ("ours",) * 2, direct=True, replication_synchro_timeout=60)
    owner, dead = mesh.members
    promote(owner)
    mesh.wait_owner(owner)
    dead_id = dead.id
    dead.kill()
    pending = Pending(owner, 1).wait_on(owner)

    def let_time_run_out() -> None:
        eventually("the row waits behind it", lambda: queue(owner)["len"] == 2)
        owner.configure(replication_synchro_timeout=0.1)

    meanwhile = Thread(target=let_time_run_out)
    meanwhile.start()
    refused = flowstone("expel", "--yes", owner.address, str(dead_id))
    meanwhile.join()
    assert (refused.code, pending.outcome()) == (1, QUORUM_TIMEOUT)
    assert "Only if gone for good and never to be started again, in this order: lower" in refused.errors[-1]
    assert dead_id in owner.replication()


@not_for_stand_ins
def test_unlisted_address_is_queried_for_its_member(nodes: Cluster, flowstone: Command) -> None:
    master = nodes.ours("master")
    replica = nodes.ours("replica", replication=[master.uri])
    number = replica.id
    gone = f"127.0.0.1:{free_port()}"
    refused = flowstone("expel", "--yes", master.address, gone)
    assert refused.code == 2
    (line,) = refused.errors
    assert line.startswith(f"flowstone: {gone} is not a member of the replica set {set_uuid(master)}; ")
    assert "connection refused" in line
    assert f"its members are {master.id} ({master.address}), {number} (replica {number})" in line
    done = flowstone("expel", "--yes", master.address, replica.address)
    assert done.code == 0, done.errors
    assert done.text == f"replica {number} ({replica.address}) is no longer a member of {set_uuid(master)}\n"
    assert any("it is running: it will no longer replicate" in line for line in done.errors)
    assert done.errors[-1].startswith("flowstone: remove the member from `replication` in the configuration")
    assert number not in master.replication()


def set_uuid(member: Member) -> str:
    return str(member.info()["cluster"]["uuid"])


@fits("2.6")
def test_a_replica_of_a_real_server_is_expelled_by_its_id(cluster: Cluster, flowstone: Command) -> None:
    master = cluster.real("master")
    cluster.real("replica", replication=[master.uri])
    refused = flowstone("expel", "--yes", master.address, "7")
    assert refused.code == 2
    assert "7 is not a member" in refused.errors[0]
    refused = flowstone("expel", "--yes", master.address, "admin:geheim@db9:3301?transport=ssl")
    assert (refused.code, "geheim" in refused.errors[0]) == (2, False)
    assert refused.errors[0].startswith("flowstone: db9:3301 is not a member")
    unasked = flowstone("expel", master.address, "2")
    assert (unasked.code, 2 in master.replication()) == (2, True)
    found = flowstone("expel", "--yes", master.address, "2")
    assert (found.code, found.text) == (0, f"replica 2 is no longer a member of {set_uuid(master)}\n")
    assert 2 not in master.replication()


OLD, NEW = (f"{number:08x}-0000-4000-8000-000000000000" for number in (1, 2))


class Hesitating(Terminal):
    """A user who confirms after `meanwhile` was called."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__("y\n")
        self._meanwhile = meanwhile

    def isatty(self) -> bool:
        self._meanwhile()
        return super().isatty()


def rows(member: Member) -> dict[int, str]:
    """Return ids and UUIDs in `_cluster`, without the member's own."""
    found = [unpack(raw)[:2] for raw in member.tuples(CLUSTER_ID)]
    return {number: uuid for number, uuid in found if uuid != member.uuid}


@fits("2.6")
def test_member_that_got_the_id_during_the_confirmation_is_kept(
    cluster: Cluster, flowstone: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for member in (cluster.real("real"), cluster.ours("ours")):
        member.client.insert(CLUSTER_ID, 2, OLD)

        def replace(member: Member = member) -> None:
            member.client.delete(CLUSTER_ID, 2)
            member.client.insert(CLUSTER_ID, 2, NEW)

        monkeypatch.setattr(sys, "stdin", Hesitating(replace))
        late = flowstone("expel", member.address, "2")
        assert (late.code, late.text) == (2, "")
        assert late.errors[-1].endswith(
            f"flowstone: replica 2, {OLD}, is no longer a member of {set_uuid(member)}; nothing was changed"
        )
        assert rows(member) == {2: NEW}

        monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
        assert flowstone("expel", member.address, "2").code == 0
        assert rows(member) == {}


@not_for_stand_ins
def test_yes_does_not_confirm_the_loss_of_the_quorum(nodes: Cluster, flowstone: Command) -> None:
    node = nodes.ours("node")
    for number, uuid in ((2, OLD), (3, NEW)):
        node.client.insert(CLUSTER_ID, number, uuid)
    refused = flowstone("expel", "--yes", node.address, "2")
    assert (refused.code, refused.text) == (1, "")
    (line,) = refused.errors
    assert line == (
        "flowstone: no quorum is left without replica 2: 1 of 2 other members are alive, 2 are needed; "
        "use --force to expel it anyway"
    )
    assert rows(node) == {2: OLD, 3: NEW}
    assert flowstone("expel", "--yes", "--force", node.address, "2").code == 0
    assert flowstone("expel", "--yes", node.address, "3").code == 0
    assert rows(node) == {}


@not_for_stand_ins
def test_rows_written_during_the_query_are_not_reported_as_lost(nodes: Cluster, flowstone: Command) -> None:
    mesh = Mesh(nodes, ("ours",) * 2, direct=True)
    writer, other = mesh.members
    number = other.id
    enough = Event()

    def write_on() -> None:
        with writer.connect() as client:
            while not enough.is_set():
                client.replace(PLAIN, 1)

    thread = Thread(target=write_on)
    thread.start()
    try:
        found = flowstone("expel", "--yes", "--json", writer.address, str(number))
    finally:
        enough.set()
        thread.join()
    assert found.code == 0, found.errors
    shown = json.loads(found.text)
    assert (shown["was_alive"], shown["lost"]) == (True, {})
