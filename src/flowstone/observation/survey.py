"""Looks at whole replica sets: asks the servers that were named, and the members that these tell of.

Whoever is named may be one member only. The others are asked where somebody follows them by an address, as the same
user and in the same way; what answers there counts, and gets the login, only if it is the member that was meant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from flowstone.iproto.uri import Uri, UriError, parse_uri
from flowstone.observation.asking import ASK_SECONDS, Asking, ask_all
from flowstone.observation.places import place_of
from flowstone.observation.replica_set import Member, ReplicaSet, replica_sets
from flowstone.observation.report import Report, Unreachable
from flowstone.outside import Outside

ROUNDS_MAX: Final = 4
"""A chain of members, each of which knows only the next, is followed this far at one look, and farther at the next."""

TOLD_MAX: Final = 64
"""Members of a set that are asked because others tell of them, twice as many as a set can have; and for each server
that was named, whatever sets are told of. A member may tell anything, and we would connect to all of it."""


class Survey:
    """The servers to ask, with the connections to them, which are kept from one look to the next."""

    def __init__(self, outside: Outside, uris: Sequence[Uri], *, timeout: float = ASK_SECONDS) -> None:
        self._outside = outside
        self._timeout = timeout
        self._named = [self._asking(uri) for uri in uris]
        self._found: dict[str, Asking] = {}
        """Members that others told of, by UUID."""

    def _asking(self, uri: Uri, instance: str | None = None) -> Asking:
        return Asking(self._outside, uri, timeout=self._timeout, instance=instance)

    async def look(self) -> tuple[ReplicaSet, ...]:
        """The replica sets as they are now."""
        named, found = await asyncio.gather(ask_all(self._named), ask_all(list(self._found.values())))
        known = dict(zip(self._found, found, strict=True))
        sets = _sets(named, known)
        for _ in range(ROUNDS_MAX):
            new = self._untold(sets, known)
            if not new:
                break
            self._found |= new
            known |= dict(zip(new, await ask_all(list(new.values())), strict=True))
            sets = _sets(named, known)
        await self._forget(uuid for uuid, answer in known.items() if not _is_meant(uuid, answer))
        return sets

    async def identify(self, uri: Uri) -> Report | Unreachable:
        """Query the server at `uri`."""
        asking = self._asking(uri)
        try:
            (answer,) = await ask_all([asking])
        finally:
            await asking.close()
        return answer

    def include(self, uri: Uri, uuid: str) -> None:
        """Query the member `uuid`, whose address no other member knows, at `uri` from the next look on."""
        self._found.setdefault(uuid, self._asking(uri, uuid))

    async def _forget(self, uuids: Iterable[str]) -> None:
        """Who did not answer is looked for anew the next time: it may come back at another address."""
        for uuid in list(uuids):
            await self._found.pop(uuid).close()

    def asking(self, member: Member) -> Asking:
        """The connection to a member that has answered, for who has more to ask of it."""
        everybody = (*self._named, *self._found.values())
        return next(asking for asking in everybody if asking.uri.address == member.address)

    def _untold(self, sets: Sequence[ReplicaSet], known: Mapping[str, Report | Unreachable]) -> dict[str, Asking]:
        """Members that nobody has asked yet, and that somebody follows by an address; no more than may be asked."""
        found: dict[str, Asking] = {}
        for one in sets:
            like = self._like(one)
            room = TOLD_MAX - sum(member.uuid in known for member in one.members)
            room = min(room, TOLD_MAX * len(self._named) - len(known) - len(found))
            for member in one.members:
                is_asked = member.report is not None or member.unreachable is not None or member.uuid in known
                if not is_asked and member.address is not None and like is not None and room > 0:
                    uri = _at(member.address, like)
                    if uri is not None:
                        found[member.uuid] = self._asking(uri, member.uuid)
                        room -= 1
        return found

    def _like(self, one: ReplicaSet) -> Uri | None:
        """A URI by which a member of the set was named: the others have its user and its way to connect."""
        places = {place_of(member.address) for member in one.members if member.address is not None}
        return next((asking.uri for asking in self._named if place_of(asking.uri.address) in places), None)

    async def close(self) -> None:
        for asking in (*self._named, *self._found.values()):
            await asking.close()


def _sets(named: Sequence[Report | Unreachable], known: Mapping[str, Report | Unreachable]) -> tuple[ReplicaSet, ...]:
    return replica_sets([*named, *(_meant(uuid, answer) for uuid, answer in known.items())])


def _is_meant(uuid: str, answer: Report | Unreachable) -> bool:
    return isinstance(answer, Report) and answer.uuid == uuid


def _meant(uuid: str, answer: Report | Unreachable) -> Report | Unreachable:
    """Somebody else may be at the address that a member is told to have."""
    if isinstance(answer, Unreachable) or _is_meant(uuid, answer):
        return answer
    reason = f"another instance answers there, {answer.uuid}"
    return Unreachable(address=answer.address, reason=reason, hint=f"it should be {uuid}")


def _at(address: str, like: Uri) -> Uri | None:
    try:
        place = parse_uri(address)
    except UriError:
        return None
    return replace(like, host=place.host, port=place.port)
