"""The limbo (synchro queue): transactions that are in the log and become facts by a verdict, as a pure state machine.

One machine per instance, for both its parts: as owner of the queue it counts ACKs and decides, as follower it applies
what others have decided. Events are method calls (a transaction, an outcome of the journal, an ACK, a control row,
the time), and each returns the actions that follow from it, to be done in their order. It relies on a journal that
writes what it is given in that order and tells outcomes in the same order. It writes nothing, reads no clock, and knows
transactions only as something to be committed or undone. Terms are Raft's business; what a term means for the queue is
decided here. Rules: seed 002, reference 14, txn_limbo.c of 2.6.0, 2.11.9 and 3.8.0.
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
from flowstone.replication.limbo_actions import (
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
from flowstone.replication.limbo_queue import Acks, Entry, Pending, Queue, State, T
from flowstone.replication.limbo_state import LimboState
from flowstone.replication.split_brain import (
    Body,
    Fate,
    Request,
    filter_request,
    filter_request_of_2_6,
    filter_transaction,
    unknown_to_2_6,
)
from flowstone.replication.synchro import Confirm, Demote, Promote, Rollback
from flowstone.replication.tenures import Owner, Tenures
from flowstone.replication.vclock import VClock, VClockBuilder

RETRY_DELAY: Final = 1.0
"""Seconds until a verdict that could not be written is tried again, as real servers do."""

_WAIT_SYNC: Final = Flag.WAIT_SYNC.value
_WAIT_ACK: Final = Flag.WAIT_ACK.value


class _Transfer(NamedTuple):
    """A promotion or demotion of ours that waits until a quorum has all that waits in the queue."""

    kind: type[Promote | Demote]
    term: int
    deadline: float | None


class _Unproven(NamedTuple, Generic[T]):
    """What a PROMOTE or DEMOTE has made facts, and no quorum is known to have that row, `lsn` of `origin_id`."""

    origin_id: int
    lsn: int
    entries: tuple[Entry[T], ...]


class Limbo(LimboState[T]):
    """See the module. `instance_id` is 0 until the instance is registered, and for anonymous ones."""

    def __init__(self, *, instance_id: int, dialect: Dialect, quorum: int, timeout: float, max_size: int = 0) -> None:
        """`max_size`: bytes of transactions from which on no more of our own may enter; 0 for no limit."""
        super().__init__(instance_id=instance_id, dialect=dialect, quorum=quorum)
        self._timeout = timeout
        self._max_size = max_size
        self._raft_term = 0
        # Of the owner: up to where we have it written, and up to where a quorum was seen to have it.
        self._written_lsn = 0
        self._reached_lsn = 0
        self._acks = Acks()
        self._overdue: Entry[T] | None = None
        self._retry_at: float | None = None
        self._transfer: _Transfer | None = None
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
        """Begins where a log ended: with `state` as of its end, and what waits, all of it written.

        `former` and `voids` are those of `Tenures`. Without them this knows less, and takes more for a split brain.
        In 2.11 the queue stays frozen until the next PROMOTE or DEMOTE: it may have been decided about elsewhere.
        """
        self._owner_id, self._term = state.owner_id, state.term
        self._confirmed = VClockBuilder(state.confirmed_vclock)
        self._note_confirmed(state.lsn)
        self._reached_lsn = self.confirmed_lsn
        terms = promote_terms or ({state.owner_id: state.term} if state.owner_id else {})
        self._tenures = Tenures(terms, former, voids or {})
        self._queue = Queue()
        for transaction, lsn, is_synchronous in pending:
            entry = Entry(transaction, self._owner_id, is_synchronous=is_synchronous, lsn=lsn, is_written=True)
            self._queue.append(entry)
            if is_synchronous:
                self._written_lsn = lsn
        return self._advance()

    # --- transactions ---

    def submit(
        self, transaction: T, *, is_synchronous: bool, is_local: bool = False, size: int = 0, count: int = 1
    ) -> Entry[T] | None:
        """A transaction of our own, before it goes to the journal. None: it has nothing to wait for but its write.

        Raises the error for its client; then it must be undone. `is_local`: no row of it is ever replicated. `count`
        of more than one: a `Run` of so many, all synchronous, one row each.
        """
        if not is_synchronous and not self._queue:
            if not is_local:
                self._tenures.made_fact()
            return None
        if self.is_in_rollback:
            raise sync_rollback()
        if not is_local:
            self._claim(self.instance_id)
            if self._max_size and self._queue.size >= self._max_size:
                raise queue_full()
        origin_id = 0 if is_local else self.instance_id
        entry = Entry(transaction, origin_id, is_synchronous=is_synchronous, size=size, count=count)
        self._queue.append(entry)
        return entry

    def row_flags(self, entry: Entry[T] | None) -> int:
        """What the last row of a transaction of ours says besides COMMIT; `entry` is what `submit` gave."""
        if entry is None or not self._has_transfers:
            return 0
        return _WAIT_SYNC | _WAIT_ACK if entry.is_synchronous else _WAIT_SYNC

    def admit(self, origin_id: int, lsn: int, *, flags: int, has_effect: bool, was_control: bool = False) -> Fate:
        """Decide about a transaction of another instance before it is applied; raises ER_SPLIT_BRAIN (reference 14.5).

        `lsn` and `flags` are those of its last row. `was_control`: the transaction is a NOP that replaces a control
        row. A transaction of NOPs, received or made here, never enters the queue.
        """
        self._check_not_busy()
        if not self._has_transfers or self.promote_term(origin_id) == self._term:
            return Fate.ACCEPTED
        waits = bool(flags & _WAIT_SYNC)
        if lsn > self._confirmed.get(origin_id):
            # A NOP carries no limbo flags, so any other NOP counts as a void synchronous transaction.
            if flags & _WAIT_ACK or not (has_effect or was_control):
                self._tenures.note_void(origin_id, lsn)
            waits = waits and not (has_effect and self.is_validating and self._tenures.keeps(origin_id))
        return filter_transaction(origin_id, lsn, self.history, waits_for_verdict=waits, has_effect=has_effect)

    def receive(
        self, transaction: T, *, origin_id: int, lsn: int, is_synchronous: bool, size: int = 0, count: int = 1
    ) -> Entry[T] | None:
        """A transaction of another instance, admitted and applied, before it goes to the journal. As `submit`."""
        self._check_not_busy()
        if not is_synchronous and not self._queue:
            self._tenures.made_fact()
            return None
        self._claim(origin_id)
        entry = Entry(transaction, origin_id, is_synchronous=is_synchronous, lsn=lsn, size=size, count=count)
        self._queue.append(entry)
        return entry

    def _claim(self, origin_id: int) -> None:
        """May `origin_id` put a transaction into the queue? In 2.6 whoever finds it empty owns it from then on."""
        if self._owner_id == origin_id and origin_id:
            return
        if not self._has_transfers and not self._queue:
            self._set_owner(origin_id)
        else:
            raise not_the_owner(self._owner_id, is_empty=not self._queue)

    def _set_owner(self, owner_id: int) -> None:
        self._owner_id = owner_id
        self._reached_lsn = self.confirmed_lsn
        self._written_lsn = 0

    def _check_not_busy(self) -> None:
        if self.is_busy:
            raise LocalProtocolError("rows of others have to wait until a verdict on the queue is written")

    # --- the journal ---

    def written(self, entry: Entry[T], lsn: int, now: float) -> list[Action[T]]:
        """The transaction is in the log. `lsn` is that of its last global row (of a local one, of its last row)."""
        assert entry.lsn in (0, lsn), "the LSN of a transaction does not change"
        entry.lsn, entry.is_written = lsn, True
        assert entry.state in (State.WAITING, State.RELEASED), "verdicts come behind what they are about"
        if entry.state is State.RELEASED:
            entry.state = State.COMMITTED
            return [Commit((entry,)), *self._advance()]
        if entry.origin_id:
            self._written_lsn = lsn
        if entry.origin_id == self.instance_id:
            entry.written_at = now
        return self._advance()

    def written_together(self, entries: Sequence[Entry[T]], now: float) -> list[Action[T]]:
        """As `written` for each of them, which have their LSNs and wait: what follows is asked once, at the end."""
        for entry in entries:
            assert entry.state is State.WAITING, "verdicts come behind what they are about"
            entry.is_written = True
            if entry.origin_id == self.instance_id:
                entry.written_at = now
        self._written_lsn = entries[-1].lsn
        return self._advance()

    def write_failed(self, entry: Entry[T]) -> list[Action[T]]:
        """The transaction is not in the log, nor is anything behind it. Told already, it is told again in vain."""
        error = write_failure()
        if entry.state is State.RELEASED:
            entry.state = State.UNDONE
            return [Undo(entry, error)]
        if entry.state is not State.WAITING:
            return []
        undone = [Undo(dropped, error) for dropped in self._queue.drop(entry)]
        return [*undone, *self._refuse_held(), *self._advance()]

    def _refuse_held(self) -> list[Action[T]]:
        """What control rows are about may be missing in the log now; their appliers have to ask for it again."""
        held, self._held = self._held, deque()
        return [Reject(request, write_failure()) for request in held]

    # --- ACKs ---

    def ack(self, replica_id: int, vclock: VClock) -> list[Action[T]]:
        """`replica_id` has all up to `vclock` in its log. 0 for any anonymous replica: 2.6 counts all of them as one.

        The last word counts: a replica that has lost its log says less than before.
        """
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
        """Up to where a quorum has the owner's rows, ourselves counted."""
        return self._acks.quorum_lsn(self._owner_id, self._written_lsn, self._quorum)

    # --- control rows ---

    def request(self, request: Request) -> list[Action[T]]:
        """A CONFIRM, ROLLBACK, PROMOTE or DEMOTE of another instance, in the order in which its rows came.

        Sooner or later it is answered with Write, WriteNop or Reject; until then this is busy.
        """
        self._held.append(request)
        return self._advance()

    def request_written(self, request: Request, lsn: int = 0) -> list[Action[T]]:
        """The answer to a Write: the row is in the log, and means something from now on. `lsn` is its own."""
        self._check_writing(request)
        self._writing = None
        return [*self._apply(request, request.lsn or lsn), *self._advance()]

    def request_failed(self, request: Request, now: float) -> list[Action[T]]:
        """The answer to a Write: the row is not in the log. Verdicts of our own are tried again later."""
        self._check_writing(request)
        self._writing = self._overdue = None
        actions = self._refuse_held()
        if request.origin_id == self.instance_id:
            if request.is_transfer:
                actions.append(self._fail_transfer(write_failure()))
            else:
                self._retry_at = now + RETRY_DELAY
        return [*actions, *self._advance()]

    def _check_writing(self, request: Request) -> None:
        if request is not self._writing:
            raise LocalProtocolError(f"{request} is not what was to be written")

    def _filter(self, request: Request) -> Fate:
        if self._has_transfers:
            return filter_request(request, self.history, is_validating=self.is_validating)
        return filter_request_of_2_6(request, self.history)

    def _apply(self, request: Request, own_lsn: int) -> list[Action[T]]:
        match request.body:
            case Confirm(owner_id, lsn) if owner_id == self._owner_id:
                # Whoever has made a quorum follow it has been read by one.
                return [*self._prove(owner_id), *self._confirm(lsn)]
            case Rollback(owner_id, lsn) if owner_id == self._owner_id:
                return [*self._rollback(lsn)]
            case Promote() | Demote() as body:
                return self._change_owner(request, body, own_lsn)
        # A verdict about a former owner's transactions, where nobody checks histories: it comes too late.
        return []

    def _confirm(self, lsn: int) -> list[Commit[T]]:
        committed = self._queue.confirm(lsn)
        if committed:
            self._tenures.made_fact()
        self._note_confirmed(lsn)
        self._reached_lsn = max(self._reached_lsn, lsn)
        return [Commit(committed)] if committed else []

    def _rollback(self, lsn: int) -> list[Undo[T]]:
        overdue, self._overdue = self._overdue, None
        undone = self._queue.rollback(lsn)
        newest = self._queue.last_synchronous
        self._reached_lsn = min(self._reached_lsn, newest.lsn if newest else self.confirmed_lsn)
        if overdue is None or overdue not in undone:
            return [Undo(entry, sync_rollback()) for entry in undone]
        actions = [Undo(entry, sync_rollback()) for entry in undone if entry is not overdue]
        first = overdue
        if overdue.count > 1:
            first = overdue.take_others(1)
            first.state = State.UNDONE
            actions.append(Undo(overdue, sync_rollback()))
        return [*actions, Undo(first, quorum_timeout())]

    def _change_owner(self, request: Request, body: Promote | Demote, own_lsn: int) -> list[Action[T]]:
        if body.term <= self._term:
            return []  # not validating: of a leader that missed its successor's election
        # Who promotes without knowing the owner was elected by a quorum that lacks the owner's transactions.
        border = body.lsn if body.owner_id == self._owner_id else 0
        proven = self._prove(body.owner_id)
        confirmed, undone = self._confirm(border), self._rollback(border + 1)
        confirmed = [Commit(commit.entries, is_proven=not own_lsn) for commit in confirmed]
        self._unproven += [_Unproven(request.origin_id, own_lsn, each.entries) for each in confirmed if own_lsn]
        actions: list[Action[T]] = [*proven, *confirmed, *undone]
        assert not self._queue, "a new owner finds the queue empty"
        first_void = min((undo.entry.lsn for undo in undone if undo.entry.is_synchronous), default=0)
        owner = self._owner_id, self.confirmed_lsn
        self._tenures.hand_over(owner, by=request.origin_id, term=body.term, first_void=first_void)
        self._term = body.term
        self._set_owner(request.origin_id if isinstance(body, Promote) else 0)
        self._is_frozen_until_promotion = False
        if self._term >= self._raft_term:
            self._is_fenced = False
        actions.append(Transferred(request))
        # One of an older term only comes late. 2.11.9 gives up there, too, and its elected leader never takes over.
        if self._transfer is not None and self._transfer.term <= body.term:
            if request.origin_id != self.instance_id:
                actions.append(TransferFailed(promoted_first(self._owner_id)))
            self._transfer = None
        return actions

    def _prove(self, origin_id: int = 0) -> list[Proven[T]]:
        """A PROMOTE decides at once, but the next leader need not have read it unless a quorum has: `origin_id`
        is known to have been read by one, of others the ACKs tell. 2.11 and 3.8 answer clients without asking."""
        proven: list[Proven[T]] = []
        # As in elections, more than there are members are all of them.
        quorum = self._quorum if self._member_count is None else min(self._quorum, self._member_count)
        for unproven in tuple(self._unproven):
            holders = self._acks.holders(unproven.origin_id, unproven.lsn) | {unproven.origin_id, self.instance_id}
            if unproven.origin_id == origin_id or len(holders) >= quorum:
                self._unproven.remove(unproven)
                proven.append(Proven(unproven.entries))
        return proven

    def _note_confirmed(self, lsn: int) -> None:
        if self._owner_id and lsn > self.confirmed_lsn:
            self._confirmed.follow(self._owner_id, lsn)

    # --- what is to be written next ---

    def _advance(self) -> list[Action[T]]:
        """Starts the next write, if none is under way; the rows of others come first."""
        actions: list[Action[T]] = []
        while self._held and not self._is_writing and self._queue.is_numbered:
            actions.append(self._answer(self._held.popleft()))
        if self._unproven and self._raft_term <= self._term:
            actions += self._prove()
        self._look_for_quorum()
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

    def _answer(self, request: Request) -> Write | WriteNop | Reject:
        try:
            fate = self._filter(request)
        except TarantoolError as error:
            return Reject(request, error)
        if fate is Fate.NOP:
            if isinstance(body := request.body, Promote | Demote):
                owner_id = request.origin_id if isinstance(body, Promote) else 0
                self._tenures.overtake((body.owner_id, body.lsn), (owner_id, self._confirmed.get(owner_id)))
            return WriteNop(request)
        self._writing = request
        return Write(request)

    def _write(self, body: Body) -> Write:
        self._writing = Request(self.instance_id, body)
        return Write(self._writing)

    @property
    def _decides(self) -> bool:
        return self.is_owner and not self.is_frozen and self._retry_at is None

    def _look_for_quorum(self) -> None:
        """ACKs count for the owner only, and for nothing while the queue is frozen or may be undone."""
        if self.is_owner and self._queue and not self.is_frozen and not self.is_in_rollback:
            self._reached_lsn = max(self._reached_lsn, self._queue.reach(self._quorum_lsn()))

    # --- time and options ---

    @property
    def deadline(self) -> float | None:
        """When `tick` is due next; None for never. It may change with every event."""
        moments = [self._retry_at, self._transfer_deadline, self._clear_at if self._clear_lsn is None else None]
        first = self._first_undecided()
        if first is not None and first.written_at is not None:
            moments.append(first.written_at + self._timeout)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> list[Action[T]]:
        """It is `now`. Before the deadline, this does nothing."""
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
        actions += self._advance()
        first = self._first_undecided()
        if first is not None and first.written_at is not None and now >= first.written_at + self._timeout:
            self._overdue = first
            actions.append(self._write(Rollback(self._owner_id, first.first_lsn)))
        return actions

    def _first_undecided(self) -> Entry[T] | None:
        """The entry whose time runs: the first, if it is ours to decide about and nobody is doing that now."""
        # With a quorum its CONFIRM would be under way.
        return self._queue.first if self._writing is None and not self._held and self._decides else None

    def configure(
        self,
        *,
        quorum: int | None = None,
        timeout: float | None = None,
        max_size: int | None = None,
        member_count: int | None = None,
    ) -> list[Action[T]]:
        """Options that changed, and how many members there are; they hold for what waits already, too."""
        self._quorum = self._quorum if quorum is None else quorum
        self._timeout = self._timeout if timeout is None else timeout
        self._max_size = self._max_size if max_size is None else max_size
        self._member_count = self._member_count if member_count is None else max(member_count, 1)
        return self._advance()

    # --- ownership ---

    def see_term(self, raft_term: int) -> None:
        """Raft knows of this term. If it is newer than the queue's, its leader decides: we freeze until its PROMOTE."""
        self._raft_term = max(self._raft_term, raft_term)
        if self._has_transfers and self._raft_term > self._term:
            self._is_fenced = True

    def fence(self) -> None:
        """No verdicts any more: a quorum is out of reach, and may elect another."""
        self._is_fenced = True

    def unfence(self) -> list[Action[T]]:
        self._is_fenced = False
        return self._advance()

    def promote(self, term: int, now: float, *, timeout: float | None = None) -> list[Action[T]]:
        """Takes the queue over in `term`, once a quorum has all that waits in it. Ends with Transferred or
        TransferFailed; `timeout` is for the waiting, None for as long as it takes."""
        return self._start_transfer(_Transfer(Promote, term, None if timeout is None else now + timeout))

    def demote(self, term: int, now: float, *, timeout: float | None = None) -> list[Action[T]]:
        """As `promote`, but gives the queue to nobody."""
        return self._start_transfer(_Transfer(Demote, term, None if timeout is None else now + timeout))

    def cancel_transfer(self, error: TarantoolError) -> list[Action[T]]:
        """Gives up waiting, for instance because the leadership is lost. What is being written cannot be stopped."""
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
        if not self._queue.is_written:
            return []
        if newest is not None and self._quorum_lsn() < newest.lsn:
            return []
        lsn = newest.lsn if newest is not None else self.confirmed_lsn
        return [self._write(transfer.kind(self._owner_id, lsn, transfer.term))]

    def _fail_transfer(self, error: TarantoolError) -> TransferFailed:
        self._transfer = None
        return TransferFailed(error)

    def clear_synchro_queue(self, now: float) -> list[Action[T]]:
        """The way of 2.6 out of a dead owner's queue; ends with Cleared.

        The owner's own verdicts have twice the timeout to come. Then what a quorum has is confirmed on behalf of the
        owner, and the rest rolled back; all of it, if fewer than a quorum are known. For a live queue of our own, whose
        clients wait, there is nothing to clear.
        """
        if self._has_transfers:
            raise errors.Unsupported("Dialect 2.11 does not support clear_synchro_queue, but PROMOTE")
        first = self._queue.first
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
        limit = self._clear_lsn
        covered = [min(limit, entry.lsn) for entry in self._queue if entry.is_synchronous and entry.first_lsn <= limit]
        verdict = Confirm(self._owner_id, covered[-1]) if covered else Rollback(self._owner_id, first.first_lsn)
        return [self._write(verdict)]
