"""Receives the live tail of a log: counts all rows, decodes samples, keeps them in a ring of limited length.

A `Sink` (node/upstream/sink.py) without data. An applier feeds it as an anonymous replica, from about the server's
position when the tail started. It acknowledges only settled rows, because it makes nothing durable and Tarantool 2.6
counts anonymous replicas for a quorum. All rows are counted by their scanned headers; a limited number of transactions
per second is decoded, and `skipped` counts the rest. Every transaction is tracked until it is confirmed or rolled back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import msgspec
import numpy as np

from flowstone.box.dialect import Dialect, from_greeting
from flowstone.box.schema import SchemaTracker
from flowstone.box.system import SCHEMA_SPACE_IDS
from flowstone.history.log_reading import FLAGS_SINCE
from flowstone.history.selection import Mask
from flowstone.history.settled_rows import LOOKED_AT, WAIT
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab
from flowstone.observation.anonymous_sink import AnonymousSink
from flowstone.observation.live_transaction import (
    LiveTransaction,
    TransactionStatus,
    WaitingRow,
    described,
    waiting_rows,
)
from flowstone.outside import Clock
from flowstone.replication.applier.states import ConnectionLost
from flowstone.replication.limbo.control_rows import Demote, Promote, decode_control
from flowstone.replication.settled_position import Decision, SettledTracker, Tracked, is_nop
from flowstone.replication.vclock import VClock, VClockBuilder
from flowstone.xlog.transactions import CONTROL_TYPES, LogTransaction, group

KEPT_MAX: Final = 5000
"""Limit of transactions in the ring."""

DECODED_PER_SECOND: Final = 100
"""Limit of decoded transactions: people do not read more, and decoding is the expensive part."""

WAITING_MAX: Final = 100
"""Limit of pending transactions that are shown."""

PENDING_MAX: Final = 10_000
PENDING_SIZE_MAX: Final = 64 * 1024 * 1024
"""Limits of the pending transactions in memory, and of their bytes; those after a pending one are pending, too."""

TURN_SIZE: Final = 200
"""Transactions that are processed one by one before yielding to the event loop: some milliseconds."""

_PROMOTE: Final = (RequestType.RAFT_PROMOTE.value, RequestType.RAFT_DEMOTE.value)


class TooMuchWaits(ConnectionLost):
    """There are more pending transactions than fit in memory; the tail must restart."""


@dataclass(frozen=True, slots=True)
class _Seen(Tracked):
    """A transaction, its entry in the ring if it was decoded, and whether it touches a synchronous space."""

    shown: LiveTransaction | None
    touches_synchronous: bool


class PendingTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """A pending transaction; `age` is in seconds."""

    replica_id: int
    lsn: int
    age: float
    rows: tuple[WaitingRow, ...]


class TailSink(AnonymousSink):
    """The `Sink` of a tail, across all its connections.

    `on_shown` is called with every transaction that enters the ring, and again when its status changes; `on_leader`
    with every new owner of the synchronous queue: term, replica id (0 for none), time.
    """

    def __init__(
        self,
        clock: Clock,
        uuid: UUID,
        *,
        on_shown: Callable[[LiveTransaction], None] = lambda transaction: None,
        on_leader: Callable[[int, int, float], None] = lambda term, replica_id, at: None,
    ) -> None:
        super().__init__(uuid)
        self.ring: deque[LiveTransaction] = deque(maxlen=KEPT_MAX)
        self.rows_seen = self.transactions_seen = self.skipped = 0
        """`rows_seen` counts only rows written since the tail started."""
        self._clock = clock
        self._on_shown = on_shown
        self._on_leader = on_leader
        self._budget = _Budget(clock, DECODED_PER_SECOND)
        self._replicaset_uuid: UUID | None = None
        self._dialect = Dialect.V2_11
        self._has_flags = True
        self._schema = SchemaTracker()
        self._tracker: SettledTracker[_Seen] | None = None
        self._seen = VClockBuilder()
        self._live_from = VClock()
        self._undecided: dict[tuple[int, int], LiveTransaction] = {}

    # --- position ---

    @property
    def replicaset_uuid(self) -> UUID | None:
        """None while the position is unknown: the applier then requests a snapshot, which reports one."""
        return self._replicaset_uuid if self._tracker is not None else None

    @property
    def version_id(self) -> int:
        return self._dialect.version_id

    @property
    def vclock(self) -> VClock:
        return self._tracker.vclock if self._tracker is not None else VClock()

    @property
    def has_position(self) -> bool:
        return self._tracker is not None

    def meet(self, replicaset_uuid: UUID, version: tuple[int, int, int], schema: SchemaTracker) -> None:
        """Prepare for a connection to a server of this version, with these definitions."""
        self._replicaset_uuid = replicaset_uuid
        self._dialect, self._has_flags = from_greeting(version), version >= FLAGS_SINCE
        self._schema = schema
        if self._tracker is not None:
            # This server sends pending transactions again, if it has them.
            self._begin(self._tracker.vclock)

    def start_at(self, vclock: VClock, *, live_from: VClock | None = None) -> None:
        """Start after `vclock`; rows up to `live_from` were written before the tail started."""
        self._begin(vclock.without_zero())
        self._seen = VClockBuilder(vclock.without_zero())
        self._live_from = (live_from if live_from is not None else vclock).without_zero()

    def pass_gap(self) -> None:
        """Skip rows that the server lacks: if they were written before the tail started, continue at `live_from`."""
        if self._tracker is not None and not self._live_from <= self._tracker.vclock:
            self.start_at(self._live_from)
        else:
            self.forget_position()

    def forget_position(self) -> None:
        """Start the next connection at the server's position then; transactions pending now stay pending."""
        self._tracker = None
        self._undecided.clear()

    def _begin(self, vclock: VClock) -> None:
        self._tracker = SettledTracker(is_synchronous=None if self._has_flags else _touches_synchronous)
        self._tracker.start(vclock)

    def waiting(self) -> list[PendingTransaction]:
        """Return the pending transactions in log order, at most WAITING_MAX."""
        if self._tracker is None or self._tracker.is_quiet:
            return []
        schema, now = self._schema.schema, self._clock.wall()
        pending = [seen for seen in self._tracker.pending if seen.rows[0].type not in CONTROL_TYPES]
        return [
            PendingTransaction(
                replica_id=seen.replica_id,
                lsn=seen.lsn,
                age=max(0.0, now - seen.transaction.timestamp),
                rows=waiting_rows(seen.transaction, schema),
            )
            for seen in pending[:WAITING_MAX]
        ]

    # --- a snapshot, requested only for its position ---

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        """Take the position and abort: a server answers only when everything pending at `vclock` is settled."""
        self.start_at(vclock)
        raise ConnectionLost("snapshot not needed: only its position was requested")

    # --- the log ---

    async def apply(self, slab: Slab) -> None:
        tracker = self._tracker
        assert tracker is not None, "subscribed without a position"
        before = tracker.vclock
        self._count(slab)
        if tracker.is_quiet and not self._needs_a_look(slab.cells):
            self._sample(slab)
            tracker.skip_to(before.merged(VClock(slab.newest())))
        else:
            await self._each(tracker, slab)
            _check_pending(tracker)
        if tracker.vclock is not before:
            for tell in tuple(self.on_written):
                tell()

    def _needs_a_look(self, cells: Cells) -> bool:
        """Return True if any row is synchronous, is a control row, or changes the schema."""
        if (cells[scan.FLAGS] & WAIT).any() or np.isin(cells[scan.TYPE], LOOKED_AT).any():
            return True
        looked_for = SCHEMA_SPACE_IDS if self._has_flags else SCHEMA_SPACE_IDS | self._schema.schema.synchronous
        return bool(np.isin(cells[scan.SPACE_ID], sorted(looked_for)).any())

    def _count(self, slab: Slab) -> None:
        """Count the rows and transactions; rows that a second server sends again are counted once."""
        is_new, is_live = self._later_than(slab, self._seen), self._later_than(slab, self._live_from)
        self.rows_seen += int((is_new & is_live).sum())
        self.transactions_seen += int((is_new & _commits(slab)).sum())
        for replica_id, lsn in slab.newest().items():
            if lsn > self._seen.get(replica_id):
                self._seen.follow(replica_id, lsn)

    @staticmethod
    def _later_than(slab: Slab, vclock: VClock | VClockBuilder) -> Mask:
        """Return which rows are after a position."""
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        found: Mask = np.zeros(len(slab), np.bool_)
        for replica_id in np.unique(replica_ids).tolist():
            found |= (replica_ids == replica_id) & (lsns > vclock.get(replica_id))
        return found

    def _sample(self, slab: Slab) -> None:
        """Decode the newest transactions of a slab in which nothing is pending: people look for the latest write."""
        ends = np.flatnonzero(_commits(slab)) + 1
        count = self._budget.take(len(ends))
        passed_by = ends[: len(ends) - count] - 1
        self.skipped += int(self._later_than(slab, self._live_from)[passed_by].sum())
        starts = np.concatenate(([0], ends[:-1]))
        for first, end in zip(starts[-count:].tolist(), ends[-count:].tolist(), strict=True) if count else ():
            transaction = LogTransaction(tuple(slab.rows(np.arange(first, end))))
            self._add(self._described(transaction, TransactionStatus.SETTLED))

    async def _each(self, tracker: SettledTracker[_Seen], slab: Slab) -> None:
        """Process the transactions one by one, as some are pending or change the schema."""
        space_ids, first = slab.cells[scan.SPACE_ID].tolist(), 0
        for number, transaction in enumerate(group(slab.rows()), 1):
            if number % TURN_SIZE == 0:
                await self._clock.sleep(0)
            of_rows, first = space_ids[first : first + len(transaction.rows)], first + len(transaction.rows)
            schema = self._schema.schema
            touches = not self._has_flags and not schema.synchronous.isdisjoint(of_rows)
            seen = _Seen(transaction, self._shown(transaction), touches)
            for row, space_id in zip(transaction.rows, of_rows, strict=True):
                if space_id in SCHEMA_SPACE_IDS:
                    self._schema.apply(row.type, row.body)
            decided = tracker.push(seen)
            if seen.shown is not None and not any(decision.transaction is seen for decision in decided):
                self._wait(seen.shown)
            for decision in decided:
                self._settle(decision)
            if transaction.rows[0].type in _PROMOTE:
                self._change_leader(tracker, transaction.rows[0])

    def _shown(self, transaction: LogTransaction) -> LiveTransaction | None:
        """Return the entry in the ring: the existing one if a server sends the transaction again; None if skipped."""
        shown = self._undecided.get((transaction.replica_id, transaction.lsn))
        if shown is None and self._budget.take(1):
            shown = self._described(transaction, TransactionStatus.WAITING)
            self.ring.append(shown)
        elif shown is None and transaction.lsn > self._live_from.get(transaction.replica_id):
            self.skipped += 1
        return shown

    def _described(self, transaction: LogTransaction, status: TransactionStatus) -> LiveTransaction:
        return described(transaction, self._schema.schema, status, replicaset_uuid=str(self._replicaset_uuid))

    def _wait(self, shown: LiveTransaction) -> None:
        self._undecided[shown.replica_id, shown.lsn] = shown
        if len(self._undecided) > KEPT_MAX:
            del self._undecided[next(iter(self._undecided))]
        self._on_shown(shown)

    def _settle(self, decision: Decision[_Seen]) -> None:
        seen, status = (
            decision.transaction,
            TransactionStatus.SETTLED if decision.kept else TransactionStatus.ROLLED_BACK,
        )
        self._undecided.pop((seen.replica_id, seen.lsn), None)
        if seen.shown is not None:
            # A new leader replaces rolled back rows with NOPs that have the same LSNs.
            seen.shown.status = TransactionStatus.ROLLED_BACK if is_nop(seen) and not _has_nop(seen.shown) else status
            self._on_shown(seen.shown)
        elif status is TransactionStatus.ROLLED_BACK and self._budget.take(1):
            # A rollback is always of interest, even if the transaction was skipped before.
            self._add(self._described(seen.transaction, status))

    def _change_leader(self, tracker: SettledTracker[_Seen], row: Row) -> None:
        """Report the new owner of the queue, and mark transactions that it did not send again as rolled back.

        The new owner has settled everything that was pending, so it never had these transactions.
        """
        body = decode_control(row.type, row.body)
        assert isinstance(body, Promote | Demote)
        self._on_leader(body.term, row.replica_id if isinstance(body, Promote) else 0, row.timestamp)
        pending = {(seen.replica_id, seen.lsn) for seen in tracker.pending}
        for place in [place for place in self._undecided if place not in pending]:
            lost = self._undecided.pop(place)
            lost.status = TransactionStatus.ROLLED_BACK
            self._on_shown(lost)

    def _add(self, transaction: LiveTransaction) -> None:
        self.ring.append(transaction)
        self._on_shown(transaction)


class _Budget:
    """Rate limit: `per_second` units, and at most one second's worth at once."""

    def __init__(self, clock: Clock, per_second: int) -> None:
        self._clock = clock
        self._per_second = per_second
        self._left = float(per_second)
        self._at = clock.monotonic()

    def take(self, wanted: int) -> int:
        """Take up to `wanted` units; return how many were available."""
        now = self._clock.monotonic()
        self._left = min(self._per_second, self._left + (now - self._at) * self._per_second)
        self._at = now
        given = min(wanted, int(self._left))
        self._left -= given
        return given


def _check_pending(tracker: SettledTracker[_Seen]) -> None:
    if tracker.is_quiet:
        return
    pending = tracker.pending
    size = sum(len(row.body) for seen in pending for row in seen.rows)
    if len(pending) > PENDING_MAX or size > PENDING_SIZE_MAX:
        raise TooMuchWaits(f"too many pending transactions: {len(pending):,}, with {size:,} bytes")


def _commits(slab: Slab) -> Mask:
    """Return which rows are the last of their transaction."""
    found: Mask = slab.cells[scan.FLAGS] & scan.COMMIT != 0
    return found


def _touches_synchronous(seen: _Seen) -> bool:
    return seen.touches_synchronous


def _has_nop(shown: LiveTransaction) -> bool:
    return any(row.type == RequestType.NOP.name for row in shown.rows)
