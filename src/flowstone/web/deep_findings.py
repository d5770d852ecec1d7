"""What is wrong, with what only a question more tells: both tuples of a conflict, where two histories parted.

The dashboard's word is that of `flowstone explain`. What a look shows is explained at once; `look_deeper` goes on from
there beside the looks of every second and never in their way, with connections and a time limit of its own. Where it
fails, what the last look showed stays. It remembers one answer, whatever happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri
from flowstone.observation.asking import Asking
from flowstone.observation.explanation import explain, in_order
from flowstone.observation.finding import Finding, Kind
from flowstone.observation.investigation import Investigation
from flowstone.observation.places import seen_from
from flowstone.observation.replica_set import Member, ReplicaSet
from flowstone.outside import Outside

LOG = logging.getLogger("flowstone.web")

DEEPER_SECONDS: Final = 30.0
"""From one deeper look to the next while the same things are wrong: it reads logs, and measures for a second."""

LIMIT_SECONDS: Final = 10.0
"""What it may take; all sets are looked at at once."""

WATCHERS_MAX: Final = 100
"""Names under which logs were read last: servers forget them as soon as a connection ends."""

ALONE_MAX: Final = 100
"""Findings that no report shows: a server may be told, or tell, of any number that it does not follow."""

Key = tuple[Kind, str, str | None]


class DeepFindings:
    """`see` what every look has seen, `look_deeper` from time to time, one at a time; `findings` whenever asked."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._sets: tuple[ReplicaSet, ...] = ()
        self._uris: dict[str, Uri] = {}
        self._shallow: tuple[Finding, ...] = ()
        self._deeper: dict[Key, Finding] = {}
        self._alone: tuple[Finding, ...] = ()
        """Those that no report shows."""
        self._looked_for: frozenset[Key] | None = None
        self._begun_at = float("-inf")
        self._failing: set[str | None] = set()
        self._watchers: deque[str] = deque(maxlen=WATCHERS_MAX)

    @property
    def watchers(self) -> frozenset[str]:
        """The UUIDs under which a deeper look follows logs: to servers these are anonymous replicas."""
        return frozenset(self._watchers)

    def see(self, sets: tuple[ReplicaSet, ...], way: Callable[[Member], Asking | None]) -> None:
        """The sets as they are now; `way` is how to reach a member that has answered."""
        ways = {member.uuid: way(member) for one in sets for member in one.members if member.report is not None}
        self._sets, self._shallow = sets, explain(sets)
        self._uris = {uuid: asking.uri for uuid, asking in ways.items() if asking is not None}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, the worst first."""
        known = set(map(_key, self._shallow))
        alone = [one for one in self._alone if _key(one) not in known and self._is_still_alone(one)]
        return in_order([*map(self._deepened, self._shallow), *alone])

    def _deepened(self, shallow: Finding) -> Finding:
        """What it is about goes on to be told as it is now: how far somebody is behind changes with every look."""
        deep = self._deeper.get(_key(shallow))
        if deep is None:
            return shallow
        return msgspec.structs.replace(shallow, why=deep.why, advice=deep.advice, evidence=deep.evidence)

    def _is_still_alone(self, finding: Finding) -> bool:
        """Its member answers, and still shows nothing of whom it does not follow."""
        member = next((one for each in self._sets for one in each.members if one.uuid == finding.member), None)
        if member is None or member.report is None or member.address is None:
            return False
        sides = [(peer.uuid, peer.upstream.peer) for peer in member.report.replication if peer.upstream is not None]
        shown = {uuid for uuid, _ in sides} | {seen_from(member.address, at) for _, at in sides if at is not None}
        return finding.peer not in shown

    async def look_deeper(self) -> None:
        """Where other things are wrong than the last time, or that is long ago; else it returns at once."""
        sets, shallow = self._sets, self._shallow
        now, wrong = self._outside.clock.monotonic(), frozenset(map(_key, shallow))
        if wrong == self._looked_for and now - self._begun_at < DEEPER_SECONDS:
            return
        self._looked_for, self._begun_at = wrong, now
        asked = _Asked(self._outside, self._uris)
        investigation = Investigation(self._outside, asked, name=self._new_watcher)
        try:
            answers = await asyncio.gather(*(self._investigate(investigation, one) for one in sets))
        finally:
            await asked.close()
        self._failing = {one.uuid for one, answer in zip(sets, answers, strict=True) if answer is None}
        found = [one for answer in answers for one in answer or () if one not in shallow]
        self._deeper = {_key(one): one for one in found if _key(one) in wrong}
        # A look that failed does not say that they are gone.
        alone = [one for one in self._alone if one.replicaset in self._failing]
        self._alone = (*alone, *(one for one in found if _key(one) not in wrong))[:ALONE_MAX]

    async def _investigate(self, investigation: Investigation, one: ReplicaSet) -> Sequence[Finding] | None:
        """None where it failed, which is told once until it does not."""
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                return await investigation.findings([one])
        except Exception as error:
            if one.uuid not in self._failing:
                is_late = isinstance(error, TimeoutError)
                reason = f"it took more than {LIMIT_SECONDS:g} s" if is_late else "an error"
                what = "cannot look deeper into what is wrong with replica set %s, and show what is seen at once: %s"
                LOG.warning(what, one.name or one.uuid or "unknown", reason, exc_info=None if is_late else error)
            return None

    def _new_watcher(self) -> UUID:
        uuid = self._outside.random.uuid()
        self._watchers.append(str(uuid))
        return uuid


class _Asked:
    """`investigation.Asked` with connections of its own: those of the looks may be closed at any time."""

    def __init__(self, outside: Outside, uris: Mapping[str, Uri]) -> None:
        self._askings = {uuid: Asking(outside, uri, instance=uuid) for uuid, uri in uris.items()}

    def asking(self, member: Member) -> Asking:
        asking = self._askings.get(member.uuid)
        if asking is None:
            raise FlowstoneError(f"{member.label} cannot be asked from here", hint="give its address, too")
        return asking

    async def close(self) -> None:
        for asking in self._askings.values():
            await asking.close()


def _key(finding: Finding) -> Key:
    return finding.kind, finding.member, finding.peer
