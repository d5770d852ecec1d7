"""Linearizable reads in mixed sets: real servers report their positions to nodes, and nodes to real servers."""

from __future__ import annotations

from functools import partial
from threading import Thread
from typing import Any

import pytest

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import TarantoolError
from tests.interop.cluster import IS_OURS_REAL, Cluster
from tests.interop.member import Member
from tests.interop.mesh import PLAIN, SYNCHRONOUS, Mesh, Pending, promote, queue, refusal, write
from tests.interop.versions import fits

KINDS = pytest.mark.parametrize("kinds", [("real", "ours"), ("ours", "real", "ours")], ids="-".join)
LINEARIZABLE, STREAM = 4, 1
UNSUPPORTED, TIMED_OUT = 5, 115
DELAY_SECONDS = 0.02
QUORUM: dict[str, Any] = {"replication_synchro_quorum": 1}
MVCC: dict[str, Any] = {"memtx_use_mvcc_engine": True}
"""Without it real servers have no such transactions; nodes always have them."""


def _start(cluster: Cluster, kinds: tuple[str, ...]) -> Mesh:
    """With a quorum of one, a read asks all members: each may have rows that the others lack."""
    options = [QUORUM | (MVCC if kind == "real" or IS_OURS_REAL else {}) for kind in kinds]
    mesh = Mesh(cluster, kinds[:1], **options[0])
    for kind, option in zip(kinds[1:], options[1:], strict=True):
        mesh.join(kind, **option)
    promote(mesh.members[0])
    mesh.wait_owner(mesh.members[0])
    return mesh


def _read(member: Member, *, timeout: float = 20.0, space: int = SYNCHRONOUS) -> list[tuple[Any, ...]]:
    """Return what a linearizable transaction reads."""
    with member.connect() as client:
        begin = {Key.TXN_ISOLATION: LINEARIZABLE, Key.TIMEOUT: timeout}
        client.request(RequestType.BEGIN, begin, stream_id=STREAM)
        select = {Key.SPACE_ID: space, Key.LIMIT: 100, Key.KEY: (), Key.ITERATOR: 2, Key.INDEX_ID: 0, Key.OFFSET: 0}
        try:
            found = client.request(RequestType.SELECT, select, stream_id=STREAM)
        finally:
            client.request(RequestType.COMMIT, {}, stream_id=STREAM)
        return list(found[Key.DATA])


@fits(">=2.11")
@KINDS
def test_every_member_reads_earlier_commits(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = _start(cluster, kinds)
    for member in mesh:
        for wire in mesh.wires(member):
            wire.delay(DELAY_SECONDS)
    number = 0
    for owner in mesh:
        promote(owner)
        mesh.wait_owner(owner)
        for _ in range(3):
            for reader in mesh:
                number += 1
                write(owner, 1, number)
                assert _read(reader) == [(1, number)], f"{reader}, after a write on {owner}"


@fits(">=2.11")
@KINDS
def test_linearizable_read_waits_while_the_member_is_isolated(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = _start(cluster, kinds)
    owner, *others = mesh.members
    for reader in others:
        mesh.isolate(reader)
        write(owner, 1, reader.id)
        assert refusal(partial(_read, reader, timeout=0.5)) == TIMED_OUT
        found: list[Any] = []
        reading = Thread(target=lambda one=reader, into=found: into.append(_read(one)), daemon=True)
        reading.start()
        mesh.rejoin(reader)
        reading.join(30)
        assert found == [[(1, reader.id)]]


@fits(">=2.11")
@KINDS
def test_linearizable_read_waits_for_the_quorum_of_pending_transactions(
    cluster: Cluster, kinds: tuple[str, ...]
) -> None:
    mesh = _start(cluster, kinds)
    owner, *others = mesh.members
    mesh.configure(owner, replication_synchro_quorum=len(kinds) + 1, replication_synchro_timeout=100)
    pending = Pending(owner, 1, 1).wait_on(*mesh)
    for reader in mesh:
        assert refusal(partial(_read, reader, timeout=0.3)) == TIMED_OUT
        assert queue(reader)["len"] == 1
    mesh.configure(owner, replication_synchro_quorum=1)
    for reader in others:
        assert _read(reader) == [(1, 1)]
    assert pending.outcome() == 0


@fits(">=2.11")
def test_asynchronous_spaces_are_rejected_with_the_message_of_a_real_server(cluster: Cluster) -> None:
    mesh = _start(cluster, ("real", "ours"))
    told = []
    for member in mesh:
        with pytest.raises(TarantoolError) as refused:
            _read(member, space=PLAIN)
        told.append((refused.value.code, refused.value.message))
    assert told[0] == told[1]
    assert told[0][0] == UNSUPPORTED
