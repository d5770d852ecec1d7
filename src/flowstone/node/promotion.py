"""Promotion and demotion: the rules of `box.ctl.promote()` and `box.ctl.demote()`, and a new leader's way to the queue.

With elections off, a promotion begins a term and takes the queue over in it; else it is an election, and whoever wins
one takes the queue over by itself, however it came about. Rules and errors are those of 2.11.9. Who wins is decided in
`replication/raft.py`, when the queue may change hands in `replication/limbo.py`.
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
from flowstone.replication.election import Mode, State
from flowstone.replication.membership import expelled

if TYPE_CHECKING:
    from flowstone.node.elections import Elections

LOG = logging.getLogger("flowstone.node")

RETRY_SECONDS: Final = 0.05
"""Until a leader tries again to take over a queue that somebody else is about to hand over."""


class Ownership(Protocol):
    """Of a queue: whose it is."""

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
    """The queue of synchronous transactions, as far as elections have to do with it."""

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
    """As waiting ends in real servers when there is no more time."""
    record = ErrorRecord("TimedOut", "timed out", "flowstone", 0, code=errors.System.code)
    return errors.System("timed out", stack=ErrorStack((record,)))


class Promotions:
    """Of one node."""

    def __init__(self, elections: Elections, queue: QueueOwnership, clock: Clock) -> None:
        self._elections = elections
        self._queue = queue
        self._clock = clock
        self._is_busy = False
        self._takeover: asyncio.Task[None] | None = None
        self._waits_in_vain: Callable[[], TarantoolError | None] = _no
        """Why the queue cannot change hands any more, for whoever waits for that now."""

    async def close(self) -> None:
        if self._takeover is not None:
            self._takeover.cancel()
            await asyncio.gather(self._takeover, return_exceptions=True)

    # --- box.ctl ---

    async def promote(self) -> None:
        """Returns when this instance leads; with elections off, when the queue is its own."""
        elections = self._elections
        if not elections.is_started:
            return
        with self._alone():
            if self._is_in_force:
                return
            if elections.mode is Mode.OFF:
                await self._empty(2 * self._queue.timeout)
                term = await self._begin_term()
                await self._hand_over(self._queue.promote, term)
                return
        await self._stand()

    async def demote(self) -> None:
        """Returns when nobody owns the queue any more; with elections on, when this instance no longer leads."""
        elections, limbo = self._elections, self._queue.limbo
        if not elections.is_started:
            return
        with self._alone():
            if elections.mode is not Mode.OFF:
                if self._own_term == elections.raft.term and limbo.is_owner:
                    elections.resign()
                return
            if elections.raft.leader:
                raise self._not_leader()
            is_valid = limbo.term == elections.raft.term and not limbo.is_owner
            if not limbo.owner_id or is_valid:
                return  # who has a queue of the newest term has to be asked, or overthrown
            term = await self._begin_term()
            await self._empty(2 * self._queue.timeout)
            await self._hand_over(self._queue.demote, term)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._is_busy:
            raise errors.Unsupported("box.ctl.promote/demote does not support simultaneous invocations")
        if self._elections.expelled_id:
            raise expelled(self._elections.expelled_id)
        if not self._elections.replica_id:
            raise errors.Unsupported("replication_anon=true does not support manual elections")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    @property
    def _own_term(self) -> int:
        """Of our last PROMOTE or DEMOTE."""
        return self._queue.limbo.promote_terms.get(self._elections.replica_id, 0)

    @property
    def _is_in_force(self) -> bool:
        """We lead, and the queue is ours in this very term."""
        raft, limbo = self._elections.raft, self._queue.limbo
        is_owner = self._own_term == raft.term and limbo.is_owner and not limbo.is_frozen
        return is_owner and (self._elections.mode is Mode.OFF or raft.state is State.LEADER)

    async def _stand(self) -> None:
        elections = self._elections
        if elections.raft.state is State.LEADER:
            return
        term = elections.stand()
        try:
            await elections.until(lambda: elections.raft.promoted(term))
        except errors.Timeout as error:
            raise timed_out() from error

    async def _begin_term(self) -> int:
        """A term on disk, in which nobody else was promoted."""
        elections, before = self._elections, self._queue.limbo.term
        term = elections.begin_term()
        await elections.until(lambda: elections.raft.term >= term)
        self._check_intact(before)
        return term

    async def _empty(self, seconds: float) -> None:
        """Gives the owner of the queue this long to decide about what waits."""
        before, deadline = self._queue.limbo.term, self._clock.monotonic() + seconds
        while self._queue.limbo and (rest := deadline - self._clock.monotonic()) > 0:
            with suppress(errors.SyncRollback, errors.SyncQuorumTimeout):
                await self._queue.settled(rest)
        self._check_intact(before)

    def _check_intact(self, term: int) -> None:
        if self._queue.limbo.term != term:
            text = f"Instance with replica id {self._queue.limbo.owner_id} was promoted first"
            raise errors.InterferingPromote(text)

    async def _hand_over(self, transfer: Callable[..., Awaitable[None]], term: int) -> None:
        error = self._interference(term)
        if error is not None:
            raise error
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

    # --- the queue of a new leader ---

    def take_over(self, term: int) -> None:
        """We lead in `term`: the queue is to be ours, however long it takes until a quorum has what waits in it."""
        if self._takeover is not None:
            self._takeover.cancel()
        self._takeover = asyncio.get_running_loop().create_task(self._take_over(term))

    def _leads(self, term: int) -> bool:
        raft = self._elections.raft
        return raft.state is State.LEADER and raft.term == term

    async def _take_over(self, term: int) -> None:
        while self._leads(term) and self._own_term != term:
            try:
                await self._take_over_once(term)
            except (errors.QuorumWait, errors.InAnotherPromote) as error:
                LOG.info("the queue is not ours yet in term %d: %s", term, error.message)
            except TarantoolError as error:
                # Real servers go on leading, and nobody can write: in the next term the queue may be to be had.
                LOG.warning("the queue does not become ours in term %d: %s", term, error.message)
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
        """Whoever waits for the queue in a term that is over, or is not led from here any more, waits in vain."""
        error = self._waits_in_vain()
        if error is not None:
            self._queue.cancel_transfer(error)

    def _not_leader(self) -> TarantoolError:
        return errors.NotLeader(f"The instance is not a leader. New leader is {self._elections.raft.leader}")


def _no() -> None:
    return None
