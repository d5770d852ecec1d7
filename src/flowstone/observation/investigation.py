"""Refines findings by further queries: asks the servers for what their reports leave open.

Starts with `explain` and returns the same findings with more detail, plus findings that no report shows: servers in
`replication` that were never followed. Only reads. If a query fails (a right is missing, a server went down), the
finding is not changed, and a line of evidence reports the failed query.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol
from uuid import UUID

import msgspec

from flowstone.client.connection import greeting_of
from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.uri import Uri, UriError, parse_uri
from flowstone.node.option_checks import UPSTREAMS_MAX
from flowstone.observation.explanation import between_of, explain, in_order
from flowstone.observation.findings.conflict import Conflict, find_conflict
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.findings.fork import Alone, Fork, common_point, digests, transactions_after
from flowstone.observation.findings.link_causes import conflict_advice, conflict_in, quoted
from flowstone.observation.findings.wording import call, capital, for_command, make, position, rows_text, seconds_text
from flowstone.observation.log_section import LogSection, read_section
from flowstone.observation.places import place_of, seen_from
from flowstone.observation.query import Asking
from flowstone.observation.replica_set import Member, ReplicaSet, missing_row_count
from flowstone.observation.report import Report, printable
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock

MEASURE_SECONDS: Final = 1.0
"""Interval between the two queries that measure how fast a follower catches up."""

CONFLICT_ROUNDS_MAX: Final = 3
"""Attempts to find the row of a conflict at a follower that applies rows in the meantime."""

LOOKBACK: Final = 200
"""Number of rows of each replica id that are compared before the position that both sides have."""

UPSTREAMS_LUA: Final = """
local uri, found = require('uri'), setmetatable({}, {__serialize = 'array'})
local given = box.cfg.replication or {}
if type(given) == 'string' then given = given:split(',') end
for _, one in ipairs(type(given) == 'table' and given or {given}) do
    if type(one) == 'table' then one = one.uri or one[1] end
    local parts = uri.parse(tostring(one))
    if parts ~= nil and parts.service ~= nil then
        table.insert(found, (parts.host or 'localhost') .. ':' .. parts.service)
    end
end
return found
"""
"""Returns the addresses in `replication` of a real server; users and passwords never leave the server."""

Deepen = Callable[["Investigation", ReplicaSet, Finding], Awaitable[Finding]]


class Asked(Protocol):
    """Source of the replica sets: `survey.Survey`, or anything else that can reach the members."""

    def asking(self, member: Member) -> Asking:
        """Return the connection to a member that has answered; raise FlowstoneError if there is none."""
        ...


class Investigation:
    """Refines the findings of a survey. `name` returns a new replica UUID for each log that it reads."""

    def __init__(self, outside: Outside, survey: Asked, *, name: Callable[[], UUID] | None = None) -> None:
        self._outside = outside
        self._survey = survey
        self._name = name or outside.random.uuid

    async def findings(self, sets: Sequence[ReplicaSet]) -> tuple[Finding, ...]:
        """Return the findings about the replica sets, the worst first."""
        found: list[Finding] = []
        by_uuid = {one.uuid: one for one in sets}
        for finding in explain(sets):
            replica_set = by_uuid.get(finding.replicaset)
            deepen = _DEEPER.get(finding.kind)
            if replica_set is None or deepen is None:
                found.append(finding)
                continue
            try:
                found.append(await deepen(self, replica_set, finding))
            except (FlowstoneError, TimeoutError) as error:
                found.append(_with(finding, [f"further query failed: {quoted(str(error)) or 'timed out'}"]))
        strangers = [one for replica_set in sets for one in await self._never_followed(replica_set)]
        told = {one.peer for one in strangers if one.kind is Kind.NOT_REGISTERED}
        found = [one for one in found if one.kind is not Kind.NOT_REGISTERED or one.member not in told]
        return in_order((*found, *strangers))

    # --- a duplicate key: the two tuples ---

    async def duplicate_key(self, replica_set: ReplicaSet, finding: Finding) -> Finding:
        follower, master = _ends(replica_set, finding)
        link = next((one for one in replica_set.links_to(follower.uuid) if one.master == master.uuid), None)
        named = conflict_in(link.message or "") if link is not None else None
        if named is None or follower.report is None:
            return finding
        conflict = await self._conflict(follower, master, *named)
        if conflict is None:
            told = f"conflicting row not found: it is not among the next rows, or {follower.label} keeps applying rows"
            return _with(finding, [told])
        index, space = named
        why = (
            f"row {conflict.row} from {master.label}, {conflict.comes} in space {space!r}, has the same key in index "
            f"{index!r} as the tuple {conflict.there} on {follower.label}: both sides have written this key"
        )
        remove = conflict.remove
        if conflict.removal is not None:
            remove = call(follower.address, *conflict.removal).strip("`")
        advice = conflict_advice(between_of(replica_set, follower, master), remove)
        lines = [f"row from {master.label}: {conflict.row} {conflict.comes}"]
        lines += [f"tuple on {follower.label}: {conflict.there}"]
        return _with(finding, lines, why=why, advice=advice)

    async def _conflict(self, follower: Member, master: Member, index: str, space: str) -> Conflict | None:
        """Return the conflict; None if it is not found, or if the follower keeps applying rows during the search."""
        asking, have = self._survey.asking(follower), follower.vclock
        for _ in range(CONFLICT_ROUNDS_MAX):
            section = await self._section(master, VClock(have))
            conflict = await find_conflict(asking, section, space, index)
            have = await _position(asking)
            # If the follower has applied the row by now, the tuple found there is the row itself: search again.
            if conflict is None or have.get(conflict.replica_id, 0) < conflict.lsn:
                return conflict
        return None

    # --- split brain: the two histories ---

    async def split_brain(self, replica_set: ReplicaSet, finding: Finding) -> Finding:
        follower, master = _ends(replica_set, finding)
        ours, theirs = VClock(follower.vclock), VClock(master.vclock)
        begin = _before(ours.common(theirs), follower, master)
        first, second = await self._section(follower, begin, ours), await self._section(master, begin, theirs)
        point = common_point(ours, theirs, digests(first.transactions), digests(second.transactions))
        sides = [
            Alone(member.label, transactions_after(section.transactions, point), section.schema, section.is_whole)
            for member, section in ((follower, first), (master, second))
        ]
        fork = Fork(point, (sides[0], sides[1]))
        if finding.kind is Kind.SPLIT_BRAIN and all(side.is_whole and side.first is None for side in sides):
            why = f"both histories are now the same up to {position(point.to_mapping())}: the split brain is over"
            again = between_of(replica_set, follower, master).set_again
            return _with(finding, [], why=why, advice=f"{again}: it does not retry by itself")
        queues = [_queue_line(one) for one in (follower, master) if one.report is not None]
        return _with(finding, [*queues, *fork.evidence()], why=f"{finding.why}. {capital(fork.sentence())}")

    # --- a gap: the missing rows, and the members that still have them ---

    async def log_gap(self, replica_set: ReplicaSet, finding: Finding) -> Finding:
        follower, master = _ends(replica_set, finding)
        have = follower.vclock
        oldest = master.report.gc.vclock if master.report is not None and master.report.gc is not None else None
        lines = [] if oldest is None else [f"the oldest log of {master.label} starts at {position(oldest)}"]
        others = [one for one in replica_set.members if one.uuid not in (follower.uuid, master.uuid)]
        holders = [one.label for one in others if _can_feed(one, have)]
        alone = missing_row_count(have, master.vclock)
        why = finding.why
        if oldest is not None:
            missing = missing_row_count(oldest, have)
            why += f": {rows_text(missing)} in between" if missing else ""
        why += f". Still available from: {', '.join(holders)}" if holders else ". No other queried member has them"
        if alone:
            why += f"; {follower.label} has {rows_text(alone)} that {master.label} lacks"
        advice = finding.advice
        if holders:
            advice = f"add {holders[0]}, which still has the logs, to `replication` of {follower.label}; or "
            advice += finding.advice
        return _with(finding, lines, why=why, advice=advice)

    # --- lag: the rate of catching up, and the time left ---

    async def behind(self, replica_set: ReplicaSet, finding: Finding) -> Finding:
        follower, master = _ends(replica_set, finding)
        if follower.report is None or master.report is None:
            return finding
        asked = [self._survey.asking(one) for one in (follower, master)]
        began = self._outside.clock.monotonic()
        first = [await _position(one) for one in asked]
        await self._outside.clock.sleep(MEASURE_SECONDS)
        second = [await _position(one) for one in asked]
        took = self._outside.clock.monotonic() - began
        taken, written = (missing_row_count(now, before) / took for now, before in zip(second, first, strict=True))
        left = missing_row_count(second[1], second[0])
        told = f"it applies {taken:.0f} rows/s while {master.label} writes {written:.0f} rows/s; rows left: {left}"
        if left == 0:
            outlook = "it has caught up"
        elif taken > written:
            outlook = f"it will catch up in about {seconds_text(left / (taken - written))}"
        elif taken == 0:
            outlook = "it makes no progress"
        else:
            outlook = "its lag grows"
        return _with(finding, [told], why=f"{finding.why}. Measured over {seconds_text(took)}: {told}; {outlook}")

    # --- servers in `replication` that no report shows ---

    async def _never_followed(self, replica_set: ReplicaSet) -> list[Finding]:
        found: list[Finding] = []
        for member in replica_set.members:
            if member.report is None:
                continue
            try:
                asking = self._survey.asking(member)
                configured = await _configured(asking, member.report)
            except (FlowstoneError, TimeoutError):
                continue
            sides = [peer.upstream for peer in member.report.replication if peer.upstream is not None]
            shown = {place_of(side.peer) for side in sides if side.peer is not None}
            for address in configured:
                if place_of(address) not in shown:
                    finding = await self._unfollowed(replica_set, member, asking.uri, address)
                    found += [finding] if finding is not None else []
        return found

    async def _unfollowed(self, replica_set: ReplicaSet, member: Member, like: Uri, address: str) -> Finding | None:
        """Return why a server in `replication` of the member is not among its upstreams; None if that is in order."""
        assert member.address is not None
        assert member.report is not None
        place = seen_from(member.address, address)
        try:
            uri = replace(like, host=parse_uri(place).host, port=parse_uri(place).port)
        except UriError:
            return None
        greeting = await greeting_of(self._outside, uri)
        if greeting is None:
            return make(
                replica_set,
                Kind.UNREACHABLE,
                Severity.STOPPED,
                member,
                f"{member.label} does not follow {place}",
                f"its `replication` lists {place}, but no Tarantool server answers there",
                f"start the server at {place}, or remove it from `replication` of {member.label}",
                [f"`replication` of {member.label} lists {place}"],
                peer=place,
            )
        uuid = str(greeting.uuid)
        followed = [peer.uuid for peer in member.report.replication if peer.upstream is not None]
        if uuid == member.uuid or uuid in followed:
            return None  # the member itself, or an upstream with two addresses
        if replica_set.member(uuid) is not None:
            return _not_followed(replica_set, member, place, uuid)
        # The server is unknown: it must not receive our login.
        return await self._stranger(replica_set, member, replace(uri, user=None, password=None), uuid)

    async def _stranger(self, replica_set: ReplicaSet, member: Member, uri: Uri, uuid: str) -> Finding:
        asking = Asking(self._outside, uri)
        try:
            answer = await asking.ask()
        finally:
            await asking.close()
        theirs = answer.replicaset_uuid if isinstance(answer, Report) else None
        if theirs is None or theirs == replica_set.uuid:
            return _not_followed(replica_set, member, uri.address, uuid, is_of_set=theirs is not None)
        return make(
            replica_set,
            Kind.WRONG_CLUSTER,
            Severity.STOPPED,
            member,
            f"{member.label} does not follow {uri.address}",
            f"{uri.address} belongs to replica set {theirs}, {member.label} to {replica_set.uuid}",
            f"correct `replication` of {member.label}; to move it to the other set, start it with an empty directory",
            [f"{uri.address} is instance {uuid}, which is not a member of this replica set"],
            peer=uuid,
        )

    # --- logs ---

    async def _section(self, member: Member, after: VClock, until: VClock | None = None) -> LogSection:
        if member.report is None:
            raise FlowstoneError(f"{member.label} was not queried, or did not answer", hint="add its address")
        uri = self._survey.asking(member).uri
        return await read_section(self._outside, uri, after, until or VClock(member.vclock), name=self._name())


_DEEPER: Final[dict[Kind, Deepen]] = {
    Kind.DUPLICATE_KEY: Investigation.duplicate_key,
    Kind.SPLIT_BRAIN: Investigation.split_brain,
    Kind.TWO_OWNERS: Investigation.split_brain,
    Kind.FOREIGN_QUEUE: Investigation.split_brain,
    Kind.LOG_GAP: Investigation.log_gap,
    Kind.BEHIND: Investigation.behind,
}


def _not_followed(replica_set: ReplicaSet, member: Member, place: str, uuid: str, *, is_of_set: bool = True) -> Finding:
    """Report a server in `replication` that runs, but is not among the upstreams; only the follower's log says why.

    `is_of_set` is True if the server reported this replica set, False if it did not report any.
    """
    assert member.report is not None
    if uuid in (peer.uuid for peer in member.report.replication):
        kind, what = Kind.REPLICATION_STOPPED, f"{member.label} does not follow {place}"
        why = f"its `replication` lists {place}, which runs and is a member of this replica set"
        advice = f"check the log of {member.label}: the login in its `replication` may be wrong, or lack a right"
    else:
        kind, what = (
            Kind.NOT_REGISTERED,
            f"`replication` of {member.label} lists {place}, which is not a member of the replica set",
        )
        why = f"the server there, {uuid}, is not in `_cluster` of {member.label}: it was expelled"
        why += "" if is_of_set else ", or belongs to another replica set, which it does not report to us"
        advice = (
            f"if it was expelled: stop it, and remove it from `replication` of {member.label}; to bring it back, run "
            f"`flowstone rebootstrap DIR {for_command(member.address)}` on its data directory, then start it"
        )
    return make(
        replica_set, kind, Severity.STOPPED, member, what, why, advice, [f"{place} is instance {uuid}"], peer=uuid
    )


def _ends(replica_set: ReplicaSet, finding: Finding) -> tuple[Member, Member]:
    follower, master = replica_set.member(finding.member), replica_set.member(finding.peer or "")
    if follower is None or master is None:
        raise FlowstoneError(f"unknown member: {finding.member if follower is None else finding.peer}")
    return follower, master


def _with(finding: Finding, lines: Sequence[str], **changes: str) -> Finding:
    return msgspec.structs.replace(finding, evidence=(*finding.evidence, *lines), **changes)


def _before(point: VClock, *members: Member) -> VClock:
    """Return the position LOOKBACK rows before `point`, but not before the logs: older rows may differ, too."""
    begin = {number: max(1, lsn - LOOKBACK) for number, lsn in point}
    for member in members:
        gc = member.report.gc if member.report is not None else None
        for number, lsn in (gc.vclock if gc is not None else point.to_mapping()).items():
            begin[number] = max(lsn, begin.get(number, 0))
    return VClock(begin)


def _queue_line(member: Member) -> str:
    queue = member.report.queue if member.report is not None else None
    if queue is None:
        return f"{member.label} is at {position(member.vclock)}"
    owner = f"replica {queue.owner} owns the queue" if queue.owner else "no member owns the queue"
    return f"{member.label}: {owner} since term {queue.term}, {queue.len} pending"


def _can_feed(member: Member, have: dict[int, int]) -> bool:
    """Return True if the member's oldest log begins at or before the position `have`."""
    gc = member.report.gc if member.report is not None else None
    return gc is not None and missing_row_count(gc.vclock, have) == 0


async def _position(asking: Asking) -> dict[int, int]:
    answer = await asking.ask()
    if not isinstance(answer, Report):
        raise FlowstoneError(f"{answer.address} no longer answers: {answer.reason}")
    return answer.vclock


async def _configured(asking: Asking, report: Report) -> list[str]:
    """Return host and port of each server in `replication`; nothing if the user may not read it."""
    async with asyncio.timeout(MEASURE_SECONDS):
        try:
            found = await _upstreams(asking, report)
        except TarantoolError:
            return []
    return [printable(str(one)) for one in found[:UPSTREAMS_MAX]] if isinstance(found, list | tuple) else []


async def _upstreams(asking: Asking, report: Report) -> Any:
    if not report.is_flowstone:
        return await asking.evaluate(UPSTREAMS_LUA)
    options = await asking.call("box.cfg")
    return options.get("replication") or [] if isinstance(options, dict) else []
