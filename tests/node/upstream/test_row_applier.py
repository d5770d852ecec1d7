"""Live application: transactions of peers reach the box and the log completely, once and in order, or not at all."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from typing import Any

import pytest

from flowstone.box.dialect import Dialect
from flowstone.box.engine.transaction import Statement
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.node.wal.journal import WalMode
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, Rollback
from flowstone.replication.vclock import VClock
from flowstone.xlog.transactions import make_transaction
from tests.node.applied_rows import (
    BEHIND,
    INDEXED,
    INSERT,
    NOP,
    OTHER,
    PLAIN,
    REPLACE,
    SYNC,
    SYNCHRONOUS,
    UPDATE,
    Master,
    Replica,
    SynchronousHistory,
    drop,
    put,
    random_transactions,
    settled,
    slab,
)


@pytest.mark.parametrize("count", [1, 5, 100])
async def test_applied_rows_reach_box_and_log_with_their_lsns_and_our_timestamps(count: int) -> None:
    replica, master = Replica(), Master(lsn=10)
    replica.applying.apply(slab(*(master.does(put(REPLACE, key, "a")) for key in range(count))))
    await settled(replica)
    assert replica.content() == dict.fromkeys(range(count), ("a",))
    rows = replica.rows()
    assert [(row.replica_id, row.lsn, row.tsn) for row in rows] == [(2, 11 + n, 11 + n) for n in range(count)]
    assert all(row.timestamp not in (0.0, 1.5e9) for row in rows)
    assert replica.journal.written_vclock == VClock({2: 10 + count})
    assert replica.applying.in_flight_bytes == 0
    assert not replica.box.in_flight


async def test_transaction_boundaries_are_preserved() -> None:
    replica, master = Replica(), Master()
    transactions = [master.does(*(put(INSERT, 3 * n + i, "a") for i in range(3))) for n in range(5)]
    transactions.append(master.does((NOP, None), put(REPLACE, 1, "b"), (NOP, None)))
    replica.applying.apply(slab(*transactions))
    await settled(replica)
    sent = [row for rows in transactions for row in rows]
    assert [(row.type, row.lsn, row.tsn, row.flags, row.body) for row in replica.rows()] == [
        (row.type, row.lsn, row.tsn, row.flags, row.body) for row in sent
    ]


@pytest.mark.parametrize("seed", range(12))
async def test_bulk_and_single_application_give_the_same_result(seed: int) -> None:
    rng = Random(seed)
    transactions = random_transactions(rng, 300)
    alone, together = Replica(), Replica()
    for rows in transactions:
        alone.applying.apply(slab(rows))
    left = list(transactions)
    while left:
        count = rng.choice((1, 3, 20, 150))
        together.applying.apply(slab(*left[:count]))
        left = left[count:]
    await settled(alone)
    await settled(together)
    assert together.everything() == alone.everything()
    sent = [(row.type, row.replica_id, row.lsn, row.tsn, row.flags, row.body) for rows in transactions for row in rows]
    for replica in (alone, together):
        assert [(r.type, r.replica_id, r.lsn, r.tsn, r.flags, r.body) for r in replica.rows()] == sent


@pytest.mark.parametrize("dialect", [Dialect.V2_6, Dialect.V2_11])
@pytest.mark.parametrize("seed", range(8))
async def test_bulk_and_single_application_agree_with_verdicts_and_known_parts(seed: int, dialect: Dialect) -> None:
    rng = Random(seed)
    left = SynchronousHistory(rng, dialect).transactions(250)
    alone, together, held = (Replica(mode, dialect) for mode in (WalMode.WRITE, WalMode.WRITE, WalMode.FSYNC))
    for rows in left:
        alone.applying.apply(slab(rows))
    while left:
        count = rng.choice((1, 3, 20, 150))
        for replica in (together, held):
            replica.applying.apply(slab(*left[:count]))
        left = left[count:]
    for replica in (alone, together, held):
        await settled(replica)
        assert replica.everything() == alone.everything()
        shown = [(r.type, r.replica_id, r.lsn, r.tsn, r.flags, r.body) for r in replica.rows()]
        assert shown == [(r.type, r.replica_id, r.lsn, r.tsn, r.flags, r.body) for r in alone.rows()]
        assert [each.lsn for each in replica.limbo.pending] == [each.lsn for each in alone.limbo.pending]
        assert replica.failures == []


@pytest.mark.parametrize("seed", range(6))
async def test_rows_received_from_two_peers_are_applied_once(seed: int) -> None:
    rng = Random(seed)
    transactions = random_transactions(rng, 200)
    once, twice = Replica(), Replica()
    once.applying.apply(slab(*transactions))
    places = [0, 0]
    while min(places) < len(transactions):
        peer = rng.randrange(2)
        count = rng.choice((1, 4, 30))
        part = transactions[places[peer] : places[peer] + count]
        places[peer] += count
        if part:
            twice.applying.apply(slab(*part))
    await settled(once)
    await settled(twice)
    assert twice.everything() == once.everything()
    assert [(row.replica_id, row.lsn) for row in twice.rows()] == [(row.replica_id, row.lsn) for row in once.rows()]


async def test_rest_of_a_partly_received_transaction_is_applied() -> None:
    """A 1.10 master sent each row as a transaction of its own; another one sends them together."""
    replica, old, new = Replica(), Master(), Master()
    replica.applying.apply(slab(old.does(put(INSERT, 1)), old.does(put(INSERT, 2))))
    replica.applying.apply(slab(new.does(put(INSERT, 1), put(INSERT, 2), put(INSERT, 3), put(INSERT, 4))))
    await settled(replica)
    assert sorted(replica.content()) == [1, 2, 3, 4]
    assert [(row.lsn, row.tsn) for row in replica.rows()] == [(1, 1), (2, 2), (3, 3), (4, 3)]


@pytest.mark.parametrize("count", [6, 40])
async def test_transaction_without_its_first_rows_is_recovered_from_the_log(count: int) -> None:
    replica, old, new = Replica(), Master(), Master()
    replica.applying.apply(slab(*(old.does(put(REPLACE, key)) for key in range(3))))
    replica.applying.apply(slab(new.does(*(put(REPLACE, key) for key in range(count)))))
    await settled(replica)
    assert [(row.lsn, row.tsn) for row in replica.rows()[3:]] == [(4 + n, 4) for n in range(count - 3)]


async def test_rest_of_a_multi_origin_transaction_ends_where_its_last_row_is_known() -> None:
    replica, one, two = Replica(), Master(2), Master(3)
    known = two.does(put(REPLACE, 9))
    mixed = list(make_transaction([*one.does(put(REPLACE, 1)), *one.does(put(REPLACE, 2)), *known]).rows)
    replica.applying.apply(slab(known))
    replica.applying.apply(slab(mixed, one.does(put(REPLACE, 3))))
    await settled(replica)
    rows = [(row.replica_id, row.lsn, row.tsn, row.is_commit) for row in replica.rows()]
    assert rows == [(3, 1, 1, True), (2, 1, 1, False), (2, 2, 1, True), (2, 3, 3, True)]


@pytest.mark.parametrize("before", [2, 50])
async def test_failed_transaction_is_rolled_back_and_earlier_ones_are_kept(before: int) -> None:
    replica, master = Replica(), Master()
    good = [master.does(put(INSERT, key)) for key in range(before)]
    bad = master.does(put(INSERT, 900), put(INSERT, 1), put(INSERT, 901))
    behind = master.does(put(INSERT, 902))
    with pytest.raises(errors.TupleFound, match="Duplicate key exists in unique index 'i0' in space 's512'") as caught:
        replica.applying.apply(slab(*good, bad, behind))
    assert caught.value.hint == f"failed at row {before + 2} of replica 2"
    await settled(replica)
    assert sorted(replica.content()) == list(range(before))
    assert replica.journal.vclock == VClock({2: before})
    assert len(replica.rows()) == before


@pytest.mark.parametrize("before", [2, 50])
async def test_skipped_conflict_becomes_a_nop_with_the_same_lsn(before: int) -> None:
    replica, master = Replica(), Master()
    replica.skips = True
    good = [master.does(put(INSERT, key, "old")) for key in range(before)]
    mixed = master.does(put(INSERT, 900), put(INSERT, 1, "new"), put(INSERT, 901))
    replica.applying.apply(slab(*good, mixed, master.does(put(INSERT, 1, "new"))))
    await settled(replica)
    assert sorted(replica.content()) == [*range(before), 900, 901]
    assert replica.content()[1] == ("old",)
    last = [(row.type, row.lsn, row.tsn, row.is_commit, bool(row.body)) for row in replica.rows()[-4:]]
    n = before
    assert last == [
        (INSERT, n + 1, n + 1, False, True),
        (NOP, n + 2, n + 1, False, False),
        (INSERT, n + 3, n + 1, True, True),
        (NOP, n + 4, n + 4, True, False),
    ]


async def test_only_duplicate_keys_are_skipped() -> None:
    replica, master = Replica(), Master()
    replica.skips = True
    with pytest.raises(errors.NoSuchSpace):
        replica.applying.apply(slab(master.does(put(INSERT, 1, space=999))))


async def test_read_only_instance_applies_rows() -> None:
    replica, master = Replica(), Master()
    replica.box.is_read_only = True
    replica.applying.apply(slab(*(master.does(put(INSERT, key)) for key in range(20)), master.does(drop(3))))
    await settled(replica)
    assert len(replica.content()) == 19
    assert not replica.box.is_recovering


async def test_rows_without_an_originator_are_rejected() -> None:
    replica = Replica()
    with pytest.raises(errors.UnknownReplica):
        replica.applying.apply(slab([Row(REPLACE, 0, 0, 5, 1.0, 5, body=pack({0x10: PLAIN, 0x21: (1,)}))]))


async def test_definitions_take_effect_between_rows() -> None:
    replica, master = Replica(), Master()
    space: tuple[Any, ...] = (600, 1, "made", "memtx", 0, {}, ())
    index = (600, 0, "pk", "tree", {"unique": True}, ((0, "unsigned"),))
    definitions = [master.does((INSERT, {0x10: 280, 0x21: space})), master.does((INSERT, {0x10: 288, 0x21: index}))]
    rows = [master.does((INSERT, {0x10: 600, 0x21: (key,)})) for key in range(20)]
    replica.applying.apply(slab(*definitions, *rows))
    await settled(replica)
    assert len(replica.content(600)) == 20


async def test_confirmed_view_has_the_old_spaces_while_a_definition_is_being_written() -> None:
    replica, master = Replica(WalMode.FSYNC), Master()
    replica.applying.apply(slab(master.does((INSERT, {0x10: 280, 0x21: (600, 1, "made", "memtx", 0, {}, ())}))))
    with replica.box.open_view(confirmed=True) as view:
        assert PLAIN in view.spaces
        assert 600 not in view.spaces
    await settled(replica)
    with replica.box.open_view(confirmed=True) as view:
        assert 600 in view.spaces


@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
@pytest.mark.parametrize("count", [3, 60])
async def test_failed_write_rolls_back_all_rows_in_flight_and_notifies_waiters(mode: WalMode, count: int) -> None:
    replica, master = Replica(mode), Master()
    replica.applying.apply(slab(*(master.does(put(INSERT, key, "old")) for key in range(count))))
    await settled(replica)
    replica.disk.room = 0
    more = [master.does(put(REPLACE, 1, "new"), drop(2)), *(master.does(put(INSERT, 100 + n)) for n in range(count))]
    later = slab(master.does(put(INSERT, 99, "a", space=INDEXED), put(INSERT, 5, "x", space=OTHER)))
    with pytest.raises(errors.WalIo) if mode is WalMode.WRITE else nullcontext():
        replica.applying.apply(slab(*more))
    with pytest.raises(errors.WalIo) if mode is WalMode.WRITE else nullcontext():
        replica.applying.apply(later)
    await settled(replica)
    assert replica.content() == dict.fromkeys(range(count), ("old",))
    assert replica.content(OTHER) == {}
    assert [type(error) for error in replica.failures] == [errors.WalIo]
    assert replica.journal.vclock == VClock({2: count})
    assert replica.applying.in_flight_bytes == 0
    replica.disk.room = 1 << 30
    with pytest.raises(errors.WalIo):
        replica.applying.apply(later)
    replica.applying.start_anew()
    replica.applying.apply(slab(*more))
    await settled(replica)
    assert replica.content()[1] == ("new",)
    assert replica.journal.written_vclock == VClock({2: count + 2 + count})


@pytest.mark.parametrize("count", [1, 20])
async def test_rows_after_a_failed_write_are_not_applied_when_the_disk_recovers(count: int) -> None:
    replica, master = Replica(), Master()
    replica.applying.apply(slab(master.does(put(REPLACE, 1, "before"))))
    await settled(replica)
    lost, verdict = master.does(put(REPLACE, 2, space=SYNC)), master.says(Confirm(2, 2))
    behind = [master.does(put(REPLACE, 10 + n)) for n in range(count)]
    replica.disk.room = 0
    replica.commits.on_rollback.append(lambda statements: setattr(replica.disk, "room", None))
    with pytest.raises(errors.WalIo):
        replica.applying.apply(slab(lost, verdict, *behind))
    with pytest.raises(errors.WalIo):
        replica.applying.apply(slab(master.does(put(REPLACE, 3))))
    await settled(replica)
    assert replica.disk.room is None
    assert replica.journal.vclock == replica.journal.written_vclock == VClock({2: 1})
    assert (list(replica.content()), replica.content(SYNC)) == ([1], {})


async def test_transactions_of_a_large_slab_are_submitted_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.node.upstream.row_applier.TOGETHER_SIZE_MAX", 500)
    monkeypatch.setattr("flowstone.node.wal.journal.TRANSACTION_SIZE_MAX", 1000)
    replica, master = Replica(), Master()
    replica.applying.apply(
        slab(master.does(put(REPLACE, 1, "x" * 900)), *(master.does(put(REPLACE, 2 + n, "y" * 30)) for n in range(20)))
    )
    await settled(replica)
    assert len(replica.content()) == len(replica.rows()) == 21


async def test_transaction_rejected_by_the_log_does_not_enter_the_limbo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.node.wal.journal.TRANSACTION_SIZE_MAX", 100)
    replica, master = Replica(), Master()
    with pytest.raises(errors.WalIo):
        replica.applying.apply(slab(master.does(put(REPLACE, 1, "x" * 200, space=SYNC))))
    assert (replica.limbo.pending, replica.content(SYNC)) == ((), {})


async def test_listeners_are_notified_of_each_transaction() -> None:
    replica, master = Replica(), Master()
    heard: list[tuple[Statement, ...]] = []
    replica.commits.on_commit.append(heard.append)
    replica.applying.apply(
        slab(*(master.does(put(INSERT, key)) for key in range(20)), master.does(put(INSERT, 50), drop(1)))
    )
    await settled(replica)
    assert [len(statements) for statements in heard] == [1] * 20 + [2]


# --- the limbo ---


@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
async def test_synchronous_transaction_is_applied_and_pending(mode: WalMode) -> None:
    replica, master = Replica(mode), Master()
    replica.applying.apply(slab(master.does(put(INSERT, 1, space=SYNC)), master.does(put(INSERT, 2))))
    assert sorted(replica.content(SYNC)) == [1]
    assert [applied.lsn for applied in replica.limbo.pending] == [1, 2]
    replica.applying.apply(slab(master.says(Confirm(2, 1)), master.does(put(INSERT, 3))))
    await settled(replica)
    assert replica.limbo.pending == ()
    assert sorted(replica.content()) == [2, 3]
    assert [row.type for row in replica.rows()] == [INSERT, INSERT, RequestType.RAFT_CONFIRM, INSERT]


@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
@pytest.mark.parametrize("behind", [1, 40])
async def test_rollback_undoes_pending_transactions_but_not_later_rows(mode: WalMode, behind: int) -> None:
    replica, master = Replica(mode), Master()
    replica.applying.apply(
        slab(
            master.does(put(INSERT, 1, "kept")),
            master.does(put(INSERT, 1, space=SYNC), put(REPLACE, 1, "lost")),
            master.does(put(REPLACE, 1, "lost, too")),
            master.says(Rollback(2, 3)),
            *(master.does(put(REPLACE, 2 + n, "later")) for n in range(behind)),
            master.does(put(REPLACE, 1, "after all"), (UPDATE, {0x10: PLAIN, 0x20: (1,), 0x21: (("!", 2, "x"),)})),
        )
    )
    await settled(replica)
    assert replica.content(SYNC) == {}
    assert replica.content()[1] == ("after all", "x")
    assert len(replica.content()) == behind + 1
    assert replica.limbo.pending == ()
    assert replica.failures == []


async def test_failed_write_keeps_written_transactions_in_the_limbo() -> None:
    replica, master = Replica(), Master()
    replica.applying.apply(slab(master.does(put(INSERT, 1, space=SYNC))))
    await settled(replica)
    replica.disk.room = 0
    second, verdict = master.does(put(INSERT, 2, space=SYNC)), master.says(Confirm(2, 2))
    with pytest.raises(errors.WalIo):
        replica.applying.apply(slab(second, verdict))
    await settled(replica)
    assert [applied.lsn for applied in replica.limbo.pending] == [1]
    assert sorted(replica.content(SYNC)) == [1]
    replica.disk.room = 1 << 30
    replica.applying.start_anew()
    replica.applying.apply(slab(second, verdict))
    await settled(replica)
    assert replica.limbo.pending == ()
    assert sorted(replica.content(SYNC)) == [1, 2]


@pytest.mark.parametrize("behind", [3, 20])
async def test_rows_after_a_pending_transaction_share_its_outcome_in_2_6(behind: int) -> None:
    replica, master = Replica(), Master()
    waiting = master.does(put(REPLACE, 1, space=SYNC))
    replica.applying.apply(slab(waiting, *(master.does(put(REPLACE, key)) for key in range(behind))))
    assert len(replica.limbo.pending) == 1 + behind
    replica.applying.apply(slab(master.says(Rollback(2, 1))))
    await settled(replica)
    assert replica.content() == replica.content(SYNC) == {}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [(MemoryError("no room"), "MemoryError: no room"), (errors.TupleFound("Duplicate"), "Duplicate")],
)
async def test_error_of_held_rows_is_reported_and_stops_later_rows(
    monkeypatch: pytest.MonkeyPatch, wrong: Exception, told: str
) -> None:
    replica, master = Replica(WalMode.FSYNC), Master()
    replica.applying.apply(slab(master.does(put(REPLACE, 1, space=SYNC))))
    held, later = master, slab(Master(lsn=4).does(put(REPLACE, 9)))
    replica.applying.apply(slab(held.says(Confirm(2, 1)), held.does(put(REPLACE, 7))))
    replica.applying.apply(slab(held.does(put(REPLACE, 8))))
    assert replica.applying.is_holding

    def fails(*args: Any) -> None:
        raise wrong

    with monkeypatch.context() as patched:
        patched.setattr("flowstone.node.upstream.row_applier.execute", fails)
        await settled(replica)
    assert [error.message for error in replica.failures] == [told]
    assert (replica.applying.in_flight_bytes, replica.applying.is_holding) == (0, False)
    with pytest.raises(FlowstoneError, match=told):
        replica.applying.apply(later)
    assert replica.content() == {}
    assert replica.journal.vclock == VClock({2: 2})


async def test_held_rows_count_and_can_be_awaited() -> None:
    replica, master = Replica(WalMode.FSYNC), Master()
    replica.applying.apply(slab(master.does(put(REPLACE, 1, space=SYNC)), master.says(Confirm(2, 1))))
    before = replica.applying.in_flight_bytes
    replica.applying.apply(slab(master.does(put(REPLACE, 7, "x" * 5000))))
    assert replica.applying.in_flight_bytes > before + 5000
    await replica.applying.release()
    assert list(replica.content()) == [7]
    assert not replica.applying.is_holding
    await settled(replica)
    assert replica.applying.in_flight_bytes == 0


async def test_waiters_for_held_rows_get_the_error_when_the_rows_are_lost() -> None:
    replica, master = Replica(WalMode.FSYNC), Master()
    replica.applying.apply(slab(master.does(put(REPLACE, 1, space=SYNC)), master.says(Confirm(2, 1))))
    replica.applying.apply(slab(master.does(put(REPLACE, 7))))
    replica.disk.room = 0
    with pytest.raises(errors.WalIo):
        await replica.applying.release()
    assert replica.applying.in_flight_bytes == 0


async def test_two_masters_cannot_both_have_pending_transactions() -> None:
    replica, one, two = Replica(), Master(2), Master(3)
    replica.applying.apply(slab(one.does(put(INSERT, 1, space=SYNC))))
    with pytest.raises(errors.UncommittedForeignSyncTxns):
        replica.applying.apply(slab(two.does(put(INSERT, 2, space=SYNC))))
    with pytest.raises(errors.SyncMasterMismatch):
        replica.applying.apply(slab(two.says(Confirm(3, 1))))
    assert sorted(replica.content(SYNC)) == [1]


class TestWithTerms:
    """Dialect 2.11: the queue has an owner, and rows of other members are filtered by term."""

    async def test_queue_without_an_owner_accepts_no_transaction(self) -> None:
        replica, master = Replica(dialect=Dialect.V2_11), Master()
        with pytest.raises(errors.SyncQueueUnclaimed):
            replica.applying.apply(slab(master.does(put(INSERT, 1, space=SYNC), flags=SYNCHRONOUS)))
        assert replica.content(SYNC) == {}

    async def test_transactions_of_the_owner_are_pending_until_confirmed(self) -> None:
        replica, master = Replica(dialect=Dialect.V2_11), Master()
        replica.applying.apply(
            slab(
                master.says(Promote(0, 0, 2)),
                master.does(put(INSERT, 1, space=SYNC), flags=SYNCHRONOUS),
                master.does(put(INSERT, 1), flags=BEHIND),
            )
        )
        await settled(replica)
        assert [applied.lsn for applied in replica.limbo.pending] == [2, 3]
        assert (replica.limbo.owner_id, replica.limbo.term) == (2, 2)
        replica.applying.apply(slab(master.says(Confirm(2, 2))))
        assert replica.limbo.pending == ()

    async def test_promote_of_a_successor_settles_pending_transactions(self) -> None:
        replica, one, two = Replica(dialect=Dialect.V2_11), Master(2), Master(3)
        replica.applying.apply(
            slab(
                one.says(Promote(0, 0, 2)),
                one.does(put(INSERT, 1, space=SYNC), flags=SYNCHRONOUS),
                one.does(put(INSERT, 2, space=SYNC), flags=SYNCHRONOUS),
            )
        )
        replica.applying.apply(slab(two.says(Promote(2, 2, 3))))
        await settled(replica)
        assert sorted(replica.content(SYNC)) == [1]
        assert replica.limbo.owner_id == 3

    async def test_synchronous_transaction_of_a_former_owner_becomes_nops(self) -> None:
        replica, one, two = Replica(dialect=Dialect.V2_11), Master(2), Master(3)
        replica.applying.apply(slab(one.says(Promote(0, 0, 2)), two.says(Promote(2, 0, 3))))
        late = one.does(put(INSERT, 1, space=SYNC), put(INSERT, 2), flags=SYNCHRONOUS)
        replica.applying.apply(slab(late))
        await settled(replica)
        assert replica.content(SYNC) == replica.content() == {}
        assert [(row.type, row.lsn) for row in replica.rows()[-2:]] == [(NOP, 2), (NOP, 3)]

    async def test_asynchronous_row_of_a_former_owner_is_a_split_brain(self) -> None:
        replica, one, two = Replica(dialect=Dialect.V2_11), Master(2), Master(3)
        replica.applying.apply(slab(one.says(Promote(0, 0, 2)), two.says(Promote(2, 0, 3))))
        await settled(replica)
        replica.applying.apply(slab(one.does((NOP, None))))
        with pytest.raises(errors.SplitBrain, match="got an async transaction from an old term"):
            replica.applying.apply(slab(*(one.does(put(INSERT, key)) for key in range(20))))
        assert replica.content() == {}

    async def test_split_brain_after_the_promote_is_found_within_one_slab(self) -> None:
        replica, one, two = Replica(dialect=Dialect.V2_11), Master(2), Master(3)
        replica.applying.apply(slab(one.says(Promote(0, 0, 2))))
        await settled(replica)
        with pytest.raises(errors.SplitBrain):
            replica.applying.apply(slab(two.says(Promote(2, 0, 3)), *(one.does(put(INSERT, key)) for key in range(20))))
        assert replica.content() == {}

    async def test_every_member_may_write_if_the_queue_has_no_owner(self) -> None:
        replica, one, two = Replica(dialect=Dialect.V2_11), Master(2), Master(3)
        replica.applying.apply(slab(one.says(Promote(0, 0, 2)), one.says(Demote(2, 0, 3))))
        replica.applying.apply(slab(*(two.does(put(INSERT, key)) for key in range(20))))
        await settled(replica)
        assert len(replica.content()) == 20
