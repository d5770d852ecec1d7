"""A master's side of replication: every session that ends and every epoch goes to the replicas, and the quorum decides.

`end_session` and `group_commit` return when as many replicas have it on disk as must. Where there are fewer, the policy
says what happens: "block" waits for as long as anybody can come back, "degrade" goes on with those that are there,
"fail" raises. A replica that is lost never takes the master with it. One replica's affairs are in `replica_link.py`;
the local log file and epoch file are the datastore's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from flowstone.limestone.catch_up import LogFiles, Store, Survey
from flowstone.limestone.conversation import AuthenticationFailed, Peer
from flowstone.limestone.ended_session import EndedSession, Parts, WireForm
from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.replica_link import LinkState, LinkStatus, ReplicaLink
from flowstone.limestone.settings import Settings
from flowstone.outside import Outside, SocketOptions
from flowstone.outside.worker import by_worker

_WITHOUT: Final = {
    "block": "sessions wait until it is there (on_lost is block)",
    "degrade": "sessions go on without it (on_lost is degrade)",
    "fail": "sessions fail until it is there (on_lost is fail)",
}
_WITHOUT_ANY: Final = "sessions fail from now on: it is not reached for again"


class QuorumLost(LimestoneError):
    """Fewer replicas than the quorum have what must be replicated, and nobody is waited for, or nobody can come."""


@dataclass(frozen=True)
class PropagationStatus:
    """What an operator asks. `degraded`: fewer replicas have everything than the quorum."""

    quorum: int
    live: int
    degraded: bool
    on_lost: str
    replicas: tuple[LinkStatus, ...]


class _Waiter:
    """Who waits for the quorum. `has` says whether a link has what is waited for, `can` whether it ever may."""

    def __init__(
        self, what: str, has: Callable[[ReplicaLink], bool], can: Callable[[ReplicaLink], bool] = lambda _: True
    ) -> None:
        self.what = what
        self.has = has
        self.can = can
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Propagation:
    """`store` is asked for what a replica lacks. Channels are opened before or after `start`."""

    def __init__(self, outside: Outside, settings: Settings, store: Store) -> None:
        self.channels: list[int] = []
        self.recorded = 0
        self.begun_with = 0
        self.has_history = False
        self._outside = outside
        self._settings = settings
        stale_end = settings.session_close == "async"
        self._form = WireForm(outside.disk, store.path, settings.compatible, stale_end)
        options = SocketOptions(settings.no_delay, settings.send_buffer, settings.receive_buffer)
        secret = None if settings.secret is None else settings.secret.encode()
        self._links = [
            ReplicaLink(outside, Peer(endpoint, settings.tls, options), secret, self._form, store, self)
            for endpoint in settings.replicas
        ]
        self._recent: dict[int, EndedSession] = {}
        self._waiters: list[_Waiter] = []
        self._survey: Survey | None = None
        self._store = store
        self._change: asyncio.Future[None] | None = None
        self._is_running = False

    # --- life ---

    async def open_channel(self, channel_id: int) -> None:
        """There is another log channel. In the original's order its connections are made now: QuorumLost if they
        cannot be, and that matters."""
        self.channels.append(channel_id)
        for link in self._links:
            if self._form.compatible and not self._is_running:
                await self._connect_channel(link, channel_id)
            else:
                await link.open_channel(channel_id)

    async def _connect_channel(self, link: ReplicaLink, channel_id: int) -> None:
        if link.is_hopeless:
            return
        try:
            await link.connect_channel(channel_id)
        except LimestoneError as error:
            if self._settings.on_lost != "degrade":
                raise self._quorum_lost(f"log channel {channel_id} cannot be opened") from error

    async def start(self, last_epoch: int) -> None:
        """Reach for the replicas until the quorum is there, once for each; what they lack is sent after that.

        QuorumLost where the policy is to fail and they cannot be reached; AuthenticationFailed where one of them was
        not given our secret, unless we go on without it."""
        self.recorded = self.begun_with = last_epoch
        self._is_running = True
        for link in self._links:
            if not link.is_hopeless:
                link.start()
        while self._count_reached() < self._settings.needed and not all(link.was_tried for link in self._links):
            self._change = asyncio.get_running_loop().create_future()
            await self._change
        if self._settings.on_lost == "degrade":
            return
        for link in self._links:
            if isinstance(link.error, AuthenticationFailed):
                raise link.error
        has_hope = self._settings.on_lost != "fail" and self._has_hope(_anything)
        if self._count_reached() < self._settings.needed and not has_hope:
            raise self._quorum_lost("the store cannot start")

    def _count_reached(self) -> int:
        return sum(link.is_receiving for link in self._links)

    async def close(self) -> None:
        """Say goodbye as the original does, without a word; who still waits is told that it was in vain."""
        self._is_running = False
        for waiter in self._waiters:
            if not waiter.done.done():
                waiter.done.set_exception(self._quorum_lost(f"{waiter.what} was waited for when the store was closed"))
        await asyncio.gather(*(link.close() for link in self._links))

    # --- work ---

    async def end_session(self, channel_id: int, epoch: int, parts: Parts) -> None:
        """Returns when the quorum has the session on disk.

        `parts` gives the entries of the session as they are in the log file, without markers, in whole entries, each
        time it is called; it must be able to until the channel's next session begins."""
        before = self._recent.get(channel_id)
        session = EndedSession(self._form, channel_id, epoch, parts, 0 if before is None else before.epoch)
        if before is not None:
            self.has_history = True
        self._recent[channel_id] = session
        for link in self._links:
            link.send(session)
        await self._wait(_Waiter(f"a session of epoch {epoch}", lambda link: link.has(session)))

    async def group_commit(self, epoch: int) -> None:
        """Returns when the quorum has recorded the epoch. All its sessions have ended."""
        self.recorded = max(self.recorded, epoch)
        for link in self._links:
            link.commit()
        has = lambda link: link.has_committed(epoch)  # noqa: E731
        await self._wait(_Waiter(f"epoch {epoch}", has, lambda link: link.takes_commits))

    def status(self) -> PropagationStatus:
        live = sum(link.state is LinkState.LIVE for link in self._links)
        needed, on_lost = self._settings.needed, self._settings.on_lost
        return PropagationStatus(needed, live, live < needed, on_lost, tuple(link.status() for link in self._links))

    # --- the quorum ---

    async def _wait(self, waiter: _Waiter) -> None:
        self._judge(waiter)
        if not waiter.done.done():
            self._waiters.append(waiter)
            try:
                await waiter.done
            finally:
                self._waiters.remove(waiter)
        else:
            waiter.done.result()

    def changed(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)
        for waiter in self._waiters:
            self._judge(waiter)

    def _judge(self, waiter: _Waiter) -> None:
        if waiter.done.done():
            return
        needed, on_lost = self._settings.needed, self._settings.on_lost
        if on_lost == "degrade":
            live = sum(link.state is LinkState.LIVE and waiter.can(link) for link in self._links)
            needed = min(needed, live)
        if sum(map(waiter.has, self._links)) >= needed:
            waiter.done.set_result(None)
        elif on_lost == "fail":
            reached = sum(link.is_receiving and waiter.can(link) for link in self._links)
            if reached < needed:
                waiter.done.set_exception(self._quorum_lost(f"{waiter.what} cannot be replicated"))
        elif on_lost == "block" and not self._has_hope(waiter.can):
            waiter.done.set_exception(self._quorum_lost(f"{waiter.what} will never be replicated"))

    def _has_hope(self, can: Callable[[ReplicaLink], bool]) -> bool:
        return sum(not link.is_hopeless and can(link) for link in self._links) >= self._settings.needed

    def _quorum_lost(self, what: str) -> QuorumLost:
        reasons = "; ".join(str(link.error) for link in self._links if link.error is not None)
        hint = 'bring the replicas back, or give on_lost="degrade" to go on without them'
        needed = self._settings.needed
        return QuorumLost(f"{what}: {needed} of {len(self._links)} replicas must have it. {reasons}", hint=hint)

    # --- for the links ---

    def without(self, link: ReplicaLink) -> str:
        needed, on_lost = self._settings.needed, self._settings.on_lost
        if sum(other.is_receiving for other in self._links if other is not link) >= needed:
            return f"the others are as many as must have every session ({needed})"
        return _WITHOUT_ANY if link.is_hopeless and on_lost == "block" else _WITHOUT[on_lost]

    def recent_sessions(self) -> list[EndedSession]:
        return list(self._recent.values())

    async def survey(self, files: LogFiles) -> Survey:
        if self._survey is None:
            disk, directory = self._outside.disk, self._store.path
            self._survey = await by_worker(self._outside, files.survey, disk, directory, self.begun_with)
        return self._survey


def _anything(link: ReplicaLink) -> bool:
    return True
