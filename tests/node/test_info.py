"""box.info: the keys of a real server, with the values of this one."""

from __future__ import annotations

from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.system import SCHEMA_ID
from flowstone.iproto.msgpack import pack
from flowstone.node.info import box_info, replicaset_name
from flowstone.replication.limbo.control_rows import Promote, RaftState
from flowstone.replication.limbo.tenures import Tenures
from tests.node.instances import REPLICASET_UUID, UUID, make_instance

KEYS_2_6 = (
    "version id ro uuid package cluster listen replication_anon replication signature status vclock uptime lsn sql gc "
    "vinyl memory pid"
)


def test_info_has_the_keys_of_a_real_2_6() -> None:
    assert list(box_info(make_instance(dialect=Dialect.V2_6))) == KEYS_2_6.split()


def test_info_of_the_newer_dialect_has_the_newer_keys() -> None:
    info = box_info(make_instance())
    assert [key for key in info if key not in KEYS_2_6.split()] == [
        "ro_reason",
        "replicaset",
        "schema_version",
        "election",
        "synchro",
    ]
    assert info["ro_reason"] is None
    assert box_info(make_instance(read_only=True))["ro_reason"] == "config"


def test_info_has_the_election_and_queue_of_the_files() -> None:
    instance = make_instance()
    assert box_info(instance)["election"] == {"state": "follower", "vote": 0, "leader": 0, "term": 1}
    instance.queue.start(1, Promote(1, 0, 3), Tenures({1: 3}, (), {}), ())
    instance.elections.start(RaftState(term=4, vote=1), 1)
    info = box_info(instance)
    assert info["election"] == {"state": "follower", "vote": 1, "leader": 0, "term": 4}
    assert info["synchro"]["quorum"] == 1
    assert info["synchro"]["queue"].items() >= {"len": 0, "owner": 1, "term": 3, "busy": False}.items()


def test_info_has_identity_and_position() -> None:
    info = box_info(make_instance())
    assert info["uuid"] == str(UUID)
    assert info["cluster"] == {"uuid": str(REPLICASET_UUID)}
    assert info["replication"] == {1: {"id": 1, "uuid": str(UUID), "lsn": 1}}
    assert (info["id"], info["lsn"], info["signature"], info["vclock"]) == (1, 1, 1, {1: 1})
    assert info["status"] == "running"


def test_replica_set_name_is_the_one_that_newer_members_sent() -> None:
    instance = make_instance()
    assert replicaset_name(instance) is None
    schema = instance.box.space(SCHEMA_ID)
    statements.insert(instance.box.begin(), schema, pack(("replicaset_name", "the-set")))
    assert replicaset_name(instance) == "the-set"


def test_failed_write_to_the_log_is_shown_until_one_succeeds() -> None:
    instance = make_instance()
    assert "wal" not in box_info(instance)
    instance.journal.counters.failures, instance.journal.counters.failure = 244, "No space left on device"
    assert box_info(instance)["wal"] == {"failure": "No space left on device", "failures": 244}
