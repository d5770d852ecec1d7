"""The queue of synchronous transactions of a running node: does what the limbo decides.

The rules are in `replication/limbo.py`; this hands it events (transactions, outcomes of the log, ACKs, rows of peers,
time) and carries out its actions: verdicts go into the log, transactions leave `Box.in_flight`, forwards as facts or
backwards undone, and whoever waits is told. Transactions come from `node/commits.py`, rows of peers from
`node/applying.py`, terms and promotions from `node/elections.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, Self, cast

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.read_view import ReadView
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.row import Row, encode_header
from flowstone.node.alarm import Alarm
from flowstone.node.journal import Journal
from flowstone.outside import Clock
from flowstone.replication.limbo import Limbo
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
    quorum_timeout,
    sync_rollback,
)
from flowstone.replication.limbo_queue import Entry, Pending, Run, State
from flowstone.replication.split_brain import Body, Fate, Request
from flowstone.replication.synchro import Confirm, Demote, Promote, Rollback
from flowstone.replication.tenures import Tenures
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

SYNCHRO_TIMEOUT: Final = 5.0
"""Default of `replication_synchro_timeout`, in seconds."""

STALL_SECONDS: Final = 1.0
"""A process that wakes up so late has been asleep: others replace a leader that says nothing for some seconds."""

EXTENSIONS_MAX: Final = 2
"""How often in succession a late wake-up extends the timeout: a node that is always late is overloaded, not asleep, and
clients wait for its verdict. Two, because a process may be paused again while it reads what it missed."""

_TYPES: Final = {
    Confirm: RequestType.RAFT_CONFIRM.value,
    Rollback: RequestType.RAFT_ROLLBACK.value,
    Promote: RequestType.RAFT_PROMOTE.value,
    Demote: RequestType.RAFT_DEMOTE.value,
}

Told = Callable[[FlowstoneError | None], None]


_CLAIM: Final = "await node.promote(), or start with election_mode"
"""For the program that the node is part of; its clients get the message alone."""

_LATER: Final = "it is in the log, and the set decides about it when the node is back"
_ELSEWHERE: Final = "ask another member whether the row is there"


class OutcomeUnknown(FlowstoneError):
    """A transaction that waits for a verdict may become a fact, or be taken back; this node will not see it."""


class Revocable(Protocol):
    """Something that is visible and can be taken back until it is a fact."""

    def rollback(self) -> None: ...

    def hide_from(self, view: ReadView) -> None:
        """Makes `view`, just opened, see what was there before."""
        ...


class Waiting(NamedTuple):
    """A transaction in the queue: what takes it back, and who is told of the verdict (None: it is a fact).

    `is_promised`: a client takes that for a promise, so it has to be proven (see `limbo_actions.Proven`).
    Also a run of many, if both can be divided: a `BulkWrite`, and replies to all of them or `NOBODY`.
    """

    effect: Revocable
    told: Told
    is_promised: bool = True

    def take_first(self, count: int) -> Waiting:
        effect, told = cast("Run", self.effect), cast("Run", self.told)
        parts = cast(Revocable, effect.take_first(count)), cast(Told, told.take_first(count))
        return Waiting(*parts, self.is_promised)

    def take_last(self, count: int) -> Waiting:
        effect, told = cast("Run", self.effect), cast("Run", self.told)
        parts = cast(Revocable, effect.take_last(count)), cast(Told, told.take_last(count))
        return Waiting(*parts, self.is_promised)


class _Nobody:
    """Nobody waits for it here: who wrote it is gone, or is another instance."""

    def __call__(self, error: FlowstoneError | None) -> None: ...

    def take_first(self, count: int) -> Self:
        return self

    def take_last(self, count: int) -> Self:
        return self


NOBODY: Final = _Nobody()


class Received(NamedTuple):
    """A row of a peer about the queue, as it goes into the log: itself, or a NOP in its place."""

    rows: bytes
    nop: Callable[[], bytes]
    lsns: Mapping[int, int]
    logged: Told


class SynchroQueue:
    """One per node. `limbo` is for others to read; whatever changes it goes through here."""

    def __init__(self, box: Box, journal: Journal, clock: Clock) -> None:
        self._box = box
        self._journal = journal
        self._clock = clock
        self.timeout = SYNCHRO_TIMEOUT
        self._max_size = 0
        self._member_count: int | None = None
        self.limbo: Limbo[Waiting] = Limbo(instance_id=0, dialect=box.dialect, quorum=1, timeout=self.timeout)
        self.on_change: list[Callable[[], None]] = []
        """Told when the queue has another owner, or is frozen or thawed."""
        self.on_free: list[Callable[[], None]] = []
        """Told when rows of peers need not wait any longer for a verdict that is being written."""
        self._received: dict[Request, Received] = {}
        self._deciding: Request | None = None
        self._unproven: dict[Entry[Waiting], None] = {}
        self._watched: dict[Entry[Waiting], list[asyncio.Future[None]]] = {}
        self._transfer: asyncio.Future[None] | None = None
        self._clearing: list[asyncio.Future[None]] = []
        self._alarm = Alarm(self._clock, self._tick)
        self._patient_until = 0.0
        self._extensions = 0
        self._shown = self._appearance()
        self._was_busy = False
        self._is_closed = False

    # --- what others look at ---

    @property
    def is_empty(self) -> bool:
        """Nothing waits for a verdict, so a transaction that needs none has nothing to wait for but its write."""
        return not self.limbo

    def checkpoint(self) -> Promote:
        """The state as snapshots and JOIN_META have it; what waits is not part of it."""
        return self.limbo.checkpoint()

    # --- life ---

    def start(self, instance_id: int, state: Promote, tenures: Tenures, pending: Sequence[Pending[Revocable]]) -> None:
        """Begins where the log ended, or anew; `pending` is in the log and in memory, and has no verdict.

        Nothing is decided about it before `resume`: peers may have done that meanwhile, on our behalf.
        """
        self._let_go("the data was given up for that of a peer")
        self.limbo = Limbo(
            instance_id=instance_id,
            dialect=self._box.dialect,
            quorum=self.limbo.quorum,
            timeout=self.timeout,
            max_size=self._max_size,
        )
        self.limbo.configure(member_count=self._member_count)
        self._box.in_flight.extend(each.transaction for each in pending)
        waiting = [
            Pending(Waiting(each.transaction, NOBODY, is_promised=False), each.lsn, each.is_synchronous)
            for each in pending
        ]
        if pending and self._box.dialect is Dialect.V2_6:  # since 2.11, a queue waits for the next promotion
            self.limbo.fence()
        terms, former, voids = tenures.promote_terms, tenures.former, tenures.voids
        self._do(self.limbo.restore(state, promote_terms=terms, pending=waiting, former=former, voids=voids))

    def resume(self) -> None:
        """We know what our peers know."""
        if self._box.dialect is Dialect.V2_6 and self.limbo.is_fenced:
            self._do(self.limbo.unfence())

    def registered(self, instance_id: int) -> None:
        """An anonymous instance has got its id."""
        self.limbo.instance_id = instance_id
        self._look_around()

    def expelled(self) -> None:
        """Stop deciding; pending clients get OutcomeUnknown, because an expelled instance gets no verdicts."""
        self.limbo.fence()
        self._do(self.limbo.cancel_transfer(sync_rollback()))
        self.limbo.instance_id = 0
        self._let_go("this instance was expelled from its replica set", hint=_ELSEWHERE)
        self._look_around()

    def close(self) -> None:
        """Nothing is decided any more. Who waits for a promotion or a verdict hears that."""
        self._is_closed = True
        self._let_go("the node was stopped before a quorum had it")

    def _let_go(self, why: str, hint: str = _LATER) -> None:
        self._alarm.cancel()
        for entry in (*self._unproven, *self.limbo.pending):
            if entry.transaction.is_promised:
                _tell(entry.transaction.told, OutcomeUnknown(why, hint=hint))
        self._unproven.clear()
        waiting = [*self._clearing, *(future for futures in self._watched.values() for future in futures)]
        if self._transfer is not None:
            waiting.append(self._transfer)
        for future in waiting:
            if not future.done():
                future.set_exception(OutcomeUnknown(why))
        self._clearing, self._watched, self._transfer = [], {}, None

    # --- transactions: `node/commits.py` and `node/applying.py` ---

    def submit(
        self, waiting: Waiting, *, is_synchronous: bool, is_local: bool = False, size: int = 0
    ) -> Entry[Waiting] | None:
        """As `Limbo.submit`, before the rows are encoded."""
        try:
            return self.limbo.submit(waiting, is_synchronous=is_synchronous, is_local=is_local, size=size)
        except errors.SyncQueueUnclaimed as error:
            error.hint = _CLAIM
            raise

    def receive(
        self, waiting: Waiting, *, origin_id: int, lsn: int, is_synchronous: bool, size: int = 0
    ) -> Entry[Waiting] | None:
        """As `Limbo.receive`, when the transaction has taken effect."""
        return self.limbo.receive(waiting, origin_id=origin_id, lsn=lsn, is_synchronous=is_synchronous, size=size)

    def submit_run(self, run: Waiting, count: int, size: int) -> Entry[Waiting] | None:
        """As `submit`, for so many synchronous ones; None if one of them may be refused."""
        if self._max_size and self.limbo.size + size > self._max_size:
            return None
        try:
            return self.limbo.submit(run, is_synchronous=True, size=size, count=count)
        except TarantoolError:
            return None

    def takes(self, origin_id: int) -> bool:
        """Whether what `origin_id` writes now may wait here."""
        limbo = self.limbo
        return limbo.owner_id == origin_id or (self._box.dialect is Dialect.V2_6 and not limbo)

    def is_current(self, origin_id: int) -> bool:
        """Whether nothing that `origin_id` writes without waiting needs a closer look."""
        limbo = self.limbo
        return not limbo.owner_id or limbo.promote_term(origin_id) == limbo.term

    def made_fact(self) -> None:
        """Something was written that waits for nobody, without asking for a place in the queue."""
        self.limbo.tenures.made_fact()

    def admit(self, origin_id: int, lsn: int, *, flags: int, has_effect: bool, was_control: bool = False) -> Fate:
        """As `Limbo.admit`."""
        return self.limbo.admit(origin_id, lsn, flags=flags, has_effect=has_effect, was_control=was_control)

    def written(self, entry: Entry[Waiting], lsn: int) -> None:
        self._do(self.limbo.written(entry, lsn, self._clock.monotonic()))

    def written_together(self, entries: Sequence[Entry[Waiting]]) -> None:
        self._do(self.limbo.written_together(entries, self._clock.monotonic()))

    def write_failed(self, entry: Entry[Waiting]) -> None:
        """The log has refused the transaction, and tells all that it refused, the newest first."""
        self._do(self.limbo.write_failed(entry), is_failing=True)

    def withdraw(self, entry: Entry[Waiting]) -> None:
        """The transaction never reached the log; whoever submitted it takes it back and needs not be told."""
        actions = self.limbo.write_failed(entry)
        self._do([each for each in actions if not (isinstance(each, Undo) and each.entry is entry)], is_failing=True)

    def decide(self, request: Request, received: Received) -> None:
        """A row of a peer about the queue; not while `limbo.is_busy`. Raises why it does not fit our history."""
        self._received[request] = received
        actions = self.limbo.request(request)
        self._deciding = request
        try:
            self._do(actions)
        finally:
            self._deciding = None
        for action in actions:
            if isinstance(action, Reject) and action.request is request:
                raise action.error

    # --- ACKs, time, options ---

    def ack(self, replica_id: int, vclock: VClock) -> None:
        """`replica_id` has written all of `vclock`; 0 for an anonymous one."""
        actions = self.limbo.ack(replica_id, vclock)
        if actions:
            self._do(actions)

    def forget(self, replica_id: int) -> None:
        """As `Limbo.forget`."""
        self.limbo.forget(replica_id)

    def configure(
        self,
        *,
        quorum: int | None = None,
        timeout: float | None = None,
        max_size: int | None = None,
        member_count: int | None = None,
    ) -> None:
        self.timeout = self.timeout if timeout is None else timeout
        self._max_size = self._max_size if max_size is None else max_size
        self._member_count = self._member_count if member_count is None else member_count
        self._do(self.limbo.configure(quorum=quorum, timeout=timeout, max_size=max_size, member_count=member_count))

    def _tick(self) -> None:
        now = self._clock.monotonic()
        if self._alarm.late > STALL_SECONDS and self._extensions < EXTENSIONS_MAX:
            # Others may have gone on without us, and confirmed what we would take back: their word is still to be read.
            LOG.warning("the process stood still for %.1f s: what waits gets its time anew", self._alarm.late)
            self._extensions += 1
            self._patient_until = now + self.timeout
        if now < self._patient_until:
            self._alarm.set(self._patient_until)
        else:
            self._extensions = 0
            self._do(self.limbo.tick(now))

    # --- ownership ---

    def see_term(self, term: int) -> None:
        """As `Limbo.see_term`."""
        self.limbo.see_term(term)
        self._look_around()

    def fence(self) -> None:
        """No verdicts any more: a quorum is out of reach, and may elect another."""
        if self.limbo and not self.limbo.is_fenced:
            LOG.warning("%d transactions wait: nobody decides about them until there is a leader", len(self.limbo))
        self.limbo.fence()
        self._look_around()

    async def promote(self, term: int, *, timeout: float | None = None) -> None:
        """Returns when our PROMOTE of `term` is in the log and in force; raises why it cannot be.

        `timeout` is for a quorum that has all that waits in the queue; None waits for it as long as it takes.
        """
        await self._hand_over(lambda now: self.limbo.promote(term, now, timeout=timeout))

    async def demote(self, term: int, *, timeout: float | None = None) -> None:
        """As `promote`; nobody owns the queue then."""
        await self._hand_over(lambda now: self.limbo.demote(term, now, timeout=timeout))

    def cancel_transfer(self, error: TarantoolError) -> None:
        self._do(self.limbo.cancel_transfer(error))

    async def _hand_over(self, start: Callable[[float], list[Action[Waiting]]]) -> None:
        actions = start(self._clock.monotonic())
        self._transfer = transfer = asyncio.get_running_loop().create_future()
        self._do(actions)
        try:
            await transfer
        except asyncio.CancelledError:
            self.cancel_transfer(errors.System("the promotion was given up"))
            raise

    async def clear(self) -> None:
        """`box.ctl.clear_synchro_queue()` of dialect 2.6: see `Limbo.clear_synchro_queue`."""
        cleared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        actions = self.limbo.clear_synchro_queue(self._clock.monotonic())
        self._clearing.append(cleared)
        self._do(actions)
        await cleared

    # --- who waits until what waits now is decided ---

    async def settled(self, timeout: float | None = None) -> None:
        """Returns when all that waits now is a fact; raises if that is undone, or `timeout` is over."""
        await self.decided(self.limbo.newest, timeout)

    async def decided(self, newest: Entry[Waiting] | None, timeout: float | None = None) -> None:
        """As `settled`, for what was the newest (`limbo.newest`) at the moment in question."""
        if newest is None:
            return
        if newest.state is State.UNDONE:
            raise sync_rollback()
        if newest.state is State.COMMITTED:
            return
        decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watched.setdefault(newest, []).append(decided)
        try:
            async with asyncio.timeout(timeout):
                await decided
        except TimeoutError:
            raise quorum_timeout() from None

    # --- what the limbo wants done ---

    def _do(self, actions: Iterable[Action[Waiting]], *, is_failing: bool = False) -> None:
        """`is_failing`: the log is telling what it has refused, and takes nothing new before it is through."""
        for action in actions:
            match action:
                case Commit(entries, is_proven):
                    self._commit(entries, is_proven=is_proven)
                case Proven(entries):
                    self._prove(entries)
                case Undo(entry, error):
                    self._undo(entry, error)
                case Write(request):
                    if is_failing:
                        asyncio.get_running_loop().call_soon(self._write, request)
                    else:
                        self._write(request)
                case WriteNop(request):
                    self._write_nop(request)
                case Reject(request, error):
                    self._reject(request, error)
                case Transferred(request):
                    self._say_owner(request)
                    if request.origin_id == self.limbo.instance_id:
                        self._end_transfer(None)
                case TransferFailed(error):
                    self._end_transfer(error)
                case Cleared():
                    self._end_clearing()
        if not self._is_closed:
            self._alarm.set(self.limbo.deadline)
        self._look_around()

    def _commit(self, entries: Sequence[Entry[Waiting]], *, is_proven: bool) -> None:
        popleft = self._box.in_flight.popleft
        for entry in entries:
            if not entry.is_part:
                popleft()
            if is_proven or not entry.transaction.is_promised:
                _tell(entry.transaction.told, None)
            else:
                self._unproven[entry] = None
            if self._watched:
                self._tell_watchers(entry, None)

    def _prove(self, entries: Sequence[Entry[Waiting]]) -> None:
        for entry in entries:
            if entry in self._unproven:
                del self._unproven[entry]
                _tell(entry.transaction.told, None)

    def _undo(self, entry: Entry[Waiting], error: TarantoolError) -> None:
        if not entry.is_part:
            self._box.in_flight.pop()
        entry.transaction.effect.rollback()
        _tell(entry.transaction.told, error)
        if self._watched:
            self._tell_watchers(entry, error)

    def _tell_watchers(self, entry: Entry[Waiting], error: TarantoolError | None) -> None:
        for decided in self._watched.pop(entry, ()):
            if decided.done():
                continue
            if error is None:
                decided.set_result(None)
            else:
                decided.set_exception(sync_rollback())

    def _say_owner(self, request: Request) -> None:
        body, limbo = request.body, self.limbo
        whose = f"is that of replica {limbo.owner_id}" if limbo.owner_id else "is nobody's"
        taken = f"; of replica {body.owner_id} stands what is up to {body.lsn}" if body.owner_id else ""
        LOG.info("the queue %s in term %d%s", whose, limbo.term, taken)

    def _reject(self, request: Request, error: TarantoolError) -> None:
        """What `decide` has just been given it refuses itself; of what had to wait nobody would hear otherwise."""
        received = self._received.pop(request, None)
        if received is not None and request is not self._deciding:
            received.logged(error)

    def _write(self, request: Request) -> None:
        received = self._received.pop(request, None)
        if received is not None:
            self._log(request, received, received.rows)
            return
        if isinstance(request.body, Rollback):
            need = f"no quorum of {self.limbo.quorum} within {self.timeout:g} s"
            LOG.warning("%s: transactions from %d on are taken back, %d wait", need, request.body.lsn, len(self.limbo))
        journal = self._journal
        lsn = journal.next_lsn(journal.replica_id)
        rows = _encode(request.body, journal.replica_id, lsn, self._clock.wall())
        try:
            journal.submit(rows, 1, lambda error: self._logged(request, error, lsn))
        except FlowstoneError:
            self._do(self.limbo.request_failed(request, self._clock.monotonic()))
            return
        journal.flush()

    def _write_nop(self, request: Request) -> None:
        received = self._received.pop(request)
        self._journal.submit_replicated(received.nop(), received.lsns, received.logged)
        self._journal.flush()

    def _log(self, request: Request, received: Received, rows: bytes) -> None:
        def logged(error: FlowstoneError | None) -> None:
            received.logged(error)  # first: rows that wait for the verdict are not to be had without it
            self._logged(request, error)

        try:
            self._journal.submit_replicated(rows, received.lsns, logged)
        except FlowstoneError as error:
            received.logged(error)
            self._do(self.limbo.request_failed(request, self._clock.monotonic()))
            return
        self._journal.flush()

    def _logged(self, request: Request, error: FlowstoneError | None, lsn: int = 0) -> None:
        if error is None:
            self._do(self.limbo.request_written(request, lsn))
        else:
            self._do(self.limbo.request_failed(request, self._clock.monotonic()), is_failing=True)

    def _end_transfer(self, error: TarantoolError | None) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is None or transfer.done():
            return
        if error is None:
            transfer.set_result(None)
        else:
            transfer.set_exception(error)

    def _end_clearing(self) -> None:
        cleared, self._clearing = self._clearing, []
        for future in cleared:
            if not future.done():
                future.set_result(None)

    # --- what others see of it ---

    def _appearance(self) -> tuple[int, int, bool]:
        limbo = self.limbo
        return limbo.owner_id, limbo.term, limbo.is_frozen

    def _look_around(self) -> None:
        appearance = self._appearance()
        if appearance != self._shown:
            self._shown = appearance
            for tell in self.on_change:
                tell()
        is_busy = self.limbo.is_busy
        was_busy, self._was_busy = self._was_busy, is_busy
        if was_busy and not is_busy:
            for tell in self.on_free:
                tell()


def _encode(body: Body, replica_id: int, lsn: int, now: float) -> bytes:
    row = Row(_TYPES[type(body)], replica_id, 0, lsn, now, lsn, body=body.encode())
    return encode_header(row) + row.body


def _tell(told: Told, error: FlowstoneError | None) -> None:
    try:
        told(error)
    except Exception:
        # One listener's mistake must not keep the others waiting for ever.
        LOG.exception("after a verdict")
