"""The node as seen by its appliers: its requests to peers, and the writes it is notified of."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.node.instance import Instance
from flowstone.node.upstream.node_sink import NOBODY, JoinRefused, NodeSink
from flowstone.node.upstream.row_applier import Applying
from flowstone.node.wal.journal import WalMode
from flowstone.node.wal.recovery import RecoveredBox
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.row_stream import slab_of_rows
from flowstone.replication.vclock import VClock
from tests.node.instances import UUID, bootstrapped_box, make_instance

FROM_2_11 = (2, 11, 9)
STRANGER = uuid.UUID("33333333-3333-4333-8333-333333333333")


async def nobody_joins(recovered: RecoveredBox) -> None:
    raise AssertionError("unexpected join")


def member_of(instance: Instance) -> NodeSink:
    return NodeSink(instance, nobody_joins)


def test_only_an_orphan_requests_its_own_rows() -> None:
    instance = make_instance()
    member = member_of(instance)
    assert list(member.id_filter) == [1]
    instance.is_orphan = True
    assert list(member.id_filter) == []


def test_higher_term_of_a_peer_is_adopted_and_a_lower_one_ignored() -> None:
    member = member_of(make_instance())
    assert member.term == 1
    for told, known in ((3, 3), (2, 3)):
        member.raft(1, Row(30, 0, body=pack({0: told, 2: 1})))
        assert member.term == known


def test_anonymous_replica_requests_no_local_rows_and_states_that_it_is_anonymous() -> None:
    member = member_of(make_instance(replication_anon=True, read_only=True))
    assert member.is_anonymous
    assert member.id_filter == (0,)


def test_instance_without_data_has_no_replica_set() -> None:
    instance = make_instance()
    instance.replicaset_uuid = NOBODY
    assert member_of(instance).replicaset_uuid is None


async def test_peers_are_notified_of_received_rows_but_not_of_each_own_row(tmp_path: Path) -> None:
    instance = make_instance(tmp_path)
    member, told = member_of(instance), list[VClock]()
    member.on_written.append(lambda: told.append(member.vclock))
    member.watch_log()
    member.watch_log()
    transaction = instance.box.begin()
    statements.replace(transaction, instance.box.space("_schema"), pack(("key", 1)))
    await instance.commits.commit(transaction)
    assert told == []
    nothing = instance.box.begin()
    row = Row(12, 2, 0, 5, 1.0, 5).encode()
    instance.commits.submit_replicated(nothing, row, {2: 5}, lambda error: None)
    await instance.journal.drain()
    assert told == [VClock({1: 2, 2: 5})]
    await instance.journal.close()


async def test_rows_wait_for_a_verdict_being_written(tmp_path: Path) -> None:
    instance = make_instance(tmp_path, mode=WalMode.FSYNC)
    member, journal = member_of(instance), instance.journal
    member.applying = Applying(instance.box, journal, instance.commits, instance.outside.clock)
    promote = Row(31, 2, 0, 1, 1.0, 1, body=Promote(0, 0, 2).encode())
    await member.apply(slab_of_rows(promote.encode(), "peer"))
    assert journal.written_vclock.get(2) == 0
    await member.apply(slab_of_rows(Row(12, 2, 0, 2, 1.0, 2).encode(), "peer"))
    assert not member.applying.is_holding
    assert (journal.written_vclock.get(2), journal.vclock.get(2)) == (1, 2)
    await journal.close()


def snapshot_rows(dialect: Dialect) -> bytes:
    """Return all system spaces of a newly bootstrapped replica set, as a peer sends them."""
    spaces = sorted(bootstrapped_box(dialect).spaces.items())
    tuples = ((space_id, raw) for space_id, space in spaces if space.primary is not None for raw in space.tuples())
    return b"".join(
        Row(2, 0, 0, 0, 0.0, body=b"\x82\x10" + pack(space_id) + b"\x21" + raw).encode() for space_id, raw in tuples
    )


def new_instance() -> Instance:
    instance = make_instance()
    instance.box.clear()
    instance.replicaset_uuid = NOBODY
    return instance


async def join(member: NodeSink) -> None:
    await member.begin_snapshot(VClock({0: 3, 1: 7}), FROM_2_11)
    await member.snapshot_rows(slab_of_rows(snapshot_rows(Dialect.V2_11), "peer"))
    await member.begin_final(VClock({1: 8}))
    await member.final_rows(slab_of_rows(Row(12, 1, 0, 8, 1.0, 8).encode(), "peer"))
    await member.end_join(VClock({1: 8}))


async def test_join_provides_data_position_and_id() -> None:
    joined: list[RecoveredBox] = []

    async def adopt(recovered: RecoveredBox) -> None:
        joined.append(recovered)

    member = NodeSink(new_instance(), adopt)
    await join(member)
    (recovered,) = joined
    assert (recovered.vclock, recovered.instance_uuid, recovered.replica_id) == (VClock({1: 8}), UUID, 1)
    assert not member.is_joining


async def test_peer_that_has_not_registered_us_is_not_joined() -> None:
    instance = new_instance()
    instance.uuid = STRANGER
    with pytest.raises(JoinRefused, match=rf"peer has not registered this instance \({STRANGER}\)"):
        await join(member_of(instance))


async def test_snapshot_of_another_schema_version_is_rejected_before_its_first_row() -> None:
    member = member_of(new_instance())
    with pytest.raises(JoinRefused, match=r"peer runs Tarantool 2\.6\.0.*match dialect 2\.11; start with dialect 2\.6"):
        await member.begin_snapshot(VClock(), (2, 6, 0))
    assert not member.is_joining
