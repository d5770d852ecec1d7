"""One relay: the packets after SUBSCRIBE, from the tail and from the files, to fast, slow and lost replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import Row
from flowstone.node.downstream import relay_stream
from flowstone.node.wal import log_reader
from flowstone.node.wal.journal import WalMode
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.messages import Ack, decode_heartbeat, decode_subscribe_reply, encode_ack
from flowstone.replication.vclock import VClock
from tests.node.instances import REPLICASET_UUID
from tests.node.masters import REPLICA, Connection, Master, kinds, lose_logs, settle, until


@pytest_asyncio.fixture
async def master(tmp_path: Path) -> AsyncIterator[Master]:
    async for made in running(tmp_path, Dialect.V2_6):
        yield made


@pytest_asyncio.fixture
async def newer(tmp_path: Path) -> AsyncIterator[Master]:
    async for made in running(tmp_path, Dialect.V2_11):
        yield made


async def running(path: Path, dialect: Dialect) -> AsyncIterator[Master]:
    """Return a master with the replica as a member of id 2."""
    made = Master(path, dialect)
    await made.create_space()
    await made.join()
    yield made
    await made.close()


def lsn_of(master: Master) -> int:
    return master.instance.vclock.get(1)


def damage(directory: Path) -> None:
    """Make the first log unreadable."""
    path = min(directory.glob("*.xlog"))
    path.write_bytes(path.read_bytes().replace(b"XLOG", b"JUNK", 1))


async def read(connection: Connection, last: int, replica_id: int = 1) -> list[str]:
    """Return the sent packets, up to row `last` of an instance."""
    found: list[str] = []

    def has_come() -> bool:
        found.extend(kinds(connection.take()))
        return f"{replica_id}:{last}" in found

    await until(has_come)
    return found


# --- start of a relay ---


async def test_subscribe_is_answered_with_identity_and_position_and_then_a_heartbeat(master: Master) -> None:
    answer, heartbeat = (await master.subscribe(master.instance.vclock, sync=5)).take()
    reply = decode_subscribe_reply(answer)
    assert (reply.replica_id, reply.vclock, reply.replicaset_uuid) == (1, master.instance.vclock, REPLICASET_UUID)
    assert (heartbeat.replica_id, heartbeat.timestamp) == (1, master.clock.wall())
    assert heartbeat.body == b""
    assert answer.sync == heartbeat.sync == 5


async def test_newer_servers_send_the_term_and_numbered_heartbeats(newer: Master) -> None:
    first = await newer.subscribe(newer.instance.vclock)
    rows = first.take()
    assert kinds(rows) == ["OK", "RAFT", "OK"]
    assert unpack(rows[1].body) == {0: 1, 2: 1}
    assert decode_heartbeat(rows[2]).vclock_sync == 1
    assert first.receiver is not None
    first.receiver.closed()
    again = (await newer.subscribe(newer.instance.vclock)).take()
    assert decode_heartbeat(again[2]).vclock_sync == 2, "the count covers all connections of the replica"


@pytest.mark.parametrize(("fields", "kind"), [({"is_anonymous": True}, "anonymous"), ({"version": 2 << 16}, "old")])
async def test_raft_rows_are_sent_only_to_members_that_support_them(
    newer: Master, fields: dict[str, Any], kind: str
) -> None:
    uuid = UUID(int=(0x4 << 76) | (0x8 << 60) | 9) if kind == "anonymous" else REPLICA
    connection = await newer.subscribe(newer.instance.vclock, uuid, **fields)
    assert kinds(connection.take()) == ["OK", "OK"]


async def test_existing_rows_precede_the_first_heartbeat(newer: Master) -> None:
    last = lsn_of(newer)
    connection = await newer.subscribe(VClock({1: last - 2}))
    await until(lambda: len(connection.sent) > 150)
    rows = connection.take()
    assert kinds(rows) == ["OK", "RAFT", f"1:{last - 1}", f"1:{last}", "OK"]
    assert rows[-1].timestamp == 0.0, "the replica computes its lag from the rows"


async def test_relay_skips_rows_that_the_replica_has(master: Master) -> None:
    last = lsn_of(master)
    connection = await master.subscribe(VClock({1: last + 2}))
    assert kinds(connection.take()) == ["OK", "OK"]
    for number in range(3):
        await master.put(number)
        await settle()
    assert kinds(connection.take()) == [f"1:{last + 3}"]


async def test_missing_logs_are_reported_after_the_heartbeat(master: Master, tmp_path: Path) -> None:
    lose_logs(tmp_path)
    connection = await master.subscribe(VClock({1: 1}))
    await until(lambda: connection.is_closed)
    error = connection.refusal()
    assert (error.code, error.message.startswith("Missing .xlog file between LSN 1 {1: 1} and ")) == (32, True)
    assert error.stack is not None
    assert error.stack.errors[0].type == "XlogGapError"
    shown = master.relays.downstream(REPLICA)
    assert shown == {"status": "stopped", "message": error.message}
    with pytest.raises(errors.ProcLua):
        connection.take()


async def test_unreadable_log_closes_the_connection_without_an_error(
    master: Master, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Most errors would stop the replica for good; after a lost connection it retries."""
    damage(tmp_path)
    connection = await master.subscribe(VClock({1: 1}))
    await until(lambda: connection.is_closed)
    assert "OK" in kinds(connection.take())
    assert "at 127.0.0.1:5000 is stopped" in caplog.text
    assert "not a log file" in caplog.text


# --- live ---


async def test_transactions_are_sent_complete_as_they_are_written(master: Master) -> None:
    connection = await master.subscribe(master.instance.vclock)
    connection.take()
    last = lsn_of(master)
    await master.put(1)
    await master.put(2, 3)
    await settle()
    rows = connection.take()
    assert kinds(rows) == [f"1:{last + 1}", f"1:{last + 2}", f"1:{last + 3}"]
    assert [row.is_commit for row in rows] == [True, False, True]


async def test_local_rows_are_not_sent_and_their_transaction_still_ends(newer: Master) -> None:
    await newer.write(lambda txn: ddl.create_space(txn, "own", is_local=True))
    await newer.write(lambda txn: ddl.create_index(txn, "own", "pk"))
    box = newer.instance.box
    connection = await newer.subscribe(newer.instance.vclock)
    connection.take()

    def work(transaction: BoxTransaction) -> None:
        for number, name in enumerate(("numbers", "numbers", "own")):
            statements.insert(transaction, box.space(name), pack((number,)))

    await newer.write(work)
    await settle()
    rows = connection.take()
    assert [row.group_id for row in rows] == [0, 0]
    assert [row.is_commit for row in rows] == [False, True]


async def test_rows_of_excluded_originators_are_omitted(master: Master) -> None:
    connection = await master.subscribe(master.instance.vclock, id_filter=(3,))
    connection.take()
    journal = master.instance.journal
    for replica_id in (3, 4):
        row = Row(RequestType.NOP.value, replica_id, 0, 1, 1.0, 1).encode()
        journal.submit_replicated(row, {replica_id: 1}, lambda error: None)
        journal.flush()
        await journal.drain()
    await settle()
    assert kinds(connection.take()) == ["4:1"]


async def test_replica_gets_back_its_earlier_rows_and_no_later_ones(master: Master) -> None:
    journal = master.instance.journal

    async def write_of_replica(lsn: int) -> None:
        journal.submit_replicated(
            Row(RequestType.NOP.value, 2, 0, lsn, 1.0, lsn).encode(), {2: lsn}, lambda error: None
        )
        journal.flush()
        await journal.drain()

    await write_of_replica(1)
    await write_of_replica(2)
    connection = await master.subscribe(VClock({1: lsn_of(master), 2: 1}))
    found = await read(connection, 2, replica_id=2)
    await write_of_replica(3)
    await master.put(1)
    await settle()
    found += kinds(connection.take())
    assert [kind for kind in found if ":" in kind] == ["2:2", f"1:{lsn_of(master)}"]


async def test_two_replicas_share_encoded_chunks(master: Master) -> None:
    other = UUID(int=(0x4 << 76) | (0x8 << 60) | 7)
    first = await master.subscribe(master.instance.vclock)
    second = await master.subscribe(master.instance.vclock, other, is_anonymous=True, id_filter=(0,))
    first.take(), second.take()
    await master.put(1)
    await settle()
    assert first.sent
    assert first.sent == second.sent


async def test_promotion_is_sent_only_after_its_term(newer: Master) -> None:
    connection = await newer.subscribe(newer.instance.vclock)
    connection.take()
    journal, lsn = newer.instance.journal, lsn_of(newer) + 1
    body = Promote(0, 0, 5).encode()
    row = Row(RequestType.RAFT_PROMOTE.value, 1, 0, lsn, 1.0, lsn, body=body).encode()
    journal.submit(row, 1, lambda error: None)
    journal.flush()
    await until(lambda: newer.instance.elections.term == 5)
    await settle()
    raft, promote = connection.take()
    assert unpack(raft.body)[0] == 5
    assert promote.lsn == lsn
    await newer.put(1)
    await settle()
    assert [row.type for row in connection.take()] == [RequestType.REPLACE.value]


async def test_promotion_in_a_file_is_sent_only_after_its_term(newer: Master) -> None:
    start = newer.instance.vclock
    journal, lsn = newer.instance.journal, lsn_of(newer) + 1
    row = Row(RequestType.RAFT_PROMOTE.value, 1, 0, lsn, 1.0, lsn, body=Promote(0, 0, 5).encode()).encode()
    journal.submit(row, 1, lambda error: None)
    journal.flush()
    await journal.drain()
    connection = await newer.subscribe(start)
    await until(lambda: len(connection.sent) and newer.instance.elections.term == 5)
    await until(lambda: newer.instance.journal.is_idle)
    await settle()
    rows = connection.take()
    types = [row.type for row in rows]
    promote = types.index(RequestType.RAFT_PROMOTE.value)
    assert any(unpack(row.body)[0] == 5 for row in rows[:promote] if row.type == RequestType.RAFT.value)


async def test_term_in_an_ack_is_ignored_in_2_6(master: Master) -> None:
    """Its log must not have a RAFT row: no server of that version starts from it."""
    before = master.instance.vclock
    connection = await master.subscribe(before)
    assert connection.receiver is not None
    connection.receiver.received(encode_ack(Ack(before, 9)))
    assert (master.instance.elections.term, master.instance.journal.vclock) == (1, before)


async def test_term_in_an_ack_is_processed_before_the_ack_counts(newer: Master) -> None:
    connection = await newer.subscribe(newer.instance.vclock)
    assert connection.receiver is not None
    terms: list[int] = []
    elections = newer.instance.elections
    newer.relays.on_ack.append(lambda number, vclock: terms.append(elections.raft.volatile_term))
    await newer.put(1)
    await settle()
    connection.receiver.received(encode_ack(Ack(newer.instance.vclock.without_zero(), 9)))
    assert terms == [9]
    await newer.instance.journal.drain()


async def test_relay_sends_only_written_rows(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = await master.subscribe(master.instance.vclock)
    connection.take()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(master.instance.journal, "_write", refuse)
        with pytest.raises(errors.WalIo):
            await master.put(1)
    last = lsn_of(master)
    await master.put(2)
    await settle()
    assert kinds(connection.take()) == [f"1:{last + 1}"]


async def test_rows_wait_for_the_disk_with_synchronous_writes(tmp_path: Path) -> None:
    master = Master(tmp_path, Dialect.V2_6)
    master.instance.journal.mode = WalMode.FSYNC
    await master.create_space()
    await master.join()
    connection = await master.subscribe(VClock({1: 1}))
    await master.put(1)
    found = await read(connection, lsn_of(master))
    assert [kind for kind in found if ":" in kind] == [f"1:{lsn}" for lsn in range(2, lsn_of(master) + 1)]
    await master.close()


# --- lag ---


async def test_relay_reads_files_first_and_then_the_tail_in_memory(master: Master) -> None:
    for number in range(50):
        await master.put(number)
        if number % 20 == 0:
            await master.instance.journal.rotate()
    connection = await master.subscribe(VClock({1: 1}))
    for number in range(50):
        await master.put(number)
    found = await read(connection, lsn_of(master))
    assert [kind for kind in found if ":" in kind] == [f"1:{lsn}" for lsn in range(2, lsn_of(master) + 1)]


async def test_slow_reader_continues_from_files_without_gaps(master: Master) -> None:
    connection = await master.subscribe(master.instance.vclock, connection=Connection(room=400))
    start = lsn_of(master)
    master.relays.tail.size_max = 300
    for number in range(200):
        await master.put(number)
        await settle()
    assert len(connection.sent) < 1000
    assert master.relays.tail.size <= 300
    connection.read()
    found = await read(connection, lsn_of(master))
    assert [kind for kind in found if ":" in kind] == [f"1:{lsn}" for lsn in range(start + 1, lsn_of(master) + 1)]


async def test_slow_reader_within_the_tail_continues_from_memory(master: Master) -> None:
    connection = await master.subscribe(master.instance.vclock, connection=Connection(room=300))
    start = lsn_of(master)
    for number in range(20):
        await master.put(number)
        await settle()
    connection.read()
    found = kinds(connection.take())
    assert [kind for kind in found if ":" in kind] == [f"1:{lsn}" for lsn in range(start + 1, lsn_of(master) + 1)]


async def test_silent_replica_is_not_flooded(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_stream, "UNANSWERED_MAX", 200)
    connection = await master.subscribe(master.instance.vclock)
    start = lsn_of(master)
    for number in range(50):
        await master.put(number)
        await settle()
    assert len(connection.sent) < 600
    while f"1:{lsn_of(master)}" not in (found := kinds(connection.take())):
        assert found, "each answer has more"
        start += sum(":" in kind for kind in found)
        master.acknowledge(connection, VClock({1: start}))
        await settle()


async def test_silent_replica_is_not_flooded_from_files(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_stream, "UNANSWERED_MAX", 200)
    monkeypatch.setattr(log_reader, "ROWS_MAX", 3)
    for number in range(50):
        await master.put(number)
    connection = await master.subscribe(VClock({1: 1}))
    found: list[str] = []

    def has_come() -> bool:
        rows = connection.take()
        if rows:
            found.extend(kinds(rows))
            master.acknowledge(connection, VClock({1: 1}))
        return f"1:{lsn_of(master)}" in found

    await until(has_come)
    assert [kind for kind in found if ":" in kind] == [f"1:{lsn}" for lsn in range(2, lsn_of(master) + 1)]


# --- heartbeats and timeouts ---


async def test_2_6_sends_heartbeats_only_when_idle(master: Master) -> None:
    connection = await master.subscribe(master.instance.vclock)
    connection.take()
    await master.clock.advance(0.6)
    await master.put(1)
    await settle()
    connection.take()
    await master.clock.advance(0.9)
    assert connection.take() == []
    await master.clock.advance(0.2)
    (heartbeat,) = connection.take()
    assert (heartbeat.lsn, heartbeat.timestamp > 0) == (0, True)


async def test_newer_servers_always_send_heartbeats(newer: Master) -> None:
    connection = await newer.subscribe(newer.instance.vclock)
    connection.take()
    await newer.clock.advance(0.6)
    await newer.put(1)
    await settle()
    await newer.clock.advance(0.5)
    rows = connection.take()
    assert kinds(rows) == [f"1:{lsn_of(newer)}", "OK"]
    assert rows[1].timestamp == 0.0
    newer.acknowledge(connection, newer.instance.vclock)
    await newer.clock.advance(1.0)
    assert [row.timestamp > 0 for row in connection.take()] == [True]


async def test_members_are_queried_for_their_position_and_answer_by_number(newer: Master) -> None:
    answers: list[tuple[int, int, VClock]] = []
    newer.relays.on_answer.append(lambda *answer: answers.append(answer))
    connection = await newer.subscribe(newer.instance.vclock)
    assert newer.relays.synchronize() == {2: 2}
    assert newer.relays.synchronize() == {2: 2}, "nothing was sent yet: both share the number"
    connection.take()
    await settle()
    assert [decode_heartbeat(row).vclock_sync for row in connection.take()] == [2]
    assert newer.relays.synchronize() == {2: 3}
    assert connection.receiver is not None
    connection.receiver.received(encode_ack(Ack(newer.instance.vclock, 1, 2)))
    connection.receiver.received(encode_ack(Ack(newer.instance.vclock, 1, 2)))
    assert answers == [(2, 2, newer.instance.vclock.without_zero())] * 2, "sent without new rows, too"
    connection.receiver.closed()
    assert newer.relays.synchronize() == {2: 3}
    again = (await newer.subscribe(newer.instance.vclock)).take()
    assert decode_heartbeat(again[-1]).vclock_sync == 3, (
        "a reconnected replica gets the question with its first heartbeat"
    )


async def test_hanging_reader_is_queried_when_it_reads_again(newer: Master) -> None:
    connection = await newer.subscribe(newer.instance.vclock, connection=Connection(room=0))
    connection.take()
    newer.relays.synchronize()
    await settle()
    assert connection.take() == []
    connection.read()
    assert [decode_heartbeat(row).vclock_sync for row in connection.take()] == [2]


async def test_anonymous_replicas_are_not_asked(newer: Master) -> None:
    uuid = UUID(int=(0x4 << 76) | (0x8 << 60) | 9)
    connection = await newer.subscribe(newer.instance.vclock, uuid, is_anonymous=True)
    connection.take()
    assert 0 not in newer.relays.synchronize()
    await settle()
    assert connection.take() == []


async def test_silent_replica_is_disconnected(master: Master) -> None:
    connection = await master.subscribe(master.instance.vclock)
    for _ in range(5):
        await master.clock.advance(1.0)
        master.acknowledge(connection, master.instance.vclock)
    await master.clock.advance(3.9)
    assert not connection.is_closed
    await master.clock.advance(0.2)
    assert connection.is_closed
    shown = master.relays.downstream(REPLICA)
    assert shown == {"status": "stopped", "message": "timed out", "system_message": "Connection timed out"}


async def test_hanging_reader_gets_no_heartbeats_and_is_disconnected(master: Master) -> None:
    connection = await master.subscribe(master.instance.vclock, connection=Connection(room=0))
    await master.put(1)
    await settle()
    size = len(connection.sent)
    await master.clock.advance(3.9)
    assert len(connection.sent) == size
    await master.clock.advance(0.2)
    assert connection.is_closed


async def test_changed_timeout_applies_at_once(master: Master) -> None:
    master.instance.configuration = master.instance.configuration.changed({"replication_timeout": 100.0})
    connection = await master.subscribe(master.instance.vclock)
    await master.clock.advance(1.0)
    master.instance.configuration = master.instance.configuration.changed({"replication_timeout": 0.5})
    await master.clock.advance(4.0)
    assert connection.is_closed


async def test_relay_closes_the_connection_on_any_message_other_than_an_ack(master: Master) -> None:
    connection = await master.subscribe(master.instance.vclock)
    assert connection.receiver is not None
    connection.receiver.received(b"\xc1")
    assert connection.is_closed
    assert connection.refusal().code == errors.InvalidMsgpack.code


# --- ACKs ---


async def test_relay_uses_the_last_of_several_acks_in_one_read(newer: Master) -> None:
    connection = await newer.subscribe(VClock({1: 1}))
    await until(lambda: len(connection.sent) > 200)
    told: list[tuple[int, VClock]] = []
    newer.relays.on_ack.append(lambda replica_id, vclock: told.append((replica_id, vclock)))
    stamped = newer.clock.wall() - 0.25
    acks = [Ack(VClock({1: 2}), timestamp=stamped - 1), Ack(VClock({1: 3}), timestamp=stamped), Ack(VClock({1: 4}))]
    data = b"".join(map(encode_ack, acks))
    assert connection.receiver is not None
    connection.receiver.received(data[:10])
    connection.receiver.received(data[10:])
    assert told == [(2, VClock({1: 4}))]
    shown = newer.relays.downstream(REPLICA)
    assert shown is not None
    assert (shown["status"], shown["vclock"]) == ("follow", {1: 4})
    assert shown["lag"] == pytest.approx(0.25)
    assert newer.relays.acked(REPLICA) == VClock({1: 4})
