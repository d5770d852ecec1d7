"""Promotion and demotion: `box.ctl.promote()`, `box.ctl.demote()`, and the takeover of the queue by a new leader.

With elections off, a promotion begins a term and takes over the synchronous queue in it. With elections on, it starts
an election; the winner of any election takes over the queue automatically. It follows the rules of 2.11.9 and raises
the same errors. `replication/raft/raft.py` decides elections, and `replication/limbo/limbo.py` when the queue may
change its owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.extensions import ErrorRecord, ErrorStack
from flowstone.outside import Clock
from flowstone.replication.membership.membership import expelled
from flowstone.replication.raft.election import ElectionMode, ElectionState

if TYPE_CHECKING:
    from flowstone.node.synchro.elections import Elections

LOG = logging.getLogger("flowstone.node")

RETRY_SECONDS: Final = 0.05
"""Pause before a leader retries to take over the queue."""


class Ownership(Protocol):
    """The ownership of the queue; implemented by `Limbo`."""

    @property
    def owner_id(self) -> int: ...

    @property
    def is_owner(self) -> bool: ...

    @property
    def is_frozen(self) -> bool: ...

    @property
    def term(self) -> int: ...

    @property
    def promote_terms(self) -> dict[int, int]: ...

    def __len__(self) -> int: ...


class QueueOwnership(Protocol):
    """The part of `SynchroQueue` that elections use."""

    @property
    def limbo(self) -> Ownership: ...

    @property
    def timeout(self) -> float: ...

    def see_term(self, term: int) -> None: ...

    def fence(self) -> None: ...

    async def promote(self, term: int, *, timeout: float | None = None) -> None: ...

    async def demote(self, term: int, *, timeout: float | None = None) -> None: ...

    def cancel_transfer(self, error: TarantoolError) -> None: ...

    async def settled(self, timeout: float | None = None) -> None: ...


def timed_out() -> TarantoolError:
    """Return the TimedOut error of real servers."""
    record = ErrorRecord("TimedOut", "timed out", "flowstone", 0, code=errors.System.code)
    return errors.System("timed out", stack=ErrorStack((record,)))


class Promotions:
    """The promotions and demotions of a node. Only one of them runs at a time."""

    def __init__(self, elections: Elections, queue: QueueOwnership, clock: Clock) -> None:
        self._elections = elections
        self._queue = queue
        self._clock = clock
        self._is_busy = False
        self._takeover: asyncio.Task[None] | None = None
        self._waits_in_vain: Callable[[], TarantoolError | None] = _no
        """Returns the error if the pending transfer of the queue can no longer succeed; else None."""

    async def close(self) -> None:
        """Cancel the takeover of the queue, if one is running."""
        if self._takeover is not None:
            self._takeover.cancel()
            await asyncio.gather(self._takeover, return_exceptions=True)

    # --- box.ctl ---

    async def promote(self) -> None:
        """Wait until this instance is the leader; with elections off, until it owns the queue."""
        elections = self._elections
        if not elections.is_started:
            return
        with self._alone():
            if self._is_in_force:
                return
            if elections.mode is ElectionMode.OFF:
                # As in 2.11 (docs/spec/synchro.md#promotion): a live owner decides within this time, and then the
                # PROMOTE rolls back no transaction of its clients.
                await self._empty(2 * self._queue.timeout)
                term = await self._begin_term()
                await self._hand_over(self._queue.promote, term)
                return
        # Not inside `_alone`: the winner writes PROMOTE in `_take_over_once`, which needs the lock.
        await self._stand()

    async def demote(self) -> None:
        """Resign as leader; with elections off, wait until the queue has no owner."""
        elections, limbo = self._elections, self._queue.limbo
        if not elections.is_started:
            return
        with self._alone():
            if elections.mode is not ElectionMode.OFF:
                if self._own_term == elections.raft.term and limbo.is_owner:
                    elections.resign()
                return
            # As in 2.11: only the leader itself may give up an elected leadership (docs/spec/synchro.md#demotion).
            if elections.raft.leader:
                raise self._not_leader()
            is_valid = limbo.term == elections.raft.term and not limbo.is_owner
            if not limbo.owner_id or is_valid:
                return  # only the owner, or a promotion, can end an ownership of the newest term
            # As 2.11, the term begins before the wait, unlike in `promote` (docs/spec/synchro.md#demotion).
            term = await self._begin_term()
            await self._empty(2 * self._queue.timeout)
            await self._hand_over(self._queue.demote, term)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Mark the block as running; raise if another promotion runs, or if this instance may not be promoted."""
        if self._is_busy:
            raise errors.Unsupported("box.ctl.promote/demote does not support simultaneous invocations")
        if self._elections.expelled_id:
            raise expelled(self._elections.expelled_id)
        if not self._elections.replica_id:
            raise errors.Unsupported("replication_anon=true does not support manual elections")
        # Held across awaits, too: two transfers of one instance would overtake each other's terms.
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    @property
    def _own_term(self) -> int:
        """The term of our last PROMOTE or DEMOTE."""
        return self._queue.limbo.promote_terms.get(self._elections.replica_id, 0)

    @property
    def _is_in_force(self) -> bool:
        """True if this instance is the leader, and owns the queue in the current term."""
        raft, limbo = self._elections.raft, self._queue.limbo
        # Frozen, as after a restart, the queue needs a PROMOTE even of its owner.
        is_owner = self._own_term == raft.term and limbo.is_owner and not limbo.is_frozen
        return is_owner and (self._elections.mode is ElectionMode.OFF or raft.state is ElectionState.LEADER)

    async def _stand(self) -> None:
        """Wait until this instance wins an election."""
        elections = self._elections
        if elections.raft.state is ElectionState.LEADER:
            return
        term = elections.stand()
        try:
            await elections.until(lambda: elections.raft.promoted(term))
        except errors.Timeout as error:
            raise timed_out() from error

    async def _begin_term(self) -> int:
        """Begin a term, wait until it is on disk, and return it; raise if another instance was promoted meanwhile."""
        elections, before = self._elections, self._queue.limbo.term
        term = elections.begin_term()
        await elections.until(lambda: elections.raft.term >= term)
        self._check_intact(before)
        return term

    async def _empty(self, seconds: float) -> None:
        """Wait up to `seconds` until the owner of the queue has decided on the pending transactions."""
        before, deadline = self._queue.limbo.term, self._clock.monotonic() + seconds
        while self._queue.limbo and (rest := deadline - self._clock.monotonic()) > 0:
            # A verdict empties the queue, or the time runs out; the transfer checks the quorum itself.
            with suppress(errors.SyncRollback, errors.SyncQuorumTimeout):
                await self._queue.settled(rest)
        self._check_intact(before)

    def _check_intact(self, term: int) -> None:
        if self._queue.limbo.term != term:
            text = f"Instance with replica id {self._queue.limbo.owner_id} was promoted first"
            raise errors.InterferingPromote(text)

    async def _hand_over(self, transfer: Callable[..., Awaitable[None]], term: int) -> None:
        """Transfer the queue in `term`; raise if a newer term interferes, or the quorum is not reached in time."""
        error = self._interference(term)
        if error is not None:
            raise error
        # Checked after every change of Raft: a newer term may have a leader, which decides about the queue instead.
        self._waits_in_vain = lambda: self._interference(term)
        try:
            await transfer(term, timeout=self._queue.timeout)
        except errors.QuorumWait as timeout:
            raise timed_out() from timeout
        finally:
            self._waits_in_vain = _no

    def _interference(self, term: int) -> TarantoolError | None:
        is_newest = self._elections.raft.volatile_term == term
        return None if is_newest else errors.InterferingElections("Interfering elections started")

    # --- takeover by a new leader ---

    def take_over(self, term: int) -> None:
        """Take over the queue as leader of `term`, without a timeout for the quorum of its pending transactions."""
        # The takeover of an earlier term, which this instance led, may still be running.
        if self._takeover is not None:
            self._takeover.cancel()
        self._takeover = asyncio.get_running_loop().create_task(self._take_over(term))

    def _leads(self, term: int) -> bool:
        raft = self._elections.raft
        return raft.state is ElectionState.LEADER and raft.term == term

    async def _take_over(self, term: int) -> None:
        while self._leads(term) and self._own_term != term:
            try:
                await self._take_over_once(term)
            except (errors.QuorumWait, errors.InAnotherPromote) as error:
                LOG.info("cannot take over synchronous queue in term %d yet: %s; retrying", term, error.message)
            except TarantoolError as error:
                # Real servers remain leader, although nobody can write. In the next term the takeover may succeed.
                LOG.warning("cannot take over synchronous queue in term %d: %s; resigning", term, error.message)
                self._elections.resign()
            await self._clock.sleep(RETRY_SECONDS)

    async def _take_over_once(self, term: int) -> None:
        if self._is_busy:
            raise errors.InAnotherPromote("box.ctl.promote() is already running")
        self._is_busy = True
        self._waits_in_vain = lambda: None if self._leads(term) else self._not_leader()
        try:
            await self._queue.promote(term)
        finally:
            self._waits_in_vain = _no
            self._is_busy = False

    def raft_changed(self) -> None:
        """Cancel the pending transfer of the queue if its term is over, or this instance no longer leads in it."""
        error = self._waits_in_vain()
        if error is not None:
            self._queue.cancel_transfer(error)

    def _not_leader(self) -> TarantoolError:
        return errors.NotLeader(f"The instance is not a leader. New leader is {self._elections.raft.leader}")


def _no() -> None:
    return None
