"""Elections of a node: runs the state machine of `replication/raft/raft.py`, which makes all decisions.

`Elections` passes events to Raft (rows and terms of peers, heartbeats, connections, time, completed writes), and
performs the resulting actions. Term and vote are written to the log as local rows, and synced, before any peer sees
them. The synchronous queue is fenced, and a new leader takes it over (`promotion.py`). Relays, `box.info`, watchers and
triggers are notified. The object exists from the start of the node, but takes part in elections only after `start`: the
term is unknown until there is data.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.row import Row
from flowstone.node.alarm import Alarm
from flowstone.node.synchro.promotion import Promotions, QueueOwnership
from flowstone.node.wal.journal import Journal, JournalClosed
from flowstone.outside import Outside
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.membership.membership import expelled
from flowstone.replication.raft.election import Config, ElectionInfo, ElectionMode, Ready
from flowstone.replication.raft.raft import Raft

LOG = logging.getLogger("flowstone.node")

RETRY_SECONDS: Final = 1.0
"""Pause before a failed write of term and vote is retried. A real server terminates instead."""

MAY_LEAD: Final = frozenset((ElectionMode.CANDIDATE, ElectionMode.MANUAL))
"""Modes in which ballots say that the instance can lead, for peers that look for a master."""

_MISTAKE: Final = "on_election trigger failed"


class Elections:
    """The elections of a node. Other modules may read `raft`, but change it only through this class."""

    def __init__(self, outside: Outside, journal: Journal, queue: QueueOwnership) -> None:
        self._outside = outside
        self._clock = outside.clock
        self._journal = journal
        self._queue = queue
        self._config = Config()
        self._quorum: tuple[int, Collection[int]] = (1, ())
        self._links: dict[int, tuple[bool, bool]] = {}
        """For each peer: True if we follow it, and True if it follows us."""
        self._is_started = self._is_closed = self._is_stepping = self._is_retiring = False
        self.expelled_id = 0
        """The id that this instance had when it was expelled; 0 if it was not expelled."""
        self._seen_term = 0
        self._alarm = Alarm(self._clock, self._tick)
        self._retry: asyncio.TimerHandle | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._triggered: dict[asyncio.Future[object], None] = {}
        self.on_broadcast: list[Callable[[], None]] = []
        """Called when `shown` has changed, so that relays send it."""
        self.on_change: list[Callable[[], None]] = []
        """Called when `info`, `is_read_only` or `disconnect_timeout` may have changed."""
        self.on_election: list[Callable[[], object]] = []
        """User triggers, called after peers were notified. Their exceptions are logged."""
        self.raft = self._make_raft(RaftState(term=1), 0)
        self._promotions = Promotions(self, queue, self._clock)
        journal.on_failure.append(self._log_failed)

    # --- state ---

    @property
    def term(self) -> int:
        """The persisted term, for ACKs: peers must not see a term that is not on disk."""
        return self.raft.term

    @property
    def mode(self) -> ElectionMode:
        """`election_mode`; OFF until `start` and after an expulsion."""
        return self._config.mode if self._takes_part else ElectionMode.OFF

    @property
    def is_started(self) -> bool:
        return self._is_started

    @property
    def _takes_part(self) -> bool:
        return self._is_started and not self.expelled_id

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def replica_id(self) -> int:
        """Our own id; 0 for an anonymous instance."""
        return self.raft.peers.instance_id

    @property
    def shown(self) -> RaftState:
        """The state that relays send to members."""
        return self.raft.shown

    @property
    def persisted(self) -> RaftState:
        """The persisted term and vote, for snapshots and joins."""
        return self.raft.persisted

    @property
    def is_read_only(self) -> bool:
        return self.raft.is_read_only

    @property
    def disconnect_timeout(self) -> float:
        """Seconds of silence after which the connection to a peer counts as lost."""
        return self.raft.disconnect_timeout

    def info(self) -> ElectionInfo:
        return self.raft.info(self._clock.monotonic())

    # --- lifecycle ---

    def start(self, state: RaftState, replica_id: int) -> None:
        """Start to take part; `state` is the newest term and vote in the data. Also called after a rejoin.

        The term of the queue can be newer: a PROMOTE is written when it arrives, and its term only later.
        """
        term = self._queue.limbo.term
        # A term below that of the queue would let this instance vote in a term that is decided. The vote belongs to the
        # older term and is dropped.
        if term > state.term:
            state = RaftState(term=term)
        self._is_started = True
        self.raft = self._make_raft(state, replica_id)
        self._seen_term = state.term
        self._queue.see_term(state.term)
        self._do(self._tell_all_that_is_known)

    def kept_beside(self, state: RaftState) -> RaftState:
        """Return the term and vote to keep when a join brings the `state` of a peer, whose vote is not ours."""
        own = self.raft.persisted
        return own if own.term >= state.term else RaftState(term=state.term)

    def _make_raft(self, state: RaftState, replica_id: int) -> Raft:
        random = self._outside.random
        return Raft(
            replica_id,
            vclock=lambda: self._journal.written_vclock,
            random=lambda: random.uniform(0.0, 1.0),
            now=self._clock.monotonic(),
            term=state.term,
            vote=state.vote,
        )

    def _tell_all_that_is_known(self, now: float) -> None:
        """Pass quorum, connections and options to a new `raft`."""
        raft = self.raft
        raft.set_quorum(*self._quorum, now)
        for peer_id, (upstream, downstream) in self._links.items():
            raft.connection(peer_id, upstream=upstream, downstream=downstream, now=now)
        raft.configure(self._effective, now)

    def registered(self, replica_id: int) -> None:
        """Set the id of an instance that was anonymous."""
        self._do(lambda now: self.raft.register(replica_id))

    def expelled(self) -> None:
        """Leave elections permanently: this instance is no longer a member."""
        self.expelled_id = self.replica_id
        # With id 0 the machine only keeps up with terms: messages of former peers cannot elect anybody here.
        self.raft = self._make_raft(self.raft.persisted, 0)
        self._links.clear()
        self.configure(self._config)
        self._carry_out(Ready(fence=True, is_changed=True))

    async def close(self) -> None:
        """Stop taking part. Pending calls of `until` raise an error."""
        self._is_closed = True
        self._alarm.cancel()
        if self._retry is not None:
            self._retry.cancel()
        # Before the promotions are closed: they may be waiting in `until`.
        self.wake()
        await self._promotions.close()
        triggered = list(self._triggered)
        for task in triggered:
            task.cancel()
        await asyncio.gather(*triggered, return_exceptions=True)

    # --- events ---

    def configure(self, config: Config) -> None:
        """Apply changed options. The mode takes effect at `start`."""
        self._config = config
        self._do(lambda now: self.raft.configure(self._effective, now))

    @property
    def _effective(self) -> Config:
        """The options that Raft gets."""
        if not self._takes_part:
            return replace(self._config, mode=ElectionMode.OFF)
        if self._is_retiring and self._config.mode in MAY_LEAD:
            return replace(self._config, mode=ElectionMode.VOTER)
        return self._config

    def set_quorum(self, quorum: int, members: Collection[int]) -> None:
        """Set the value of `replication_synchro_quorum` and the ids of the members in `_cluster`."""
        self._quorum = quorum, frozenset(members)
        self._do(lambda now: self.raft.set_quorum(*self._quorum, now))

    def message(self, source_id: int, told: RaftState) -> None:
        """Process a RAFT row of the member `source_id`; raise an error if it is invalid."""
        if self.expelled_id:
            return
        self._do(lambda now: self.raft.message(source_id, told, now))

    def heartbeat(self, source_id: int) -> None:
        """Process a heartbeat of the member `source_id`."""
        # Most rows are no heartbeat of the leader; skipping `_do` keeps them cheap.
        if source_id == self.raft.leader:
            self._do(lambda now: self.raft.heartbeat(source_id, now))

    def heard_term(self, source_id: int, term: int) -> None:
        """Process a term that arrived in an ACK, a PROMOTE or a DEMOTE."""
        if term > self.raft.volatile_term and not self.expelled_id:
            self._do(lambda now: self.raft.heard_term(source_id, term, now))

    def connection(self, peer_id: int, *, upstream: bool | None = None, downstream: bool | None = None) -> None:
        """Set whether we follow `peer_id`, and whether it follows us; None leaves a value unchanged."""
        before = self._links.get(peer_id, (False, False))
        link = before[0] if upstream is None else upstream, before[1] if downstream is None else downstream
        if link != before and peer_id and not self.expelled_id:
            self._links[peer_id] = link
            self._do(lambda now: self.raft.connection(peer_id, upstream=link[0], downstream=link[1], now=now))
            self.wake()  # Raft requests nothing if the quorum stays healthy

    # --- box.ctl ---

    async def promote(self) -> None:
        """Execute `box.ctl.promote()`; see `promotion.py`."""
        await self._promotions.promote()

    async def demote(self) -> None:
        """Execute `box.ctl.demote()`; see `promotion.py`."""
        await self._promotions.demote()

    def stand(self) -> int:
        """Start an election as candidate; return its term."""
        self._do(self.raft.promote)
        return self.raft.volatile_term

    def begin_term(self) -> int:
        """Begin a new term while elections are off; return it."""
        self._do(self.raft.begin_term)
        return self.raft.volatile_term

    def resign(self) -> None:
        self._do(self.raft.resign)

    def retire(self) -> None:
        """Resign, and only vote from now on: the instance is about to stop."""
        self._is_retiring = True

        def step_down(now: float) -> None:
            self.raft.resign(now)  # first: only a resignation fences the queue
            self.raft.configure(self._effective, now)

        self._do(step_down)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`, which reads `raft`, is true.

        Raise the error that `condition` raises, or an error if the instance is expelled or stopped.
        """
        while not condition():
            if self._is_closed:
                raise errors.Loading("Instance is being stopped")
            if self.expelled_id:
                raise expelled(self.expelled_id)
            await self.changed()

    def changed(self) -> asyncio.Future[None]:
        """Return a future that is done after the next change, and when the elections are closed."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        return changed

    def wake(self) -> None:
        """Wake everything that waits for a change."""
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)

    # --- actions ---

    def _do(self, event: Callable[[float], object]) -> None:
        """Pass an event to Raft, and perform the resulting actions."""
        if self._is_closed:
            return
        try:
            event(self._clock.monotonic())
        finally:
            self._step()

    def _step(self) -> None:
        """Perform actions until Raft requests none; an action can cause others."""
        # Actions such as `take_over` call back; the outer loop handles the actions that the callback caused.
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while ready := self.raft.ready():
                self._carry_out(ready)
        finally:
            self._is_stepping = False
        if not self._is_closed:
            self._alarm.set(self.raft.deadline)

    def _carry_out(self, ready: Ready) -> None:
        for note in ready.notes:
            LOG.info("RAFT: replica %d, term %d: %s", self.replica_id, self.raft.volatile_term, note)
        # Freeze first: the queue must not write a verdict between the new term and any other action.
        self._fence(ready)
        if ready.write is not None:
            self._write(ready.write)
        if ready.is_changed:
            for tell in self.on_change:
                tell()
        if ready.broadcast is not None:
            for tell in self.on_broadcast:
                tell()
            self._pull_triggers()
        if ready.promote_term:
            self._promotions.take_over(ready.promote_term)
        self._promotions.raft_changed()
        self.wake()

    def _fence(self, ready: Ready) -> None:
        """Pass a new term to the queue, which fences itself unless its own PROMOTE has that term; else fence it on
        request."""
        term = self.raft.volatile_term
        if term != self._seen_term:
            self._seen_term = term
            self._queue.see_term(term)
        elif ready.fence:
            self._queue.fence()

    # --- the log ---

    def _write(self, state: RaftState) -> None:
        raft, journal = self.raft, self._journal

        def done(error: FlowstoneError | None) -> None:
            if self.raft is not raft:
                return  # a rejoin has replaced the data
            if error is None:
                self._do(lambda now: raft.written(state.term, state.vote, now))
            else:
                self._write_later(raft, state, error)

        row = Row(
            RequestType.RAFT.value,
            group_id=GROUP_LOCAL,
            lsn=journal.next_lsn(0),
            timestamp=self._clock.wall(),
            body=state.encode(),
        )
        try:
            # Synced even with `wal_mode = write`: after a power loss, an instance that forgot its vote could vote twice
            # in a term.
            journal.submit(row.encode(), 0, done, local_count=1, sync=True)
        except JournalClosed:
            return
        journal.flush()

    def _log_failed(self) -> None:
        """Resign: a leader that cannot write has to be replaced."""
        self._do(self.raft.resign)

    def _write_later(self, raft: Raft, state: RaftState, error: FlowstoneError) -> None:
        """Retry the write later. Until it succeeds, Raft neither votes nor leads, and sends nothing new."""
        if self._is_closed or isinstance(error, JournalClosed):
            return
        LOG.error("RAFT: cannot write term %d: %s; not taking part in elections until it is written", state.term, error)
        # `call_later` and not the alarm, which belongs to Raft and has no deadline while something is being written.
        self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._write_again, raft, state)

    def _write_again(self, raft: Raft, state: RaftState) -> None:
        if self.raft is raft and not self._is_closed:
            self._write(state)

    # --- time ---

    def _tick(self) -> None:
        self._do(self.raft.tick)

    # --- triggers ---

    def _pull_triggers(self) -> None:
        """Schedule the triggers, so that they run after all other notifications: a trigger may call anything."""
        if self.on_election:
            asyncio.get_running_loop().call_soon(self._run_triggers)

    def _run_triggers(self) -> None:
        for trigger in list(self.on_election):
            if self._is_closed:
                return
            try:
                result = trigger()
            except Exception:
                LOG.exception(_MISTAKE)
                continue
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(_as_coroutine(result))
                self._triggered[task] = None
                task.add_done_callback(self._trigger_ended)

    def _trigger_ended(self, task: asyncio.Future[object]) -> None:
        self._triggered.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error(_MISTAKE, exc_info=error)


async def _as_coroutine(result: Awaitable[object]) -> object:
    return await result
