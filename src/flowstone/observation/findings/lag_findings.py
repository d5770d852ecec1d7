"""Findings about members that lack rows although no failed or slow link of their own says why.

Pure; the last part of `observation/explanation.py`. Every registered member that lacks rows of the leader is named by a
finding (docs/reference/findings.md, "What a report promises"), but most findings are about a link, and name its
follower. This module reports the other members. The upstreams of such a member also lack the rows, are starting or are
unreachable; or the member could not be queried because no answering server knows its address. Rows in transit are not
reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from flowstone.observation.findings.connection_findings import is_cut_off, is_loading
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.findings.link_causes import Between, cause_of, quoted
from flowstone.observation.findings.wording import expel, make, position, rows_text, seconds_text
from flowstone.observation.replica_set import (
    BEHIND_SECONDS,
    Link,
    Member,
    ReplicaSet,
    furthest,
    missing_row_count,
)
from flowstone.observation.report import VClock

EXPLAINING: Final = frozenset(
    {
        Kind.SPLIT_BRAIN,
        Kind.DUPLICATE_KEY,
        Kind.LOG_GAP,
        Kind.LOST_ROWS,
        Kind.WRONG_CLUSTER,
        Kind.NOT_REGISTERED,
        Kind.NO_RIGHTS,
        Kind.WRONG_PASSWORD,
        Kind.VERSION_MISMATCH,
        Kind.SCHEMA_MISMATCH,
        Kind.FOREIGN_QUEUE,
        Kind.DISK_FULL,
        Kind.COPIED_INSTANCE,
        Kind.STARTING,
        Kind.UNREACHABLE,
        Kind.REPLICATION_STOPPED,
        Kind.NOT_FOLLOWING,
        Kind.LOG_FAILING,
        Kind.ORPHAN,
        Kind.TWO_OWNERS,
        Kind.BEHIND,
    }
)
"""Findings that say why `Finding.member` lacks rows."""

EXPLAINING_IF_STOPPED: Final = frozenset({Kind.DISK_FULL, Kind.LOG_FAILING})
"""As warnings, these are about a disk that still accepts rows."""

EXPLAINING_BOTH: Final = frozenset({Kind.SPLIT_BRAIN, Kind.UNREACHABLE, Kind.TWO_OWNERS, Kind.LOST_ROWS})
"""Findings that also explain the lag of `Finding.peer`, unless it follows `Finding.member`."""


class _Supply(NamedTuple):
    """The source of a member's rows."""

    masters: tuple[Member, ...]
    """Members whose rows reach the member through working links, directly or through each other."""

    blocked: tuple[Link, ...]
    """Links from other members to the member and to `masters` through which no rows arrive now, or arrive too late."""


def lag_findings(replica_set: ReplicaSet, found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a finding for each registered member that lacks rows and that none of `found` explains."""
    target, leader = _target(replica_set)
    for member in replica_set.members:
        if member.id and missing_row_count(target, member.vclock) and not _is_explained(replica_set, member, found):
            yield from _of_member(replica_set, member, _without_own(member, target), leader)


def _target(replica_set: ReplicaSet) -> tuple[VClock, Member | None]:
    """Return the position that every member has to reach, and the leader if it is the leader's.

    Without a leader that answers, it is the furthest position of any member.
    """
    leader = next((one for one in replica_set.members if one.is_leader and one.report is not None), None)
    return (leader.vclock, leader) if leader is not None else (replica_set.vclock, None)


def _is_explained(replica_set: ReplicaSet, member: Member, found: Sequence[Finding]) -> bool:
    follows = {link.master for link in replica_set.links_to(member.uuid) if link.is_following}
    for finding in found:
        if finding.kind not in EXPLAINING:
            continue
        if finding.kind in EXPLAINING_IF_STOPPED and finding.severity is not Severity.STOPPED:
            continue
        if finding.member == member.uuid:
            return True
        if finding.kind in EXPLAINING_BOTH and finding.peer == member.uuid and finding.member not in follows:
            return True
    return False


def _without_own(member: Member, target: VClock) -> VClock:
    """Return `target` without the member's own rows, except those that a follower has acknowledged to the member.

    Members answer one after another, so a follower that answers later may have rows that the member wrote in between.
    """
    peers = member.report.replication if member.report is not None else ()
    own = max((peer.downstream.vclock.get(member.id, 0) for peer in peers if peer.downstream is not None), default=0)
    return target | {member.id: min(own, target.get(member.id, 0))}


def _of_member(replica_set: ReplicaSet, member: Member, target: VClock, leader: Member | None) -> Iterator[Finding]:
    supply = _supply(replica_set, member)
    coming = furthest((member.vclock, *(one.vclock for one in supply.masters)))
    if not missing_row_count(target, coming):
        return  # the missing rows are in transit
    if member.report is None and not supply.masters:
        if _is_view_complete(replica_set):
            yield _not_queried(replica_set, member, target)
        return
    source = leader or _holder(replica_set, target, coming)
    yield _rows_do_not_come(
        replica_set, member, source, supply, missing_row_count(_common(target, source.vclock), coming)
    )


def _common(target: VClock, vclock: VClock) -> VClock:
    return {replica_id: min(lsn, vclock.get(replica_id, 0)) for replica_id, lsn in target.items()}


def _holder(replica_set: ReplicaSet, target: VClock, coming: VClock) -> Member:
    """Return the server with the most rows of `target` that are not in `coming`, a member rather than another one."""
    answered = [one for one in replica_set.members if one.report is not None]
    return max(answered, key=lambda one: (missing_row_count(_common(target, one.vclock), coming), bool(one.id)))


def _supply(replica_set: ReplicaSet, member: Member) -> _Supply:
    reached, blocked = [member], []
    for one in reached:
        for link in replica_set.links_to(one.uuid):
            master = replica_set.member(link.master)
            if master is None:
                continue
            if not _is_working(link, master):
                blocked.append(link)
            elif master not in reached:
                reached.append(master)
    uuids = {one.uuid for one in reached}
    return _Supply(tuple(reached[1:]), tuple(link for link in blocked if link.master not in uuids))


def _is_working(link: Link, master: Member) -> bool:
    """Return True if rows arrive through the link in time, or if it is being established and may work in a moment."""
    if link.is_failed or link.is_behind or _is_starting(master) or (link.idle or 0.0) > BEHIND_SECONDS:
        return False
    return link.is_following or master.report is not None


def _is_starting(member: Member) -> bool:
    if is_loading(member):
        return True
    if member.unreachable is None or member.unreachable.is_denied:
        return False
    return cause_of(member.unreachable.reason, Between("flowstone", member.label)).kind is Kind.STARTING


# --- rows that do not come ---


def _rows_do_not_come(
    replica_set: ReplicaSet, member: Member, source: Member, supply: _Supply, missing: int
) -> Finding:
    """Report a member whose upstreams do not have the rows that it lacks, or do not send them."""
    silent = [one for one in supply.masters if one.report is None]
    reasons = [*_about_source(replica_set, source), *(_why_blocked(replica_set, one) for one in supply.blocked)]
    reasons += [f"{_silence(one)}, so it is unknown whether it has these rows" for one in silent]
    reasons += [f"{one.label} lacks these rows, too" for one in supply.masters if one.report is not None]
    outlook = "no link brings them in time" if not silent else "it is unknown whether they are on their way"
    return make(
        replica_set,
        Kind.BEHIND,
        Severity.WARNING if silent else Severity.BEHIND,
        member,
        f"{member.label} lags {source.label} by {rows_text(missing)}, and {outlook}",
        "; ".join(dict.fromkeys(reasons)) or f"{member.label} follows no server that has these rows",
        _advice(replica_set, member, source, supply),
        [f"{one.label} is at {position(one.vclock)}" for one in _unique(member, *supply.masters, source)],
        peer=source.uuid,
    )


def _unique(*members: Member) -> list[Member]:
    return list({one.uuid: one for one in members}.values())


def _about_source(replica_set: ReplicaSet, source: Member) -> Iterator[str]:
    if _is_starting(source):
        yield f"{source.label} is starting and sends no rows yet"
    elif not source.id:
        yield f"{source.label} is not a member, so its rows reach nobody"


def _why_blocked(replica_set: ReplicaSet, link: Link) -> str:
    follower, label = replica_set.label_of(link.follower), replica_set.label_of(link.master)
    master = replica_set.member(link.master)
    if master is not None and _is_starting(master):
        return f"{label} is starting and sends no rows yet"
    if link.is_failed:
        return f"{follower} does not follow {label}: {quoted(link.message or link.status)}"
    if not link.is_following:
        return f"{follower} is not connected to {label} yet"
    if link.is_behind:
        return f"{follower} lags {label} by {rows_text(link.lag_lsn or 0)} and {seconds_text(link.lag or 0.0)}"
    return f"{follower} has received nothing from {label} for {seconds_text(link.idle or 0.0)}"


def _silence(member: Member) -> str:
    if member.unreachable is None:
        return f"{member.label} could not be queried"
    return f"{member.label} denies access" if member.unreachable.is_denied else f"{member.label} does not answer"


def _advice(replica_set: ReplicaSet, member: Member, source: Member, supply: _Supply) -> str:
    masters = [replica_set.member(link.master) for link in supply.blocked]
    involved = _unique(source, *supply.masters, *(one for one in masters if one is not None))
    steps = _steps(involved)
    follows = {link.master for link in replica_set.links_to(member.uuid)}
    if source.id and source.uuid not in follows and not _is_starting(source):
        steps.append(f"add {source.label} to `replication` of {member.label}, so that it gets these rows directly")
    if not steps:
        steps.append("follow the advice of the findings about the other members")
    return "; ".join(steps)


def _steps(members: Sequence[Member]) -> list[str]:
    """Return what to do about members that are starting or could not be queried, one step for each state."""
    starting = [one.label for one in members if _is_starting(one)]
    others = [one for one in members if one.report is None and not _is_starting(one)]
    denied = [one.label for one in others if one.unreachable is not None and one.unreachable.is_denied]
    silent = [one.label for one in others if one.unreachable is not None and not one.unreachable.is_denied]
    unknown = [one.label for one in others if one.unreachable is None]
    steps = [
        (starting, "wait until {} {have} started"),
        (silent, "make sure that {} {run}, and that the network to it works"),
        (denied, "give the user the right to query {}"),
        (unknown, "add the address of {} to `flowstone explain`"),
    ]
    verbs = {True: {"have": "have", "run": "run"}, False: {"have": "has", "run": "runs"}}
    return [text.format(" and ".join(labels), **verbs[len(labels) > 1]) for labels, text in steps if labels]


# --- members that could not be queried ---


def _is_view_complete(replica_set: ReplicaSet) -> bool:
    """Return True if all members with a known address were queried, and what answered can know of other members.

    If only a member without upstreams was queried, nothing is concluded about the others.
    """
    members = replica_set.members
    if any(one.report is None and one.unreachable is None and one.address is not None for one in members):
        return False
    is_blind = all(is_cut_off(one) for one in members if one.report is not None)
    return not is_blind or any(one.unreachable is not None for one in members)


def _not_queried(replica_set: ReplicaSet, member: Member, target: VClock) -> Finding:
    """Report a member whose address is unknown; it may be one of the servers that could not be queried."""
    label = member.label
    links = [link for link in replica_set.links if link.master == member.uuid and link.is_following]
    followers = " and ".join(replica_set.label_of(link.follower) for link in links)
    strays = [one for one in replica_set.members if not one.id and one.unreachable is not None]
    why = (
        f"{label} is known to have rows up to {position(member.vclock)}, and other members are at {position(target)}; "
    )
    if followers:
        why += f"it runs: {followers} {'follow' if len(links) > 1 else 'follows'} it"
    else:
        why += "no server that answered has a connection to it"
    if strays:
        names = " or ".join(f"{one.label} ({_state(one)})" for one in strays)
        why += f". It may be the server at {names}: it is unknown which member runs there"
    find = f"add the address of {label} to `flowstone explain`"
    if followers:
        advice = find
    else:
        steps = _steps(strays) or [f"start {label}"]
        advice = (
            f"{'; '.join(steps)}; if it runs elsewhere, {find}; if it is gone for good, {expel(replica_set, member)}"
        )
    return make(
        replica_set,
        Kind.UNREACHABLE,
        Severity.WARNING,
        member,
        f"{label} could not be queried: no server that answered knows its address",
        why,
        advice,
        [f"{one.label}: {quoted(one.unreachable.reason)}" for one in strays if one.unreachable is not None],
    )


def _state(member: Member) -> str:
    if _is_starting(member):
        return "starting"
    return "access denied" if member.unreachable is not None and member.unreachable.is_denied else "unreachable"
