"""Expulsions across kinds: an expelled node stops writing; a real server does not, and nodes reject its rows."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import unpack
from tests.interop import workload
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.member import Member, by_id, eventually
from tests.interop.versions import fits

CLUSTER, LEDGER = 320, 700
HEIR = "eeeeeeee-0000-4000-8000-000000000001"
READ_ONLY, UNKNOWN_REPLICA = 7, "is not registered with replica set"


def _pair(cluster: Cluster, master_kind: str, replica_kind: str) -> tuple[Member, Member]:
    """Return two members that follow each other, and a space."""
    master: Member = getattr(cluster, master_kind)("master")
    create = ["call", "box.schema.space.create", ["ledger", {"id": LEDGER}]]
    workload.run(master, [create, ["call", "box.space.ledger:create_index", ["pk", {"parts": [1, "unsigned"]}]]])
    replica: Member = getattr(cluster, replica_kind)("replica", replication=[master.uri])
    master.configure(replication=[replica.uri])
    master.wait_follow(replica)
    replica.wait_follow(master)
    replica.client.insert(LEDGER, 1)
    master.catch_up(replica)
    return master, replica


def _keys(member: Member) -> list[int]:
    return sorted(unpack(raw)[0] for raw in member.tuples(LEDGER))


def _expel(by: Member, member: Member) -> int:
    number = member.id
    by.client.delete(CLUSTER, number)
    eventually("it is no member", lambda: number not in by.replication())
    return number


@not_for_stand_ins
def test_node_expelled_by_a_real_server_stops_writing(cluster: Cluster) -> None:
    master, replica = _pair(cluster, "real", "ours")
    _expel(master, replica)
    eventually("it knows", lambda: replica.info()["id"] is None)
    assert replica.info()["ro"]
    with pytest.raises(TarantoolError) as refused:
        replica.client.insert(LEDGER, 2)
    assert refused.value.code == READ_ONLY
    (shown,) = replica.replication().values()
    assert "The local instance id 2 is read-only" in shown["upstream"]["message"]
    assert "downstream" not in shown or shown["downstream"]["status"] == "stopped"
    master.client.insert(LEDGER, 3)
    replica.stop()
    replica.launch()
    assert replica.exit_code() != 0
    assert UNKNOWN_REPLICA in replica.log()
    assert "flowstone rebootstrap" in replica.log()
    assert len(master.tuples(CLUSTER)) == 1


@not_for_stand_ins
def test_node_rejects_rows_of_a_real_server_that_it_expelled(cluster: Cluster) -> None:
    """2.6 and 2.11 reject the row, and continue to write; 3.8 accepts it, and its later rows reach no member."""
    master, replica = _pair(cluster, "ours", "real")
    number = _expel(master, replica)
    eventually("it follows nobody", lambda: replica.upstream(master)["status"] == "stopped")
    assert f"The local instance id {number} is read-only" in replica.upstream(master)["message"]
    before = master.vclock()
    replica.client.insert(LEDGER, 2)
    master.client.insert(LEDGER, 3)
    eventually("the master refuses it", lambda: _refuses(master))
    assert _keys(master) == [1, 3]
    assert master.vclock() == before | {1: before[1] + 1}


def _refuses(master: Member) -> bool:
    return "is not a member: _cluster does not have" in master.log() or "non-anonymous followers" in master.log()


@not_for_stand_ins
@fits("<3.0")
def test_reissued_id_does_not_mix_the_rows_of_two_real_servers(cluster: Cluster) -> None:
    """The expelled one still runs and is still configured; both write equally many rows under one id.

    A real master reissues the id; here an operator does, because a node would not.
    """
    master, expelled = _pair(cluster, "ours", "real")
    number = _expel(master, expelled)
    eventually("it follows nobody", lambda: expelled.upstream(master)["status"] == "stopped")
    master.client.insert(CLUSTER, number, HEIR)
    heir = cluster.real("heir", replication=[master.uri], instance_uuid=HEIR)
    assert heir.id == number
    master.configure(replication=[heir.uri, expelled.uri])
    master.wait_follow(heir)
    for key in (10, 11, 12):
        expelled.client.insert(LEDGER, key)
        heir.client.insert(LEDGER, key + 10)
    master.catch_up(heir)
    master.configure(replication=[expelled.uri, heir.uri])
    expelled.client.insert(LEDGER, 13)
    eventually("the master refuses it", lambda: _refuses(master))
    heir.client.insert(LEDGER, 30)
    eventually("the heir is followed", lambda: _keys(master) == [1, 20, 21, 22, 30])
    assert _keys(heir) == _keys(master)


@not_for_stand_ins
@fits(">=2.11")
def test_leader_stays_after_it_expels_the_only_other_member(cluster: Cluster) -> None:
    """Two servers of 3.8 behave the same."""
    timing: dict[str, Any] = {"replication_timeout": 0.3, "election_mode": "candidate"}
    leader = cluster.ours("leader", **timing)
    leader.wait_writable()
    other = cluster.real("other", replication=[leader.uri], **timing | {"election_mode": "voter"})
    leader.configure(replication=[other.uri])
    leader.wait_follow(other)
    term = leader.info()["election"]["term"]
    _expel(leader, other)
    eventually("the other follows nobody", lambda: other.upstream(leader)["status"] == "stopped")
    assert leader.info()["election"] | {"leader_idle": 0} == {
        "state": "leader",
        "vote": 1,
        "leader": 1,
        "term": term,
        "leader_idle": 0,
    }
    assert not leader.info()["ro"]
    assert by_id(leader.info()["vclock"])[1] == leader.info()["lsn"]
