"""`box.info` of an instance, with the fields of its dialect (`docs/spec/iproto.md#instance-information`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from flowstone.box.dialect import Dialect
from flowstone.box.system import CLUSTER_ID
from flowstone.iproto.msgpack import unpack
from flowstone.node.instance import Instance
from flowstone.node.schema_row import schema_row

PACKAGE = "Flowstone"


def box_info(instance: Instance) -> dict[str, Any]:
    """Return the whole map. Fields that are functions in Tarantool (`gc`, `memory`, …) are empty, as in Tarantool."""
    own_lsn = instance.vclock.get(instance.id)
    vclock = instance.vclock.to_mapping()
    info: dict[str, Any] = {
        "version": instance.box.dialect.version_text,
        "id": None if instance.is_expelled else instance.id,
        "ro": instance.is_read_only,
        "uuid": str(instance.uuid),
        "package": PACKAGE,
        "cluster": {"uuid": str(instance.replicaset_uuid)},
        "listen": instance.listen,
        "replication_anon": {"count": len(instance.peers.anonymous())},
        "replication": replication(instance),
        "signature": sum(lsn for replica_id, lsn in vclock.items() if replica_id),
        "status": instance.status,
        "vclock": vclock,
        "uptime": int(instance.uptime()),
        "lsn": own_lsn if instance.id else -1,
        "sql": [],
        "gc": [],
        "vinyl": [],
        "memory": [],
        "pid": instance.pid,
    }
    if instance.box.dialect is not Dialect.V2_6:
        info["ro_reason"] = instance.read_only_reason
        info["replicaset"] = {"uuid": str(instance.replicaset_uuid)}  # 3.x has this instead of cluster.uuid
        info["schema_version"] = instance.box.schema_version
        info["election"] = _election(instance)
        info["synchro"] = _synchro(instance)
    wal = instance.journal.counters
    if wal.failure is not None:  # real servers only log it
        info["wal"] = {"failure": wal.failure, "failures": wal.failures}
    return info


def _election(instance: Instance) -> dict[str, Any]:
    info = instance.elections.info()
    shown = {"state": info.state, "vote": info.vote, "leader": info.leader, "term": info.term}
    return shown if info.leader_idle is None else shown | {"leader_idle": info.leader_idle}


def _synchro(instance: Instance) -> dict[str, Any]:
    """Return `box.info.synchro` of 2.11, plus `size` and `age` of 3.x, and `rollback_count`, which is our own."""
    limbo = instance.queue.limbo
    queue: dict[str, Any] = {
        "len": len(limbo),
        "owner": limbo.owner_id,
        "term": limbo.term,
        "busy": limbo.is_busy,
        "size": limbo.size,
        "age": _age(instance),
        "rollback_count": limbo.rollback_count,
    }
    return {"queue": queue, "quorum": limbo.quorum}


def _age(instance: Instance) -> float:
    """Return the seconds that our own oldest pending transaction has waited; 0 without one."""
    first = next(iter(instance.queue.limbo.pending), None)
    if first is None or first.written_at is None:
        return 0.0
    return instance.outside.clock.monotonic() - first.written_at


def replication(instance: Instance) -> dict[int, dict[str, Any]]:
    """Return `box.info.replication`: the registered members by id, with the state of their upstream and downstream."""
    return {replica_id: _member(instance, replica_id, uuid) for replica_id, uuid in members(instance)}


def _member(instance: Instance, replica_id: int, uuid: str) -> dict[str, Any]:
    known, peers = UUID(uuid), instance.peers
    sides = {"upstream": peers.upstream(known), "downstream": peers.downstream(known)}
    shown = {"id": replica_id, "uuid": uuid, "lsn": instance.vclock.get(replica_id)}
    return shown | {name: side for name, side in sides.items() if side is not None}


def replication_anon(instance: Instance) -> dict[str, dict[str, Any]]:
    """Return `box.info.replication_anon()`: the anonymous replicas by UUID."""
    return {
        str(uuid): {"id": 0, "uuid": str(uuid), "lsn": 0, "downstream": downstream}
        for uuid, downstream in instance.peers.anonymous()
    }


def members(instance: Instance) -> Iterator[tuple[int, str]]:
    """Yield id and UUID of each row of `_cluster`."""
    cluster = instance.box.spaces.get(CLUSTER_ID)
    for raw in cluster.tuples() if cluster is not None else ():
        replica_id, uuid, *_ = unpack(raw)
        yield replica_id, uuid


def replicaset_name(instance: Instance) -> str | None:
    """Return the name of the replica set, which members of 3.x may have set; None without one."""
    name = schema_row(instance.box, "replicaset_name")
    return name[0] if name else None
