"""Findings for the dashboard, with details that need further queries: the two tuples of a conflict, or a fork point.

The dashboard shows the same findings as `flowstone explain`. `see` derives findings from the reports of each poll;
`look_deeper` investigates them further. It runs concurrently with the polls and never delays them: it has its own
connections and a timeout. If it fails, the findings of the last poll remain. Only the result of the last investigation
is kept.
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
from flowstone.observation.explanation import explain, in_order
from flowstone.observation.findings.finding import Finding, Kind
from flowstone.observation.investigation import Investigation
from flowstone.observation.places import seen_from
from flowstone.observation.query import Asking
from flowstone.observation.replica_set import Member, ReplicaSet
from flowstone.outside import Outside

LOG = logging.getLogger("flowstone.web")

DEEPER_SECONDS: Final = 30.0
"""Interval between investigations while the findings are the same: each one reads logs and measures for a second."""

LIMIT_SECONDS: Final = 10.0
"""Timeout of an investigation; all sets are investigated concurrently."""

WATCHERS_MAX: Final = 100
"""Number of recent log reader UUIDs to remember; servers drop a reader when its connection ends."""

ALONE_MAX: Final = 100
"""Limit on findings that no report shows: a server can name any number of peers that it does not follow."""

Key = tuple[Kind, str, str | None]


class DeepFindings:
    """Call `see` after every poll and `look_deeper` periodically, never twice at the same time; read `findings` at any
    time."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._sets: tuple[ReplicaSet, ...] = ()
        self._uris: dict[str, Uri] = {}
        self._shallow: tuple[Finding, ...] = ()
        self._deeper: dict[Key, Finding] = {}
        self._alone: tuple[Finding, ...] = ()
        """Findings that no report shows."""
        self._looked_for: frozenset[Key] | None = None
        self._begun_at = float("-inf")
        self._failing: set[str | None] = set()
        self._watchers: deque[str] = deque(maxlen=WATCHERS_MAX)

    @property
    def watchers(self) -> frozenset[str]:
        """UUIDs under which investigations read logs; servers list these readers as anonymous replicas."""
        return frozenset(self._watchers)

    def see(self, sets: tuple[ReplicaSet, ...], way: Callable[[Member], Asking | None]) -> None:
        """Take the sets of a poll. `way` returns the connection to a member that has answered."""
        ways = {member.uuid: way(member) for one in sets for member in one.members if member.report is not None}
        self._sets, self._shallow = sets, explain(sets)
        self._uris = {uuid: asking.uri for uuid, asking in ways.items() if asking is not None}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, the most severe first."""
        known = set(map(_key, self._shallow))
        alone = [one for one in self._alone if _key(one) not in known and self._is_still_alone(one)]
        return in_order([*map(self._deepened, self._shallow), *alone])

    def _deepened(self, shallow: Finding) -> Finding:
        """Add the details of the last investigation. All other values come from the poll, because a lag changes with
        every poll."""
        deep = self._deeper.get(_key(shallow))
        if deep is None:
            return shallow
        return msgspec.structs.replace(shallow, why=deep.why, advice=deep.advice, evidence=deep.evidence)

    def _is_still_alone(self, finding: Finding) -> bool:
        """Return True if the member answers and its report still does not show the peer of the finding."""
        member = next((one for each in self._sets for one in each.members if one.uuid == finding.member), None)
        if member is None or member.report is None or member.address is None:
            return False
        sides = [(peer.uuid, peer.upstream.peer) for peer in member.report.replication if peer.upstream is not None]
        shown = {uuid for uuid, _ in sides} | {seen_from(member.address, at) for _, at in sides if at is not None}
        return finding.peer not in shown

    async def look_deeper(self) -> None:
        """Investigate if the findings have changed or DEEPER_SECONDS have passed; otherwise return at once."""
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
        # If an investigation fails, keep its previous findings: they may still be true.
        alone = [one for one in self._alone if one.replicaset in self._failing]
        self._alone = (*alone, *(one for one in found if _key(one) not in wrong))[:ALONE_MAX]

    async def _investigate(self, investigation: Investigation, one: ReplicaSet) -> Sequence[Finding] | None:
        """Return the findings of one set; None if the investigation fails. Log only the first of failures in a row."""
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                return await investigation.findings([one])
        except Exception as error:
            if one.uuid not in self._failing:
                is_late = isinstance(error, TimeoutError)
                reason = f"timed out after {LIMIT_SECONDS:g} s" if is_late else "unexpected error"
                what = "cannot investigate replica set %s, showing findings from reports only: %s"
                LOG.warning(what, one.name or one.uuid or "unknown", reason, exc_info=None if is_late else error)
            return None

    def _new_watcher(self) -> UUID:
        uuid = self._outside.random.uuid()
        self._watchers.append(str(uuid))
        return uuid


class _Asked:
    """`investigation.Asked` with its own connections: the poll's connections may be closed at any time."""

    def __init__(self, outside: Outside, uris: Mapping[str, Uri]) -> None:
        self._askings = {uuid: Asking(outside, uri, instance=uuid) for uuid, uri in uris.items()}

    def asking(self, member: Member) -> Asking:
        asking = self._askings.get(member.uuid)
        if asking is None:
            raise FlowstoneError(f"cannot query {member.label}: its URI is unknown", hint="pass its URI as well")
        return asking

    async def close(self) -> None:
        for asking in self._askings.values():
            await asking.close()


def _key(finding: Finding) -> Key:
    return finding.kind, finding.member, finding.peer
