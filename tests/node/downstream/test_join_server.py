"""JOIN, FETCH_SNAPSHOT and REGISTER: the packets that a replica gets before it subscribes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import Row
from flowstone.node.downstream.join_server import JoinServer, raft_row, snapshot_packets
from flowstone.node.info import members
from flowstone.node.synchro.limbo_driver import Received, Waiter
from flowstone.replication.limbo.control_rows import Confirm, Promote, RaftState, Rollback, decode_control
from flowstone.replication.limbo.split_brain import SettlingRequest
from flowstone.replication.messages import FetchSnapshot, decode_vclock_reply
from flowstone.replication.vclock import VClock
from tests.node.masters import REPLICA, VERSION_2_6, VERSION_2_11, Connection, Master, kinds, lose_logs, settle

OTHER = UUID("44444444-4444-4444-8444-444444444444")


@pytest_asyncio.fixture
async def master(tmp_path: Path) -> AsyncIterator[Master]:
    async for made in running(tmp_path, Dialect.V2_6):
        yield made


@pytest_asyncio.fixture
async def newer(tmp_path: Path) -> AsyncIterator[Master]:
    async for made in running(tmp_path, Dialect.V2_11):
        yield made


async def running(path: Path, dialect: Dialect) -> AsyncIterator[Master]:
    made = Master(path, dialect)
    await made.create_space()
    await made.put(1)
    yield made
    await made.close()


def values(row: Row) -> Any:
    return unpack(row.body)


def tuples(rows: list[Row], space_id: int) -> list[Any]:
    return [values(row)[0x21] for row in rows if row.type == RequestType.INSERT and values(row)[0x10] == space_id]


async def test_join_sends_a_snapshot_the_registration_and_three_positions(master: Master) -> None:
    start = master.instance.vclock
    rows = (await master.join()).take()
    positions = [number for number, row in enumerate(rows) if row.type == RequestType.OK]
    assert [decode_vclock_reply(rows[number].body) for number in positions] == [
        start,
        start.advanced(1, start.get(1) + 1),
        start.advanced(1, start.get(1) + 1),
    ]
    assert positions[0] == 0
    assert positions[2] == len(rows) - 1
    snapshot, final = rows[1 : positions[1]], rows[positions[1] + 1 : -1]
    assert all(row.lsn == row.replica_id == 0 and row.timestamp == 0 for row in snapshot)
    assert tuples(snapshot, 512) == [(1,)]
    assert [(row.replica_id, row.lsn) for row in final] == [(1, start.get(1) + 1)]
    assert tuples(final, 320) == [(2, str(REPLICA))]
    assert dict(members(master.instance))[2] == str(REPLICA)


async def test_every_packet_of_a_join_carries_its_sync(newer: Master) -> None:
    rows = (await newer.join(sync=9, version=VERSION_2_11)).take()
    assert {row.sync for row in rows} == {9}


async def test_spaces_are_sent_by_id_without_local_or_temporary_ones(master: Master) -> None:
    await master.write(lambda txn: ddl.create_space(txn, "own", is_local=True))
    await master.write(lambda txn: ddl.create_index(txn, "own", "pk"))
    await master.write(lambda txn: ddl.create_space(txn, "gone", temporary=True))
    await master.write(lambda txn: ddl.create_index(txn, "gone", "pk"))
    for name in ("own", "gone"):
        space = master.instance.box.space(name)
        await master.write(lambda txn, space=space: statements.replace(txn, space, pack((1,))))  # type: ignore[misc]
    rows = [row for row in (await master.join()).take() if row.lsn == 0 and row.type == RequestType.INSERT]
    spaces = [values(row)[0x10] for row in rows]
    assert spaces == sorted(spaces)
    assert spaces[-1] == 512
    assert {"own", "gone"} <= {row[2] for row in tuples(rows, 280)}


async def test_join_sends_raft_and_promote_when_the_replica_sends_its_version(newer: Master) -> None:
    rows = (await newer.join(version=VERSION_2_11)).take()
    assert kinds(rows[:5]) == ["OK", "JOIN_META", "RAFT", "RAFT_PROMOTE", "JOIN_SNAPSHOT"]
    assert (values(rows[2]), rows[2].group_id) == ({0: 1}, 0)
    assert values(rows[3]) == {2: 0, 3: 0, 0x26: {}}
    rows = (await newer.join(OTHER)).take()
    assert kinds(rows[:2]) == ["OK", "INSERT"]


async def test_2_6_lacks_join_metadata(master: Master) -> None:
    rows = (await master.join(version=VERSION_2_11)).take()
    assert kinds(rows[:2]) == ["OK", "INSERT"]


def test_older_replicas_expect_raft_rows_to_be_local() -> None:
    plain = [(2, 11, 6), (2, 11, 9), (3, 2, 2), (3, 8, 0), (4, 0, 0)]
    marked = [(2, 6, 0), (2, 10, 0), (2, 11, 5), (3, 0, 0), (3, 2, 1)]
    for versions, group_id in ((plain, 0), (marked, 1)):
        for major, minor, patch in versions:
            assert raft_row(RaftState(term=1), major << 16 | minor << 8 | patch).group_id == group_id


def test_snapshot_row_equals_that_of_real_servers() -> None:
    raw = bytes.fromhex("94a776657273696f6e020301")
    assert snapshot_packets(272, [raw]).hex() == "ce00000017" + "8100028210ce0000011021" + raw.hex()
    assert snapshot_packets(272, [raw], 3).hex() == "ce00000019" + "82000201038210ce0000011021" + raw.hex()
    assert snapshot_packets(272, []) == b""


async def test_rows_written_during_the_snapshot_follow_it(master: Master) -> None:
    class Slow(Connection):
        has_written = False

        async def flushed(self) -> None:
            if not self.has_written:
                self.has_written = True
                await master.put(2)
                await master.put(3, 4)

    start = master.instance.vclock.get(1)
    rows = (await master.join(connection=Slow())).take()
    assert tuples([row for row in rows if not row.lsn], 512) == [(1,)]
    final = [row for row in rows if row.lsn]
    assert [row.lsn for row in final] == [start + 1, start + 2, start + 3, start + 4]
    assert [row.is_commit for row in final] == [True, False, True, True]


async def test_snapshot_is_consistent_and_includes_rows_pending_for_the_log(master: Master) -> None:
    transaction = master.instance.box.begin()
    statements.replace(transaction, master.instance.box.space("numbers"), pack((7,)))
    master.instance.commits.submit(transaction, lambda error: None)
    position = master.instance.journal.vclock
    rows = (await master.join()).take()
    assert decode_vclock_reply(rows[0].body) == position
    assert tuples([row for row in rows if not row.lsn], 512) == [(1,), (7,)]


async def test_join_fails_when_the_log_cannot_be_written(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(master.instance.journal, "_write", refuse)
    with pytest.raises(errors.WalIo):
        await master.join()
    assert master.collector.consumers == []


async def test_joining_member_gets_the_smallest_free_id(master: Master) -> None:
    for number in (2, 3, 5):
        await master.write(
            lambda txn, number=number: statements.insert(  # type: ignore[misc]
                txn, master.instance.box.space(320), pack((number, str(UUID(int=1 << 64 | number))))
            )
        )
    await master.join()
    assert dict(members(master.instance))[4] == str(REPLICA)


async def test_id_of_a_former_member_is_reused_only_when_all_ids_were_used(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = master.instance.box.space(320)
    first = UUID(int=1 << 64 | 2)
    await master.join(first)
    await master.write(lambda txn: statements.delete(txn, cluster, 0, pack((2,))))
    for number in range(3, 32):
        uuid = UUID(int=1 << 64 | number)
        await master.join(uuid)
        assert dict(members(master.instance))[number] == str(uuid)
    assert "former member" not in caplog.text
    await master.join()
    assert dict(members(master.instance))[2] == str(REPLICA)
    assert f"{REPLICA} gets id 2 of a former member" in caplog.text


async def test_thirty_second_member_is_rejected(master: Master) -> None:
    for number in range(2, 32):
        await master.join(UUID(int=(0x4 << 76) | (0x8 << 60) | number))
    connection = Connection()
    with pytest.raises(errors.ReplicaMax, match="Replica count limit reached: 32"):
        await master.join(connection=connection)
    assert len(dict(members(master.instance))) == 31
    assert len(master.collector.consumers) == 30


async def test_rejoining_member_keeps_its_id_without_a_write(master: Master) -> None:
    await master.join()
    before = master.instance.vclock
    master.instance.box.is_read_only = True
    rows = (await master.join()).take()
    assert [row for row in rows if row.lsn] == []
    assert master.instance.vclock == before
    assert len(master.collector.consumers) == 1


async def waiting(master: Master) -> asyncio.Task[None]:
    """Run a synchronous transaction that lacks a quorum."""
    await master.write(lambda txn: ddl.create_space(txn, "sync", is_sync=True))
    await master.write(lambda txn: ddl.create_index(txn, "sync", "pk"))
    master.instance.queue.configure(quorum=2, timeout=5.0)
    space = master.instance.box.space("sync")
    task = asyncio.create_task(master.write(lambda txn: statements.replace(txn, space, pack((1,)))))
    await master.clock.advance(0.1)
    assert len(master.instance.queue.limbo) == 1
    return task


async def test_join_waits_for_verdicts_on_pending_transactions(master: Master) -> None:
    writing = await waiting(master)
    connection = Connection()
    task = asyncio.create_task(master.join(connection=connection))
    await master.clock.advance(1.0)
    assert not connection.sent
    master.instance.queue.ack(2, master.instance.vclock)
    await writing
    await task
    assert connection.sent


async def test_join_fails_with_the_transaction_it_waits_for(master: Master) -> None:
    writing = await waiting(master)
    task = asyncio.create_task(master.join())
    await asyncio.sleep(0)
    rollback = SettlingRequest(1, Rollback(1, master.instance.vclock.get(1)))
    lsn = master.instance.vclock.get(1) + 1
    row = Row(RequestType.RAFT_ROLLBACK.value, 1, lsn=lsn, timestamp=1.0, tsn=lsn, body=rollback.body.encode())
    master.instance.queue.decide(rollback, Received(row.encode(), lambda: b"", {1: lsn}, lambda error: None))
    with pytest.raises(errors.SyncRollback):
        await task
    with pytest.raises(errors.SyncRollback):
        await writing
    assert master.collector.consumers == []


class Effect:
    """Return a transaction of another member."""

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def hide_from(self, view: object) -> None: ...


def pend(master: Master) -> JoinServer:
    """Put a synchronous transaction of member 2 into the queue; return a server of joins."""
    queue, effect = master.instance.queue, Effect()
    master.instance.box.in_flight.append(effect)
    entry = queue.receive(Waiter(effect, lambda error: None), origin_id=2, lsn=1, is_synchronous=True)
    assert entry is not None
    queue.written(entry, 1)
    return JoinServer(master.instance, "", Connection(), 1)


async def test_registration_waits_for_foreign_transactions_of_2_6(master: Master) -> None:
    join = pend(master)
    task = asyncio.create_task(join.register(REPLICA))
    await settle()
    assert not task.done()
    confirm = Confirm(2, 1)
    row = Row(RequestType.RAFT_CONFIRM.value, 2, lsn=2, timestamp=1.0, tsn=2, body=confirm.encode())
    received = Received(row.encode(), lambda: b"", {2: 2}, lambda error: None)
    master.instance.queue.decide(SettlingRequest(2, confirm), received)
    await task
    assert str(REPLICA) in dict(members(master.instance)).values()


async def test_registration_fails_when_foreign_transactions_stay_pending(master: Master) -> None:
    join = pend(master)
    master.instance.queue.configure(timeout=0.05)
    with pytest.raises(errors.UncommittedForeignSyncTxns):
        await join.register(REPLICA)
    assert str(REPLICA) not in dict(members(master.instance)).values()


async def test_confirm_in_the_final_stage_is_sent_to_2_6_as_a_nop(master: Master) -> None:
    await master.write(lambda txn: ddl.create_space(txn, "sync", is_sync=True))
    await master.write(lambda txn: ddl.create_index(txn, "sync", "pk"))

    class Slow(Connection):
        has_written = False

        async def flushed(self) -> None:
            if not self.has_written:
                self.has_written = True
                space = master.instance.box.space("sync")
                await master.write(lambda txn: statements.replace(txn, space, pack((1,))))
                await master.put(5)

    rows = [row for row in (await master.join(connection=Slow())).take() if row.lsn]
    assert [RequestType(row.type).name for row in rows] == ["REPLACE", "NOP", "REPLACE", "INSERT"]
    assert [row.lsn - rows[0].lsn for row in rows] == [0, 1, 2, 3]


async def test_fetched_snapshot_ends_with_its_position(newer: Master) -> None:
    before = newer.instance.vclock
    rows = (await newer.fetch(FetchSnapshot(VERSION_2_11), sync=3)).take()
    assert kinds(rows[:5]) == ["OK", "JOIN_META", "RAFT", "RAFT_PROMOTE", "JOIN_SNAPSHOT"]
    assert decode_vclock_reply(rows[-1].body) == before.without_zero()
    assert not any(row.lsn for row in rows)
    assert newer.instance.vclock == before
    assert newer.collector.consumers == []


async def test_join_snapshot_marks_transactions_pending_at_its_start_as_confirmed(newer: Master) -> None:
    """Otherwise the next PROMOTE, which decides these rows, would confirm rows that the replica does not know."""
    queue = newer.instance.queue
    await queue.promote(2)
    writing = await waiting(newer)
    newest = queue.limbo.newest
    assert newest is not None
    fetching = asyncio.create_task(newer.fetch(FetchSnapshot(VERSION_2_11)))
    await newer.clock.advance(1.0)
    queue.ack(2, newer.instance.vclock)
    await writing
    row = (await fetching).take()[3]
    state = decode_control(row.type, row.body)
    assert state == Promote(1, newest.lsn, 2, VClock({1: newest.lsn}))


async def test_registration_sends_the_rows_up_to_it(master: Master) -> None:
    start = master.instance.vclock.get(1)
    rows = (await master.register()).take()
    assert kinds(rows) == [f"1:{start + 1}", "OK"]
    assert tuples(rows, 320) == [(2, str(REPLICA))]


async def test_newer_servers_send_all_rows_that_the_registering_replica_lacks(newer: Master) -> None:
    start = newer.instance.vclock.get(1)
    rows = (await newer.register(vclock=VClock({1: start - 1}))).take()
    assert kinds(rows) == [f"1:{start}", f"1:{start + 1}", "OK"]
    assert [consumer.vclock for consumer in newer.collector.consumers] == [VClock({1: start + 1})]


async def test_logs_for_a_registering_replica_may_be_lost(newer: Master, tmp_path: Path) -> None:
    lose_logs(tmp_path)
    with pytest.raises(errors.XlogGap, match=r"Missing \.xlog file between LSN 1 "):
        await newer.register(vclock=VClock({1: 1}))
    assert newer.collector.consumers == []


async def test_join_keeps_no_logs_after_the_replica_disconnects(master: Master) -> None:
    class Gone(Connection):
        async def flushed(self) -> None:
            await asyncio.Event().wait()

    task = asyncio.create_task(master.join(connection=Gone()))
    await settle()
    assert len(master.collector.consumers) == 1
    assert len(master.instance.box.views) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert master.collector.consumers == []
    assert list(master.instance.box.views) == []
    assert REPLICA not in dict(members(master.instance)).values()


def test_version_ids_equal_those_on_the_wire() -> None:
    assert (VERSION_2_6, VERSION_2_11) == (132608, 133897)
