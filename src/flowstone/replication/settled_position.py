"""The settled position of a log: which transactions are committed, which were rolled back, and which are pending.

The module only reads: it counts no ACKs and writes no rows. It follows the rules of txn_limbo.c in 2.6.0, 2.11.9 and
3.8.0.

Theory of operation
-------------------

`SettledTracker` is the limbo (synchro queue) as a reader of one log sees it. A synchronous transaction is in the log
before it is decided; a later CONFIRM, ROLLBACK, PROMOTE or DEMOTE row, its verdict, says whether it is kept. A reader
that must not show a transaction that may still be rolled back passes each transaction through the tracker.

Input: `start` at a position without pending transactions (a snapshot, or the first row of a log), then `push` with each
transaction in log order. `skip_to` passes over rows that need no decision while nothing is pending; `give_up` discards
the pending transactions if rows are missing. Output: `push` returns a `Decision` for each transaction that is settled
now, and `vclock` is the settled position.

A transaction that is pushed is in one of three states:

- pending: synchronous, or asynchronous with the flag WAIT_SYNC after a pending one. It waits for its verdict.
- decided: kept or rolled back, but queued after a pending transaction. An asynchronous transaction without the flag, a
  NOP, and a control row are decided (kept) at once; the others by their verdict.
- settled: returned as a `Decision`. A transaction is settled when it is decided and all transactions before it are.

Verdicts are about the owner of the limbo only:

- CONFIRM keeps the pending transactions up to its LSN, and the asynchronous ones directly after them.
- ROLLBACK rolls back the pending synchronous transactions from its LSN on, and all that wait after them.
- PROMOTE and DEMOTE confirm up to their LSN, roll back the rest, and change the owner.

`Tenure` recognises transactions of a former owner that appear after the PROMOTE of its successor ("late"), which that
PROMOTE has decided already, and control rows of an old term or about another owner, which have no effect.

Invariants:

- Decisions are returned in log order, exactly one per transaction, unless `give_up` discards it.
- The first transaction in the queue, if any, is synchronous and pending.
- `vclock` covers exactly the rows that are settled or skipped, and never moves backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from flowstone.errors import LocalProtocolError, RemoteProtocolError
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.row import Row
from flowstone.replication.limbo.control_rows import (
    Confirm,
    Demote,
    Promote,
    RaftState,
    Rollback,
    decode_control,
)
from flowstone.replication.vclock import VClock, VClockBuilder
from flowstone.xlog.transactions import CONTROL_TYPES, LogTransaction

_COMMIT: Final = Flag.COMMIT.value
_WAIT_ACK: Final = Flag.WAIT_ACK.value
_WAIT_SYNC: Final = Flag.WAIT_SYNC.value
_WAIT: Final = _WAIT_ACK | _WAIT_SYNC
_NOP: Final = RequestType.NOP.value
_CONTROL: Final = frozenset(int(row_type) for row_type in CONTROL_TYPES)


class TrackedTransaction(Protocol):
    """The attributes of a transaction that the tracker uses; `flowstone.xlog.transactions.LogTransaction` has them."""

    @property
    def rows(self) -> tuple[Row, ...]: ...
    @property
    def replica_id(self) -> int: ...
    @property
    def lsn(self) -> int:
        """LSN of the last row that is not local, to which CONFIRM and ROLLBACK refer."""
        ...

    @property
    def flags(self) -> int:
        """Flags of the last row."""
        ...


@dataclass(frozen=True, slots=True)
class Tracked:
    """Base class of transactions that carry additional data through the tracker."""

    transaction: LogTransaction

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.transaction.rows

    @property
    def replica_id(self) -> int:
        return self.transaction.replica_id

    @property
    def lsn(self) -> int:
        return self.transaction.lsn

    @property
    def flags(self) -> int:
        return self.transaction.flags


T = TypeVar("T", bound=TrackedTransaction)


class Decision(NamedTuple, Generic[T]):
    """A settled transaction. `kept`: it is committed; otherwise it was rolled back, and must not be shown."""

    transaction: T
    kept: bool


class SettledError(RemoteProtocolError):
    """The log contains a sequence of rows that no server writes."""


class Tenure:
    """The owner of the queue according to one log, and late transactions of former owners, which follow the PROMOTE in
    the log.

    The log of one server has NOPs in place of late transactions. A reader that moves to another server may receive
    them: it has the PROMOTE from the first server, and the second one sends rows that the former owner wrote before it.
    `term` is 0 if no instance was ever promoted: then the owner is the instance that writes to the empty queue.
    """

    __slots__ = ("_voids", "owner_id", "term")

    def __init__(self, owner_id: int = 0, term: int = 0, voids: Iterable[int] = ()) -> None:
        self.owner_id = owner_id
        self.term = term
        self._voids = dict.fromkeys(voids)

    @property
    def voids(self) -> tuple[int, ...]:
        """The former owners with a synchronous transaction that was rolled back."""
        return tuple(self._voids)

    def copy(self) -> Tenure:
        return Tenure(self.owner_id, self.term, self._voids)

    def is_late(self, transaction: TrackedTransaction) -> bool:
        """Return True if the transaction has limbo flags, but its originator does not own the queue (any longer)."""
        # Without a term there is no PROMOTE that could have decided before; local rows (id 0) have no owner.
        has_owner = self.term and transaction.replica_id and transaction.replica_id != self.owner_id
        return bool(has_owner) and bool(transaction.flags & _WAIT)

    def is_void(self, transaction: TrackedTransaction) -> bool:
        """Return True if the transaction is late and was rolled back; remember its originator.

        A late asynchronous transaction has the same outcome as the preceding synchronous transactions of its
        originator.
        """
        origin_id = transaction.replica_id
        # A server wrote the NOP in place of a late synchronous transaction, so later asynchronous ones of this owner
        # are void, too (docs/spec/synchro.md#late-rows).
        if is_nop(transaction):
            if self.term and origin_id and origin_id != self.owner_id:
                self._voids[origin_id] = None
            return False
        if not self.is_late(transaction):
            return False
        if transaction.flags & _WAIT_ACK:
            self._voids[origin_id] = None
        return origin_id in self._voids

    def is_obsolete(self, row: Row) -> bool:
        """Return True if a control row has no effect: a verdict about another owner, or a transfer of an old term.

        Real servers of 2.11 check neither during recovery: in a log file these rows would have an effect.
        """
        body = decode_control(row.type, row.body)
        if isinstance(body, Promote | Demote):
            return bool(self.term) and body.term <= self.term
        return isinstance(body, Confirm | Rollback) and bool(self.term) and body.owner_id != self.owner_id

    def follow(self, row: Row, *, has_voids: bool = False) -> None:
        """Apply a control row. `has_voids`: it rolls back synchronous transactions of the owner."""
        body = decode_control(row.type, row.body)
        if not isinstance(body, Promote | Demote) or self.is_obsolete(row):
            return
        # For the owner whose tenure ends, only this tenure counts.
        self._voids.pop(self.owner_id, None)
        if has_voids:
            self._voids[self.owner_id] = None
        self.owner_id = row.replica_id if isinstance(body, Promote) else 0
        self.term = max(self.term, body.term)
        # A former owner that is promoted again starts without void transactions.
        self._voids.pop(self.owner_id, None)


class _Entry(Generic[T]):
    """A transaction that is not settled: pending, or decided but after a pending one."""

    __slots__ = ("is_synchronous", "transaction", "verdict")

    def __init__(self, transaction: T, *, is_synchronous: bool = False, verdict: bool | None = None) -> None:
        self.transaction = transaction
        self.is_synchronous = is_synchronous
        self.verdict = verdict


class SettledTracker(Generic[T]):
    """Takes the transactions of a log and returns decisions.

    `is_synchronous` is for logs of servers older than 2.8.1, whose rows have no flags: it returns True if the
    transaction changes a space with is_sync, by the schema as of this transaction. If it is None, the flags decide.
    """

    def __init__(self, *, is_synchronous: Callable[[T], bool] | None = None) -> None:
        self._touches_synchronous = is_synchronous
        # Invariant: the first entry, if any, is synchronous and undecided.
        self._queue: deque[_Entry[T]] = deque()
        self._settled = VClockBuilder()
        self._confirmed = VClockBuilder()
        self._tenure = Tenure()

    def start(self, vclock: VClock, promote: Promote | None = None, voids: Iterable[int] = ()) -> None:
        """Start at a snapshot of `vclock`, with the PROMOTE row in it (servers since 2.10 write one).

        A server completes a snapshot only when everything in it is confirmed, so the queue is empty. `voids` comes from
        a `Tenure` of an earlier tracker, if there was one.
        """
        self._queue.clear()
        self._settled = VClockBuilder(vclock)
        self._confirmed = VClockBuilder(promote.confirmed_vclock if promote else None)
        self._tenure = Tenure(promote.owner_id, promote.term, voids) if promote else Tenure()
        if promote and promote.owner_id:
            self._note_confirmed(promote.lsn)

    @property
    def vclock(self) -> VClock:
        """The settled position: every transaction up to it is committed or rolled back."""
        return self._settled.vclock()

    @property
    def is_quiet(self) -> bool:
        """True if nothing is pending. The caller may then pass over rows with `skip_to`, if none of them is a NOP or of
        CONTROL_TYPES, has WAIT_ACK or WAIT_SYNC, or (in logs without flags) changes a synchronous space."""
        return not self._queue

    @property
    def pending(self) -> tuple[T, ...]:
        """The transactions that were pushed and are not settled, in log order."""
        return tuple(entry.transaction for entry in self._queue)

    @property
    def owner_id(self) -> int:
        """The instance that owns the queue; 0 if there is none."""
        return self._tenure.owner_id

    @property
    def term(self) -> int:
        """The newest term of a PROMOTE or DEMOTE."""
        return self._tenure.term

    @property
    def tenure(self) -> Tenure:
        """A copy of the tenure after all transactions pushed so far."""
        return self._tenure.copy()

    @property
    def confirmed_lsn(self) -> int:
        """The highest confirmed LSN of the owner."""
        return self._confirmed.get(self.owner_id)

    def is_void(self, transaction: TrackedTransaction) -> bool:
        """Return True if the transaction, which is pushed next, is rolled back already: see `Tenure.is_void`."""
        return bool(transaction.flags & _WAIT) and self._tenure.is_void(transaction)

    def skip_to(self, vclock: VClock) -> None:
        """Move the settled position past rows that were not pushed: only while quiet, never backwards."""
        if self._queue:
            # The skipped rows might contain the verdict.
            raise LocalProtocolError(f"cannot skip rows while transactions are pending: {len(self._queue)}")
        if not self._settled.vclock() <= vclock:
            raise LocalProtocolError(f"cannot move the settled position from {self.vclock} to {vclock}")
        self._settled.merge(vclock)

    def give_up(self) -> list[Decision[T]]:
        """Discard the pending transactions, because rows are missing here and their verdicts may be among them.

        Return the decided transactions that were queued after them.
        """
        decided: list[Decision[T]] = []
        for entry in self._queue:
            if entry.verdict is not None:
                self._follow(entry.transaction)
                decided.append(Decision(entry.transaction, entry.verdict))
        self._queue.clear()
        return decided

    def push(self, transaction: T) -> list[Decision[T]]:
        """Take the next transaction of the log; return all decisions that are settled now, in log order."""
        if transaction.rows[0].type in _CONTROL:
            return self._push_control(transaction)
        # The cheapest test comes first: in most logs every transaction gets here, and none is pending.
        if (transaction.flags & _WAIT or transaction.rows[0].type == _NOP) and self._tenure.is_void(transaction):
            self._queue.append(_Entry(transaction, verdict=False))
            return self._release()
        may_be_synchronous = transaction.flags & _WAIT_ACK or self._touches_synchronous is not None
        if may_be_synchronous and self._is_synchronous(transaction):
            self._enqueue_synchronous(transaction)
            return []
        if self._queue:
            # Queue it even if it is decided: verdicts are reported in log order, so it follows the pending one.
            self._queue.append(_Entry(transaction, verdict=None if self._waits(transaction) else True))
            return []
        # Even with WAIT_SYNC: the transaction was submitted while the CONFIRM was being written, and logged after it.
        self._follow(transaction)
        return [Decision(transaction, True)]

    def _is_synchronous(self, transaction: T) -> bool:
        if transaction.flags & _WAIT_ACK:
            return not is_nop(transaction)
        touches = self._touches_synchronous
        return touches is not None and touches(transaction) and not is_nop(transaction)

    def _waits(self, transaction: T) -> bool:
        """Return True if an asynchronous transaction has the same outcome as the pending transactions before it.

        The flag decides. In a log without flags it always does, even if it is local: a ROLLBACK of 2.6.0 undoes it.
        """
        flagged = transaction.flags & _WAIT_SYNC or self._touches_synchronous is not None
        return bool(flagged) and not is_nop(transaction) and not self._tenure.is_late(transaction)

    def _enqueue_synchronous(self, transaction: T) -> None:
        if self.owner_id != transaction.replica_id:
            if self._queue:
                raise SettledError(
                    f"synchronous transaction {transaction.replica_id}:{transaction.lsn} in the log"
                    f" while transactions of replica {self.owner_id} are pending"
                )
            # Before PROMOTE existed, the instance that wrote to the empty queue became its owner.
            self._tenure.owner_id = transaction.replica_id
        self._queue.append(_Entry(transaction, is_synchronous=True))

    def _push_control(self, transaction: T) -> list[Decision[T]]:
        row = transaction.rows[0]
        body = decode_control(row.type, row.body)
        # Appended before it takes effect: its own position in the log is after all transactions that it decides.
        self._queue.append(_Entry(transaction, verdict=True))
        match body:
            case Confirm() if body.owner_id == self.owner_id:
                self._confirm(body.lsn)
            case Rollback() if body.owner_id == self.owner_id:
                self._withdraw(body.lsn)
            case Promote() | Demote():
                self._transfer(row, body)
            # RAFT rows are local and say nothing about the queue.
            case Confirm() | Rollback() | RaftState():
                # A verdict on transactions of a former owner is late: its successor's PROMOTE decided them.
                pass
        return self._release()

    def _confirm(self, lsn: int) -> None:
        """Keep the synchronous transactions up to `lsn`, and the asynchronous ones directly after them."""
        for entry in self._queue:
            if entry.verdict is not None:
                continue
            # Asynchronous ones before this point share the fate of the synchronous one before them.
            if entry.is_synchronous and entry.transaction.lsn > lsn:
                break
            entry.verdict = True
        self._note_confirmed(lsn)

    def _withdraw(self, lsn: int) -> bool:
        """Roll back the first synchronous transaction at or after `lsn`, and all pending ones after it.

        Return True if there is one.
        """
        waiting: list[_Entry[T]] = []
        has_withdrawn = False
        for entry in reversed(self._queue):
            if entry.verdict is not None:
                continue
            if entry.is_synchronous and entry.transaction.lsn < lsn:
                break
            # Held until a synchronous one is found: an asynchronous transaction that follows only confirmed ones is not
            # rolled back.
            waiting.append(entry)
            if entry.is_synchronous:
                for withdrawn in waiting:
                    withdrawn.verdict = False
                waiting.clear()
                has_withdrawn = True
        return has_withdrawn

    def _transfer(self, row: Row, body: Promote | Demote) -> None:
        """Decide all pending transactions and change the owner."""
        if self._tenure.is_obsolete(row):
            # From a leader that missed its successor's election. 2.8 to 2.10 log such a row and ignore it.
            return
        # A PROMOTE that does not name the owner comes from a leader whose quorum lacks the owner's transactions.
        border = body.lsn if body.owner_id == self.owner_id else 0
        # As in `Limbo._change_owner`: the row rolls back everything that it does not confirm.
        self._confirm(border)
        self._tenure.follow(row, has_voids=self._withdraw(border + 1))

    def _note_confirmed(self, lsn: int) -> None:
        if lsn > self._confirmed.get(self.owner_id):
            self._confirmed.follow(self.owner_id, lsn)

    def _release(self) -> list[Decision[T]]:
        """Return and remove the decided transactions before the first pending one."""
        decisions: list[Decision[T]] = []
        queue = self._queue
        while queue:
            verdict = queue[0].verdict
            if verdict is None:
                break
            transaction = queue.popleft().transaction
            self._follow(transaction)
            decisions.append(Decision(transaction, verdict))
        return decisions

    def _follow(self, transaction: T) -> None:
        # Row by row: a transaction may include local rows, and rows that a trigger on the replica added.
        follow = self._settled.follow
        for row in transaction.rows:
            follow(row.replica_id, row.lsn)


def is_nop(transaction: TrackedTransaction) -> bool:
    """Return True if all rows are NOPs, so that the transaction only advances the vclock.

    Such a transaction does not enter the limbo; servers write one in place of a late transaction of a former owner. Its
    flags have no meaning: 2.11 writes none, 3.8 keeps WAIT_ACK, and earlier releases of Flowstone kept both.
    """
    return all(row.type == _NOP for row in transaction.rows)


def void_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the NOPs that replace the rows of a void transaction, with the same LSN, TSN and COMMIT.

    The limbo flags are dropped: during recovery real servers queue any transaction with WAIT_SYNC, even a NOP, and stop
    if its originator is not the owner (docs/spec/synchro.md#late-rows).
    """
    for row in rows:
        yield Row(_NOP, row.replica_id, row.group_id, row.lsn, row.timestamp, row.tsn, row.flags & _COMMIT)
