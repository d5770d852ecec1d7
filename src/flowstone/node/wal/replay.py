"""Replay: applies the rows of snapshots and logs to the box, by whole transactions.

Takes decoded slabs in the order of their files. Runs of plain rows are applied by `box/lane/`, and all other rows
one by one as statements; both lead to the same state. Synchronous transactions stay pending in
`replication/settled_position.py` until their verdict, and are rolled back if it is a rollback. With `force` rows that
cannot be applied are skipped and reported. This module reads and writes no files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from flowstone.box.box import Box
from flowstone.box.engine import statements
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.box.lane.rows import WRITES, are_alone, codes_of, tables_of
from flowstone.box.lane.statement_lane import StatementLane
from flowstone.box.lane.table import table_of
from flowstone.box.lane.writes import Writes
from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.constants import VCLOCK_MAX, Flag, RequestType, type_name
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, RaftState, decode_control
from flowstone.replication.limbo.tenures import Tenures
from flowstone.replication.row_stream import replaces_control
from flowstone.replication.settled_position import SettledTracker, Tracked, is_nop, void_rows
from flowstone.replication.vclock import VClock, VClockBuilder
from flowstone.xlog.errors import DamagedLog, LsnUsedTwice
from flowstone.xlog.transactions import CONTROL_TYPES, Grouping, TransactionError, first_global
from flowstone.xlog.transactions import LogTransaction as Rows

LOG = logging.getLogger("flowstone.node")

BULK_MIN = 8
"""Minimum number of consecutive rows for which a run in the lane pays off."""

_CONTROL = frozenset(int(kind) for kind in CONTROL_TYPES)
_NOP = int(RequestType.NOP)
_INSERT = int(RequestType.INSERT)
_WAIT = (Flag.WAIT_ACK | Flag.WAIT_SYNC).value
_WAIT_ACK = Flag.WAIT_ACK.value


FORCE_HINT: Final = "skip it with force_recovery"
OF_A_PEER: Final = "check the data of the peer, or use another peer"


class RecoveryError(FlowstoneError):
    """A row or transaction cannot be applied. The message names it; `path` is its file, or the peer that sent it."""

    def __init__(self, path: str, what: str, cause: FlowstoneError, *, hint: str = FORCE_HINT) -> None:
        super().__init__(f"{path}: cannot apply {what}: {cause.message}", hint=hint)
        self.path = path


@dataclass(slots=True)
class Synchro:
    """The state of elections and of the synchronous queue according to the log."""

    raft: RaftState = field(default_factory=lambda: RaftState(term=1))
    owner_id: int = 0
    term: int = 0
    confirmed: dict[int, int] = field(default_factory=dict)
    tenures: Tenures = field(default_factory=lambda: Tenures({}, (), {}))
    pending: tuple[Applied, ...] = ()
    """Pending synchronous transactions, and all transactions after them. They are applied, but may have to be rolled
    back."""

    @property
    def queue_owner_id(self) -> int:
        """The owner of the queue. Without a promotion it is the originator of the pending transactions."""
        return self.owner_id or (self.pending[0].replica_id if self.pending else 0)

    def promote(self) -> Promote:
        """Return the state of the queue in the form that a snapshot has."""
        owner_id = self.queue_owner_id
        return Promote(owner_id, self.confirmed.get(owner_id, 0), self.term, VClock(self.confirmed))

    def follow(self, row: Row, *, in_snapshot: bool = False) -> None:
        """Process a row of CONTROL_TYPES."""
        match decode_control(row.type, row.body):
            case RaftState() as raft:
                # A row without a vote repeats the term only; forgetting the vote would allow a second one in this term.
                vote = raft.vote or (self.raft.vote if raft.term == self.raft.term else 0)
                self.raft = RaftState(term=raft.term, vote=vote)
            case Confirm() as confirm:
                self._confirm(confirm.owner_id, confirm.lsn)
            case Promote() as promote if in_snapshot:
                self.owner_id, self.term = promote.owner_id, promote.term
                self.confirmed = promote.confirmed_vclock.to_mapping() if promote.confirmed_vclock else {}
                if promote.owner_id:
                    self._confirm(promote.owner_id, promote.lsn)
                    self.tenures.promote_terms[promote.owner_id] = promote.term
            case Promote() | Demote() as transfer:
                # From a leader that missed its successor's election; see `Limbo._change_owner`.
                if self.term and transfer.term <= self.term:
                    return
                self._confirm(transfer.owner_id, transfer.lsn)
                owner = self.owner_id, self.confirmed.get(self.owner_id, 0)
                # `_decide` adds the void transactions, which only the tracker knows.
                self.tenures.hand_over(owner, by=row.replica_id, term=transfer.term, first_void=0)
                self.owner_id = row.replica_id if isinstance(transfer, Promote) else 0
                self.term = transfer.term

    def note_void(self, transaction: Rows) -> None:
        """Process a transaction of NOPs. A NOP of an earlier owner replaces a transaction that was rolled back."""
        origin_id, lsn = transaction.replica_id, transaction.lsn
        is_current = self.tenures.promote_terms.get(origin_id, 0) == self.term
        # A NOP at or below a confirmed LSN replaces something else, such as a conflicting row.
        if origin_id and not is_current and lsn > self.confirmed.get(origin_id, 0):
            self.tenures.note_void(origin_id, lsn)

    def _confirm(self, owner_id: int, lsn: int) -> None:
        if owner_id and lsn > self.confirmed.get(owner_id, 0):
            self.confirmed[owner_id] = lsn


@dataclass(frozen=True, slots=True)
class Applied(Tracked):
    """A transaction of the log that was applied to the box; `effect` can roll it back."""

    effect: BoxTransaction
    touches_synchronous: bool

    @property
    def is_synchronous(self) -> bool:
        """True if the transaction needs a quorum itself, and does not only wait for an earlier one."""
        return self.touches_synchronous or bool(self.flags & _WAIT_ACK)

    def waits(self, *, by_schema: bool) -> bool:
        """Return True if the transaction is pending. The tracker also keeps confirmed transactions and NOPs, for order.

        `by_schema`: rows have no flags, as in 2.6, so everything after a synchronous transaction is pending, too.
        """
        return self.rows[0].type not in _CONTROL and (by_schema or bool(self.flags & _WAIT)) and not is_nop(self)


class Replay:
    """Applies slabs to a box. `vclock` is updated by all rows, `synchro` by the control rows."""

    def __init__(
        self,
        box: Box,
        *,
        force: bool = False,
        report: Callable[[str], None] | None = None,
        hint: str = FORCE_HINT,
    ) -> None:
        """`hint` is the advice for a row that cannot be applied; `report` gets a text for each row that is skipped."""
        self._box = box
        self._lane = StatementLane(box)
        self._hint = hint
        self._force = force
        self._report = report or (lambda what: None)
        self._vclock = VClockBuilder()
        self._file_lsns: dict[int, int] = {}
        self._by_schema = False
        self._tracker: SettledTracker[Applied] = SettledTracker()
        self.synchro = Synchro()
        self.row_count = 0

    @property
    def vclock(self) -> VClock:
        return self._vclock.vclock()

    @property
    def pending(self) -> tuple[Applied, ...]:
        """Pending synchronous transactions, and all transactions after them, in the order of the log."""
        return tuple(applied for applied in self._tracker.pending if applied.waits(by_schema=self._by_schema))

    def rewind(self) -> None:
        """Roll back pending transactions and all transactions after them, because a snapshot must contain confirmed
        data only."""
        if self._tracker.is_quiet:
            return
        # Decided ones after a pending one are removed, too: the vclock can only return to a prefix of the log.
        for applied in reversed(self._tracker.pending):
            applied.effect.rollback()
        self._vclock = VClockBuilder(self._tracker.vclock)
        self._new_tracker(by_schema=self._by_schema)

    # --- snapshots ---

    def push_snapshot(self, slab: Slab) -> None:
        """Apply rows of a snapshot: tuples, whose space must exist already, and the state of the limbo."""
        cells = slab.cells
        if not len(slab):
            return
        spaces, types = cells[scan.SPACE_ID], cells[scan.TYPE]
        changes = np.flatnonzero((np.diff(spaces) != 0) | (np.diff(types) != 0)) + 1
        for first, stop in zip([0, *changes.tolist()], [*changes.tolist(), len(slab)], strict=True):
            if int(types[first]) in _CONTROL:
                for row in slab.rows(np.arange(first, stop)):
                    self._control_of_snapshot(slab, row)
            else:
                self._load(slab, first, stop)
        self.row_count += len(slab)

    def start_logs(self, vclock: VClock) -> None:
        """Continue with logs from `vclock` on, when the snapshot was read."""
        self._vclock = VClockBuilder(vclock)
        self._new_tracker(by_schema=False)

    def _control_of_snapshot(self, slab: Slab, row: Row) -> None:
        try:
            self.synchro.follow(row, in_snapshot=True)
        except FlowstoneError as error:
            self._refuse(slab.path, f"a row of type {type_name(row.type)}", error)

    def _load(self, slab: Slab, first: int, stop: int) -> None:
        """Insert the tuples of rows of one space, as many as possible in the lane."""
        space = self._box.spaces.get(int(slab.cells[scan.SPACE_ID, first]))
        table = table_of(space) if space is not None and int(slab.cells[scan.TYPE, first]) == _INSERT else None
        # The values of sequences are in rows of their own, and a snapshot keeps its constraints.
        tables = {int(codes_of(slab.cells[:, first : first + 1])[0]): table} if table is not None else {}
        number = first
        while number < stop:
            self._lane.begin(Writes(), 0)
            number += self._lane.execute_rows(slab.buf, slab.cells, number, stop, tables)
            if number < stop:
                self._insert(slab, number)
                number += 1

    def _insert(self, slab: Slab, number: int) -> None:
        cells = slab.cells
        space_id = int(cells[scan.SPACE_ID, number])
        at, end = int(cells[scan.TUPLE_AT, number]), int(cells[scan.TUPLE_END, number])
        try:
            if int(cells[scan.TYPE, number]) != _INSERT or space_id < 0 or at < 0:
                raise DamagedLog(slab.path, _offset(slab, number), "snapshot row is not an INSERT of a tuple")
            # The values of sequences are in rows of their own.
            statements.insert(self._box.begin(), self._box.space(space_id), slab.payload[at:end], numbered=False)
        except FlowstoneError as error:
            self._refuse(slab.path, f"row {int(cells[scan.LSN, number])} (space {space_id})", error)

    # --- logs ---

    def start_log(self, path: str, vclock: VClock, *, has_flags: bool) -> None:
        """Begin the next log, which starts at `vclock`. `has_flags` is true if the rows have flags for synchronous
        transactions."""
        # Per file: the LSNs of overlapping files may repeat, those inside a file must not.
        self._file_lsns = vclock.to_mapping()
        # Pending transactions of a 2.6 log keep its rules, even if their verdict is in a log with flags.
        if self._tracker.is_quiet and has_flags is self._by_schema:
            self._new_tracker(by_schema=not has_flags)

    def push_log(self, slab: Slab) -> None:
        """Apply the next rows of the log; rows that were applied before are skipped."""
        if not len(slab):
            return
        self._check_lsns(slab)
        done = 0
        for first, stop in _long_runs(slab):
            self._apply_each(slab, done, first)
            # After a pending transaction, each one must be applied so that it can be rolled back alone.
            end = self._apply_in_bulk(slab, first, stop) if self._tracker.is_quiet else first
            self._apply_each(slab, end, stop)
            done = stop
        self._apply_each(slab, done, len(slab))
        self.row_count += len(slab)

    def _check_lsns(self, slab: Slab) -> None:
        """Check that the LSNs of each originator increase from the start of the file on."""
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        for replica_id in np.unique(replica_ids).tolist():
            if not 0 <= replica_id < VCLOCK_MAX:
                raise DamagedLog(slab.path, _offset(slab, 0), f"row has invalid replica id {replica_id}")
            mine = lsns[replica_ids == replica_id]
            known = self._file_lsns.get(replica_id, 0)
            steps = np.diff(mine, prepend=known)
            if (steps <= 0).any() and not self._force:
                at = int(np.argmax(steps <= 0))
                before = int(mine[at - 1]) if at else known
                raise LsnUsedTwice(slab.path, replica_id, int(mine[at]), before)
            self._file_lsns[replica_id] = max(known, int(mine.max()))

    def _apply_in_bulk(self, slab: Slab, first: int, stop: int) -> int:
        """Apply single-row transactions from `first` on; return the end of those that were applied."""
        cells = slab.cells[:, first:stop]
        newest = replace(slab, cells=cells).newest()
        # Some rows were applied before; the lane cannot skip them.
        lsns = cells[scan.LSN]
        if any(int(lsns[cells[scan.REPLICA_ID] == number].min()) <= self._vclock.get(number) for number in newest):
            return first
        tables = tables_of(self._box, codes_of(cells), lambda table: not table.is_sync)
        self._lane.begin(Writes(), 0)
        count = self._lane.execute_rows(slab.buf, slab.cells, first, stop, tables)
        if count:
            self._vclock.merge(VClock(replace(slab, cells=cells[:, :count]).newest()))
            self.synchro.tenures.note_async_commit()
        return first + count

    def _apply_each(self, slab: Slab, first: int, stop: int) -> None:
        """Group the rows from `first` to `stop` into transactions, and apply these one by one."""
        grouping = Grouping()
        begin = first
        for number, row in enumerate(slab.rows(np.arange(first, stop)), first):
            if row.lsn <= self._vclock.get(row.replica_id):
                begin = number + 1
                continue
            try:
                transaction = grouping.push(row)
            except TransactionError as error:
                if not self._force:
                    self._refuse(slab.path, f"the transaction of LSN {row.lsn} of replica {row.replica_id}", error)
                # Resume after the last whole transaction: everything before it was applied.
                self._apply_mixed(slab, begin, stop)
                return
            if transaction is not None:
                self._apply(slab, transaction, range(begin, number + 1))
                begin = number + 1
        if grouping.pending:
            torn = DamagedLog(slab.path, _offset(slab, begin), "block ends inside a transaction")
            self._leave_out(slab, grouping.pending, torn)

    def _apply_mixed(self, slab: Slab, first: int, stop: int) -> None:
        """Do what `_apply_each` does for interleaved transactions, as 2.1.2 to 2.2.0 wrote them, grouped by TSN."""
        unfinished: dict[int, tuple[Grouping, list[int], list[Row]]] = {}
        for number, row in enumerate(slab.rows(np.arange(first, stop)), first):
            if row.lsn <= self._vclock.get(row.replica_id):
                continue
            grouping, numbers, rows = unfinished.setdefault(row.tsn, (Grouping(), [], []))
            numbers.append(number)
            rows.append(row)
            try:
                transaction = grouping.push(row)
            except TransactionError as error:
                self._leave_out(slab, rows, error)
                del unfinished[row.tsn]
                continue
            if transaction is not None:
                self._apply(slab, transaction, numbers)
                del unfinished[row.tsn]
        for _, numbers, rows in unfinished.values():
            torn = DamagedLog(slab.path, _offset(slab, numbers[0]), "block ends inside a transaction")
            self._leave_out(slab, rows, torn)

    def _leave_out(self, slab: Slab, rows: Sequence[Row], error: FlowstoneError) -> None:
        row = first_global(rows)
        self._refuse(slab.path, f"the transaction of LSN {row.lsn} of replica {row.replica_id}", error)
        for left_out in rows:
            self._follow(left_out)

    def _apply(self, slab: Slab, transaction: Rows, numbers: Sequence[int]) -> None:
        """Apply one transaction, whose rows have these numbers in the slab, and advance the vclock."""
        # Read before the transaction: it may be the one that makes the queue non-empty.
        before = self._tracker.is_quiet
        effect = self._box.begin()
        is_control = transaction.rows[0].type in _CONTROL
        if not is_control and self._tracker.is_void(transaction):
            # No server writes such a row, but archives of earlier releases may have it.
            origin_id = transaction.replica_id
            LOG.warning("%s: ignoring LSN %d of former owner %d", slab.path, transaction.lsn, origin_id)
            transaction, numbers = _emptied(transaction), ()
        try:
            if is_control:
                # Decoded only to check the body now: with force_recovery an invalid row is replaced by a NOP.
                decode_control(transaction.rows[0].type, transaction.rows[0].body)
            else:
                for number in numbers:
                    execute(self._box, effect, slab, number)
        except FlowstoneError as error:
            effect.rollback()
            what = f"the transaction of LSN {transaction.lsn} of replica {transaction.replica_id}"
            self._refuse(slab.path, what, error)
            is_control = False
            transaction = _emptied(transaction)
        waits = transaction.flags & _WAIT_ACK or (self._by_schema and effect.is_sync)
        # Most transactions need no tracker: nothing is pending, and they do not wait.
        if is_control or waits or not before or is_nop(transaction):
            self._decide(slab, Applied(transaction, effect, effect.is_sync))
        else:
            self.synchro.tenures.note_async_commit()
        if is_nop(transaction) and not (numbers and replaces_control(slab, numbers[-1])):
            self.synchro.note_void(transaction)
        for row in transaction.rows:
            self._follow(row)

    def _decide(self, slab: Slab, applied: Applied) -> None:
        """Pass the transaction to the tracker, and process it if it is a control row."""
        row, owner_id = applied.rows[0], self.synchro.owner_id
        undone = self._settle(slab, applied)
        if row.type in _CONTROL:
            self.synchro.follow(row)
            if undone and self.synchro.owner_id != owner_id:
                # The last one of `undone`, which is newest first, is the first void LSN.
                self.synchro.tenures.note_void(owner_id, undone[-1])

    def _settle(self, slab: Slab, applied: Applied) -> list[int]:
        """Pass the transaction to the tracker. Roll back the transactions that the tracker rejects, the newest first.

        Return the LSNs of the synchronous ones among them.
        """
        if self._tracker.is_quiet:
            # The tracker sees few transactions; those in between were committed by their write.
            self._tracker.skip_to(self.vclock)
        try:
            decisions = self._tracker.push(applied)
        except FlowstoneError as error:
            self._refuse(slab.path, f"the verdict of LSN {applied.lsn} of replica {applied.replica_id}", error)
            return []
        undone: list[int] = []
        for decided, kept in reversed(decisions):
            if not kept:
                decided.effect.rollback()
                if decided.is_synchronous:
                    undone.append(decided.lsn)
            elif decided.rows[0].type not in _CONTROL and not is_nop(decided):
                self.synchro.tenures.note_async_commit()
        return undone

    def _new_tracker(self, *, by_schema: bool) -> None:
        self._by_schema = by_schema
        self._tracker = SettledTracker(
            is_synchronous=(lambda applied: applied.touches_synchronous) if by_schema else None
        )
        self._tracker.start(self.vclock, self.synchro.promote(), self.synchro.tenures.voids)

    def _follow(self, row: Row) -> None:
        if row.lsn > self._vclock.get(row.replica_id):
            self._vclock.follow(row.replica_id, row.lsn)

    def _refuse(self, path: str, what: str, error: FlowstoneError) -> None:
        if not self._force:
            raise RecoveryError(path, what, error, hint=self._hint) from error
        self._report(f"{path}: skipped {what}: {error}")


def execute(box: Box, effect: BoxTransaction, slab: Slab, number: int) -> None:
    """Execute row `number`, which must be a data row, in the transaction `effect`."""
    cells, payload = slab.cells[:, number].tolist(), slab.payload
    kind = cells[scan.TYPE]
    if kind == _NOP:
        return
    space = box.space(cells[scan.SPACE_ID])
    tuple_ = payload[cells[scan.TUPLE_AT] : cells[scan.TUPLE_END]]
    key = payload[cells[scan.KEY_AT] : cells[scan.KEY_END]]
    index_id, index_base = max(cells[scan.INDEX_ID], 0), max(cells[scan.INDEX_BASE], 0)
    match kind:
        case RequestType.INSERT:
            statements.insert(effect, space, tuple_)
        case RequestType.REPLACE:
            statements.replace(effect, space, tuple_)
        case RequestType.DELETE:
            statements.delete(effect, space, index_id, key)
        case RequestType.UPDATE:
            statements.update(effect, space, index_id, key, tuple_, index_base)
        case RequestType.UPSERT:
            operations = payload[cells[scan.OPS_AT] : cells[scan.OPS_END]]
            statements.upsert(effect, space, tuple_, operations, index_base)
        case _:
            what = f"unexpected row of type {type_name(kind)}"
            raise DamagedLog(slab.path, _offset(slab, number), what)


def _long_runs(slab: Slab) -> list[tuple[int, int]]:
    """Return the ranges of many consecutive statements, each an asynchronous transaction of its own."""
    cells = slab.cells
    is_single = are_alone(cells) & np.isin(cells[scan.TYPE], WRITES)
    edges = np.concatenate(([0], np.flatnonzero(np.diff(is_single)) + 1, [len(slab)]))
    is_long = (np.diff(edges) >= BULK_MIN) & is_single[edges[:-1]]
    return list(zip(edges[:-1][is_long].tolist(), edges[1:][is_long].tolist(), strict=True))


def _emptied(transaction: Rows) -> Rows:
    """Return NOPs in place of the rows: they advance the vclock as the transaction does, and are not synchronous."""
    return Rows(tuple(void_rows(transaction.rows)))


def _offset(slab: Slab, number: int) -> int:
    """Return the file offset of the block that contains row `number`."""
    return int(slab.offsets[slab.cells[scan.SPAN, min(number, len(slab) - 1)]])
