"""Looks deeper where it can: asks the servers for what an explanation from their reports leaves open.

Begins with `explain` and gives the same findings with more in them, and findings that no report shows: servers in
somebody's `replication` that were never followed. Reads only. What cannot be read (a right is missing, a server is
gone meanwhile) leaves a finding as it was, with a line that says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol
from uuid import UUID

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.uri import Uri, UriError, parse_uri
from flowstone.node.connection import greeting_of
from flowstone.node.option_checks import UPSTREAMS_MAX
from flowstone.observation.asking import Asking
from flowstone.observation.conflict import Conflict, find_conflict
from flowstone.observation.explanation import between_of, explain, in_order
from flowstone.observation.finding import Finding, Kind, Severity
from flowstone.observation.fork import Alone, Fork, behind, common_point, digests
from flowstone.observation.link_causes import conflict_advice, conflict_in, quoted
from flowstone.observation.log_section import LogSection, read_section
from flowstone.observation.places import place_of, seen_from
from flowstone.observation.replica_set import Member, ReplicaSet, missing_rows
from flowstone.observation.report import Report, printable
from flowstone.observation.wording import capital, for_command, make, position, rows_text, seconds_text
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock

MEASURE_SECONDS: Final = 1.0
"""Between the two looks that tell how fast somebody catches up."""

CONFLICT_ROUNDS_MAX: Final = 3
"""How often the row of a conflict is looked for at a follower that has taken what was found until then."""

LOOKBACK: Final = 200
"""Rows of each origin before the end of what both sides have in which a difference is looked for."""

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
"""Whom a real server is told to follow, without users and passwords: those do not leave it."""

Deepen = Callable[["Investigation", ReplicaSet, Finding], Awaitable[Finding]]


class Asked(Protocol):
    """Where the replica sets come from: `survey.Survey`, or who else can reach the members."""

    def asking(self, member: Member) -> Asking:
        """The connection to a member that has answered; FlowstoneError where there is none."""
        ...


class Investigation:
    """Of what one survey has found. `name` names it to the servers whose logs it reads, anew each time."""

    def __init__(self, outside: Outside, survey: Asked, *, name: Callable[[], UUID] | None = None) -> None:
        self._outside = outside
        self._survey = survey
        self._name = name or outside.random.uuid

    async def findings(self, sets: Sequence[ReplicaSet]) -> tuple[Finding, ...]:
        """What is wrong, the worst first."""
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
                found.append(_with(finding, [f"could not look deeper: {quoted(str(error)) or 'no answer'}"]))
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
            told = f"the row in question is not among those that come next, or {follower.label} takes rows meanwhile"
            return _with(finding, [told])
        index, space = named
        why = (
            f"row {conflict.row} that comes from {master.label}, {conflict.comes} in space {space!r}, has the same key "
            f"in index {index!r} as the tuple that {follower.label} has, {conflict.there}: both sides have written it"
        )
        advice = conflict_advice(between_of(replica_set, follower, master), conflict.remove)
        lines = [f"comes: {conflict.row} {conflict.comes}", f"is there: {conflict.there}"]
        return _with(finding, lines, why=why, advice=advice)

    async def _conflict(self, follower: Member, master: Member, index: str, space: str) -> Conflict | None:
        """None where it is not found, or where the follower takes rows meanwhile, and again and again."""
        asking, have = self._survey.asking(follower), follower.vclock
        for _ in range(CONFLICT_ROUNDS_MAX):
            section = await self._section(master, VClock(have))
            conflict = await find_conflict(asking, section, space, index)
            have = await _position(asking)
            # What it has by now it had not yet written when it was asked: the tuple that is there is the row itself.
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
            Alone(member.label, behind(section.transactions, point), section.schema, section.is_whole)
            for member, section in ((follower, first), (master, second))
        ]
        fork = Fork(point, (sides[0], sides[1]))
        if finding.kind is Kind.SPLIT_BRAIN and all(side.is_whole and side.first is None for side in sides):
            why = f"both histories are the same by now, up to {position(point.to_mapping())}: the split brain is over"
            again = between_of(replica_set, follower, master).set_again
            return _with(finding, [], why=why, advice=f"on {follower.label}, {again}: it does not try again by itself")
        queues = [_queue_line(one) for one in (follower, master) if one.report is not None]
        return _with(finding, [*queues, *fork.evidence()], why=f"{finding.why}. {capital(fork.sentence())}")

    # --- a gap: from where to where, and who still has it ---

    async def log_gap(self, replica_set: ReplicaSet, finding: Finding) -> Finding:
        follower, master = _ends(replica_set, finding)
        have = follower.vclock
        oldest = master.report.gc.vclock if master.report is not None and master.report.gc is not None else None
        lines = [] if oldest is None else [f"the oldest log of {master.label} begins at {position(oldest)}"]
        others = [one for one in replica_set.members if one.uuid not in (follower.uuid, master.uuid)]
        holders = [one.label for one in others if _can_feed(one, have)]
        alone = missing_rows(have, master.vclock)
        why = finding.why
        if oldest is not None:
            missing = missing_rows(oldest, have)
            why += f": {rows_text(missing)} lie between" if missing else ""
        why += f". {', '.join(holders)} still has them" if holders else ". No other member that was asked has them"
        if alone:
            why += f"; {follower.label} has {rows_text(alone)} that {master.label} lacks"
        advice = finding.advice
        if holders:
            advice = (
                f"let {follower.label} follow {holders[0]} (add it to `replication` there), which has the logs; or "
            )
            advice += finding.advice
        return _with(finding, lines, why=why, advice=advice)

    # --- behind: how fast, and for how long ---

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
        taken, written = (missing_rows(now, before) / took for now, before in zip(second, first, strict=True))
        left = missing_rows(second[1], second[0])
        told = (
            f"it takes {taken:.0f} rows/s while {master.label} writes {written:.0f} rows/s, {rows_text(left)} are left"
        )
        if left == 0:
            outlook = "it has caught up meanwhile"
        elif taken > written:
            outlook = f"it will have caught up in about {seconds_text(left / (taken - written))}"
        elif taken == 0:
            outlook = "it stands still"
        else:
            outlook = "it falls farther behind"
        return _with(finding, [told], why=f"{finding.why}. Measured over {seconds_text(took)}: {told}; {outlook}")

    # --- those in `replication` that nobody shows ---

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
        """Why nothing is shown of a server that a member is told to follow; None: that is as it should be."""
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
                f"{place} is in its `replication`, and no Tarantool server answers there",
                f"start that server, or take it out of `replication` of {member.label}",
                [f"`replication` of {member.label} names {place}"],
                peer=place,
            )
        uuid = str(greeting.uuid)
        followed = [peer.uuid for peer in member.report.replication if peer.upstream is not None]
        if uuid == member.uuid or uuid in followed:
            return None  # itself, or somebody who has two addresses
        if replica_set.member(uuid) is not None:
            return _not_followed(replica_set, member, place, uuid)
        # It may be anybody: it gets no login of ours to guess at.
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
            f"{uri.address} is of replica set {theirs}, {member.label} of {replica_set.uuid}",
            f"correct `replication` of {member.label}; if it shall move over, start it with an empty directory",
            [f"{uri.address} is instance {uuid}, which is no member of this set"],
            peer=uuid,
        )

    # --- what they share ---

    async def _section(self, member: Member, after: VClock, until: VClock | None = None) -> LogSection:
        if member.report is None:
            raise FlowstoneError(f"{member.label} was not asked, or did not answer", hint="give its address, too")
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
    """It runs, and nothing is shown of it; what it answers, only the log of the follower says.

    `is_of_set`: by its own word; else it does not tell, as it does not know us.
    """
    assert member.report is not None
    if uuid in (peer.uuid for peer in member.report.replication):
        kind, what = Kind.REPLICATION_STOPPED, f"{member.label} does not follow {place}, which it is told to"
        why = f"{place} is of this set and runs"
        advice = f"see the log of {member.label}: the login in its `replication` may be wrong, or a right missing"
    else:
        kind, what = (
            Kind.NOT_REGISTERED,
            f"`replication` of {member.label} lists {place}, which is not a member of the replica set",
        )
        why = f"the server there, {uuid}, is not in `_cluster` of {member.label}: it was expelled"
        why += "" if is_of_set else ", or is of another replica set: it does not tell us which"
        advice = (
            f"if it was expelled: stop it, and take it out of `replication` of {member.label}; if it shall come back, "
            f"`flowstone rebootstrap DIR {for_command(member.address)}` with its data directory, and start it"
        )
    return make(
        replica_set, kind, Severity.STOPPED, member, what, why, advice, [f"{place} is instance {uuid}"], peer=uuid
    )


def _ends(replica_set: ReplicaSet, finding: Finding) -> tuple[Member, Member]:
    follower, master = replica_set.member(finding.member), replica_set.member(finding.peer or "")
    if follower is None or master is None:
        raise FlowstoneError("one of the two is not known")
    return follower, master


def _with(finding: Finding, lines: Sequence[str], **changes: str) -> Finding:
    return msgspec.structs.replace(finding, evidence=(*finding.evidence, *lines), **changes)


def _before(point: VClock, *members: Member) -> VClock:
    """Some rows before a position, as far as both have logs: what differs may be older than what is missing."""
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
    owner = f"replica {queue.owner} owns the queue" if queue.owner else "nobody owns the queue"
    return f"{member.label}: {owner} since term {queue.term}, {queue.len} waiting"


def _can_feed(member: Member, have: dict[int, int]) -> bool:
    """Its oldest log begins at or before that position."""
    gc = member.report.gc if member.report is not None else None
    return gc is not None and missing_rows(gc.vclock, have) == 0


async def _position(asking: Asking) -> dict[int, int]:
    answer = await asking.ask()
    if not isinstance(answer, Report):
        raise FlowstoneError(f"{answer.address} does not answer any more: {answer.reason}")
    return answer.vclock


async def _configured(asking: Asking, report: Report) -> list[str]:
    """Host and port of each server in `replication`."""
    async with asyncio.timeout(MEASURE_SECONDS):
        try:
            found = await _upstreams(asking, report)
        except TarantoolError:
            return []  # it does not let us see its options
    return [printable(str(one)) for one in found[:UPSTREAMS_MAX]] if isinstance(found, list | tuple) else []


async def _upstreams(asking: Asking, report: Report) -> Any:
    if not report.is_flowstone:
        return await asking.evaluate(UPSTREAMS_LUA)
    options = await asking.call("box.cfg")
    return options.get("replication") or [] if isinstance(options, dict) else []
