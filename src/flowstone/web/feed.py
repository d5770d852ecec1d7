"""The dashboard's feed: polls the servers every second, follows their logs, and sends changes to the listeners.

Each event is encoded once for all listeners; transactions are encoded only while there are listeners. Memory is
bounded. The feed only reads; an unreachable server is shown as unreachable, and is never an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from flowstone.iproto.uri import Uri
from flowstone.observation.live_transaction import LiveTransaction
from flowstone.observation.query import Asking
from flowstone.observation.replica_set import Member, ReplicaSet, missing_row_count
from flowstone.outside import Outside
from flowstone.web.deep_findings import DeepFindings
from flowstone.web.event_stream import EventStream
from flowstone.web.feed_set import WatchedSet
from flowstone.web.feed_state import FeedState, LagHistory, PipelineTable, TransactionList, to_json

if TYPE_CHECKING:
    from flowstone.web.pipeline import Pipeline

LOG = logging.getLogger("flowstone.web")

LOOK_SECONDS: Final = 1.0
"""Interval between polls of the servers."""

LAKE_SECONDS: Final = 2.0
"""Interval between polls of the lakes."""

TELL_SECONDS: Final = 0.25
"""Interval between batches of transactions."""

STATE_SECONDS: Final = 0.5
"""Minimum interval between two states that are sent."""

SEARCHED_AT_ONCE: Final = 50
"""Transactions searched before yielding to the event loop, which may also serve a database: one or two milliseconds if
all their rows are as long as possible. A worker thread would block the loop for longer, because of the GIL."""

SETS_MAX: Final = 32
"""Maximum number of replica sets watched; the servers on a command line belong to fewer."""


class Observed(Protocol):
    """The source of replica sets: `observation.survey.Survey`, or `NodeView` in `flowstone serve`."""

    async def look(self) -> tuple[ReplicaSet, ...]: ...

    def asking(self, member: Member) -> Asking | None:
        """Return the connection to a member; None if its URI is unknown."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class TransactionFilter:
    """A filter on transactions; None matches everything. `text` is searched in the rows' data, ignoring case."""

    set: str | None = None
    space: str | None = None
    type: str | None = None
    replica: int | None = None
    text: str | None = None
    limit: int = 100

    def fits(self, one: LiveTransaction) -> bool:
        if self.replica is not None and one.replica_id != self.replica:
            return False
        text = self.text.lower() if self.text is not None else None
        return any(
            (self.space is None or self.space in (row.space, str(row.space_id)))
            and (self.type is None or self.type == row.type)
            and (text is None or text in row.data.lower())
            for row in one.rows
        )


class Feed:
    """Runs from `start` to `stop`. `state`, `history` and `transactions` answer queries; `events` serves listeners."""

    def __init__(
        self,
        outside: Outside,
        observed: Observed,
        *,
        lakes: Sequence[str] = (),
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._outside = outside
        self._observed = observed
        self._pipeline = _pipeline(lakes) if lakes else None
        self._look_seconds = look_seconds
        self._version = f"flowstone {version('flowstone')}"
        self._watched: dict[str | None, WatchedSet] = {}
        self._shown: list[str | None] = []
        self._wrong = DeepFindings(outside)
        self._tables: tuple[PipelineTable, ...] = ()
        self._sets: tuple[ReplicaSet, ...] = ()
        self._is_changed = False
        self._told_at = float("-inf")
        self._tasks: list[asyncio.Task[None]] = []
        self._searching = asyncio.Lock()
        self.events = EventStream()

    # --- start and stop ---

    async def start(self) -> None:
        """Start polling; return after the first poll, so that there is a state to show."""
        await self._look()
        await self._look_at_tables()
        await self._tell()
        work = [
            self._forever(self._look, self._look_seconds),
            self._forever(self._wrong.look_deeper, self._look_seconds),
            self._forever(self._tell, TELL_SECONDS),
        ]
        if self._pipeline is not None:
            work.append(self._forever(self._look_at_tables, LAKE_SECONDS))
        self._tasks = [asyncio.get_running_loop().create_task(each) for each in work]

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for watched in self._watched.values():
            await watched.stop()
        await self._observed.close()

    async def _forever(self, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            await self._outside.clock.sleep(seconds)
            try:
                await work()
            except Exception:
                LOG.exception("dashboard feed failed; retrying")

    # --- polling ---

    async def _look(self) -> None:
        ours = {str(watched.tail.sink.instance_uuid) for watched in self._watched.values() if watched.tail is not None}
        asked_at = self._outside.clock.wall()
        seen = await self._observed.look()
        ours |= self._wrong.watchers  # read after the poll, to include watchers that started during it
        self._sets = tuple(_without(ours, one) for one in seen)
        self._wrong.see(self._sets, self._observed.asking)
        for one in self._sets:
            watched = self._watched.get(one.uuid)
            if watched is None:
                if len(self._watched) >= SETS_MAX:
                    continue
                watched = self._watched[one.uuid] = WatchedSet(self._outside, one.uuid, self._note_change)
            watched.look(one, self._whom_to_follow(one), asked_at)
            if watched.tail is None and one.uuid is not None:
                watched.follow()
        self._shown = [one.uuid for one in self._sets if one.uuid in self._watched]
        self._note_change()

    def _whom_to_follow(self, one: ReplicaSet) -> list[Uri]:
        """Return the URIs of members that can be followed: the leader first, then the others in the order of missing
        rows, fewest first."""
        answering = [member for member in one.members if member.report is not None]

        def rank(member: Member) -> tuple[bool, int, bool]:
            return not member.is_leader, missing_row_count(one.vclock, member.vclock), member.mode != "rw"

        ordered = sorted(answering, key=rank)
        reached = (self._observed.asking(member) for member in ordered)
        return [asking.uri for asking in reached if asking is not None]

    async def _look_at_tables(self) -> None:
        if self._pipeline is None:
            return
        positions = {one.uuid: one.vclock for one in self._sets if one.uuid is not None}
        self._tables = await self._outside.blocking(self._pipeline.look, self._outside.clock.wall(), positions)
        self._note_change()

    def _note_change(self) -> None:
        self._is_changed = True

    # --- sending ---

    async def _tell(self) -> None:
        for watched in list(self._watched.values()):
            batch = watched.take_batch()
            if batch is not None and self.events.listeners:
                count = len(batch.transactions) + batch.skipped
                self.events.put_batch(batch.replicaset_uuid, count, to_json(batch))
        now = self._outside.clock.monotonic()
        if self._is_changed and now - self._told_at >= STATE_SECONDS:
            self._is_changed, self._told_at = False, now
            self.events.put_state(to_json(self.state()))

    # --- queries ---

    @property
    def sets(self) -> tuple[ReplicaSet, ...]:
        """The replica sets of the last poll."""
        return self._sets

    def state(self) -> FeedState:
        return FeedState(
            now=self._outside.clock.wall(),
            version=self._version,
            sets=tuple(self._watched[uuid].state() for uuid in self._shown),
            findings=(*self._wrong.findings, *(self._pipeline.findings if self._pipeline is not None else ())),
            pipeline=self._tables,
        )

    def watches(self, uuid: str) -> bool:
        return uuid in self._watched

    def history(self, uuid: str | None) -> LagHistory:
        """Return the history of one set; without a UUID, of the first set."""
        uuid = uuid if uuid is not None else next(iter(self._shown), None)
        return self._watched[uuid].history() if uuid in self._watched else LagHistory(points=())

    async def transactions(self, wanted: TransactionFilter) -> TransactionList:
        """Return the kept transactions that match, newest first. Searches run one at a time, to bound their cost."""
        chosen = [one for uuid, one in self._watched.items() if wanted.set is None or uuid == wanted.set]
        sinks = [watched.tail.sink for watched in chosen if watched.tail is not None]
        found: list[LiveTransaction] = []
        async with self._searching:
            for sink in sinks:
                found += await self._search(tuple(reversed(sink.ring)), wanted)
        found.sort(key=lambda one: -one.at)
        return TransactionList(
            transactions=tuple(found[: wanted.limit]),
            kept=sum(len(sink.ring) for sink in sinks),
            seen=sum(sink.transactions_seen for sink in sinks),
        )

    async def _search(self, ring: Sequence[LiveTransaction], wanted: TransactionFilter) -> list[LiveTransaction]:
        found: list[LiveTransaction] = []
        for start in range(0, len(ring), SEARCHED_AT_ONCE):
            found += filter(wanted.fits, ring[start : start + SEARCHED_AT_ONCE])
            if len(found) >= wanted.limit:
                break
            await self._outside.clock.sleep(0)
        return found[: wanted.limit]


def _pipeline(lakes: Sequence[str]) -> Pipeline:
    """Import deltalake only if a lake is watched."""
    from flowstone.web.pipeline import Pipeline

    return Pipeline(lakes)


def _without(uuids: set[str], one: ReplicaSet) -> ReplicaSet:
    """Return the set without our own readers: the tails of the feed and the log readers of investigations."""
    if not any(member.uuid in uuids for member in one.members):
        return one
    return msgspec.structs.replace(
        one,
        members=tuple(member for member in one.members if member.uuid not in uuids),
        links=tuple(link for link in one.links if link.follower not in uuids),
    )
