"""This node's part in elections: does what the pure machine of `replication/raft.py` decides.

It hands Raft what happens (rows and terms of peers, signs of life, connections, time, what is on disk) and does what
follows: term and vote go into the log as local rows, synced, before anybody is shown them; the queue of synchronous
transactions is fenced, and taken over by whoever leads (`promotion.py`); relays, `box.info`, watchers and triggers are
told. Lives from the start of a node, but takes part only once there is data (`start`): before that nobody knows which
term it is.
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
from flowstone.node.journal import Journal, JournalClosed
from flowstone.node.promotion import Promotions, QueueOwnership
from flowstone.outside import Outside
from flowstone.replication.election import Config, ElectionInfo, Mode, Ready
from flowstone.replication.membership import expelled
from flowstone.replication.raft import Raft
from flowstone.replication.synchro import RaftState

LOG = logging.getLogger("flowstone.node")

RETRY_SECONDS: Final = 1.0
"""Until a term or vote that the log refused is written again. A real server ends itself instead."""

MAY_LEAD: Final = frozenset((Mode.CANDIDATE, Mode.MANUAL))
"""Ballots say so, for whoever looks for a master."""

_MISTAKE: Final = "in a trigger of on_election"


class Elections:
    """One per node. `raft` is for others to read; whatever changes it goes through here."""

    def __init__(self, outside: Outside, journal: Journal, queue: QueueOwnership) -> None:
        self._outside = outside
        self._clock = outside.clock
        self._journal = journal
        self._queue = queue
        self._config = Config()
        self._quorum: tuple[int, Collection[int]] = (1, ())
        self._links: dict[int, tuple[bool, bool]] = {}
        """For each peer: do we follow it, does it follow us?"""
        self._is_started = self._is_closed = self._is_stepping = False
        self.expelled_id = 0
        """The id that this instance had when it was expelled; 0 if it was not expelled."""
        self._seen_term = 0
        self._alarm = Alarm(self._clock, self._tick)
        self._retry: asyncio.TimerHandle | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._triggered: dict[asyncio.Future[object], None] = {}
        self.on_broadcast: list[Callable[[], None]] = []
        """What peers are shown has changed: relays send `shown`."""
        self.on_change: list[Callable[[], None]] = []
        """`info`, `is_read_only` or `disconnect_timeout` may have changed."""
        self.on_election: list[Callable[[], object]] = []
        """Triggers of users, called after peers were told. What they raise is logged."""
        self.raft = self._make_raft(RaftState(term=1), 0)
        self._promotions = Promotions(self, queue, self._clock)
        journal.on_failure.append(self._log_failed)

    # --- what others look at ---

    @property
    def term(self) -> int:
        """The one for ACKs: what is said must be on disk."""
        return self.raft.term

    @property
    def mode(self) -> Mode:
        """`election_mode`, as soon as the node takes part; off before that."""
        return self._config.mode if self._takes_part else Mode.OFF

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
        """Ours; 0 for an anonymous instance."""
        return self.raft.peers.instance_id

    @property
    def shown(self) -> RaftState:
        """For a row to a member."""
        return self.raft.shown

    @property
    def persisted(self) -> RaftState:
        """For snapshots and joins."""
        return self.raft.persisted

    @property
    def is_read_only(self) -> bool:
        return self.raft.is_read_only

    @property
    def disconnect_timeout(self) -> float:
        """Seconds after which a peer that says nothing is lost."""
        return self.raft.disconnect_timeout

    def info(self) -> ElectionInfo:
        return self.raft.info(self._clock.monotonic())

    # --- life ---

    def start(self, state: RaftState, replica_id: int) -> None:
        """There is data, and `state` is the newest term and vote in it; also anew, when data was fetched again.

        A queue can be ahead of them: a PROMOTE is in the log as soon as it came, its term when we come to it.
        """
        term = self._queue.limbo.term
        if term > state.term:
            state = RaftState(term=term)
        self._is_started = True
        self.raft = self._make_raft(state, replica_id)
        self._seen_term = state.term
        self._queue.see_term(state.term)
        self._do(self._tell_all_that_is_known)

    def kept_beside(self, state: RaftState) -> RaftState:
        """What we have to stand by when data, and with it `state`, comes from a peer: its vote is not ours."""
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
        raft = self.raft
        raft.set_quorum(*self._quorum, now)
        for peer_id, (upstream, downstream) in self._links.items():
            raft.connection(peer_id, upstream=upstream, downstream=downstream, now=now)
        raft.configure(self._config, now)

    def registered(self, replica_id: int) -> None:
        """An anonymous instance has got its id."""
        self._do(lambda now: self.raft.register(replica_id))

    def expelled(self) -> None:
        """Leave elections for good: this instance is not a member any more."""
        self.expelled_id = self.replica_id
        self.raft = self._make_raft(self.raft.persisted, 0)
        self._links.clear()
        self.configure(self._config)
        self._carry_out(Ready(fence=True, is_changed=True))

    async def close(self) -> None:
        """It takes part no more. Who waits for the end of an election hears that."""
        self._is_closed = True
        self._alarm.cancel()
        if self._retry is not None:
            self._retry.cancel()
        self._wake()
        await self._promotions.close()
        triggered = list(self._triggered)
        for task in triggered:
            task.cancel()
        await asyncio.gather(*triggered, return_exceptions=True)

    # --- what happens to it ---

    def configure(self, config: Config) -> None:
        """Options have changed. The mode holds from `start` on."""
        self._config = config
        effective = config if self._takes_part else replace(config, mode=Mode.OFF)
        self._do(lambda now: self.raft.configure(effective, now))

    def set_quorum(self, quorum: int, members: Collection[int]) -> None:
        """`replication_synchro_quorum`, evaluated, and the ids in `_cluster`."""
        self._quorum = quorum, frozenset(members)
        self._do(lambda now: self.raft.set_quorum(*self._quorum, now))

    def message(self, source_id: int, told: RaftState) -> None:
        """A RAFT row of the member `source_id`; raises what is wrong with it."""
        if self.expelled_id:
            return
        self._do(lambda now: self.raft.message(source_id, told, now))

    def heartbeat(self, source_id: int) -> None:
        """A sign of life of the member `source_id`."""
        if source_id == self.raft.leader:
            self._do(lambda now: self.raft.heartbeat(source_id, now))

    def heard_term(self, source_id: int, term: int) -> None:
        """A term that came without a state: in an ACK, or in a PROMOTE or DEMOTE."""
        if term > self.raft.volatile_term and not self.expelled_id:
            self._do(lambda now: self.raft.heard_term(source_id, term, now))

    def connection(self, peer_id: int, *, upstream: bool | None = None, downstream: bool | None = None) -> None:
        """How `peer_id` is connected: do we follow it, does it follow us? None: that is as it was."""
        before = self._links.get(peer_id, (False, False))
        link = before[0] if upstream is None else upstream, before[1] if downstream is None else downstream
        if link != before and peer_id and not self.expelled_id:
            self._links[peer_id] = link
            self._do(lambda now: self.raft.connection(peer_id, upstream=link[0], downstream=link[1], now=now))

    # --- box.ctl ---

    async def promote(self) -> None:
        """`box.ctl.promote()`: see `promotion.py`."""
        await self._promotions.promote()

    async def demote(self) -> None:
        """`box.ctl.demote()`."""
        await self._promotions.demote()

    def stand(self) -> int:
        """Stands for election in a new term, which is returned."""
        self._do(self.raft.promote)
        return self.raft.volatile_term

    def begin_term(self) -> int:
        """With elections off, a new term, which is returned."""
        self._do(self.raft.begin_term)
        return self.raft.volatile_term

    def resign(self) -> None:
        self._do(self.raft.resign)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when `condition`, about `raft`, holds; raise its error, or that of an expulsion or a stop."""
        while not condition():
            if self._is_closed:
                raise errors.Loading("Instance is being stopped")
            if self.expelled_id:
                raise expelled(self.expelled_id)
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(changed)
            await changed

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)

    # --- what Raft wants done ---

    def _do(self, event: Callable[[float], object]) -> None:
        if self._is_closed:
            return
        try:
            event(self._clock.monotonic())
        finally:
            self._step()

    def _step(self) -> None:
        """Does what is due, and what becomes due by that."""
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
            LOG.info("RAFT, %d in term %d: %s", self.replica_id, self.raft.volatile_term, note)
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
        self._wake()

    def _fence(self, ready: Ready) -> None:
        """A term that the queue knows better than we did fences nothing: its PROMOTE is in force."""
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
                return  # the data it was about is gone
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
            journal.submit(row.encode(), 0, done, local_count=1, sync=True)
        except JournalClosed:
            return
        journal.flush()

    def _log_failed(self) -> None:
        """Who leads and cannot write lets others lead."""
        self._do(self.raft.resign)

    def _write_later(self, raft: Raft, state: RaftState, error: FlowstoneError) -> None:
        """Until it is written Raft shows nobody anything new, and neither votes nor leads."""
        if self._is_closed or isinstance(error, JournalClosed):
            return
        LOG.error("RAFT: term %d cannot be written: %s; no part in elections until it is", state.term, error)
        self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._write_again, raft, state)

    def _write_again(self, raft: Raft, state: RaftState) -> None:
        if self.raft is raft and not self._is_closed:
            self._write(state)

    # --- time ---

    def _tick(self) -> None:
        self._do(self.raft.tick)

    # --- triggers ---

    def _pull_triggers(self) -> None:
        """When all who have to know have been told: a trigger may ask for anything."""
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
