"""The limbo (synchro queue): transactions that wait for a verdict before they commit, as a pure state machine.

It relies on a journal that writes rows and reports the outcomes, in order. The limbo never writes itself, reads no
clock, and only commits or undoes transactions. Terms come from Raft; this module decides their effect on the queue. The
rules are in docs/spec/synchro.md#limbo.

Theory of operation
-------------------

A synchronous transaction is applied and logged at once, but commits only when a quorum has it. One member, the owner of
the limbo, decides that. It counts ACKs and writes verdicts: CONFIRM commits its entries up to an LSN; ROLLBACK, after a
timeout, undoes its entries from an LSN on. Every instance runs this machine. Instances that are not the owner apply the
verdicts they receive. PROMOTE makes its origin the owner, DEMOTE leaves no owner, and either decides all pending
entries. In 2.6 the instance that writes to the empty queue is the owner. `queue.State` has the states of an entry,
`state.py` the states of the limbo (owner, frozen, busy).

Input is method calls: transactions, outcomes of the journal, ACKs, control rows of other instances, terms, commands and
time. Output is the actions they return (`actions.py`), to be carried out in order. After each event, `_advance`
requests the next write unless one is pending: control rows of others, then our own PROMOTE or DEMOTE, then CONFIRM.

Invariants:
- One control row is written at a time, and takes effect only when it is in the log.
- Entries commit in log order and are undone in reverse order. The first one is synchronous, and an asynchronous one
  shares the fate of the synchronous one before it. All entries belong to the owner, or are local.
- A frozen limbo writes no verdict of its own, and the confirmed LSN of an owner never decreases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Generic, NamedTuple

from flowstone.box.dialect import Dialect
from flowstone.errors import LocalProtocolError
from flowstone.iproto import errors
from flowstone.iproto.constants import Flag
from flowstone.iproto.errors import TarantoolError
from flowstone.replication.limbo.actions import (
    Action,
    Cleared,
    Commit,
    Proven,
    Reject,
    TransferFailed,
    Transferred,
    Undo,
    Write,
    WriteNop,
    not_the_owner,
    promoted_first,
    queue_full,
    quorum_timeout,
    quorum_wait,
    sync_rollback,
    write_failure,
)
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, Rollback
from flowstone.replication.limbo.queue import Acks, EntryState, LimboEntry, LimboQueue, Pending, T
from flowstone.replication.limbo.split_brain import (
    Body,
    Fate,
    SettlingRequest,
    filter_request,
    filter_request_of_2_6,
    filter_transaction,
    unknown_to_2_6,
)
from flowstone.replication.limbo.state import LimboState
from flowstone.replication.limbo.tenures import Owner, Tenures
from flowstone.replication.vclock import VClock, VClockBuilder

RETRY_DELAY: Final = 1.0
"""Seconds until a failed write of a verdict is retried, as in real servers."""

_WAIT_SYNC: Final = Flag.WAIT_SYNC.value
_WAIT_ACK: Final = Flag.WAIT_ACK.value


class _Transfer(NamedTuple):
    """A promotion or demotion of ours that waits until a quorum has all pending entries."""

    kind: type[Promote | Demote]
    term: int
    deadline: float | None


class _Unproven(NamedTuple, Generic[T]):
    """Entries committed by a PROMOTE or DEMOTE, row `lsn` of `origin_id`, that no quorum is known to have yet."""

    origin_id: int
    lsn: int
    entries: tuple[LimboEntry[T], ...]


class Limbo(LimboState[T]):
    """The limbo of one instance. `instance_id` is 0 for anonymous instances and until the instance is registered."""

    def __init__(self, *, instance_id: int, dialect: Dialect, quorum: int, timeout: float, max_size: int = 0) -> None:
        """`max_size`: size of the queue in bytes at which our own transactions are rejected; 0 for no limit."""
        super().__init__(instance_id=instance_id, dialect=dialect, quorum=quorum)
        self._timeout = timeout
        self._max_size = max_size
        # Kept apart from `_term`: elections raise the Raft term before the new leader has written a PROMOTE, and in
        # between nobody may decide about the queue (docs/spec/synchro.md#claimed-ownership).
        self._raft_term = 0
        # LSNs of the owner: the last one that is written here, and the last one that a quorum was seen to have.
        self._written_lsn = 0
        self._reached_lsn = 0
        self._acks = Acks()
        # The entry whose timeout caused the ROLLBACK that is being written: only its client gets
        # ER_SYNC_QUORUM_TIMEOUT, clients of later entries get ER_SYNC_ROLLBACK (docs/spec/synchro.md#transaction-life).
        self._overdue: LimboEntry[T] | None = None
        self._retry_at: float | None = None
        self._transfer: _Transfer | None = None
        # Only in 2.6. `_clear_lsn` is fixed when the wait ends, so that an ACK that arrives between the CONFIRM and the
        # ROLLBACK of one clearing cannot change what was decided.
        self._clear_at: float | None = None
        self._clear_lsn: int | None = None
        self._unproven: list[_Unproven[T]] = []
        self._member_count: int | None = None

    def restore(
        self,
        state: Promote,
        *,
        promote_terms: Mapping[int, int] | None = None,
        pending: Iterable[Pending[T]] = (),
        former: Sequence[Owner] = (),
        voids: Mapping[int, int] | None = None,
    ) -> list[Action[T]]:
        """Start from the end of a recovered log: with its `state` and the `pending` entries, all of which are written.

        `former` and `voids` come from `Tenures`; without them more histories look like a split brain. In 2.11 the queue
        stays frozen until the next PROMOTE or DEMOTE, because other members may have decided about it meanwhile.
        """
        self._owner_id, self._term = state.owner_id, state.term
        self._confirmed = VClockBuilder(state.confirmed_vclock)
        self._note_confirmed(state.lsn)
        self._reached_lsn = self.confirmed_lsn
        terms = promote_terms or ({state.owner_id: state.term} if state.owner_id else {})
        self._tenures = Tenures(terms, former, voids or {})
        self._queue = LimboQueue()
        for transaction, lsn, is_synchronous in pending:
            entry = LimboEntry(transaction, self._owner_id, is_synchronous=is_synchronous, lsn=lsn, is_written=True)
            self._queue.append(entry)
            if is_synchronous:
                self._written_lsn = lsn
        return self._advance()

    # --- transactions ---

    def submit(
        self, transaction: T, *, is_synchronous: bool, is_local: bool = False, size: int = 0, count: int = 1
    ) -> LimboEntry[T] | None:
        """Add a transaction of our own before it is written. Return None if it commits with its write.

        Raise the error for the client; the caller must then undo the transaction. `is_local`: its rows are never
        replicated. `count` above 1: the transaction is a `Run` of that many synchronous transactions of one row each.
        """
        # The common case: nothing is pending, so a write to the log commits the transaction. The tenure now has a
        # commit that a later leader must know (see `Tenures.former`); local rows never reach other members and do not
        # count.
        if not is_synchronous and not self._queue:
            if not is_local:
                self._tenures.note_async_commit()
            return None
        if self.is_in_rollback:
            raise sync_rollback()
        # Transactions of local spaces are exempt from the check of the owner, but wait like all others
        # (docs/spec/synchro.md#claimed-ownership).
        if not is_local:
            self._claim(self.instance_id)
            if self._max_size and self._queue.size >= self._max_size:
                raise queue_full()
        # Origin 0: the LSNs of local rows are not those of the owner, so they must not advance `_written_lsn`.
        origin_id = 0 if is_local else self.instance_id
        entry = LimboEntry(transaction, origin_id, is_synchronous=is_synchronous, size=size, count=count)
        self._queue.append(entry)
        return entry

    def row_flags(self, entry: LimboEntry[T] | None) -> int:
        """Return the flags, besides COMMIT, of the last row of our transaction; `entry` comes from `submit`."""
        if entry is None or not self._has_transfers:
            return 0
        # Recovery relies on these flags, not on the space (docs/spec/synchro.md#limbo-recovery). 2.6 has no flags.
        return _WAIT_SYNC | _WAIT_ACK if entry.is_synchronous else _WAIT_SYNC

    def admit(self, origin_id: int, lsn: int, *, flags: int, has_effect: bool, was_control: bool = False) -> Fate:
        """Decide about a transaction of another instance before it is applied; raise ER_SPLIT_BRAIN.

        The rules: docs/spec/synchro.md#term-filter.

        `lsn` and `flags` come from its last row. `was_control`: the transaction is a NOP that replaces a control row. A
        transaction of NOPs, received or made here, never enters the queue.
        """
        # The row that is being written may change the owner and the term, and with them the answer.
        self._check_not_busy()
        if not self._has_transfers or self.promote_term(origin_id) == self._term:
            return Fate.ACCEPTED
        waits = bool(flags & _WAIT_SYNC)
        if lsn > self._confirmed.get(origin_id):
            # A NOP carries no limbo flags, so any other NOP counts as a void synchronous transaction.
            if flags & _WAIT_ACK or not (has_effect or was_control):
                self._tenures.note_void(origin_id, lsn)
            # The originator keeps an asynchronous transaction that follows only confirmed ones. Replacing it by a NOP,
            # as real servers do, would let the data diverge without an error; not waiting, it is a split brain and
            # stops the applier.
            waits = waits and not (has_effect and self.is_validating and self._tenures.keeps(origin_id))
        return filter_transaction(origin_id, lsn, self.history, waits_for_verdict=waits, has_effect=has_effect)

    def receive(
        self, transaction: T, *, origin_id: int, lsn: int, is_synchronous: bool, size: int = 0, count: int = 1
    ) -> LimboEntry[T] | None:
        """Add a transaction of another instance, admitted and applied, before it is written; see `submit`."""
        self._check_not_busy()
        if not is_synchronous and not self._queue:
            self._tenures.note_async_commit()
            return None
        self._claim(origin_id)
        entry = LimboEntry(transaction, origin_id, is_synchronous=is_synchronous, lsn=lsn, size=size, count=count)
        self._queue.append(entry)
        return entry

    def _claim(self, origin_id: int) -> None:
        """Raise unless `origin_id` may add a transaction. In 2.6 it becomes the owner if the queue is empty."""
        if self._owner_id == origin_id and origin_id:
            return
        # 2.6 has no PROMOTE: the queue belongs to the instance that fills it while it is empty
        # (docs/spec/synchro.md#implicit-ownership).
        if not self._has_transfers and not self._queue:
            self._set_owner(origin_id)
        else:
            raise not_the_owner(self._owner_id, is_empty=not self._queue)

    def _set_owner(self, owner_id: int) -> None:
        self._owner_id = owner_id
        self._reached_lsn = self.confirmed_lsn
        # LSNs of the former owner say nothing about rows of the new one.
        self._written_lsn = 0

    def _check_not_busy(self) -> None:
        if self.is_busy:
            raise LocalProtocolError("limbo is busy: a control row is being written")

    # --- the journal ---

    def written(self, entry: LimboEntry[T], lsn: int, now: float) -> list[Action[T]]:
        """Record that the transaction is in the log. `lsn` is that of its last global row, or last row if local."""
        assert entry.lsn in (0, lsn), "the LSN of a transaction does not change"
        entry.lsn, entry.is_written = lsn, True
        assert entry.state in (EntryState.WAITING, EntryState.RELEASED), "a verdict is written after its transactions"
        # A CONFIRM overtook the write of this asynchronous entry and removed it from the queue.
        if entry.state is EntryState.RELEASED:
            entry.become(EntryState.COMMITTED)
            return [Commit((entry,)), *self._advance()]
        # Only rows of the owner count for the quorum; local rows have LSNs of their own.
        if entry.origin_id:
            self._written_lsn = lsn
        # The timeout runs from the write on, and on the owner only: replicas wait for its verdict without a limit.
        if entry.origin_id == self.instance_id:
            entry.written_at = now
        return self._advance()

    def written_together(self, entries: Sequence[LimboEntry[T]], now: float) -> list[Action[T]]:
        """Do as `written` for several entries that have their LSNs, but look for a quorum only once."""
        released: list[LimboEntry[T]] = []
        for entry in entries:
            entry.is_written = True
            if entry.state is EntryState.RELEASED:
                entry.become(EntryState.COMMITTED)
                released.append(entry)
                continue
            assert entry.state is EntryState.WAITING, "a verdict is written after its transactions"
            if entry.origin_id == self.instance_id:
                entry.written_at = now
            # No entry of a batch is local, so these LSNs are those of the owner.
            self._written_lsn = entry.lsn
        return [*([Commit(tuple(released))] if released else ()), *self._advance()]

    def write_failed(self, entry: LimboEntry[T]) -> list[Action[T]]:
        """Record that neither the transaction nor any later one is in the log. A repeated call has no effect."""
        error = write_failure()
        # A CONFIRM has removed it from the queue: only its own write decides.
        if entry.state is EntryState.RELEASED:
            entry.become(EntryState.UNDONE)
            return [Undo(entry, error)]
        if entry.state is not EntryState.WAITING:
            return []
        # The journal writes in order and drops everything after a failure, so no later entry is in the log either. All
        # are undone here, newest first; their own failures, reported later, have no effect.
        undone = [Undo(dropped, error) for dropped in self._queue.drop(entry)]
        return [*undone, *self._refuse_held(), *self._advance()]

    def _refuse_held(self) -> list[Action[T]]:
        """Reject held control rows: rows they refer to may be missing in the log, so their appliers must reconnect."""
        held, self._held = self._held, deque()
        return [Reject(request, write_failure()) for request in held]

    # --- ACKs ---

    def ack(self, replica_id: int, vclock: VClock) -> list[Action[T]]:
        """Record that `replica_id` has all rows up to `vclock`. 0 is any anonymous replica: 2.6 counts them as one.

        The last ACK counts, even if it is lower, because the replica has then lost rows.
        """
        # This instance counts through `_written_lsn`. From 2.10 on, anonymous replicas do not count.
        if replica_id == self.instance_id or (replica_id == 0 and self._has_transfers):
            return []
        is_news = self._acks.note(replica_id, vclock)
        return self._advance() if is_news and (self._queue or self._unproven) else []

    def forget(self, replica_id: int) -> None:
        """Drop the acknowledgements of `replica_id`, which was expelled or is disconnected.

        Real servers keep counting the last acknowledgement of a disconnected member. If its data has been deleted
        since, they confirm a row that fewer than a quorum have.
        """
        self._acks.forget(replica_id)

    def _quorum_lsn(self) -> int:
        """Return the LSN up to which a quorum, including this instance, has the owner's rows."""
        return self._acks.quorum_lsn(self._owner_id, self._written_lsn, self._quorum)

    # --- control rows ---

    def request(self, request: SettlingRequest) -> list[Action[T]]:
        """Accept a CONFIRM, ROLLBACK, PROMOTE or DEMOTE of another instance, in the order of its rows.

        It is answered with Write, WriteNop or Reject, now or by a later event; the limbo is busy until then.
        """
        self._held.append(request)
        return self._advance()

    def request_written(self, request: SettlingRequest, lsn: int = 0) -> list[Action[T]]:
        """Complete a Write: the row, at `lsn`, is in the log and takes effect."""
        self._check_writing(request)
        self._writing = None
        return [*self._apply(request, request.lsn or lsn), *self._advance()]

    def request_failed(self, request: SettlingRequest, now: float) -> list[Action[T]]:
        """Fail a Write: the row is not in the log. Our own verdicts are retried after RETRY_DELAY."""
        self._check_writing(request)
        # The timeout may have been changed, or a quorum reached, before the retry: the next `tick` decides again.
        self._writing = self._overdue = None
        actions = self._refuse_held()
        if request.origin_id == self.instance_id:
            if request.is_transfer:
                # Not retried: a newer term may begin meanwhile. The caller, an election or a user, decides.
                actions.append(self._fail_transfer(write_failure()))
            else:
                self._retry_at = now + RETRY_DELAY
        return [*actions, *self._advance()]

    def _check_writing(self, request: SettlingRequest) -> None:
        if request is not self._writing:
            raise LocalProtocolError(f"unexpected write completion: {request}")

    def _filter(self, request: SettlingRequest) -> Fate:
        if self._has_transfers:
            return filter_request(request, self.history, is_validating=self.is_validating)
        return filter_request_of_2_6(request, self.history)

    def _apply(self, request: SettlingRequest, own_lsn: int) -> list[Action[T]]:
        match request.body:
            case Confirm(owner_id, lsn) if owner_id == self._owner_id:
                # A quorum acknowledged rows after the owner's PROMOTE, so a quorum has read the PROMOTE.
                # Proven first: an entry that a PROMOTE committed is older than those that the new owner confirms.
                return [*self._prove(owner_id), *self._confirm(lsn)]
            case Rollback(owner_id, lsn) if owner_id == self._owner_id:
                return [*self._rollback(lsn)]
            case Promote() | Demote() as body:
                return self._change_owner(request, body, own_lsn)
        # A late verdict on transactions of a former owner, which passed because histories are not validated.
        return []

    def _confirm(self, lsn: int) -> list[Commit[T]]:
        committed = self._queue.confirm(lsn)
        if committed:
            self._tenures.note_async_commit()
        self._note_confirmed(lsn)
        self._reached_lsn = max(self._reached_lsn, lsn)
        return [Commit(committed)] if committed else []

    def _rollback(self, lsn: int) -> list[Undo[T]]:
        overdue, self._overdue = self._overdue, None
        undone = self._queue.rollback(lsn)
        newest = self._queue.last_synchronous
        # A quorum may have rows that are void now: no CONFIRM must name them.
        self._reached_lsn = min(self._reached_lsn, newest.lsn if newest else self.confirmed_lsn)
        # Not our own timeout, so no client gets the timeout error.
        if overdue is None or overdue not in undone:
            return [Undo(entry, sync_rollback()) for entry in undone]
        actions = [Undo(entry, sync_rollback()) for entry in undone if entry is not overdue]
        first = overdue
        if overdue.count > 1:
            # Only the first transaction of the run has timed out; the others are rolled back because they follow it.
            first = overdue.take_others(1)
            first.become(EntryState.UNDONE)
            actions.append(Undo(overdue, sync_rollback()))
        # Last, because it is the oldest: undoing in another order would restore tuples that never existed.
        return [*actions, Undo(first, quorum_timeout())]

    def _change_owner(self, request: SettlingRequest, body: Promote | Demote, own_lsn: int) -> list[Action[T]]:
        if body.term <= self._term:
            return []  # histories are not validated: from a leader that missed its successor's election
        # A PROMOTE that does not name the owner comes from a leader whose quorum lacks the owner's transactions.
        border = body.lsn if body.owner_id == self._owner_id else 0
        proven = self._prove(body.owner_id)
        # `_confirm` comes first: `_rollback` undoes everything that is left.
        confirmed, undone = self._confirm(border), self._rollback(border + 1)
        # A PROMOTE decides with the votes of a quorum, but it is in one log only. If that member dies now, the next
        # leader may not know the row, so clients are answered when a quorum has it (docs/spec/synchro.md#promotion).
        confirmed = [Commit(commit.entries, is_proven=not own_lsn) for commit in confirmed]
        self._unproven += [_Unproven(request.origin_id, own_lsn, each.entries) for each in confirmed if own_lsn]
        actions: list[Action[T]] = [*proven, *confirmed, *undone]
        assert not self._queue, "a new owner finds the queue empty"
        first_void = min((undo.entry.lsn for undo in undone if undo.entry.is_synchronous), default=0)
        # Must precede `_set_owner`: these are the LSNs of the tenure that ends.
        owner = self._owner_id, self.confirmed_lsn
        self._tenures.hand_over(owner, by=request.origin_id, term=body.term, first_void=first_void)
        self._term = body.term
        self._set_owner(request.origin_id if isinstance(body, Promote) else 0)
        self._is_frozen_until_promotion = False
        # A PROMOTE of an older term must not resume the queue: the newer term may have another leader.
        if self._term >= self._raft_term:
            self._is_fenced = False
        actions.append(Transferred(request))
        # A row of an older term is late and fails nothing. 2.11.9 gives up then: its new leader never takes over.
        if self._transfer is not None and self._transfer.term <= body.term:
            if request.origin_id != self.instance_id:
                actions.append(TransferFailed(promoted_first(self._owner_id)))
            self._transfer = None
        return actions

    def _prove(self, origin_id: int = 0) -> list[Proven[T]]:
        """Return the entries whose PROMOTE a quorum has, by its ACKs or, for `origin_id`, as the caller knows. Until
        then the next leader may not have read the PROMOTE. 2.11 and 3.8 answer clients without this check."""
        proven: list[Proven[T]] = []
        # As in elections, a quorum above the number of members means all members.
        quorum = self._quorum if self._member_count is None else min(self._quorum, self._member_count)
        for unproven in tuple(self._unproven):
            # The author has the row, and so do we: it has just taken effect here.
            holders = self._acks.holders(unproven.origin_id, unproven.lsn) | {unproven.origin_id, self.instance_id}
            if unproven.origin_id == origin_id or len(holders) >= quorum:
                self._unproven.remove(unproven)
                proven.append(Proven(unproven.entries))
        return proven

    def _note_confirmed(self, lsn: int) -> None:
        # Verdicts may be repeated, and a PROMOTE may name an LSN below one that is confirmed already (LSN 0 in the
        # first one).
        if self._owner_id and lsn > self.confirmed_lsn:
            self._confirmed.follow(self._owner_id, lsn)

    # --- the next write ---

    def _advance(self) -> list[Action[T]]:
        """Request the next write, unless one is pending; control rows of others come first."""
        actions: list[Action[T]] = []
        # Split-brain filters compare LSNs with those of pending entries, so every entry must have its LSN. Filtering
        # happens here and not on arrival: the row before may have changed the owner.
        while self._held and not self._is_writing and self._queue.is_numbered:
            actions.append(self._answer(self._held.popleft()))
        # In a newer term, ACKs are no proof: its leader may have been elected before them, by members that lacked the
        # row.
        if self._unproven and self._raft_term <= self._term:
            actions += self._prove()
        self._look_for_quorum()
        # A transfer decides the whole queue, so it comes before a CONFIRM.
        for start in (self._try_transfer, self._try_clear, self._try_confirm):
            if self._is_writing or self._held:
                break
            actions += start()
        return actions

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None

    def _try_confirm(self) -> list[Action[T]]:
        if self._reached_lsn <= self.confirmed_lsn or not self._decides:
            return []
        return [self._write(Confirm(self._owner_id, self._reached_lsn))]

    def _answer(self, request: SettlingRequest) -> Write | WriteNop | Reject:
        try:
            fate = self._filter(request)
        except TarantoolError as error:
            return Reject(request, error)
        if fate is Fate.NOP:
            if isinstance(body := request.body, Promote | Demote):
                owner_id = request.origin_id if isinstance(body, Promote) else 0
                self._tenures.overtake((body.owner_id, body.lsn), (owner_id, self._confirmed.get(owner_id)))
            return WriteNop(request)
        # Busy from here until `request_written` or `request_failed`.
        self._writing = request
        return Write(request)

    def _write(self, body: Body) -> Write:
        self._writing = SettlingRequest(self.instance_id, body)
        return Write(self._writing)

    @property
    def _decides(self) -> bool:
        return self.is_owner and not self.is_frozen and self._retry_at is None

    def _look_for_quorum(self) -> None:
        """Count ACKs, on the owner only, and not while the queue is frozen or may be rolled back."""
        # ACKs are recorded even while frozen; they count when the queue thaws.
        if self.is_owner and self._queue and not self.is_frozen and not self.is_in_rollback:
            self._reached_lsn = max(self._reached_lsn, self._queue.reach(self._quorum_lsn()))

    # --- time and options ---

    @property
    def deadline(self) -> float | None:
        """The time at which `tick` is due; None if it is not. Any event may change it."""
        moments = [self._retry_at, self._transfer_deadline, self._clear_at if self._clear_lsn is None else None]
        first = self._first_undecided()
        if first is not None and first.written_at is not None:
            moments.append(first.written_at + self._timeout)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> list[Action[T]]:
        """Handle the passing of time; no effect before `deadline`."""
        actions: list[Action[T]] = []
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
        transfer_deadline = self._transfer_deadline
        if transfer_deadline is not None and now >= transfer_deadline:
            newest = self._queue.last_synchronous
            acks = self._acks.count(self._owner_id, newest.lsn if newest else 0) + 1
            actions.append(self._fail_transfer(quorum_wait(self._quorum, acks)))
        if self._clear_at is not None and self._clear_lsn is None and now >= self._clear_at:
            self._clear_lsn = self._quorum_lsn()
        # Before the timeout is checked: an entry that has reached its quorum is confirmed, not rolled back.
        actions += self._advance()
        first = self._first_undecided()
        if first is not None and first.written_at is not None and now >= first.written_at + self._timeout:
            self._overdue = first
            actions.append(self._write(Rollback(self._owner_id, first.first_lsn)))
        return actions

    def _first_undecided(self) -> LimboEntry[T] | None:
        """Return the entry whose timeout is running: the first, if we decide and no control row is being written."""
        # If it had a quorum, its CONFIRM would be pending.
        return self._queue.first if self._writing is None and not self._held and self._decides else None

    def configure(
        self,
        *,
        quorum: int | None = None,
        timeout: float | None = None,
        max_size: int | None = None,
        member_count: int | None = None,
    ) -> list[Action[T]]:
        """Change options or the number of members; the new values apply to pending entries, too."""
        self._quorum = self._quorum if quorum is None else quorum
        self._timeout = self._timeout if timeout is None else timeout
        self._max_size = self._max_size if max_size is None else max_size
        self._member_count = self._member_count if member_count is None else max(member_count, 1)
        return self._advance()

    # --- ownership ---

    def see_term(self, raft_term: int) -> None:
        """Record the newest term of Raft. If it is above the queue's, freeze until the PROMOTE of its leader."""
        self._raft_term = max(self._raft_term, raft_term)
        if self._has_transfers and self._raft_term > self._term:
            # Not lifted when the term is seen to be ours: only its PROMOTE decides about the pending entries.
            self._is_fenced = True

    def fence(self) -> None:
        """Stop writing verdicts: this instance has lost its quorum, and another leader may be elected."""
        self._is_fenced = True

    def unfence(self) -> list[Action[T]]:
        self._is_fenced = False
        return self._advance()

    def promote(self, term: int, now: float, *, timeout: float | None = None) -> list[Action[T]]:
        """Take over the queue in `term` once a quorum has all pending entries; fail if that exceeds `timeout`."""
        return self._start_transfer(_Transfer(Promote, term, None if timeout is None else now + timeout))

    def demote(self, term: int, now: float, *, timeout: float | None = None) -> list[Action[T]]:
        """Do as `promote`, but leave the queue without an owner."""
        return self._start_transfer(_Transfer(Demote, term, None if timeout is None else now + timeout))

    def cancel_transfer(self, error: TarantoolError) -> list[Action[T]]:
        """Cancel a transfer, for example because leadership is lost, unless its row is being written already."""
        # A row that is being written cannot be withdrawn. Its outcome ends the transfer.
        if self._transfer is None or self._is_transferring:
            return []
        return [self._fail_transfer(error), *self._advance()]

    def _start_transfer(self, transfer: _Transfer) -> list[Action[T]]:
        if not self._has_transfers:
            raise unknown_to_2_6(transfer.kind)
        if self._transfer is not None:
            raise errors.InAnotherPromote("box.ctl.promote() is already running")
        if transfer.term <= self._term:
            raise errors.OldTerm(f"The term is outdated: old - {transfer.term}, new - {self._term}")
        self._transfer = transfer
        return self._advance()

    @property
    def _is_transferring(self) -> bool:
        writing = self._writing
        return writing is not None and writing.is_transfer and writing.origin_id == self.instance_id

    @property
    def _transfer_deadline(self) -> float | None:
        return None if self._transfer is None or self._is_transferring else self._transfer.deadline

    def _try_transfer(self) -> list[Action[T]]:
        transfer = self._transfer
        if transfer is None:
            return []
        newest = self._queue.last_synchronous
        # PROMOTE names the last LSN of the queue, so all entries must be in the log before it.
        if not self._queue.is_written:
            return []
        if newest is not None and self._quorum_lsn() < newest.lsn:
            return []
        # The row must name an LSN in the queue, or the confirmed one: others stop real appliers with 244
        # (docs/spec/synchro.md#split-brain-filter).
        lsn = newest.lsn if newest is not None else self.confirmed_lsn
        return [self._write(transfer.kind(self._owner_id, lsn, transfer.term))]

    def _fail_transfer(self, error: TarantoolError) -> TransferFailed:
        self._transfer = None
        return TransferFailed(error)

    def clear_synchro_queue(self, now: float) -> list[Action[T]]:
        """Decide the queue of a dead owner, in 2.6; ends with Cleared.

        The owner's own verdicts have twice the timeout to arrive. Then the entries that a quorum has are confirmed on
        behalf of the owner, and the others are rolled back. If fewer members than a quorum have sent ACKs, all entries
        are rolled back. A live queue of our own, whose clients are waiting, is not cleared.
        """
        if self._has_transfers:
            raise errors.Unsupported("Dialect 2.11 does not support clear_synchro_queue; use box.ctl.promote()")
        first = self._queue.first
        # `written_at` is None for recovered entries: their clients are gone, so an owner may clear its own leftovers.
        if first is None or (self.is_owner and first.written_at is not None):
            return [Cleared()]
        if self._clear_at is None:
            self._clear_at = now + 2 * self._timeout
        return []

    def _try_clear(self) -> list[Action[T]]:
        if self._clear_at is None:
            return []
        first = self._queue.first
        if first is None:
            self._clear_at = self._clear_lsn = None
            return [Cleared()]
        if self._clear_lsn is None or self._retry_at is not None or not self._queue.is_written:
            return []
        # Write the CONFIRM first, if there is anything to confirm; the next call, after that write, rolls back the
        # rest.
        limit = self._clear_lsn
        covered = [min(limit, entry.lsn) for entry in self._queue if entry.is_synchronous and entry.first_lsn <= limit]
        verdict = Confirm(self._owner_id, covered[-1]) if covered else Rollback(self._owner_id, first.first_lsn)
        return [self._write(verdict)]
