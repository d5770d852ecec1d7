"""Applies rows of peers to the box of a running node and submits them to its log, with their original LSNs.

Rows are applied as whole transactions, in the order of arrival; transactions that the log already has are skipped. One
step of the event loop compares a slab with the log, applies and submits it, so no latch is needed if two peers send the
same rows. Plain rows are applied in bulk (`plain_rows.py`), all others as single statements; the rows of a slab are one
submission. Synchronous transactions, and transactions after them, enter the queue one by one
(`node/synchro/limbo_driver.py`). The queue also decides on control rows, and checks that rows match our history.

A failed write rolls back everything in flight and is reported to every applier (`on_failure`). After that, rows are
rejected, because they would follow a gap, until the appliers are restarted (`start_anew`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowstone.box.box import Box
from flowstone.box.engine.transaction import BoxTransaction, Statement
from flowstone.box.lane.rows import distinct
from flowstone.box.lane.writes import Writes
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors, scan
from flowstone.iproto.constants import VCLOCK_MAX, Flag, RequestType
from flowstone.iproto.row import Row, encode_header
from flowstone.iproto.slab import Slab
from flowstone.node.schema_row import schema_version
from flowstone.node.synchro.limbo_driver import NOBODY, Received, Waiter
from flowstone.node.upstream.applied_batch import AppliedBatch, Together
from flowstone.node.upstream.plain_rows import PlainRows, Replicated
from flowstone.node.wal.commits import Commits, client_error
from flowstone.node.wal.journal import Journal
from flowstone.node.wal.replay import BULK_MIN, execute
from flowstone.outside import Clock
from flowstone.replication.limbo.control_rows import Demote, Promote, RaftState, decode_control
from flowstone.replication.limbo.queue import LimboEntry
from flowstone.replication.limbo.split_brain import Fate, SettlingRequest
from flowstone.replication.row_stream import journal_rows, replaces_control
from flowstone.xlog.block import TRANSACTION_SIZE_MAX
from flowstone.xlog.transactions import CONTROL_TYPES, make_transaction

LOG = logging.getLogger("flowstone.node")

_CONTROL: Final = frozenset(int(kind) for kind in CONTROL_TYPES)
_NOP: Final = RequestType.NOP.value
_COMMIT, _WAIT_ACK = Flag.COMMIT.value, Flag.WAIT_ACK.value
_WAIT: Final = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value

UNCHECKED_SCHEMA: Final = (2, 10, 1)
"""The newest schema version with which control rows are not validated against our history."""

TOGETHER_SIZE_MAX: Final = TRANSACTION_SIZE_MAX // 2
"""Size of a slab, in bytes, above which each transaction is submitted separately: a submission must not exceed
TRANSACTION_SIZE_MAX."""


class _Kind(Enum):
    """The way in which a transaction of a slab is applied."""

    OTHER = 0
    PLAIN = 1  # in bulk, if the queue is empty
    WAITING = 2  # in bulk, each with its own entry in the queue


class _Held(NamedTuple):
    """A held slab, and the futures to resolve when it has been applied."""

    slab: Slab
    released: list[asyncio.Future[None]]


class Applying:
    """Applies slabs of all peers. `in_flight_bytes` is the size of the rows that are held or not written yet."""

    def __init__(
        self,
        box: Box,
        journal: Journal,
        commits: Commits,
        clock: Clock,
        *,
        skip_conflict: Callable[[], bool] = lambda: False,
    ) -> None:
        self._box = box
        self._journal = journal
        self._commits = commits
        self._queue = commits.queue
        self._clock = clock
        self._skip_conflict = skip_conflict
        self._plain = PlainRows(box)
        self._held: deque[_Held] = deque()
        """Slabs that arrived while a verdict was being written, or after such a slab."""
        self._released: list[asyncio.Future[None]] = []
        """Futures to resolve when the current slab has been applied, if it was held."""
        self._failure: FlowstoneError | None = None
        self.in_flight_bytes = 0
        self.on_failure: list[Callable[[FlowstoneError], None]] = []
        """Called with the error if applied rows were rolled back, or if held rows could not be applied."""
        self.on_term: Callable[[int, int], None] | None = None
        """Called with the originator and the term of a PROMOTE or DEMOTE before it is processed."""
        self._is_applying = False
        self._queue.on_free.append(self._release_held)

    def apply(self, slab: Slab) -> None:
        """Apply the new transactions in `slab`, and start to write them; hold the slab if a verdict is being written.

        Raise the error of the first transaction that cannot be applied; earlier transactions are applied, later ones
        are not. After a failed write, raise that error for every slab until `start_anew`.
        """
        self._check_sound()
        # Hold it after a held slab, too, even if the queue is free again: rows must be applied in the order of arrival.
        if (self._queue.limbo.is_busy or self._held) and len(slab):
            self._held.append(_Held(slab, []))
            self.in_flight_bytes += _size(slab)
        else:
            self._apply_now(slab)

    def _apply_now(self, slab: Slab) -> None:
        news = self._news(slab)
        if news is None:
            return
        self._is_applying = True
        try:
            self._apply(news)
        finally:
            # In `finally`: transactions before one that cannot be applied must still be written.
            self._journal.flush()
            self._is_applying = False
        self._check_sound()

    @property
    def is_holding(self) -> bool:
        """True if slabs wait for a verdict to be written."""
        return bool(self._held)

    async def release(self) -> None:
        """Wait until the slabs held now have been applied; raise the error if they cannot be."""
        released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._held:
            self._held[-1].released.append(released)
            await released

    @property
    def is_sound(self) -> bool:
        """False after a failed write: no rows are accepted until `start_anew`."""
        return self._failure is None

    def start_anew(self) -> None:
        """Accept rows again. Appliers must resubscribe at the end of the log after this, so that there is no gap."""
        self._failure = None

    def _check_sound(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- new rows ---

    def _news(self, slab: Slab) -> Slab | None:
        """Return the slab without the rows that the log has; None if no row is new."""
        if not len(slab):
            return None
        if len(slab) < BULK_MIN:
            news = self._new_among_few(slab)
            if not any(news):
                return None  # the usual case in a mesh: another peer sent the rows first
            keep = np.array(news)
        else:
            keep = self._new_among_many(slab)
        if keep.all():
            return slab
        return _cut(slab, keep) if keep.any() else None

    def _known(self, replica_id: int) -> int:
        """Return the last LSN of `replica_id` that was submitted; raise UnknownReplica for an invalid id."""
        if not 0 < replica_id < VCLOCK_MAX:
            raise errors.UnknownReplica(f"Replica {replica_id} is not registered with this replica set")
        return self._journal.next_lsn(replica_id) - 1

    def _new_among_few(self, slab: Slab) -> list[bool]:
        highest: dict[int, int] = {}
        keep: list[bool] = []
        rows = zip(slab.cells[scan.REPLICA_ID].tolist(), slab.cells[scan.LSN].tolist(), strict=True)
        for replica_id, lsn in rows:
            known = highest.get(replica_id)
            if known is None:
                known = self._known(replica_id)
            keep.append(lsn > known)
            # Check inside the slab, too: a row may arrive twice.
            highest[replica_id] = max(lsn, known)
        return keep

    def _new_among_many(self, slab: Slab) -> NDArray[np.bool_]:
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        keep: NDArray[np.bool_] = np.ones(len(slab), np.bool_)
        for number in distinct(replica_ids):
            known, mine = self._known(number), np.flatnonzero(replica_ids == number)
            if not (np.diff(lsns[mine], prepend=known) > 0).all():
                highest = np.maximum.accumulate(np.concatenate(([known], lsns[mine])))
                keep[mine] = lsns[mine] > highest[:-1]
        return keep

    def _apply(self, slab: Slab) -> None:
        batch = AppliedBatch(slab, 0)
        try:
            for first, stop, kind in self._stretches(slab):
                effect = None
                if kind is _Kind.PLAIN and self._may_be_plain(slab, first, stop):
                    # None if a row needs a closer look; nothing has changed then.
                    effect = self._plain.apply(slab, first, stop)
                if effect is not None:
                    batch.add(stop, effect)
                    continue
                begin = first if kind is _Kind.OTHER else self._let_wait(batch, first, stop)
                if self._each(batch, begin, stop):
                    return
        finally:
            # In `finally`: what was applied must be written, or the box would differ from the log.
            self._submit(batch)

    def _stretches(self, slab: Slab) -> Iterator[tuple[int, int, _Kind]]:
        """Split the slab into ranges of whole transactions of one kind: first row, end, kind."""
        count = len(slab)
        if count < BULK_MIN or _size(slab) > TOGETHER_SIZE_MAX:
            yield 0, count, _Kind.OTHER
            return
        is_plain = self._plain.found(slab)
        # The usual case, without the cost of finding ranges.
        if is_plain.all():
            yield 0, count, _Kind.PLAIN
            return
        ends = np.flatnonzero(slab.cells[scan.FLAGS] & _COMMIT) + 1
        starts = np.concatenate(([0], ends[:-1]))
        kinds = np.where(
            np.logical_and.reduceat(is_plain, starts),
            _Kind.PLAIN.value,
            np.where(self._plain.may_wait(slab)[starts], _Kind.WAITING.value, _Kind.OTHER.value),
        )
        edges = np.flatnonzero(np.diff(kinds)) + 1
        cuts = [0, *starts[edges].tolist(), count]
        for first, stop in pairwise(cuts):
            kind = _Kind(int(kinds[np.searchsorted(starts, first)]))
            yield first, stop, kind if stop - first >= BULK_MIN else _Kind.OTHER

    def _may_be_plain(self, slab: Slab, first: int, stop: int) -> bool:
        """Return True if the rows can be applied in bulk: no listeners, no pending transactions, no former owner.

        Checked for each range, because an earlier one may have changed the queue.
        """
        if self._commits.has_listeners or not self._queue.is_empty:
            return False
        return all(map(self._queue.is_current, distinct(slab.cells[scan.REPLICA_ID, first:stop])))

    # --- pending transactions in bulk ---

    def _let_wait(self, batch: AppliedBatch, first: int, stop: int) -> int:
        """Apply rows in bulk, each a pending transaction of its own; return the first row left to `_each`."""
        slab = batch.slab
        cells = slab.cells[:, first:stop]
        origin_ids = distinct(cells[scan.REPLICA_ID])
        # Listeners are called per transaction, and a bulk write has no statements for them.
        if len(origin_ids) > 1 or self._commits.has_listeners or not self._queue.takes(origin_ids[0]):
            return first
        # Transactions of several rows are rolled back as a whole; NOPs never enter the queue.
        if not (cells[scan.FLAGS] & _COMMIT).all() or (cells[scan.TYPE] == _NOP).any():
            return first
        effect = self._plain.apply_run(slab, first, stop)
        if effect is not None:
            self._let_run(batch, origin_ids[0], stop, effect)
            return stop
        is_flagged = (cells[scan.FLAGS] & _WAIT_ACK != 0).tolist()
        if self._queue.is_empty and not (is_flagged[0] or self._plain.is_synchronous(slab, first)):
            return first
        self._submit(batch)
        entries = self._enter_many(origin_ids[0], slab, first, is_flagged)
        end = first + len(entries)
        if entries:
            rows = journal_rows(slab, first, end, self._clock.wall())
            lsns = {origin_ids[0]: entries[-1].lsn}
            logged = self._logging(len(rows))
            try:
                submit = lambda done: self._journal.submit_replicated(rows, lsns, done)  # noqa: E731
                self._commits.submit_waiting(entries, submit, logged)
            except FlowstoneError:
                self.in_flight_bytes -= len(rows)
                raise
        batch.go_on(end)
        return end

    def _let_run(self, batch: AppliedBatch, origin_id: int, stop: int, effect: Writes) -> None:
        """Add the rows up to `stop`, each an applied synchronous transaction, to the queue as one entry."""
        self._submit(batch)
        cells, first, last = batch.slab.cells, batch.stop, stop - 1
        lsn, size = int(cells[scan.LSN, last]), int(cells[scan.ROW_END, last]) - int(cells[scan.ROW_AT, first])
        entry = self._queue.limbo.receive(
            Waiter(effect, NOBODY, is_promised=False),
            origin_id=origin_id,
            lsn=lsn,
            is_synchronous=True,
            size=size,
            count=stop - first,
        )
        assert entry is not None, "a synchronous transaction always gets an entry"
        batch.add(stop, effect)
        self._submit(batch, entry=entry)

    def _enter_many(
        self, origin_id: int, slab: Slab, first: int, is_flagged: Sequence[bool]
    ) -> list[LimboEntry[Waiter]]:
        """Apply the rows from `first` on, up to one that has to be applied on its own; return the entries of those."""
        receive, told = self._queue.limbo.receive, self._commits.teller(())
        entries: list[LimboEntry[Waiter]] = []
        cells, effects = slab.cells, self._plain.apply_each(slab, first, first + len(is_flagged))
        for number, effect in enumerate(effects, first):
            has_flag = is_flagged[number - first]
            entry = receive(
                Waiter(effect, told, False),
                origin_id=origin_id,
                lsn=int(cells[scan.LSN, number]),
                is_synchronous=has_flag or self._plain.is_synchronous(slab, number),
                size=int(cells[scan.ROW_END, number]) - int(cells[scan.ROW_AT, number]),
            )
            assert entry is not None, "the queue is not empty, or the first transaction is synchronous"
            entries.append(entry)
        return entries

    # --- one by one ---

    def _each(self, batch: AppliedBatch, first: int, stop: int) -> bool:
        """Apply transactions one by one. Return True if a verdict has to be written first, and the rest is held."""
        slab = batch.slab
        flags, types = slab.cells[scan.FLAGS, first:stop].tolist(), slab.cells[scan.TYPE, first:stop].tolist()
        begin = first
        for number in range(first, stop):
            if not flags[number - first] & _COMMIT:
                continue
            if types[begin - first] in _CONTROL:
                self._submit(batch)
                # Submit the batch first: a verdict decides about the transactions before it.
                self._submit_control(slab, begin)
                self._check_sound()
                batch.go_on(number + 1)
                if self._queue.limbo.is_busy:
                    self._hold_rest(slab, number + 1)
                    return True
            else:
                if self._may_wait(slab, begin, number + 1):
                    self._submit(batch)  # a pending transaction is rolled back separately
                self._one(batch, begin, number + 1)
                if self._commits.has_listeners or _size(slab) > TOGETHER_SIZE_MAX:
                    self._submit(batch)
            begin = number + 1
        return False

    def _hold_rest(self, slab: Slab, first: int) -> None:
        if first < len(slab):
            rest = replace(slab, cells=slab.cells[:, first:])
            # In front of slabs that arrived meanwhile. Waiters for this slab now wait for its rest.
            self._held.appendleft(_Held(rest, self._released))
            self._released = []
            self.in_flight_bytes += _size(rest)

    def _one(self, batch: AppliedBatch, first: int, stop: int) -> None:
        """Apply the transaction in the rows from `first` to `stop`, add it to the batch, and submit it if pending."""
        slab, effect = batch.slab, Replicated(self._box)
        types = slab.cells[scan.TYPE, first:stop].tolist()
        nops: set[int] = set()
        number = stop - 1
        entry = None
        self._box.is_recovering = True  # the originator has checked and allowed it
        try:
            if self._is_void(slab, first, stop):
                # Still written, as NOPs: the vclock must advance, or the peer would send the rows again.
                nops.update(range(first, stop))
            else:
                for number in range(first, stop):
                    if not self._execute(effect, slab, number):
                        nops.add(number)
            # A transaction whose rows were all skipped has nothing to wait for.
            has_effect = any(number not in nops and types[number - first] != _NOP for number in range(first, stop))
            if has_effect:
                entry = self._enter(slab, first, stop, effect)
        except Exception as error:
            effect.rollback()
            if isinstance(error, FlowstoneError):
                _say_where(error, slab, number)
            raise
        finally:
            self._box.is_recovering = False
        received = flags = int(slab.cells[scan.FLAGS, stop - 1]) & _WAIT
        is_foreign = entry is None and not self._queue.takes(int(slab.cells[scan.REPLICA_ID, stop - 1]))
        if not has_effect or is_foreign:
            # In recovery, real servers queue every flagged transaction, and exit if it is not the owner's
            # (docs/spec/synchro.md#late-rows).
            flags = 0
        is_changed = bool(nops) or flags != received
        rows = self._with_nops(slab, first, stop, nops, flags) if is_changed else None
        batch.add(stop, effect, rows, has_effect=has_effect)
        if entry is not None:
            self._submit(batch, entry=entry)

    def _may_wait(self, slab: Slab, first: int, stop: int) -> bool:
        """Return True if the transaction may get an entry in the queue."""
        if not self._queue.is_empty or int(slab.cells[scan.FLAGS, stop - 1]) & _WAIT:
            return True
        spaces = map(self._box.spaces.get, slab.cells[scan.SPACE_ID, first:stop].tolist())
        return any(space is not None and space.definition.is_sync for space in spaces)

    def _is_void(self, slab: Slab, first: int, stop: int) -> bool:
        """Return True for a synchronous transaction of a former owner that its successor rolled back.

        Raise ER_SPLIT_BRAIN if the transaction contradicts our history (docs/spec/synchro.md#term-filter).
        """
        cells, last = slab.cells, stop - 1
        replica_id, lsn, flags = (int(cells[line, last]) for line in (scan.REPLICA_ID, scan.LSN, scan.FLAGS))
        has_effect = not (cells[scan.TYPE, first:stop] == _NOP).all()
        is_control = stop - first == 1 and replaces_control(slab, last)
        fate = self._queue.admit(replica_id, lsn, flags=flags, has_effect=has_effect, was_control=is_control)
        return fate is Fate.NOP

    def _enter(self, slab: Slab, first: int, stop: int, effect: BoxTransaction) -> LimboEntry[Waiter] | None:
        """Return the entry of the transaction in the queue; None if it does not have to wait.

        Rows of 2.6 have no flag for synchronous transactions, so the spaces decide, too.
        """
        cells, last = slab.cells, stop - 1
        is_synchronous = bool(int(cells[scan.FLAGS, last]) & _WAIT_ACK) or effect.is_sync
        if not is_synchronous and self._queue.is_empty:
            return None
        waiting = Waiter(effect, self._commits.teller(tuple(effect.statements)), is_promised=False)
        return self._queue.receive(
            waiting,
            origin_id=int(cells[scan.REPLICA_ID, last]),
            lsn=int(cells[scan.LSN, last]),
            is_synchronous=is_synchronous,
            size=int(cells[scan.ROW_END, last]) - int(cells[scan.ROW_AT, first]),
        )

    def _execute(self, effect: BoxTransaction, slab: Slab, number: int) -> bool:
        """Execute a row; return False if `replication_skip_conflict` skips it because of a duplicate key."""
        savepoint = effect.savepoint()
        try:
            execute(self._box, effect, slab, number)
        except errors.TupleFound:
            if not self._skip_conflict():
                raise
            # The failed row may have changed other indexes before it met the duplicate key.
            effect.rollback_to(savepoint)
            return False
        return True

    def _with_nops(self, slab: Slab, first: int, stop: int, nops: set[int], flags: int) -> bytes:
        """Return a transaction in which the rows `nops` have become NOPs, with the limbo flags `flags`."""
        now = self._clock.wall()
        rows: list[Row] = []
        for number, row in enumerate(slab.rows(np.arange(first, stop)), first):
            kind, body = (_NOP, b"") if number in nops else (row.type, row.body)
            rows.append(Row(kind, row.replica_id, row.group_id, row.lsn, now, row.tsn, row.flags, 0, 0, body))
        made = make_transaction(rows, flags)
        return b"".join(encode_header(row) + row.body for row in made.rows)

    def _in_place_of_control(self, row: Row) -> bytes:
        """Return the NOP that replaces a control row. Explicit TSN and COMMIT tell it from a void transaction."""
        nop = Row(_NOP, row.replica_id, row.group_id, row.lsn, self._clock.wall(), row.lsn, _COMMIT)
        return encode_header(nop, is_explicit=True)

    # --- the log ---

    def _submit(self, batch: AppliedBatch, *, entry: LimboEntry[Waiter] | None = None) -> None:
        """Submit the rows of the batch, and empty it."""
        effects, statements = batch.effects, tuple(batch.statements)
        if not effects:
            return
        # A committed row that later leaders must know (see `Tenures.former`).
        if entry is None and batch.has_facts:
            self._queue.note_async_commit()
        rows, lsns = batch.rows(self._clock.wall()), batch.lsns()
        # Clear it before `_log`, which may raise: the `finally` of `_apply` must not submit rows twice.
        batch.go_on(batch.stop)
        self._log(effects[0] if len(effects) == 1 else Together(effects), rows, lsns, statements, entry)

    def _log(
        self,
        effect: Writes | BoxTransaction | Together,
        rows: bytes,
        lsns: dict[int, int],
        statements: tuple[Statement, ...],
        entry: LimboEntry[Waiter] | None,
    ) -> None:
        """Submit rows to the log; `effect` rolls them back if the write fails."""
        logged = self._logging(len(rows))
        try:
            self._commits.submit_replicated(effect, rows, lsns, logged, statements, entry=entry)
        except FlowstoneError:
            self.in_flight_bytes -= len(rows)
            raise

    def _logging(self, size: int) -> Callable[[FlowstoneError | None], None]:
        """Count `size` bytes as in flight, and return the callback that the log calls when they are written or lost."""

        def logged(error: FlowstoneError | None) -> None:
            self.in_flight_bytes -= size
            if error is not None:
                self._give_up(client_error(error))

        self.in_flight_bytes += size
        return logged

    def _give_up(self, error: FlowstoneError) -> None:
        """Report the error and stop accepting rows, because they would follow a gap. Only the first call has an
        effect."""
        # The log reports each lost batch; appliers are stopped by the first report.
        if self._failure is not None:
            return
        self._failure = error
        while self._held:
            held = self._held.popleft()
            self.in_flight_bytes -= _size(held.slab)
            _tell(held.released, error)
        for tell in self.on_failure:
            tell(error)

    # --- control rows ---

    def _submit_control(self, slab: Slab, number: int) -> None:
        """Submit a control row. It confirms or rolls back transactions once it is written."""
        (row,) = slab.rows(np.arange(number, number + 1))
        body = decode_control(row.type, row.body)
        if isinstance(body, RaftState):
            raise errors.Protocol("unexpected RAFT row among rows of the log")
        if isinstance(body, Promote | Demote) and self.on_term is not None:
            # Raise the Raft term first: the row resumes the queue only if its own term is not lower
            # (docs/spec/synchro.md#claimed-ownership).
            self.on_term(row.replica_id, body.term)
        # Read it now: an earlier row may have upgraded the schema.
        self._queue.limbo.is_validating = schema_version(self._box) > UNCHECKED_SCHEMA
        rows = journal_rows(slab, number, number + 1, self._clock.wall())
        received = Received(
            rows, lambda: self._in_place_of_control(row), {row.replica_id: row.lsn}, self._logging(len(rows))
        )
        try:
            self._queue.decide(SettlingRequest(row.replica_id, body, row.lsn), received)
        except FlowstoneError as error:
            self.in_flight_bytes -= len(rows)
            _say_where(error, slab, number)
            raise
        self._journal.flush()

    def _release_held(self) -> None:
        """Apply held slabs when the queue is free. An error goes to the appliers waiting for the slab, else to all."""
        if self._is_applying:
            return  # held slabs come after the one that is being applied
        while self._held and not self._queue.limbo.is_busy:
            held = self._held.popleft()
            self.in_flight_bytes -= _size(held.slab)
            # `_hold_rest` passes the futures on if the slab is held again after another verdict.
            self._released = held.released
            error: FlowstoneError | None = None
            try:
                self._apply_now(held.slab)
            except FlowstoneError as caught:
                error = caught
            except Exception as caught:
                LOG.exception("applying held rows failed")
                error = FlowstoneError(f"{type(caught).__name__}: {caught}")
            released, self._released = self._released, []
            # No applier waits for the slab, so the error would be lost: it stops all of them.
            if error is not None and not released:
                self._give_up(error)
            _tell(released, error)


def _tell(waiting: Sequence[asyncio.Future[None]], error: FlowstoneError | None) -> None:
    for future in waiting:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _cut(slab: Slab, keep: NDArray[np.bool_]) -> Slab:
    """Return the slab with only the rows `keep`, which are whole transactions again.

    If a transaction loses rows, its first row left gives the TSN, and its last one the COMMIT flag. Parts of a
    transaction can be known if it has rows of several instances, or came row by row from a 1.10 master.
    """
    flags = slab.cells[scan.FLAGS]
    is_end = flags & _COMMIT != 0
    ends = np.flatnonzero(is_end)
    numbers = (np.cumsum(is_end) - is_end)[keep]
    last = np.flatnonzero(np.diff(numbers, append=-1))
    first = np.concatenate(([0], last[:-1] + 1))
    cells = np.ascontiguousarray(slab.cells[:, keep])
    cells[scan.FLAGS, last] = flags[ends[numbers[last]]]
    counts = last - first + 1
    cells[scan.TSN] = np.repeat(cells[scan.LSN, first], counts)
    cells[scan.SINGLE, last[(counts == 1) & (np.diff(ends, prepend=-1)[numbers[last]] > 1)]] = 1
    return replace(slab, cells=cells)


def _size(slab: Slab) -> int:
    """Return the bytes from the first row to the last. A part of a slab keeps the payload of the whole in memory."""
    return int(slab.cells[scan.ROW_END, -1]) - int(slab.cells[scan.ROW_AT, 0])


def _say_where(error: FlowstoneError, slab: Slab, number: int) -> None:
    """Add the row to the hint of the error. The message stays equal to the message of real servers."""
    lsn, replica_id = int(slab.cells[scan.LSN, number]), int(slab.cells[scan.REPLICA_ID, number])
    error.hint = error.hint or f"failed at row {lsn} of replica {replica_id}"
