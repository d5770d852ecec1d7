"""Replay: rows become state, transactions stay atomic, and rolled-back ones have no effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.box import system
from flowstone.box.bootstrap import bootstrap_rows
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import Row, encode_header
from flowstone.iproto.slab import Slab
from flowstone.node.wal.replay import BULK_MIN, RecoveryError, Replay, Synchro
from flowstone.outside import production
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, RaftState, Rollback
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import LsnUsedTwice
from flowstone.xlog.meta import FileType
from flowstone.xlog.reader import LogFile
from flowstone.xlog.transactions import make_transaction
from tests.xlog.files import block, header, opened

SYNC = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value
QUEUED = Flag.WAIT_SYNC.value


def box_with_spaces() -> Box:
    """Space 512 is plain, 513 synchronous, 514 has a secondary index."""
    box = Box(Dialect.V2_11)
    random = production().random
    box.is_recovering = True
    for space_id, raw in bootstrap_rows(box.dialect, random.uuid(), random.uuid()):
        statements.insert(box.begin(), box.space(space_id), raw)
    for number, flags in ((512, {}), (513, {"is_sync": True}), (514, {})):
        space = [number, 1, f"s{number}", "memtx", 0, flags, []]
        statements.insert(box.begin(), box.space(system.SPACE_ID), pack(space))
        index = [number, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]]]
        statements.insert(box.begin(), box.space(system.INDEX_ID), pack(index))
    second = [514, 1, "sk", "tree", {"unique": True}, [[1, "unsigned"]]]
    statements.insert(box.begin(), box.space(system.INDEX_ID), pack(second))
    return box


def replace(lsn: int, values: list[Any], space: int = 512, replica_id: int = 1, **how: Any) -> Row:
    body = b"\x82\x10" + pack(space) + b"\x21" + pack(values)
    kind = how.pop("kind", RequestType.REPLACE)
    return Row(kind, replica_id, lsn=lsn, timestamp=1.0, body=body, **how)


def alone(row: Row, flags: int = 0) -> bytes:
    return together(row, flags=flags)


def together(*rows: Row, flags: int = 0) -> bytes:
    return b"".join(row.encode() for row in make_transaction(rows, flags).rows)


def control(lsn: int, kind: RequestType, body: bytes, replica_id: int = 1) -> bytes:
    return alone(Row(kind, replica_id, lsn=lsn, timestamp=1.0, body=body))


def confirm(lsn: int, up_to: int) -> bytes:
    return control(lsn, RequestType.RAFT_CONFIRM, Confirm(1, up_to).encode())


def rollback(lsn: int, first: int) -> bytes:
    return control(lsn, RequestType.RAFT_ROLLBACK, Rollback(1, first).encode())


def promotion(replica_id: int, lsn: int, body: Promote) -> bytes:
    return control(lsn, RequestType.RAFT_PROMOTE, body.encode(), replica_id)


def slabs(rows: Iterable[bytes], file_type: FileType = FileType.XLOG) -> list[Slab]:
    """One block per item."""
    data = header(file_type) + b"".join(block(item) for item in rows) + b"\xd5\x10\xad\xed"
    file: LogFile = opened(data)
    return list(file.slabs())


def replayed(
    *rows: bytes, start: int = 0, has_flags: bool = True, force: bool = False, reports: list[str] | None = None
) -> tuple[Box, Replay]:
    box = box_with_spaces()
    replay = Replay(box, force=force, report=reports.append if reports is not None else None)
    replay.start_logs(VClock({1: start}))
    replay.start_log("some.xlog", VClock(), has_flags=has_flags)
    for slab in slabs(rows):
        replay.push_log(slab)
    return box, replay


def tuples(box: Box, space: int = 512) -> list[Any]:
    return [unpack(raw) for raw in box.space(space).tuples()]


class TestTransactions:
    def test_rows_of_one_transaction_are_applied_together(self) -> None:
        box, replay = replayed(together(replace(1, [1]), replace(2, [2]), replace(3, [1, "x"])))
        assert tuples(box) == [(1, "x"), (2,)]
        assert replay.vclock == VClock({1: 3})

    def test_replay_skips_rows_up_to_its_start(self) -> None:
        rows = [alone(replace(lsn, [lsn])) for lsn in range(1, 30)]
        box, replay = replayed(*rows, start=20)
        assert tuples(box) == [(lsn,) for lsn in range(21, 30)]
        assert replay.vclock == VClock({1: 29})

    def test_every_kind_of_statement_is_replayed(self) -> None:
        def row(lsn: int, kind: RequestType, body: dict[int, Any]) -> bytes:
            return alone(Row(kind, 1, lsn=lsn, timestamp=1.0, body=pack(body)))

        box, _ = replayed(
            row(1, RequestType.INSERT, {0x10: 512, 0x21: [1, 10]}),
            row(2, RequestType.UPDATE, {0x10: 512, 0x15: 1, 0x20: [1], 0x21: [["+", 2, 5]]}),
            row(3, RequestType.UPSERT, {0x10: 512, 0x28: [["+", 1, 1]], 0x21: [1, 0]}),
            row(4, RequestType.UPSERT, {0x10: 512, 0x28: [], 0x21: [2, 0]}),
            row(5, RequestType.REPLACE, {0x10: 512, 0x21: [3]}),
            row(6, RequestType.DELETE, {0x10: 512, 0x20: [2]}),
            row(7, RequestType.DELETE, {0x10: 512, 0x20: [99]}),
            row(8, RequestType.REPLACE, {0x10: 514, 0x21: [1, 7]}),
            row(9, RequestType.DELETE, {0x10: 514, 0x11: 1, 0x20: [7]}),
            alone(Row(RequestType.NOP, 1, lsn=10, timestamp=1.0)),
        )
        assert tuples(box) == [(1, 16), (3,)]
        assert tuples(box, 514) == []

    def test_block_that_ends_inside_a_transaction_is_damage_and_skipped_with_force(self) -> None:
        whole = make_transaction([replace(2, [2]), replace(3, [3])])
        rows = [alone(replace(1, [1])), whole.rows[0].encode()]
        with pytest.raises(RecoveryError, match="inside a transaction"):
            replayed(*rows)
        reports: list[str] = []
        box, replay = replayed(*rows, force=True, reports=reports)
        assert tuples(box) == [(1,)]
        assert replay.vclock == VClock({1: 2})
        assert len(reports) == 1

    def test_interleaved_transactions_are_damage_and_separated_with_force(self) -> None:
        first = make_transaction([replace(1, [1]), replace(3, [3])])
        rows = [first.rows[0].encode() + alone(replace(2, [2])), alone(replace(4, [4]))]
        with pytest.raises(RecoveryError, match="has not ended"):
            replayed(*rows)
        reports: list[str] = []
        box, replay = replayed(*rows, force=True, reports=reports)
        assert tuples(box) == [(2,), (4,)]
        assert len(reports) == 1, "the unfinished one is skipped"
        assert replay.vclock == VClock({1: 4})

    def test_an_lsn_used_twice_is_an_error(self) -> None:
        with pytest.raises(LsnUsedTwice, match="LSN 2 of replica 1 is used twice"):
            replayed(alone(replace(1, [1])), alone(replace(2, [2])), alone(replace(2, [3])))

    def test_replay_rolls_back_a_transaction_with_a_row_that_cannot_be_applied(self) -> None:
        rows = together(replace(1, [1]), replace(2, [2], 777))
        with pytest.raises(RecoveryError, match=r"Space '#?777' does not exist"):
            replayed(rows)
        box, replay = replayed(rows, force=True)
        assert tuples(box) == []
        assert replay.vclock == VClock({1: 2})

    def test_row_of_an_unexpected_type_is_an_error(self) -> None:
        with pytest.raises(RecoveryError, match="unexpected row of type"):
            replayed(alone(replace(1, [1], kind=RequestType.SELECT)))

    @pytest.mark.parametrize("kind", [RequestType.INSERT, RequestType.REPLACE])
    def test_long_runs_are_replayed_like_single_rows(self, kind: RequestType) -> None:
        count = 5 * BULK_MIN
        rows = [alone(replace(lsn, [lsn, "x"], 512 if lsn % 20 else 514, kind=kind)) for lsn in range(1, count)]
        rows = [row for lsn, row in enumerate(rows, 1) if lsn % 20]
        box, replay = replayed(b"".join(rows))
        assert tuples(box) == [(lsn, "x") for lsn in range(1, count) if lsn % 20]
        assert replay.vclock == VClock({1: count - 1})
        assert replay.row_count == len(rows)

    def test_transaction_that_begins_with_a_local_row_may_precede_a_long_run(self) -> None:
        """Its last row has the LSN that all its rows have as TSN, and so looks like a transaction of its own."""
        local = [replace(lsn, [100 + lsn], replica_id=0, tsn=1, flags=0).encode() for lsn in (1, 2)]
        run = [alone(replace(lsn, [lsn])) for lsn in range(1, 2 * BULK_MIN)]
        box, replay = replayed(b"".join(local + run))
        assert tuples(box) == [*((lsn,) for lsn in range(1, 2 * BULK_MIN)), (101,), (102,)]
        assert replay.vclock == VClock({0: 2, 1: 2 * BULK_MIN - 1})

    @settings(max_examples=40)
    @given(st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=1, max_size=3), st.integers(0, 3))
    def test_transactions_with_local_rows_are_replayed_anywhere_among_long_runs(
        self, shapes: list[list[bool]], place: int
    ) -> None:
        """Each shape has one row per item, local where it is True. Long runs stand before, between or after them."""
        run = [[False]] * (2 * BULK_MIN)
        transactions = [*shapes[:place], *run, *shapes[place:], *run]
        lsns, rows, keys = {0: 0, 1: 0}, [], []
        for shape in transactions:
            tsn = lsns[int(False in shape)] + 1
            for number, is_local in enumerate(shape, 1):
                replica_id = int(not is_local)
                lsns[replica_id] += 1
                keys.append(lsns[replica_id] + 10_000 * is_local)
                flags = Flag.COMMIT.value if number == len(shape) else 0
                row = replace(
                    lsns[replica_id], [keys[-1]], replica_id=replica_id, tsn=tsn, flags=flags, group_id=int(is_local)
                )
                rows.append(row.encode())
        box, replay = replayed(b"".join(rows))
        assert tuples(box) == [(key,) for key in sorted(keys)]
        assert replay.vclock == VClock({number: lsn for number, lsn in lsns.items() if lsn})

    def test_run_with_a_duplicate_is_replayed_row_by_row(self) -> None:
        rows = [alone(replace(lsn, [lsn % 15], kind=RequestType.INSERT)) for lsn in range(1, 21)]
        with pytest.raises(RecoveryError, match="LSN 16 of replica 1: Duplicate key"):
            replayed(b"".join(rows))
        reports: list[str] = []
        box, replay = replayed(b"".join(rows), force=True, reports=reports)
        assert len(tuples(box)) == 15
        assert len(reports) == 5
        assert replay.vclock == VClock({1: 20})


class TestSynchronous:
    def test_rollback_undoes_pending_transactions_from_its_lsn_on(self) -> None:
        box, replay = replayed(
            alone(replace(1, [1, "old"], 513), SYNC),
            confirm(2, 1),
            alone(replace(3, [1, "new"], 513), SYNC),
            alone(replace(4, [1, "newer"], 513), SYNC),
            alone(replace(5, [5]), QUEUED),
            rollback(6, 3),
            alone(replace(7, [7])),
        )
        assert tuples(box, 513) == [(1, "old")]
        assert tuples(box) == [(7,)]
        assert replay.vclock == VClock({1: 7})
        assert replay.pending == ()
        assert replay.synchro.confirmed == {1: 1}

    def test_replay_keeps_and_lists_pending_transactions(self) -> None:
        box, replay = replayed(
            alone(replace(1, [1], 513), SYNC),
            together(replace(2, [2], 513), replace(3, [3], 513), flags=SYNC),
            confirm(4, 1),
            alone(replace(5, [5]), QUEUED),
        )
        assert tuples(box, 513) == [(1,), (2,), (3,)]
        # The CONFIRM comes after a pending transaction, and is committed nevertheless.
        assert [applied.lsn for applied in replay.pending] == [3, 5]
        for applied in reversed(replay.pending):
            applied.effect.rollback()
        assert tuples(box, 513) == [(1,)]
        assert tuples(box) == []

    def test_replay_does_not_queue_nops_of_a_former_owner(self) -> None:
        """The row arrived while transactions of the current owner were pending; only its synchronous flag remains."""
        nop = Row(RequestType.NOP, 3, lsn=17, timestamp=1.0)
        _, replay = replayed(alone(replace(1, [1], 513), SYNC), alone(nop, SYNC), alone(replace(2, [2]), QUEUED))
        assert [(applied.replica_id, applied.lsn) for applied in replay.pending] == [(1, 1), (1, 2)]
        assert replay.vclock == VClock({1: 2, 3: 17})

    @pytest.mark.parametrize("flags", [0, Flag.WAIT_ACK.value, QUEUED, SYNC])
    def test_nop_of_a_former_owner_voids_its_later_rows_whatever_its_flags(self, flags: int) -> None:
        """3.8 leaves WAIT_ACK, earlier releases of ours both flags, 2.11 none."""
        promotes = [promotion(1, 1, Promote(0, 0, 2)), promotion(3, 1, Promote(1, 0, 3))]
        _, replay = replayed(*promotes, alone(Row(RequestType.NOP, 1, lsn=2, timestamp=1.0), flags))
        assert (replay.pending, replay.synchro.owner_id) == ((), 3)
        assert replay.synchro.tenures.voids == {1: 2}

    def test_nop_in_place_of_a_control_row_voids_nothing(self) -> None:
        nop = Row(RequestType.NOP, 1, lsn=2, timestamp=1.0, tsn=2, flags=Flag.COMMIT.value)
        promotes = [promotion(1, 1, Promote(0, 0, 2)), promotion(3, 1, Promote(1, 0, 3))]
        _, replay = replayed(*promotes, encode_header(nop, is_explicit=True))
        assert replay.vclock == VClock({1: 2, 3: 1})
        assert replay.synchro.tenures.voids == {}

    def test_late_transaction_of_a_former_owner_has_no_effect(self) -> None:
        """Archives of earlier releases may contain such rows. A real server stops at them."""
        promotes = [promotion(1, 1, Promote(0, 0, 2)), promotion(3, 1, Promote(1, 0, 3))]
        box, replay = replayed(*promotes, alone(replace(2, [2], 513), SYNC), alone(replace(3, [3]), QUEUED))
        assert tuples(box) == tuples(box, 513) == []
        assert (replay.pending, replay.vclock) == ((), VClock({1: 3, 3: 1}))

    def test_rows_without_flags_are_synchronous_by_schema(self) -> None:
        box, replay = replayed(
            alone(replace(1, [1], 513)),
            alone(replace(2, [2], 513)),
            confirm(3, 1),
            rollback(4, 2),
            has_flags=False,
        )
        assert tuples(box, 513) == [(1,)]
        assert replay.pending == ()

    def test_promotion_settles_the_queue_of_the_previous_owner(self) -> None:
        promote = Promote(1, 1, 2).encode()
        box, replay = replayed(
            alone(replace(1, [1], 513), SYNC),
            alone(replace(2, [2], 513), SYNC),
            control(1, RequestType.RAFT_PROMOTE, promote, replica_id=2),
        )
        assert tuples(box, 513) == [(1,)]
        assert replay.synchro.owner_id == 2
        assert replay.synchro.term == 2
        assert replay.synchro.tenures.promote_terms == {2: 2}

    def test_next_owner_may_ignore_a_tenure_without_commits(self) -> None:
        rows = (
            control(1, RequestType.RAFT_PROMOTE, Promote(0, 0, 2).encode(), replica_id=2),
            alone(replace(1, [1], 513), SYNC),
            control(2, RequestType.RAFT_PROMOTE, Promote(2, 0, 3).encode(), replica_id=1),
        )
        _, replay = replayed(*rows)
        assert replay.synchro.tenures.former == ((0, 0), (2, 0))
        _, replay = replayed(*rows, alone(replace(3, [3], 512)))
        assert replay.synchro.tenures.former == ()

    def test_runs_after_a_pending_transaction_can_be_rolled_back(self) -> None:
        rows = [alone(replace(lsn, [lsn]), QUEUED) for lsn in range(2, 40)]
        box, _ = replayed(alone(replace(1, [1], 513), SYNC), b"".join(rows), rollback(40, 1))
        assert tuples(box) == []
        assert tuples(box, 513) == []

    def test_term_and_vote_follow_the_last_rows(self) -> None:
        def raft(lsn: int, body: dict[int, int]) -> bytes:
            row = Row(RequestType.RAFT, 0, group_id=1, lsn=lsn, timestamp=1.0, body=pack(body))
            return alone(row)

        _, replay = replayed(raft(1, {0: 2}), raft(2, {0: 2, 1: 1}), raft(3, {0: 3}))
        assert replay.synchro.raft == RaftState(term=3)
        assert replay.vclock == VClock({0: 3})
        _, replay = replayed(raft(1, {0: 2, 1: 1}))
        assert replay.synchro.raft == RaftState(term=2, vote=1)

    def test_demotion_leaves_no_owner(self) -> None:
        synchro = Synchro()
        synchro.follow(Row(RequestType.RAFT_PROMOTE, 1, lsn=1, body=Promote(0, 0, 2).encode()))
        synchro.follow(Row(RequestType.RAFT_DEMOTE, 1, lsn=2, body=Demote(1, 17, 3).encode()))
        assert (synchro.owner_id, synchro.term, synchro.confirmed) == (0, 3, {1: 17})
        synchro.follow(Row(RequestType.RAFT_PROMOTE, 2, lsn=1, body=Promote(0, 0, 3).encode()))
        assert synchro.owner_id == 0


class TestSnapshots:
    def load(self, *rows: bytes, force: bool = False) -> tuple[Box, Replay, list[str]]:
        box = box_with_spaces()
        reports: list[str] = []
        replay = Replay(box, force=force, report=reports.append)
        for slab in slabs(rows, FileType.SNAP):
            replay.push_snapshot(slab)
        return box, replay, reports

    def row(self, number: int, values: list[Any], space: int = 512) -> bytes:
        return replace(number, values, space, 0, kind=RequestType.INSERT).encode()

    @pytest.mark.parametrize("count", [3, 100])
    @pytest.mark.parametrize("space", [512, 514])
    def test_tuples_of_all_spaces_are_loaded(self, count: int, space: int) -> None:
        box, replay, _ = self.load(b"".join(self.row(number, [number, number], space) for number in range(count)))
        assert tuples(box, space) == [(number, number) for number in range(count)]
        assert replay.row_count == count

    @pytest.mark.parametrize("count", [3, 100])
    @pytest.mark.parametrize("space", [512, 514])
    def test_duplicate_is_an_error_and_skipped_with_force(self, count: int, space: int) -> None:
        rows = [self.row(number, [number, number], space) for number in range(count)]
        rows.append(self.row(count, [count, 0] if space == 514 else [0, 0], space))
        with pytest.raises(RecoveryError, match="Duplicate key"):
            self.load(b"".join(rows))
        box, _, reports = self.load(b"".join(rows), force=True)
        assert len(tuples(box, space)) == count
        assert len(reports) == 1

    def test_a_row_of_an_unknown_space_or_another_type_is_an_error(self) -> None:
        with pytest.raises(RecoveryError, match="does not exist"):
            self.load(self.row(0, [1], 777))
        with pytest.raises(RecoveryError, match="not an INSERT"):
            self.load(replace(0, [1], kind=RequestType.DELETE).encode())
        _, _, reports = self.load(self.row(0, [1], 777), force=True)
        assert len(reports) == 1
