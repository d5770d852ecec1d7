"""The members of a replica set, the leader among them, and the choice of a member for a request.

The leader is the writable member with the highest term of elections. Members that were never elected have term 0: then
the leader stays as long as it is writable, and otherwise the first writable member follows it, in the order given.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, Literal

from flowstone.client.member import REFUSED_SECONDS, PoolMember
from flowstone.errors import FlowstoneError, LocalProtocolError
from flowstone.iproto.uri import Uri
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock

ReadFrom = Literal["leader", "any"] | float
"""Where reads go: to the leader, to any member, or to one that lacks at most this many seconds of changes."""

SAMPLES: Final = 128
"""Number of positions of the leader that are remembered: some minutes."""


class NoMember(FlowstoneError):
    """No member could take the request in time. The request was certainly not executed."""


class Pool:
    """The members. `on_leader` is called after each change of the leader or of its connection."""

    def __init__(self, outside: Outside, uris: Sequence[Uri], *, timeout: float, on_leader: Callable[[], None]) -> None:
        self._clock = outside.clock
        self.members = tuple(PoolMember(outside, uri, timeout=timeout, on_change=self._note) for uri in uris)
        self.leader: PoolMember | None = None
        self._on_leader = on_leader
        self._changed = asyncio.Event()
        self._samples: deque[tuple[float, VClock]] = deque(maxlen=SAMPLES)
        self._turn = 0

    async def start(self) -> None:
        """Connect. Return when the leader is known, or every member was tried; raise NoMember if none answered."""
        for member in self.members:
            member.start()
        while self.leader is None and not all(member.is_tried for member in self.members):
            await self.change()
        if not any(member.connection for member in self.members):
            raise self._unreachable()

    async def close(self) -> None:
        """Close all connections."""
        for member in self.members:
            await member.close()

    async def change(self) -> None:
        """Wait until a member reports something."""
        await self._changed.wait()

    def choose(self, place: ReadFrom) -> PoolMember | None:
        """Return the member for a request; None if there is none at the moment."""
        if place == "leader":
            return self.leader
        fresh_since = -inf if place == "any" else self._clock.monotonic() - float(place)
        self._turn += 1
        count = len(self.members)
        for number in range(count):
            member = self.members[(self._turn + number) % count]
            if member.connection is not None and (place == "any" or self._freshness(member) >= fresh_since):
                return member
        return self.leader

    async def find(self, place: ReadFrom) -> PoolMember:
        """Wait until there is a member for a request, and return it."""
        while (member := self.choose(place)) is None:
            await self.change()
        return member

    def missing(self, place: ReadFrom) -> NoMember:
        """Return the error of a request for which no member was found in time."""
        what = "is reachable" if place == "any" else "accepts writes"
        states = "; ".join(f"{member.uri.address}: {self._state(member)}" for member in self.members)
        return NoMember(f"no member {what}: {states}")

    def _unreachable(self) -> FlowstoneError:
        found = [member.error for member in self.members if member.error is not None]
        return found[0] if len(self.members) == 1 and found else self.missing("any")

    def _state(self, member: PoolMember) -> str:
        if member.connection is not None:
            return "is read-only" if member.refusal is None else str(member.refusal)
        return "not connected yet" if member.error is None else str(member.error)

    def _freshness(self, member: PoolMember) -> float:
        return inf if member is self.leader else member.fresh_as_of

    def _note(self, member: PoolMember) -> None:
        """Take a report of a member."""
        before, self.leader = self.leader, self._elect()
        if self.leader is not before:
            self._samples.clear()
            self._on_leader()
        self._note_position(member)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _elect(self) -> PoolMember | None:
        now = self._clock.monotonic()

        def rank(member: PoolMember) -> tuple[int, bool, bool]:
            return member.term, now - member.refused > REFUSED_SECONDS, member is self.leader

        writable = [member for member in self.members if member.connection is not None and not member.is_read_only]
        return max(writable, key=rank, default=None)

    def _note_position(self, member: PoolMember) -> None:
        """Compare positions: a member that has what the leader had at a moment is fresh as of that moment."""
        if member.connection is None:
            return
        if member is self.leader:
            if not self._samples or self._samples[-1][0] < member.asked:
                self._samples.append((member.asked, member.vclock))
            return
        for moment, vclock in reversed(self._samples):
            if vclock <= member.vclock:
                member.fresh_as_of = moment
                return


def checked_place(place: object) -> ReadFrom:
    """Return `read_from` if it is valid; raise LocalProtocolError otherwise."""
    if place == "leader" or place == "any":
        return place
    if isinstance(place, int | float) and not isinstance(place, bool) and place >= 0:
        return float(place)
    raise LocalProtocolError(f"read_from is {place!r}", hint="use 'leader', 'any', or a number of seconds")
