"""Synchronous transactions on an asynchronous space, by request: their rows are flagged, and members wait.

Servers before 3.0 ignore the flag: they go by the space alone, and keep rolled-back rows. Their peers must not use it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import TarantoolError
from tests.interop.cluster import IS_OURS_REAL, Cluster
from tests.interop.compare import assert_converged, assert_same_log
from tests.interop.member import Member
from tests.interop.mesh import PLAIN, QUORUM_TIMEOUT, Mesh, keys, promote, queue, refusal, verdicts, wait_until
from tests.interop.versions import fits

STREAM = 1
MVCC: dict[str, Any] = {"memtx_use_mvcc_engine": True}
"""Without it real servers roll back transactions of more than one request."""
IS_SYNC: dict[Key, Any] = {Key.IS_SYNC: True}
WHERE = pytest.mark.parametrize(("begin", "commit"), [(IS_SYNC, {}), ({}, IS_SYNC)], ids=("begin", "commit"))


def _mesh(cluster: Cluster, first: str, second: str) -> Mesh:
    options = {kind: MVCC if kind == "real" or IS_OURS_REAL else {} for kind in (first, second)}
    mesh = Mesh(cluster, (first,), **options[first])
    mesh.join(second, **options[second])
    return mesh


def _write(member: Member, key: int, begin: dict[Key, Any], commit: dict[Key, Any]) -> None:
    with member.connect() as client:
        client.request(RequestType.BEGIN, begin, stream_id=STREAM)
        client.request(RequestType.INSERT, {Key.SPACE_ID: PLAIN, Key.TUPLE: (key, "x")}, stream_id=STREAM)
        client.request(RequestType.INSERT, {Key.SPACE_ID: PLAIN, Key.TUPLE: (key + 1, "y")}, stream_id=STREAM)
        client.request(RequestType.COMMIT, commit, stream_id=STREAM)


def _check(mesh: Mesh, begin: dict[Key, Any], commit: dict[Key, Any]) -> None:
    """The first member, which owns the queue, writes; the second completes the quorum, or not."""
    owner, other = mesh.members
    promote(owner)
    mesh.wait_owner(owner)
    _write(owner, 1, begin, commit)
    other.catch_up(owner)
    wait_until(other, "has the verdict", lambda one: queue(one)["len"] == 0)
    assert keys(other, PLAIN) == [1, 2]
    assert [name for name, *_ in verdicts(owner)] == ["PROMOTE", "CONFIRM"]
    mesh.configure(owner, replication_synchro_quorum=3, replication_synchro_timeout=0.3)
    assert refusal(partial(_write, owner, 11, begin, commit)) == QUORUM_TIMEOUT
    other.catch_up(owner)
    wait_until(other, "has the verdict", lambda one: queue(one)["len"] == 0)
    assert keys(owner, PLAIN) == keys(other, PLAIN) == [1, 2]
    assert [name for name, *_ in verdicts(other)] == ["PROMOTE", "CONFIRM", "ROLLBACK"]
    assert_converged(*mesh)
    assert_same_log(owner, other, origins=[owner.id])


@fits(">=3.0")
@WHERE
def test_node_waits_for_a_quorum_of_real_servers(
    cluster: Cluster, begin: dict[Key, Any], commit: dict[Key, Any]
) -> None:
    _check(_mesh(cluster, "ours", "real"), begin, commit)


@fits(">=3.0")
@WHERE
def test_real_server_waits_for_a_quorum_of_nodes(
    cluster: Cluster, begin: dict[Key, Any], commit: dict[Key, Any]
) -> None:
    _check(_mesh(cluster, "real", "ours"), begin, commit)


@fits(">=3.0")
def test_is_sync_false_is_rejected_like_on_a_real_server(cluster: Cluster) -> None:
    told = []
    for member in _mesh(cluster, "real", "ours"):
        refused = []
        for type in (RequestType.BEGIN, RequestType.COMMIT):
            with member.connect() as client, pytest.raises(TarantoolError) as error:
                client.request(type, {Key.IS_SYNC: False}, stream_id=STREAM)
            # Since 3.x without the words "Illegal parameters," at the start.
            refused.append((error.value.code, error.value.message.removeprefix("Illegal parameters, ")))
        told.append(refused)
    assert told[0] == told[1]
    assert told[0][0][1] == "is_sync can only be true"
