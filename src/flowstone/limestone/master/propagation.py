"""Replication on the master: sends ended sessions and epochs to the replicas, and waits for the quorum.

`end_session` and `group_commit` return when the quorum has made the data durable. If too few replicas are available,
the policy decides: "block" waits as long as a lost replica can return, "degrade" continues with the available ones,
"fail" raises. A lost replica never stops the master otherwise. `replica_link.py` handles one replica; the datastore
writes the local log files and epoch file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.master.catch_up import CatchUpStore, LogFiles, LogSurvey
from flowstone.limestone.master.conversation import AuthenticationFailed, ReplicaAddress
from flowstone.limestone.master.ended_session import EndedSession, Parts, WireForm
from flowstone.limestone.master.replica_link import LinkState, LinkStatus, ReplicaLink
from flowstone.limestone.settings import Settings
from flowstone.outside import Outside, SocketOptions
from flowstone.outside.worker import by_worker

_WITHOUT: Final = {
    "block": "sessions wait for it (on_lost is block)",
    "degrade": "sessions continue without it (on_lost is degrade)",
    "fail": "sessions fail until it returns (on_lost is fail)",
}
_WITHOUT_ANY: Final = "sessions fail from now on: the master does not reconnect to it"


class QuorumLost(LimestoneError):
    """Too few replicas acknowledged a session or an epoch, and the policy is "fail", or no lost replica can return."""


@dataclass(frozen=True)
class PropagationStatus:
    """The status of replication. `degraded`: fewer replicas than the quorum are up to date."""

    quorum: int
    live: int
    degraded: bool
    on_lost: str
    replicas: tuple[LinkStatus, ...]


class _Waiter:
    """A caller that waits for a quorum. `has` is true for a link that has acknowledged the item, `can` for a link that
    may still acknowledge it."""

    def __init__(
        self, what: str, has: Callable[[ReplicaLink], bool], can: Callable[[ReplicaLink], bool] = lambda _: True
    ) -> None:
        self.what = what
        self.has = has
        self.can = can
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Propagation:
    """The replicas of a store. `store` provides the data for catch-up. Channels may be opened before or after
    `start`."""

    def __init__(self, outside: Outside, settings: Settings, store: CatchUpStore) -> None:
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
            ReplicaLink(outside, ReplicaAddress(endpoint, settings.tls, options), secret, self._form, store, self)
            for endpoint in settings.replicas
        ]
        self._recent: dict[int, EndedSession] = {}
        self._waiters: list[_Waiter] = []
        self._survey: LogSurvey | None = None
        self._store = store
        self._change: asyncio.Future[None] | None = None
        self._is_running = False

    # --- life ---

    async def open_channel(self, channel_id: int) -> None:
        """Add a log channel. In compatible mode, connect it to the replicas at once; raise QuorumLost if this fails and
        the policy requires the connections."""
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
                raise self._quorum_lost(f"cannot open log channel {channel_id}") from error

    async def start(self, last_epoch: int) -> None:
        """Try to connect to each replica once, until the quorum is reached. Missing data is sent afterwards.

        Raise QuorumLost if the policy is "fail" and too few replicas are reachable, AuthenticationFailed if a required
        replica does not have our secret."""
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
            raise self._quorum_lost("cannot start the store")

    def _count_reached(self) -> int:
        return sum(link.is_receiving for link in self._links)

    async def close(self) -> None:
        """Close all connections without a message, as the original does; pending calls raise QuorumLost."""
        self._is_running = False
        for waiter in self._waiters:
            if not waiter.done.done():
                waiter.done.set_exception(self._quorum_lost(f"store closed while {waiter.what} was pending"))
        await asyncio.gather(*(link.close() for link in self._links))

    # --- work ---

    async def end_session(self, channel_id: int, epoch: int, parts: Parts) -> None:
        """Return when the quorum has made the session durable.

        `parts` returns the entries of the session as in the log file, without markers, in parts of whole entries. It
        must be callable until the next session of the channel begins."""
        before = self._recent.get(channel_id)
        session = EndedSession(self._form, channel_id, epoch, parts, 0 if before is None else before.epoch)
        if before is not None:
            self.has_history = True
        self._recent[channel_id] = session
        for link in self._links:
            link.send(session)
        await self._wait(_Waiter(f"session of epoch {epoch}", lambda link: link.has(session)))

    async def group_commit(self, epoch: int) -> None:
        """Return when the quorum has recorded the epoch. All its sessions must have ended."""
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
                waiter.done.set_exception(self._quorum_lost(f"cannot replicate {waiter.what}"))
        elif on_lost == "block" and not self._has_hope(waiter.can):
            waiter.done.set_exception(self._quorum_lost(f"cannot replicate {waiter.what}: no replica can return"))

    def _has_hope(self, can: Callable[[ReplicaLink], bool]) -> bool:
        return sum(not link.is_hopeless and can(link) for link in self._links) >= self._settings.needed

    def _quorum_lost(self, what: str) -> QuorumLost:
        reasons = "; ".join(str(link.error) for link in self._links if link.error is not None)
        hint = 'bring the replicas back, or set on_lost="degrade" to continue without them'
        needed = self._settings.needed
        return QuorumLost(f"{what}: {needed} of {len(self._links)} replicas must acknowledge it. {reasons}", hint=hint)

    # --- for the links ---

    def without(self, link: ReplicaLink) -> str:
        needed, on_lost = self._settings.needed, self._settings.on_lost
        if sum(other.is_receiving for other in self._links if other is not link) >= needed:
            return f"the quorum of {needed} is available without it"
        return _WITHOUT_ANY if link.is_hopeless and on_lost == "block" else _WITHOUT[on_lost]

    def recent_sessions(self) -> list[EndedSession]:
        return list(self._recent.values())

    async def survey(self, files: LogFiles) -> LogSurvey:
        if self._survey is None:
            disk, directory = self._outside.disk, self._store.path
            self._survey = await by_worker(self._outside, files.survey, disk, directory, self.begun_with)
        return self._survey


def _anything(link: ReplicaLink) -> bool:
    return True
