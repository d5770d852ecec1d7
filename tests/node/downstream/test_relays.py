"""All replicas of a node: admission, the logs kept for each, and `box.info`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec
from uuid import UUID

import pytest
import pytest_asyncio

from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.node.downstream.relays import Relays
from flowstone.node.wal.gc import GarbageCollector
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.messages import Ack, encode_ack
from flowstone.replication.raft.election import Config, ElectionMode
from flowstone.replication.vclock import VClock
from tests.node.instances import UUID as OWN
from tests.node.instances import make_instance
from tests.node.masters import REPLICA, VERSION_2_11, Connection, Master, settle, until

OTHER = UUID("44444444-4444-4444-8444-444444444444")


@pytest_asyncio.fixture
async def master(tmp_path: Path) -> AsyncIterator[Master]:
    made = Master(tmp_path, Dialect.V2_6)
    await made.create_space()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def newer(tmp_path: Path) -> AsyncIterator[Master]:
    made = Master(tmp_path, Dialect.V2_11)
    await made.create_space()
    yield made
    await made.close()


def logs(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.xlog"))


async def remove_member(master: Master, replica_id: int, uuid: UUID) -> None:
    cluster = master.instance.box.space(320)
    await master.write(lambda txn: statements.delete(txn, cluster, 0, pack((replica_id,))))
    master.relays.member_removed(uuid)


# --- privileges ---


async def test_replica_needs_the_role_replication(master: Master) -> None:
    access = master.instance.box.access
    await master.write(lambda txn: ddl.create_user(txn, "nobody", password="", time=0))
    await master.write(lambda txn: ddl.create_user(txn, "reader", password="", time=0))
    await master.write(lambda txn: ddl.create_user(txn, "replicator", password="", time=0))
    await master.write(lambda txn: ddl.grant(txn, "reader", "read", "universe"))
    await master.write(lambda txn: ddl.grant(txn, "replicator", "replication"))
    with pytest.raises(errors.AccessDenied, match="Read access to universe '' is denied for user 'nobody'"):
        await master.join(connection=Connection(user=access.user("nobody").id))
    with pytest.raises(errors.AccessDenied, match="Write access to space '_cluster' is denied for user 'reader'"):
        await master.join(connection=Connection(user=access.user("reader").id))
    await master.join(connection=Connection(user=access.user("replicator").id))
    await master.subscribe(master.instance.vclock, connection=Connection(user=access.user("reader").id))


READ_ONLY: list[tuple[Dialect, str]] = [
    (Dialect.V2_6, "Can't modify data because this instance is in read-only mode."),
    (Dialect.V2_11, "Can't modify data on a read-only instance - box.cfg.read_only is true"),
]


@pytest.mark.parametrize(("dialect", "text"), READ_ONLY)
async def test_read_only_master_rejects_a_join(tmp_path: Path, dialect: Dialect, text: str) -> None:
    master = Master(tmp_path, dialect, read_only=True)
    with pytest.raises(errors.Readonly) as caught:
        await master.join()
    assert caught.value.message == text
    await master.close()


async def test_master_that_becomes_read_only_during_a_join_registers_no_replica(master: Master) -> None:
    class Slow(Connection):
        async def flushed(self) -> None:
            master.instance.box.is_read_only = True

    with pytest.raises(errors.Readonly):
        await master.join(connection=Slow())
    assert master.collector.consumers == []


async def test_instance_without_a_log_rejects_replicas() -> None:
    instance = make_instance(None, Dialect.V2_6)
    relays = Relays(instance, create_autospec(GarbageCollector, is_paused=False))
    request: Any = type("Asked", (), {"type": 66, "sync": 0, "body": b"\x81\x50\xc3"})
    with pytest.raises(errors.Unsupported, match="wal_mode = 'none'"):
        await relays.serve(request, Connection())


async def test_replication_request_must_be_the_only_one(master: Master) -> None:
    connection = Connection()
    connection.is_busy = True
    with pytest.raises(errors.Protocol, match="Can't process join/subscribe while there are pending requests"):
        await master.join(connection=connection)
    assert not connection.is_held


async def test_other_requests_wait_until_a_join_ends(master: Master) -> None:
    connection = Connection()
    joining = asyncio.create_task(master.join(connection=connection))
    await asyncio.sleep(0)
    assert connection.is_held
    await joining
    assert not connection.is_held
    connection = Connection()
    with pytest.raises(errors.ConnectionToSelf):
        await master.join(OWN, connection=connection)
    assert not connection.is_held


async def test_second_connection_of_a_replica_is_rejected(master: Master) -> None:
    await master.join()
    first = await master.subscribe(master.instance.vclock)
    with pytest.raises(errors.Cfg, match="duplicate connection with the same replica UUID"):
        await master.subscribe(master.instance.vclock)
    assert not first.is_closed
    assert first.receiver is not None
    first.receiver.closed()
    await master.subscribe(master.instance.vclock)


async def test_repeated_rejection_is_logged_once(master: Master, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flowstone.node"):
        for _ in range(3):
            with pytest.raises(errors.UnknownReplica):
                await master.subscribe(VClock())
    refused = [record.message for record in caplog.records if "rejected" in record.message]
    assert len(refused) == 1
    assert refused[0].startswith("SUBSCRIBE from 127.0.0.1 rejected: Replica ")


async def test_log_lines_about_rejections_are_rate_limited(master: Master, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flowstone.node"):
        for _ in range(50):  # no two consecutive ones are equal
            with pytest.raises(errors.UnknownReplica):
                await master.subscribe(VClock())
            with pytest.raises(errors.ConnectionToSelf):
                await master.join(OWN)
    assert 10 <= sum("rejected" in record.message for record in caplog.records) < 50


async def test_relay_rejects_a_replica_without_version_when_the_schema_is_newer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cases = ((Dialect.V2_11, 0, True), (Dialect.V2_11, VERSION_2_11, False), (Dialect.V2_6, 0, False))
    for dialect, version, is_warned in cases:
        caplog.clear()
        directory = tmp_path / f"{dialect.value}-{version}"
        directory.mkdir()
        master = Master(directory, dialect)
        await master.join(version=version)
        assert ("before 2.10" in caplog.text and "--dialect 2.6" in caplog.text) is is_warned
        await master.close()


@pytest.mark.parametrize("is_anonymous", [True, False])
async def test_relay_warns_about_a_disconnected_replica_only_if_it_is_a_member(
    master: Master, is_anonymous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if not is_anonymous:
        await master.join()
    connection = await master.subscribe(master.instance.vclock, is_anonymous=is_anonymous)
    assert connection.receiver is not None
    with caplog.at_level(logging.INFO, "flowstone.node"):
        connection.receiver.closed()
    levels = [record.levelname for record in caplog.records if "is stopped" in record.message]
    assert levels == ["INFO" if is_anonymous else "WARNING"]


# --- box.info ---


async def test_member_that_never_connected_has_no_downstream(master: Master) -> None:
    assert master.relays.downstream(REPLICA) is None
    await master.join()
    assert master.relays.downstream(REPLICA) is None


@pytest.mark.parametrize("dialect", [Dialect.V2_6, Dialect.V2_11])
async def test_follower_is_shown_with_its_position(tmp_path: Path, dialect: Dialect) -> None:
    master = Master(tmp_path, dialect)
    await master.join()
    await master.subscribe(master.instance.vclock)
    await master.clock.advance(0.5)
    shown = master.relays.downstream(REPLICA)
    lag = {} if dialect is Dialect.V2_6 else {"lag": 0.0}
    assert shown == {"status": "follow", "idle": 0.5, "vclock": master.instance.vclock.to_mapping(), **lag}
    await master.close()


async def test_disconnected_replica_is_shown_with_the_reason(master: Master) -> None:
    await master.join()
    connection = await master.subscribe(master.instance.vclock)
    assert connection.receiver is not None
    connection.receiver.closed()
    assert master.relays.downstream(REPLICA) == {
        "status": "stopped",
        "message": "unexpected EOF when reading from socket",
        "system_message": "Broken pipe",
    }
    assert master.relays.acked(REPLICA) is None


async def test_connected_anonymous_replicas_are_listed(master: Master) -> None:
    connection = await master.subscribe(master.instance.vclock, OTHER, is_anonymous=True)
    ((uuid, shown),) = master.relays.anonymous
    assert (uuid, shown["status"]) == (OTHER, "follow")
    assert master.collector.consumers == [], "no log is kept for them"
    assert connection.receiver is not None
    connection.receiver.closed()
    assert master.relays.anonymous == []


async def test_anonymous_replica_becomes_a_member_by_registering(master: Master) -> None:
    connection = await master.subscribe(master.instance.vclock, is_anonymous=True)
    assert connection.receiver is not None
    connection.receiver.closed()
    await master.register()
    await master.subscribe(master.instance.vclock)
    assert master.relays.anonymous == []
    assert master.relays.downstream(REPLICA) is not None
    with pytest.raises(errors.ReplicaNotAnon):
        await master.register()


# --- logs ---


async def test_logs_are_kept_until_a_member_has_them(master: Master, tmp_path: Path) -> None:
    await master.join()
    connection = await master.subscribe(master.instance.vclock)
    for number in range(3):
        await master.put(number)
        await master.instance.journal.rotate()
    position = master.instance.vclock
    master.collector.checkpoint_count = 1
    master.collector.add_checkpoint(position)
    await master.collector.collect()
    assert len(logs(tmp_path)) == 3
    master.acknowledge(connection, VClock({1: position.get(1) - 1}))
    await until(lambda: len(logs(tmp_path)) == 1)
    master.acknowledge(connection, position)
    await settle()
    assert len(logs(tmp_path)) == 1, "the last log is kept"


async def test_logs_are_kept_while_the_member_is_disconnected(master: Master, tmp_path: Path) -> None:
    await master.join()
    connection = await master.subscribe(master.instance.vclock)
    assert connection.receiver is not None
    connection.receiver.closed()
    for number in range(3):
        await master.put(number)
        await master.instance.journal.rotate()
    master.collector.checkpoint_count = 1
    master.collector.add_checkpoint(master.instance.vclock)
    await master.collector.collect()
    assert len(logs(tmp_path)) == 3
    await remove_member(master, 2, REPLICA)
    await until(lambda: len(logs(tmp_path)) == 1)


async def test_expelled_member_gets_the_row_of_its_expulsion_and_its_acks_no_longer_count(master: Master) -> None:
    await master.join()
    connection = await master.subscribe(master.instance.vclock)
    assert connection.receiver is not None
    acked: list[int] = []
    master.relays.on_ack.append(lambda replica_id, vclock: acked.append(replica_id))
    connection.take()
    await remove_member(master, 2, REPLICA)
    await settle()
    assert [row.type for row in connection.take()] == [RequestType.REPLACE.value, RequestType.DELETE.value]
    connection.receiver.received(encode_ack(Ack(master.instance.vclock.without_zero(), 1)))
    assert acked == []
    assert not connection.is_closed
    connection.receiver.closed()
    assert master.collector.consumers == []
    assert master.relays.replicas == []
    with pytest.raises(errors.UnknownReplica):
        await master.subscribe(master.instance.vclock)


async def test_expelled_member_that_stays_connected_is_disconnected(master: Master) -> None:
    await master.join()
    connection = await master.subscribe(master.instance.vclock)
    assert connection.receiver is not None
    await remove_member(master, 2, REPLICA)
    before = master.instance.vclock.without_zero()
    for _ in range(40):
        connection.receiver.received(encode_ack(Ack(VClock({1: before.get(1) - 1}), 1)))
        await master.clock.advance(1)
    assert connection.is_closed
    assert master.collector.consumers == []


async def test_expelled_member_that_has_the_row_is_disconnected_soon(master: Master) -> None:
    await master.join()
    connection = await master.subscribe(master.instance.vclock)
    assert connection.receiver is not None
    await remove_member(master, 2, REPLICA)
    connection.receiver.received(encode_ack(Ack(master.instance.vclock.without_zero(), 1)))
    await master.clock.advance(2)
    assert connection.is_closed


async def test_expelled_member_with_the_row_is_disconnected_despite_further_acks(master: Master) -> None:
    await master.join()
    connection = await master.subscribe(master.instance.vclock)
    assert connection.receiver is not None
    await remove_member(master, 2, REPLICA)
    for number in range(8):
        await master.put(number)
        if not connection.is_closed:
            connection.receiver.received(encode_ack(Ack(master.instance.vclock.without_zero(), 1)))
        await master.clock.advance(0.5)
    assert connection.is_closed


async def test_acknowledgements_of_a_member_are_forgotten_when_its_connection_ends(master: Master) -> None:
    await master.join()
    connection = await master.subscribe(master.instance.vclock)
    assert connection.receiver is not None
    lost: list[int] = []
    master.relays.on_lost.append(lost.append)
    connection.receiver.closed()
    assert lost == [2]


async def test_member_is_intact_while_it_follows_with_all_its_own_rows(newer: Master) -> None:
    await newer.join()
    assert not newer.relays.is_intact(REPLICA)
    connection = await newer.subscribe(newer.instance.vclock)
    assert newer.relays.is_intact(REPLICA)
    assert connection.receiver is not None
    connection.receiver.closed()
    assert not newer.relays.is_intact(REPLICA)
    newer.instance.journal.submit_replicated(b"", {2: 5}, lambda error: None)
    await newer.subscribe(newer.instance.vclock)
    assert not newer.relays.is_intact(REPLICA)


async def test_expelled_instance_rejects_replicas(newer: Master) -> None:
    await newer.join()
    connection = await newer.subscribe(newer.instance.vclock)
    newer.instance.expelled_id = 1
    newer.relays.expelled()
    assert connection.is_closed
    with pytest.raises(errors.Unsupported, match="does not support non-anonymous followers"):
        await newer.subscribe(newer.instance.vclock)
    with pytest.raises(errors.Unsupported, match="does not support registration"):
        await newer.join(OTHER)


async def test_position_of_a_member_is_taken_from_its_reconnection(master: Master) -> None:
    await master.join()
    connection = await master.subscribe(master.instance.vclock)
    (consumer,) = master.collector.consumers
    assert (consumer.name, consumer.vclock) == (f"replica {REPLICA}", master.instance.vclock)
    assert connection.receiver is not None
    connection.receiver.closed()
    await master.subscribe(VClock({1: 2}))
    assert [consumer.vclock for consumer in master.collector.consumers] == [VClock({1: 2})]


async def test_logs_are_deleted_only_after_all_members_have_returned(newer: Master, tmp_path: Path) -> None:
    await newer.join()
    restarted = Relays(newer.instance, newer.collector)
    assert newer.collector.is_paused
    for number in range(3):
        await newer.put(number)
        await newer.instance.journal.rotate()
    newer.collector.checkpoint_count = 1
    newer.collector.add_checkpoint(newer.instance.vclock)
    for consumer in list(newer.collector.consumers):
        newer.collector.remove_consumer(consumer)
    await newer.collector.collect()
    assert len(logs(tmp_path)) == 3
    newer.relays = restarted
    await newer.subscribe(newer.instance.vclock)
    assert not newer.collector.is_paused
    await until(lambda: len(logs(tmp_path)) == 1)


async def let_time_pass(master: Master, relays: Relays) -> None:
    await master.clock.advance(14400.1)


async def take_off_the_list(master: Master, relays: Relays) -> None:
    relays.member_removed(REPLICA)


@pytest.mark.parametrize("end", [let_time_pass, take_off_the_list])
async def test_gc_pause_ends_after_its_delay_or_when_the_member_is_expelled(
    newer: Master, end: Callable[[Master, Relays], Any]
) -> None:
    await newer.join()
    restarted = Relays(newer.instance, newer.collector)
    await settle()
    assert newer.collector.is_paused
    await end(newer, restarted)
    assert not newer.collector.is_paused
    assert newer.collector.info()["is_paused"] is False
    await restarted.close()


async def test_2_6_keeps_logs_for_its_members_too(master: Master) -> None:
    """Real 2.6 servers do not: they delete logs that a disconnected member needs."""
    await master.join()
    Relays(master.instance, master.collector)
    assert master.collector.info()["is_paused"]


async def test_gc_without_a_delay_has_no_pause(tmp_path: Path) -> None:
    master = Master(tmp_path, Dialect.V2_11, wal_cleanup_delay=0)
    await master.join()
    Relays(master.instance, master.collector)
    assert not master.collector.is_paused
    await master.close()


# --- the tail ---


async def test_relays_keep_no_rows_in_memory_without_replicas(master: Master) -> None:
    await master.join()
    assert master.instance.journal.on_written == []
    connection = await master.subscribe(master.instance.vclock)
    await master.put(1)
    await settle()
    assert master.relays.tail.size == 0, "all members have it"
    assert connection.receiver is not None
    connection.receiver.closed()
    assert master.instance.journal.on_written == []


async def test_election_caused_by_a_replica_is_announced_after_the_answer_to_its_request(newer: Master) -> None:
    await newer.join()
    elections = newer.instance.elections
    elections.start(RaftState(term=1), 1)
    elections.set_quorum(2, (1, 2))
    elections.connection(2, upstream=True)
    elections.configure(Config(mode=ElectionMode.CANDIDATE))
    connection = await newer.subscribe(newer.instance.vclock)
    elections.heard_term(2, 7)
    await newer.instance.journal.drain()
    first, *others = connection.take()
    assert first.type == RequestType.OK.value
    assert RequestType.RAFT.value in [row.type for row in others]
    assert elections.raft.peers.healthy_count == 2
    assert connection.receiver is not None
    connection.receiver.closed()
    assert elections.raft.peers.healthy_count == 1
    await elections.close()


async def test_elections_are_announced_to_all_replicas(newer: Master) -> None:
    await newer.join()
    connection = await newer.subscribe(newer.instance.vclock)
    connection.take()
    newer.relays.send_raft()
    assert [row.type for row in connection.take()] == [30]


async def test_closing_ends_all_connections(master: Master) -> None:
    await master.join()
    connections = [
        await master.subscribe(master.instance.vclock),
        await master.subscribe(VClock(), OTHER, is_anonymous=True),
    ]
    await master.relays.close()
    assert all(connection.is_closed for connection in connections)
