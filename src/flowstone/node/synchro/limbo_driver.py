"""The synchronous queue of a running node: runs the state machine of `replication/limbo/limbo.py`, which has the rules.

`LimboDriver` passes events to the limbo (transactions, results of writes, ACKs, rows of peers, time) and performs the
resulting actions. It writes verdicts to the log, removes transactions from `Box.in_flight`, oldest first if committed
and newest first if rolled back, and reports the outcome to clients. Transactions come from `node/wal/commits.py`, rows
of peers from `node/upstream/row_applier.py`, terms and promotions from `node/synchro/elections.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, Self, cast

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine.read_view import ReadView
from flowstone.errors import FlowstoneError, OutcomeUnknown
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.row import Row, encode_header
from flowstone.node.alarm import Alarm
from flowstone.node.wal.journal import Journal
from flowstone.outside import Clock
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
    quorum_timeout,
    sync_rollback,
)
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, Rollback
from flowstone.replication.limbo.limbo import Limbo
from flowstone.replication.limbo.queue import EntryRun, EntryState, LimboEntry, Pending
from flowstone.replication.limbo.split_brain import Body, Fate, SettlingRequest
from flowstone.replication.limbo.tenures import Tenures
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

SYNCHRO_TIMEOUT: Final = 5.0
"""Timeout in seconds until the node sets `replication_synchro_timeout`, which `node/configuration.py` defines."""

STALL_SECONDS: Final = 1.0
"""If a timer fires with this delay, the process was suspended. Other members, which need some seconds to replace a
leader, may have done so in that time."""

EXTENSIONS_MAX: Final = 2
"""Maximum number of consecutive extensions of the timeout after a late timer. A node whose timers are always late is
overloaded, not suspended, and clients wait for its verdict. The value is two, because the process may be suspended
again while it reads the rows that it missed."""

_TYPES: Final = {
    Confirm: RequestType.RAFT_CONFIRM.value,
    Rollback: RequestType.RAFT_ROLLBACK.value,
    Promote: RequestType.RAFT_PROMOTE.value,
    Demote: RequestType.RAFT_DEMOTE.value,
}

OnDone = Callable[[FlowstoneError | None], None]


_CLAIM: Final = "claim it with await node.promote(), or start with election_mode"
"""Hint for the program that runs the node; clients only get the message."""

_LATER: Final = "the transaction is in the log; the replica set decides on it after the node has restarted"
_ELSEWHERE: Final = "check on another member whether the row exists"


class Revocable(Protocol):
    """A visible change that can be rolled back until it is committed."""

    def rollback(self) -> None: ...

    def hide_from(self, view: ReadView) -> None:
        """Make `view`, which was just opened, show the state before the change."""
        ...


class Waiter(NamedTuple):
    """A transaction in the queue: `effect` rolls it back, `told` gets its outcome (None: committed, else the error).

    `is_promised`: a client relies on the outcome, so a commit must be proven first (see `limbo_actions.Proven`). A run
    of several transactions is also represented by this class; then both fields can be divided: `effect` is a
    `Writes`, and `told` the replies to all of them, or NOBODY.
    """

    effect: Revocable
    told: OnDone
    is_promised: bool = True

    def take_first(self, count: int) -> Waiter:
        effect, told = cast("EntryRun", self.effect), cast("EntryRun", self.told)
        parts = cast(Revocable, effect.take_first(count)), cast(OnDone, told.take_first(count))
        return Waiter(*parts, self.is_promised)

    def take_last(self, count: int) -> Waiter:
        effect, told = cast("EntryRun", self.effect), cast("EntryRun", self.told)
        parts = cast(Revocable, effect.take_last(count)), cast(OnDone, told.take_last(count))
        return Waiter(*parts, self.is_promised)


class _Nobody:
    """Ignores the outcome: no client of this node waits for it."""

    def __call__(self, error: FlowstoneError | None) -> None: ...

    def take_first(self, count: int) -> Self:
        return self

    def take_last(self, count: int) -> Self:
        return self


NOBODY: Final = _Nobody()


class Received(NamedTuple):
    """A control row of a peer, to be written to the log: the row itself, or the NOP that replaces it."""

    rows: bytes
    nop: Callable[[], bytes]
    lsns: Mapping[int, int]
    logged: OnDone


class LimboDriver:
    """The synchronous queue of a node. Other modules may read `limbo`, but change it only through this class."""

    def __init__(self, box: Box, journal: Journal, clock: Clock) -> None:
        self._box = box
        self._journal = journal
        self._clock = clock
        self.timeout = SYNCHRO_TIMEOUT
        self._max_size = 0
        self._member_count: int | None = None
        self.limbo: Limbo[Waiter] = Limbo(instance_id=0, dialect=box.dialect, quorum=1, timeout=self.timeout)
        self.on_change: list[Callable[[], None]] = []
        """Called when the owner or the term has changed, or the queue was frozen or thawed."""
        self.on_free: list[Callable[[], None]] = []
        """Called when rows of peers no longer have to wait for a verdict that is being written."""
        # Bytes of control rows of peers, kept until the limbo returns Write, WriteNop or Reject for the row.
        self._received: dict[SettlingRequest, Received] = {}
        # The row of the running `decide`, which raises the rejection itself; a held row is rejected through its
        # callback.
        self._deciding: SettlingRequest | None = None
        # Committed by a PROMOTE, but not answered yet: if the node stops now, the outcome is unknown to the client.
        self._unproven: dict[LimboEntry[Waiter], None] = {}
        self._watched: dict[LimboEntry[Waiter], list[asyncio.Future[None]]] = {}
        self._transfer: asyncio.Future[None] | None = None
        self._clearing: list[asyncio.Future[None]] = []
        self._alarm = Alarm(self._clock, self._tick)
        self._patient_until = 0.0
        self._extensions = 0
        self._shown = self._appearance()
        self._was_busy = False
        self._is_closed = False

    # --- state ---

    @property
    def is_empty(self) -> bool:
        """True if no transaction is pending. An asynchronous transaction is then committed by its write."""
        return not self.limbo

    def checkpoint(self) -> Promote:
        """Return the state for snapshots and JOIN_META, without pending transactions."""
        return self.limbo.checkpoint()

    # --- lifecycle ---

    def start(self, instance_id: int, state: Promote, tenures: Tenures, pending: Sequence[Pending[Revocable]]) -> None:
        """Restore the state at the end of the log; called after a rejoin, too.

        `pending` are the transactions in the log and in memory without a verdict. No verdict is written before
        `resume`, because peers may have decided in the meantime.
        """
        self._let_go("local data was replaced by that of a peer")
        self.limbo = Limbo(
            instance_id=instance_id,
            dialect=self._box.dialect,
            quorum=self.limbo.quorum,
            timeout=self.timeout,
            max_size=self._max_size,
        )
        self.limbo.configure(member_count=self._member_count)
        # In the order of the log: read views and checkpoints hide what is in flight, and `_commit` removes from the
        # left.
        self._box.in_flight.extend(each.transaction for each in pending)
        waiting = [
            Pending(Waiter(each.transaction, NOBODY, is_promised=False), each.lsn, each.is_synchronous)
            for each in pending
        ]
        if pending and self._box.dialect is Dialect.V2_6:  # since 2.11, a queue waits for the next promotion
            self.limbo.fence()
        terms, former, voids = tenures.promote_terms, tenures.former, tenures.voids
        self._do(self.limbo.restore(state, promote_terms=terms, pending=waiting, former=former, voids=voids))

    def resume(self) -> None:
        """Allow verdicts after `start`, when the node is in sync with its peers. Only 2.6 waits for this."""
        if self._box.dialect is Dialect.V2_6 and self.limbo.is_fenced:
            self._do(self.limbo.unfence())

    def registered(self, instance_id: int) -> None:
        """Set the id of an instance that was anonymous."""
        self.limbo.instance_id = instance_id
        self._notify_changes()

    def expelled(self) -> None:
        """Stop deciding; pending clients get OutcomeUnknown, because an expelled instance gets no verdicts."""
        self.limbo.fence()
        # Must precede the loss of the id, by which the transfer is recognised as ours.
        self._do(self.limbo.cancel_transfer(sync_rollback()))
        self.limbo.instance_id = 0
        self._let_go("this instance was expelled from its replica set", hint=_ELSEWHERE)
        self._notify_changes()

    def close(self) -> None:
        """Stop deciding. Pending clients, promotions and waiters get OutcomeUnknown."""
        self._is_closed = True
        self._let_go("node was stopped before a quorum acknowledged the transaction")

    def _let_go(self, why: str, hint: str = _LATER) -> None:
        """Report OutcomeUnknown to all clients and waiters."""
        self._alarm.cancel()
        for entry in (*self._unproven, *self.limbo.pending):
            # Recovered transactions and those of peers have no client here.
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

    # --- transactions: `node/wal/commits.py` and `node/upstream/row_applier.py` ---

    def submit(
        self, waiting: Waiter, *, is_synchronous: bool, is_local: bool = False, size: int = 0
    ) -> LimboEntry[Waiter] | None:
        """Call `Limbo.submit`, before the rows are encoded."""
        try:
            return self.limbo.submit(waiting, is_synchronous=is_synchronous, is_local=is_local, size=size)
        except errors.SyncQueueUnclaimed as error:
            # Only local statements get here, so the hint addresses the author of the statement.
            error.hint = _CLAIM
            raise

    def receive(
        self, waiting: Waiter, *, origin_id: int, lsn: int, is_synchronous: bool, size: int = 0
    ) -> LimboEntry[Waiter] | None:
        """Call `Limbo.receive`, after the transaction was applied."""
        return self.limbo.receive(waiting, origin_id=origin_id, lsn=lsn, is_synchronous=is_synchronous, size=size)

    def submit_run(self, run: Waiter, count: int, size: int) -> LimboEntry[Waiter] | None:
        """Call `submit` for a run of `count` synchronous transactions; return None if one of them may be rejected."""
        # The limit applies to each transaction, so the caller submits a run above the limit one by one.
        if self._max_size and self.limbo.size + size > self._max_size:
            return None
        try:
            return self.limbo.submit(run, is_synchronous=True, size=size, count=count)
        except TarantoolError:
            return None

    def takes(self, origin_id: int) -> bool:
        """Return True if transactions of `origin_id` may enter the queue now."""
        limbo = self.limbo
        return limbo.owner_id == origin_id or (self._box.dialect is Dialect.V2_6 and not limbo)

    def is_current(self, origin_id: int) -> bool:
        """Return True if asynchronous transactions of `origin_id` need no check against our history."""
        limbo = self.limbo
        return not limbo.owner_id or limbo.promote_term(origin_id) == limbo.term

    def note_async_commit(self) -> None:
        """Record the commit of an asynchronous transaction that did not enter the queue."""
        self.limbo.tenures.note_async_commit()

    def admit(self, origin_id: int, lsn: int, *, flags: int, has_effect: bool, was_control: bool = False) -> Fate:
        """Call `Limbo.admit`."""
        return self.limbo.admit(origin_id, lsn, flags=flags, has_effect=has_effect, was_control=was_control)

    def written(self, entry: LimboEntry[Waiter], lsn: int) -> None:
        self._do(self.limbo.written(entry, lsn, self._clock.monotonic()))

    def written_together(self, entries: Sequence[LimboEntry[Waiter]]) -> None:
        self._do(self.limbo.written_together(entries, self._clock.monotonic()))

    def write_failed(self, entry: LimboEntry[Waiter]) -> None:
        """Roll back a transaction that could not be written. The log reports failures newest first."""
        self._do(self.limbo.write_failed(entry), is_failing=True)

    def withdraw(self, entry: LimboEntry[Waiter]) -> None:
        """Remove a transaction that never reached the log. The caller rolls it back, and `told` is not called."""
        actions = self.limbo.write_failed(entry)
        # Later entries are undone, too: none of them can be in the log before this one.
        self._do([each for each in actions if not (isinstance(each, Undo) and each.entry is entry)], is_failing=True)

    def decide(self, request: SettlingRequest, received: Received) -> None:
        """Process a control row of a peer; not while `limbo.is_busy`. Raise an error if it contradicts our history."""
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
        """Record that `replica_id`, 0 if anonymous, has written all rows up to `vclock`."""
        actions = self.limbo.ack(replica_id, vclock)
        if actions:
            self._do(actions)

    def forget(self, replica_id: int) -> None:
        """Call `Limbo.forget`."""
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
            # A new leader may have confirmed transactions that we would roll back, and its rows are not read yet.
            text = "process was suspended for %.1f s: extending timeout of pending synchronous transactions"
            LOG.warning(text, self._alarm.late)
            self._extensions += 1
            self._patient_until = now + self.timeout
        # Give rows that arrived during the pause a full timeout to be read.
        if now < self._patient_until:
            self._alarm.set(self._patient_until)
        else:
            self._extensions = 0
            self._do(self.limbo.tick(now))

    # --- ownership ---

    def see_term(self, term: int) -> None:
        """Call `Limbo.see_term`."""
        self.limbo.see_term(term)
        self._notify_changes()

    def fence(self) -> None:
        """Stop writing verdicts: the quorum is lost, and another leader may be elected."""
        if self.limbo and not self.limbo.is_fenced:
            text = "fencing synchronous queue: %d transactions stay pending until a leader is elected"
            LOG.warning(text, len(self.limbo))
        self.limbo.fence()
        self._notify_changes()

    async def promote(self, term: int, *, timeout: float | None = None) -> None:
        """Take over the queue in `term`; wait until our PROMOTE is written, or raise an error.

        `timeout` limits the wait until a quorum has all pending transactions; None is no limit.
        """
        await self._hand_over(lambda now: self.limbo.promote(term, now, timeout=timeout))

    async def demote(self, term: int, *, timeout: float | None = None) -> None:
        """Give up the queue in `term`, so that it has no owner; otherwise like `promote`."""
        await self._hand_over(lambda now: self.limbo.demote(term, now, timeout=timeout))

    def cancel_transfer(self, error: TarantoolError) -> None:
        self._do(self.limbo.cancel_transfer(error))

    async def _hand_over(self, start: Callable[[float], list[Action[Waiter]]]) -> None:
        actions = start(self._clock.monotonic())
        # Set before `_do`: the transfer may end at once.
        self._transfer = transfer = asyncio.get_running_loop().create_future()
        self._do(actions)
        try:
            await transfer
        except asyncio.CancelledError:
            # The limbo would write the PROMOTE later, when no caller expects it.
            self.cancel_transfer(errors.System("transfer of synchronous queue was cancelled"))
            raise

    async def clear(self) -> None:
        """Execute `box.ctl.clear_synchro_queue()` of dialect 2.6; see `Limbo.clear_synchro_queue`."""
        cleared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        actions = self.limbo.clear_synchro_queue(self._clock.monotonic())
        # Set before `_do`: an empty queue is cleared at once.
        self._clearing.append(cleared)
        self._do(actions)
        await cleared

    # --- waiting for verdicts ---

    async def settled(self, timeout: float | None = None) -> None:
        """Wait until all transactions pending now are committed; raise if they are rolled back, or after `timeout`."""
        await self.decided(self.limbo.newest, timeout)

    async def decided(self, newest: LimboEntry[Waiter] | None, timeout: float | None = None) -> None:
        """Wait as `settled` does, for the transactions up to `newest`, an earlier value of `limbo.newest`."""
        if newest is None:
            return
        if newest.state is EntryState.UNDONE:
            raise sync_rollback()
        if newest.state is EntryState.COMMITTED:
            return
        decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watched.setdefault(newest, []).append(decided)
        try:
            async with asyncio.timeout(timeout):
                await decided
        except TimeoutError:
            raise quorum_timeout() from None

    # --- actions of the limbo ---

    def _do(self, actions: Iterable[Action[Waiter]], *, is_failing: bool = False) -> None:
        """Perform actions. `is_failing`: the log is reporting failed writes, and accepts no rows until it is done."""
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
        self._notify_changes()

    def _commit(self, entries: Sequence[LimboEntry[Waiter]], *, is_proven: bool) -> None:
        popleft = self._box.in_flight.popleft
        for entry in entries:
            # A part of a run shares the effect of the run, which stays in flight until its last transaction is decided.
            if not entry.is_part:
                popleft()
            # Only answers wait for the proof; the data is committed in any case.
            if is_proven or not entry.transaction.is_promised:
                _tell(entry.transaction.told, None)
            else:
                self._unproven[entry] = None
            if self._watched:
                self._tell_watchers(entry, None)

    def _prove(self, entries: Sequence[LimboEntry[Waiter]]) -> None:
        for entry in entries:
            if entry in self._unproven:
                del self._unproven[entry]
                _tell(entry.transaction.told, None)

    def _undo(self, entry: LimboEntry[Waiter], error: TarantoolError) -> None:
        if not entry.is_part:
            # Entries are undone newest first, so this one is the last in flight.
            self._box.in_flight.pop()
        entry.transaction.effect.rollback()
        _tell(entry.transaction.told, error)
        if self._watched:
            self._tell_watchers(entry, error)

    def _tell_watchers(self, entry: LimboEntry[Waiter], error: TarantoolError | None) -> None:
        for decided in self._watched.pop(entry, ()):
            if decided.done():
                continue
            if error is None:
                decided.set_result(None)
            else:
                # Regardless of the client's error, real servers answer joins with 217 after any rollback
                # (docs/spec/replication.md#join-stream).
                decided.set_exception(sync_rollback())

    def _say_owner(self, request: SettlingRequest) -> None:
        body, limbo = request.body, self.limbo
        owner = f"is owned by replica {limbo.owner_id}" if limbo.owner_id else "has no owner"
        former = f"; transactions of replica {body.owner_id} confirmed up to lsn {body.lsn}" if body.owner_id else ""
        LOG.info("synchronous queue %s in term %d%s", owner, limbo.term, former)

    def _reject(self, request: SettlingRequest, error: TarantoolError) -> None:
        """Report the rejection of a held row. `decide` itself raises the error of the row it was called with."""
        received = self._received.pop(request, None)
        if received is not None and request is not self._deciding:
            received.logged(error)

    def _write(self, request: SettlingRequest) -> None:
        """Write a control row: as received from a peer, or a verdict or transfer of our own."""
        received = self._received.pop(request, None)
        if received is not None:
            self._log(request, received, received.rows)
            return
        if isinstance(request.body, Rollback):
            need = f"no quorum of {self.limbo.quorum} within {self.timeout:g} s"
            text = "%s: rolling back transactions from lsn %d on (%d pending)"
            LOG.warning(text, need, request.body.lsn, len(self.limbo))
        journal = self._journal
        # The LSN is assigned here: nothing else can be submitted between here and `submit`.
        lsn = journal.next_lsn(journal.replica_id)
        rows = _encode(request.body, journal.replica_id, lsn, self._clock.wall())
        try:
            journal.submit(rows, 1, lambda error: self._logged(request, error, lsn))
        except FlowstoneError:
            self._do(self.limbo.request_failed(request, self._clock.monotonic()))
            return
        # Control rows do not wait for the end of the turn: clients and peers wait for them.
        journal.flush()

    def _write_nop(self, request: SettlingRequest) -> None:
        received = self._received.pop(request)
        self._journal.submit_replicated(received.nop(), received.lsns, received.logged)
        self._journal.flush()

    def _log(self, request: SettlingRequest, received: Received, rows: bytes) -> None:
        def logged(error: FlowstoneError | None) -> None:
            received.logged(error)  # first, so that held rows are not applied if the verdict was not written
            self._logged(request, error)

        try:
            self._journal.submit_replicated(rows, received.lsns, logged)
        except FlowstoneError as error:
            received.logged(error)
            self._do(self.limbo.request_failed(request, self._clock.monotonic()))
            return
        self._journal.flush()

    def _logged(self, request: SettlingRequest, error: FlowstoneError | None, lsn: int = 0) -> None:
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

    # --- notifications ---

    def _appearance(self) -> tuple[int, int, bool]:
        limbo = self.limbo
        return limbo.owner_id, limbo.term, limbo.is_frozen

    def _notify_changes(self) -> None:
        """Call `on_change` and `on_free` if the state has changed."""
        appearance = self._appearance()
        if appearance != self._shown:
            self._shown = appearance
            for tell in self.on_change:
                tell()
        is_busy = self.limbo.is_busy
        # Compared with the last call, so that `on_free` is called once per busy period, after all actions of an event.
        was_busy, self._was_busy = self._was_busy, is_busy
        if was_busy and not is_busy:
            for tell in self.on_free:
                tell()


def _encode(body: Body, replica_id: int, lsn: int, now: float) -> bytes:
    row = Row(_TYPES[type(body)], replica_id, 0, lsn, now, lsn, body=body.encode())
    return encode_header(row) + row.body


def _tell(told: OnDone, error: FlowstoneError | None) -> None:
    try:
        told(error)
    except Exception:
        # An error of one callback must not keep other clients waiting.
        LOG.exception("transaction completion callback failed")
