"""Surveys whole replica sets: queries the given servers, and the members that they report.

One member of a set is enough. The others are queried at the addresses at which members follow them, with the same user
and transport; an answer counts, and the login is sent, only if the server there has the expected UUID.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from flowstone.iproto.uri import Uri, UriError, parse_uri
from flowstone.observation.places import place_of
from flowstone.observation.query import ASK_SECONDS, Asking, ask_all
from flowstone.observation.replica_set import Member, ReplicaSet, replica_sets
from flowstone.observation.report import Report, Unreachable
from flowstone.outside import Outside

ROUNDS_MAX: Final = 4
"""Limit of rounds in one survey: each round of a chain, in which every member knows only the next, finds one member."""

TOLD_MAX: Final = 64
"""Limit of reported members that are queried per replica set, and in total per given server; twice the size of a set.
Members may report anything, and we would connect to all of it."""


class Survey:
    """The servers to query, and the connections to them, which are kept between surveys."""

    def __init__(self, outside: Outside, uris: Sequence[Uri], *, timeout: float = ASK_SECONDS) -> None:
        self._outside = outside
        self._timeout = timeout
        self._named = [self._asking(uri) for uri in uris]
        self._found: dict[str, Asking] = {}
        """Members that others reported, by UUID."""

    def _asking(self, uri: Uri, instance: str | None = None) -> Asking:
        return Asking(self._outside, uri, timeout=self._timeout, instance=instance)

    async def look(self) -> tuple[ReplicaSet, ...]:
        """Query all servers and return the current replica sets."""
        named, found = await asyncio.gather(ask_all(self._named), ask_all(list(self._found.values())))
        known = dict(zip(self._found, found, strict=True))
        # A member that does not answer at its old address may have moved: also query the addresses that others follow.
        places = [msgspec.structs.replace(one, uuid=None) if isinstance(one, Unreachable) else one for one in named]
        sets = _sets(places, known)
        for _ in range(ROUNDS_MAX):
            new = self._untold(sets, known)
            if not new:
                break
            self._found |= new
            known |= dict(zip(new, await ask_all(list(new.values())), strict=True))
            sets = _sets(places, known)
        await self._forget(uuid for uuid, answer in known.items() if not _is_meant(uuid, answer))
        return _sets(named, known)

    async def identify(self, uri: Uri) -> Report | Unreachable:
        """Query the server at `uri`."""
        asking = self._asking(uri)
        try:
            (answer,) = await ask_all([asking])
        finally:
            await asking.close()
        return answer

    def include(self, uri: Uri, uuid: str) -> None:
        """Query the member `uuid`, whose address no other member knows, at `uri` from the next survey on."""
        self._found.setdefault(uuid, self._asking(uri, uuid))

    async def _forget(self, uuids: Iterable[str]) -> None:
        """Drop the members that did not answer; the next survey looks for them again, perhaps at another address."""
        for uuid in list(uuids):
            await self._found.pop(uuid).close()

    def asking(self, member: Member) -> Asking:
        """Return the connection to a member that has answered, for further queries."""
        everybody = (*self._named, *self._found.values())
        return next(asking for asking in everybody if asking.uri.address == member.address)

    def _untold(self, sets: Sequence[ReplicaSet], known: Mapping[str, Report | Unreachable]) -> dict[str, Asking]:
        """Return members that were not queried yet and have a known address, up to TOLD_MAX."""
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
        """Return a given URI of a member of the set; the other members are queried with its user and transport."""
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
    """Return the answer, or `Unreachable` if another server answers at the address of the member."""
    if isinstance(answer, Unreachable) or _is_meant(uuid, answer):
        return answer
    reason = f"another instance answers at this address: {answer.uuid}"
    return Unreachable(address=answer.address, reason=reason, hint=f"expected {uuid}", uuid=uuid)


def _at(address: str, like: Uri) -> Uri | None:
    try:
        place = parse_uri(address)
    except UriError:
        return None
    return replace(like, host=place.host, port=place.port)
