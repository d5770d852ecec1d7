"""The settled position: what of a log can no longer be withdrawn, and what was.

`SettledTracker` reads the transactions of one log in its order and answers, in the same order, which of them
are kept and which were rolled back. It is the limbo (synchro queue) as a reader sees it: synchronous
transactions wait for a CONFIRM, ROLLBACK, PROMOTE or DEMOTE row, and nothing behind a waiting one leaves
before it. The tracker starts where no synchronous transaction is waiting: at a snapshot or at the first row
of a log. It counts no ACKs and writes no rows. The rules are those of txn_limbo.c in 2.6.0, 2.11.9 and 3.8.0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from flowstone.errors import LocalProtocolError, RemoteProtocolError
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.row import Row
from flowstone.replication.synchro import (
    Confirm,
    Demote,
    Promote,
    RaftState,
    Rollback,
    decode_control,
)
from flowstone.replication.vclock import VClock, VClockBuilder
from flowstone.xlog.transactions import CONTROL_TYPES
from flowstone.xlog.transactions import Transaction as LogTransaction

_COMMIT: Final = Flag.COMMIT.value
_WAIT_ACK: Final = Flag.WAIT_ACK.value
_WAIT_SYNC: Final = Flag.WAIT_SYNC.value
_WAIT: Final = _WAIT_ACK | _WAIT_SYNC
_NOP: Final = RequestType.NOP.value
_CONTROL: Final = frozenset(int(row_type) for row_type in CONTROL_TYPES)


class Transaction(Protocol):
    """What the tracker looks at: `flowstone.xlog.transactions.Transaction` has it all."""

    @property
    def rows(self) -> tuple[Row, ...]: ...
    @property
    def replica_id(self) -> int: ...
    @property
    def lsn(self) -> int:
        """LSN of the last row that is not local: the number by which CONFIRM and ROLLBACK mean it."""
        ...

    @property
    def flags(self) -> int:
        """Flags of the last row."""
        ...


@dataclass(frozen=True, slots=True)
class Tracked:
    """A transaction for the tracker, for who keeps something beside it: a base of such classes."""

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


T = TypeVar("T", bound=Transaction)


class Decision(NamedTuple, Generic[T]):
    """`kept`: a fact for ever. Otherwise it was rolled back, and its data must not be shown."""

    transaction: T
    kept: bool


class SettledError(RemoteProtocolError):
    """The log says something that no server writes."""


class Tenure:
    """The owner of the queue as one log shows it, and late transactions: those of former owners after the PROMOTE.

    The log of one server has NOPs in place of late transactions. A reader that moves to another server gets them if it
    has the PROMOTE from the first server, and the second sends what the former owner wrote before. `term` is 0 if no
    instance was ever promoted: then the queue belongs to the instance that writes to it while it is empty.
    """

    __slots__ = ("_voids", "owner_id", "term")

    def __init__(self, owner_id: int = 0, term: int = 0, voids: Iterable[int] = ()) -> None:
        self.owner_id = owner_id
        self.term = term
        self._voids = dict.fromkeys(voids)

    @property
    def voids(self) -> tuple[int, ...]:
        """Former owners that have synchronous transactions which were rolled back."""
        return tuple(self._voids)

    def copy(self) -> Tenure:
        return Tenure(self.owner_id, self.term, self._voids)

    def is_late(self, transaction: Transaction) -> bool:
        """True if the transaction has limbo flags, but its originator is not, or no longer, the owner of the queue."""
        has_owner = self.term and transaction.replica_id and transaction.replica_id != self.owner_id
        return bool(has_owner) and bool(transaction.flags & _WAIT)

    def is_void(self, transaction: Transaction) -> bool:
        """True if the transaction is late and was rolled back; takes note of its originator.

        An asynchronous one shares the fate of the synchronous ones before it.
        """
        origin_id = transaction.replica_id
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
        """True if a control row changes nothing: a verdict on another owner's queue, or a transfer of an old term.

        Real servers of 2.11 do not check either during recovery: in a file they would count.
        """
        body = decode_control(row.type, row.body)
        if isinstance(body, Promote | Demote):
            return bool(self.term) and body.term <= self.term
        return isinstance(body, Confirm | Rollback) and bool(self.term) and body.owner_id != self.owner_id

    def follow(self, row: Row, *, has_voids: bool = False) -> None:
        """Take note of a control row. `has_voids`: it rolls synchronous transactions of the owner back."""
        body = decode_control(row.type, row.body)
        if not isinstance(body, Promote | Demote) or self.is_obsolete(row):
            return
        self._voids.pop(self.owner_id, None)
        if has_voids:
            self._voids[self.owner_id] = None
        self.owner_id = row.replica_id if isinstance(body, Promote) else 0
        self.term = max(self.term, body.term)
        self._voids.pop(self.owner_id, None)


class _Entry(Generic[T]):
    """A transaction that has not left: waiting itself, or already decided but behind one that waits."""

    __slots__ = ("is_synchronous", "transaction", "verdict")

    def __init__(self, transaction: T, *, is_synchronous: bool = False, verdict: bool | None = None) -> None:
        self.transaction = transaction
        self.is_synchronous = is_synchronous
        self.verdict = verdict


class SettledTracker(Generic[T]):
    """Transactions in, decisions out.

    `is_synchronous` is for logs of servers older than 2.8.1, whose rows do not say it: does this transaction
    touch a space with is_sync, by the schema as of this transaction? Without it the row flags decide alone.
    """

    def __init__(self, *, is_synchronous: Callable[[T], bool] | None = None) -> None:
        self._touches_synchronous = is_synchronous
        # Invariant: the first entry, if any, is synchronous and undecided.
        self._queue: deque[_Entry[T]] = deque()
        self._settled = VClockBuilder()
        self._confirmed = VClockBuilder()
        self._tenure = Tenure()

    def start(self, vclock: VClock, promote: Promote | None = None, voids: Iterable[int] = ()) -> None:
        """Begins at a snapshot of `vclock`, with the PROMOTE row it holds (servers since 2.10 write one).

        A server finishes a snapshot only when all it contains is confirmed, so the queue is empty there. `voids` are
        those of `Tenure`, where a tracker before this one has seen them.
        """
        self._queue.clear()
        self._settled = VClockBuilder(vclock)
        self._confirmed = VClockBuilder(promote.confirmed_vclock if promote else None)
        self._tenure = Tenure(promote.owner_id, promote.term, voids) if promote else Tenure()
        if promote and promote.owner_id:
            self._note_confirmed(promote.lsn)

    @property
    def vclock(self) -> VClock:
        """The settled position: up to here every transaction has left, kept or rolled back."""
        return self._settled.vclock()

    @property
    def is_quiet(self) -> bool:
        """Nothing waits. A caller may then pass rows by with `skip_to`, if none of them is a NOP or of CONTROL_TYPES,
        none carries WAIT_ACK or WAIT_SYNC, and (where the flags do not tell) none touches a synchronous space."""
        return not self._queue

    @property
    def pending(self) -> tuple[T, ...]:
        """What was pushed and has not left, in log order."""
        return tuple(entry.transaction for entry in self._queue)

    @property
    def owner_id(self) -> int:
        """The instance whose synchronous transactions may wait; 0 for nobody."""
        return self._tenure.owner_id

    @property
    def term(self) -> int:
        """The newest term of a PROMOTE or DEMOTE."""
        return self._tenure.term

    @property
    def tenure(self) -> Tenure:
        """A copy of the tenure after all that was pushed."""
        return self._tenure.copy()

    @property
    def confirmed_lsn(self) -> int:
        """The highest LSN of the owner known to be confirmed."""
        return self._confirmed.get(self.owner_id)

    def is_void(self, transaction: Transaction) -> bool:
        """True if the transaction, which is to be pushed next, is rolled back already: see `Tenure.is_void`."""
        return bool(transaction.flags & _WAIT) and self._tenure.is_void(transaction)

    def skip_to(self, vclock: VClock) -> None:
        """Moves the settled position over rows that were not pushed: only while quiet, never backwards."""
        if self._queue:
            waiting = len(self._queue)
            raise LocalProtocolError(f"cannot pass rows by while {waiting} transactions wait for a verdict")
        if not self._settled.vclock() <= vclock:
            raise LocalProtocolError(f"cannot move the settled position from {self.vclock} to {vclock}")
        self._settled.merge(vclock)

    def give_up(self) -> list[Decision[T]]:
        """Rows are missing here, and verdicts may be among them: what waits is forgotten, as nobody can tell any more.

        Returns what was decided and stood behind it.
        """
        decided: list[Decision[T]] = []
        for entry in self._queue:
            if entry.verdict is not None:
                self._follow(entry.transaction)
                decided.append(Decision(entry.transaction, entry.verdict))
        self._queue.clear()
        return decided

    def push(self, transaction: T) -> list[Decision[T]]:
        """Takes the next transaction of the log; returns all that is now decided, in log order."""
        if transaction.rows[0].type in _CONTROL:
            return self._push_control(transaction)
        # Asked first what costs least: in most logs every transaction passes here, and none waits.
        if (transaction.flags & _WAIT or transaction.rows[0].type == _NOP) and self._tenure.is_void(transaction):
            self._queue.append(_Entry(transaction, verdict=False))
            return self._release()
        may_be_synchronous = transaction.flags & _WAIT_ACK or self._touches_synchronous is not None
        if may_be_synchronous and self._is_synchronous(transaction):
            self._enqueue_synchronous(transaction)
            return []
        if self._queue:
            self._queue.append(_Entry(transaction, verdict=None if self._waits(transaction) else True))
            return []
        # Also with WAIT_SYNC: it was made while its CONFIRM was being written, and came behind it in the log.
        self._follow(transaction)
        return [Decision(transaction, True)]

    def _is_synchronous(self, transaction: T) -> bool:
        if transaction.flags & _WAIT_ACK:
            return not is_nop(transaction)
        touches = self._touches_synchronous
        return touches is not None and touches(transaction) and not is_nop(transaction)

    def _waits(self, transaction: T) -> bool:
        """Does an asynchronous transaction, found while the queue is not empty, share its fate?

        By its flag. In a log without flags it always does, local ones too: a ROLLBACK of 2.6.0 undoes those.
        """
        flagged = transaction.flags & _WAIT_SYNC or self._touches_synchronous is not None
        return bool(flagged) and not is_nop(transaction) and not self._tenure.is_late(transaction)

    def _enqueue_synchronous(self, transaction: T) -> None:
        if self.owner_id != transaction.replica_id:
            if self._queue:
                raise SettledError(
                    f"synchronous transaction {transaction.replica_id}:{transaction.lsn} in the log"
                    f" while those of replica {self.owner_id} are waiting"
                )
            # Before PROMOTE existed the queue belonged to whoever found it empty.
            self._tenure.owner_id = transaction.replica_id
        self._queue.append(_Entry(transaction, is_synchronous=True))

    def _push_control(self, transaction: T) -> list[Decision[T]]:
        row = transaction.rows[0]
        body = decode_control(row.type, row.body)
        self._queue.append(_Entry(transaction, verdict=True))
        match body:
            case Confirm() if body.owner_id == self.owner_id:
                self._confirm(body.lsn)
            case Rollback() if body.owner_id == self.owner_id:
                self._withdraw(body.lsn)
            case Promote() | Demote():
                self._transfer(row, body)
            case Confirm() | Rollback() | RaftState():
                # A verdict on a former owner's transactions comes late: its successor's PROMOTE settled them.
                pass
        return self._release()

    def _confirm(self, lsn: int) -> None:
        """Keeps synchronous transactions up to `lsn`, and the asynchronous ones directly behind them."""
        for entry in self._queue:
            if entry.verdict is not None:
                continue
            if entry.is_synchronous and entry.transaction.lsn > lsn:
                break
            entry.verdict = True
        self._note_confirmed(lsn)

    def _withdraw(self, lsn: int) -> bool:
        """Roll back the first synchronous transaction at or after `lsn`, and all that waits after it.

        Returns True if there is one.
        """
        waiting: list[_Entry[T]] = []
        has_withdrawn = False
        for entry in reversed(self._queue):
            if entry.verdict is not None:
                continue
            if entry.is_synchronous and entry.transaction.lsn < lsn:
                break
            waiting.append(entry)
            if entry.is_synchronous:
                for withdrawn in waiting:
                    withdrawn.verdict = False
                waiting.clear()
                has_withdrawn = True
        return has_withdrawn

    def _transfer(self, row: Row, body: Promote | Demote) -> None:
        """The queue gets a new owner, and is empty for it."""
        if self._tenure.is_obsolete(row):
            # From a leader that missed its successor's election. 2.8 to 2.10 log such a row and ignore it.
            return
        # Who promotes without knowing the present owner was elected by a quorum that lacks its transactions.
        border = body.lsn if body.owner_id == self.owner_id else 0
        self._confirm(border)
        self._tenure.follow(row, has_voids=self._withdraw(border + 1))

    def _note_confirmed(self, lsn: int) -> None:
        if lsn > self._confirmed.get(self.owner_id):
            self._confirmed.follow(self.owner_id, lsn)

    def _release(self) -> list[Decision[T]]:
        """Lets go of what is decided, up to the first that is not."""
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
        # Every row for itself: a transaction may hold local rows, and rows a trigger of the replica added.
        follow = self._settled.follow
        for row in transaction.rows:
            follow(row.replica_id, row.lsn)


def is_nop(transaction: Transaction) -> bool:
    """True if the transaction only moves the vclock.

    Servers let such a transaction pass the limbo, and write one in place of what a former owner wrote too late. Its
    flags mean nothing: 2.11 writes none, 3.8 leaves WAIT_ACK, and earlier releases of ours left both.
    """
    return all(row.type == _NOP for row in transaction.rows)


def void_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the NOPs that replace the rows of a void transaction: LSN, TSN and COMMIT stay.

    The limbo flags are dropped: during recovery real servers queue any transaction with WAIT_SYNC, even a NOP, and stop
    if its originator is not the owner (3.x reference, section 2.1).
    """
    for row in rows:
        yield Row(_NOP, row.replica_id, row.group_id, row.lsn, row.timestamp, row.tsn, row.flags & _COMMIT)
