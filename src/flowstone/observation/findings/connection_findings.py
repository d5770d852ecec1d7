"""Findings about missing links, from a comparison of vclocks and `_cluster` with the links between members.

Pure; a part of `observation/explanation.py`, which reports links that exist and fail. This module reports links that
are not configured at all, so that rows or votes of a member do not reach another one although every link works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.findings.wording import expel, for_command, make, position, rows_text, set_replication
from flowstone.observation.replica_set import FOLLOWING, Member, ReplicaSet, expelled, missing_row_count
from flowstone.observation.report import Report, ReportedPeer


def connection_findings(replica_set: ReplicaSet) -> Iterator[Finding]:
    """Yield members that rows do not reach, members whose votes do not reach others, and expelled members that run."""
    yield from _not_following(replica_set)
    yield from _not_followed(replica_set)
    yield from _expelled(replica_set)


# --- members without links ---


def is_alone(report: Report) -> bool:
    """Return True if other members exist, but none of them is an upstream or a follower."""
    sides = [peer.downstream for peer in other_members(report)]
    is_followed = any(side is not None and side.status in FOLLOWING for side in sides)
    return bool(sides) and not is_followed and not has_upstreams(report)


def has_upstreams(report: Report) -> bool:
    """Return True if another member is an upstream, connected or not.

    An upstream that has not answered since the start has no UUID yet and is not listed with the members, so the number
    of configured upstreams counts, too.
    """
    return bool(report.upstreams_configured) or any(peer.upstream is not None for peer in other_members(report))


def is_master(report: Report) -> bool:
    """Return True if other members get their rows from this writable server: it has no rows of others, or was followed.

    A server without upstreams that has rows of other members does not receive their next rows.
    """
    others = other_members(report)
    was_followed = any(peer.downstream is not None for peer in others)
    return not report.ro and (was_followed or not any(peer.lsn for peer in others))


def other_members(report: Report) -> list[ReportedPeer]:
    """Return the other members that a server lists in `_cluster`."""
    return [peer for peer in report.replication if peer.id and peer.uuid != report.uuid]


def lacks_upstreams(report: Report) -> bool:
    """Return True if the member has no upstream, but needs one to receive rows or votes.

    A master need not follow its replicas. A voter must follow the others to get votes and to learn of a leader.
    """
    if not other_members(report) or has_upstreams(report):
        return False
    if (report.cfg or {}).get("election_mode", "off") != "off":
        return report.election is None or report.election.state != "leader"
    owns_queue = report.queue is not None and report.queue.owner == report.id
    return is_alone(report) and not is_master(report) and not owns_queue


def is_cut_off(member: Member) -> bool:
    """Return True if the member has no upstream because its `replication` is empty, and needs one."""
    report = member.report
    if report is None or not member.id or report.status == "loading" or report.upstreams_configured != 0:
        return False
    return lacks_upstreams(report)


def is_loading(member: Member) -> bool:
    return member.report is not None and member.report.status == "loading"


def _may_wait_for(report: Report | None) -> bool:
    """Return True if `replication` may list servers that have not answered since the start: they have no UUID yet.

    `replication` may list the server itself, so one entry more than there are upstreams proves nothing.
    """
    if report is None:
        return False
    upstreams = sum(peer.upstream is not None for peer in other_members(report))
    return report.upstreams_configured is not None and report.upstreams_configured > upstreams


def _cut_off(replica_set: ReplicaSet, member: Member) -> Finding:
    assert member.report is not None
    has_votes = _mode(member) not in (None, "off")
    return make(
        replica_set,
        Kind.NOT_FOLLOWING,
        Severity.STOPPED,
        member,
        f"{member.label} follows no other member: it gets no rows{' and no votes' if has_votes else ''}",
        "its `replication` is empty" + (", and no other member follows it" if is_alone(member.report) else ""),
        f"add the other members to `replication` of {member.label}: {set_replication(member.address)}",
        [f"{member.label} is at {position(member.vclock)}"],
    )


# --- rows ---


def _not_following(replica_set: ReplicaSet) -> Iterator[Finding]:
    """Yield a finding for each member that lacks rows which no link brings, and for each other isolated member."""
    for member in replica_set.members:
        source = _unreached(replica_set, member)
        if source is not None:
            yield _rows_do_not_come(replica_set, member, source)
        elif is_cut_off(member):
            yield _cut_off(replica_set, member)


def _unreached(replica_set: ReplicaSet, member: Member) -> Member | None:
    """Return the member with the most rows that `member` lacks and that no chain of links brings to it."""
    if member.report is None or not member.id or is_loading(member):
        return None
    others = [one for one in replica_set.members if one.id and one is not member]
    masters = {one.uuid for one in others if replica_set.gets_rows_of(member.uuid, one.uuid)}
    silent = {one.uuid for one in others if one.report is None}
    if masters & silent:
        # The upstreams of that master are unknown: it may forward rows of members that did not answer.
        others = [
            one
            for one in others
            if one.report is not None and not any(replica_set.gets_rows_of(uuid, one.uuid) for uuid in silent)
        ]
    sources = [
        (missing, -one.id, one)
        for one in others
        # A member that is loading has no followers yet, whatever the `replication` of others lists.
        if one.uuid not in masters and not is_loading(one) and (missing := _missing(member, member.report, one))
    ]
    return max(sources, key=lambda found: found[:2])[2] if sources else None


def _missing(member: Member, report: Report, source: Member) -> int:
    """Return how many rows of `source` the member lacks.

    Members answer one after another, so a follower that answers later may have rows that the member wrote in between.
    The member's own rows count only if the follower has acknowledged them to the member.
    """
    sides = [peer.downstream for peer in report.replication if peer.uuid == source.uuid]
    own = max((side.vclock.get(member.id, 0) for side in sides if side is not None), default=0)
    return missing_row_count(source.vclock | {member.id: own}, member.vclock)


def _rows_do_not_come(replica_set: ReplicaSet, member: Member, source: Member) -> Finding:
    assert member.report is not None
    label, missing = member.label, _missing(member, member.report, source)
    followed = " and ".join(replica_set.label_of(link.master) for link in replica_set.links_to(member.uuid))
    what = f"{label} does not get the rows of {source.label}" if followed else f"{label} follows no other member"
    why = f"no link leads from {source.label} to {label}, not even through other members"
    listed = set_replication(member.address)
    advice = f"add {source.label}, and the other members, to `replication` of {label}: {listed}"
    if _may_wait_for(member.report):
        why = f"`replication` of {label} does not list {source.label}, or {source.label} has not answered {label} yet"
        advice = f"check the network from {label} to {source.label}; if `replication` of {label} does not list "
        advice += f"{source.label}, add it: {listed}"
    elif followed:
        why += f": {label} follows only {followed}"
    elif member.report.upstreams_configured == 0:
        why = f"`replication` of {label} is empty"
    return make(
        replica_set,
        Kind.NOT_FOLLOWING,
        Severity.STOPPED,
        member,
        f"{what}, and lacks {rows_text(missing)} of {source.label}",
        why,
        f"{advice}; if {label} was removed from the set on purpose, {expel(replica_set, member)}",
        [f"{one.label} is at {position(one.vclock)}" for one in (member, source)],
        peer=source.uuid,
    )


# --- votes ---


def is_alive(replica_set: ReplicaSet, member: Member) -> bool:
    """Return True if the member answers, or could not be queried and has a working link with another member.

    If a query failed, links do not count: they show the state before their timeout.
    """
    if member.report is not None:
        return True
    if member.unreachable is not None:
        return member.unreachable.is_denied
    return any(link.is_following for link in replica_set.links if member.uuid in (link.follower, link.master))


def _mode(member: Member) -> str | None:
    """Return the member's `election_mode`; None if its options are unknown."""
    cfg = member.report.cfg if member.report is not None else None
    return str(cfg.get("election_mode", "off")) if cfg is not None else None


def _not_followed(replica_set: ReplicaSet) -> Iterator[Finding]:
    """Yield members that count for the quorum of elections, but whose votes do not reach some of the voters.

    Unlike rows, votes are not forwarded. A member with `election_mode` off need not be followed. A member whose options
    are unknown is still reported: whether or not it votes, the others cannot elect a leader without it once they are
    too few for a quorum of all members.
    """
    if replica_set.failover != "election":
        return
    links = {(link.follower, link.master) for link in replica_set.links}
    # A member that is loading has no upstreams yet, whatever its `replication` lists.
    voters = [
        one
        for one in replica_set.members
        if one.id
        and one.report is not None
        and one.report.status != "loading"
        and not is_cut_off(one)
        and _mode(one) not in (None, "off")
    ]
    for member in replica_set.members:
        if not member.id or _mode(member) == "off" or (_mode(member) is None and not is_alive(replica_set, member)):
            continue
        deaf = [one for one in voters if one is not member and (one.uuid, member.uuid) not in links]
        if deaf:
            yield _votes_do_not_come(replica_set, member, deaf)


def _votes_do_not_come(replica_set: ReplicaSet, member: Member, deaf: Sequence[Member]) -> Finding:
    names, label = " and ".join(one.label for one in deaf), member.label
    do, their, them = ("does", "its", "it") if len(deaf) == 1 else ("do", "their", "them")
    is_known = _mode(member) is not None
    what = "its votes do not reach" if is_known else "if it votes, its votes do not reach"
    unknown = "" if is_known else " and its `election_mode` could not be read"
    is_missing = f"is missing from {their} `replication`"
    listed = set_replication(deaf[0].address if len(deaf) == 1 else None)
    advice = f"add {label} to `replication` of {names}: {listed}"
    if any(_may_wait_for(one.report) for one in deaf):
        is_missing += f", or has not answered {them} yet"
        advice = f"check the network from {names} to {label}; if {their} `replication` does not list {label}, add it: "
        advice += listed
    if not is_known:
        advice += "; if it only serves reads, let it join as an anonymous replica, which does not count for a quorum"
    return make(
        replica_set,
        Kind.NOT_FOLLOWED,
        Severity.WARNING,
        member,
        f"{names} {do} not follow {label}: {what} {them}",
        f"{label} is a member and counts for the quorum, but {is_missing}{unknown}; a vote "
        f"reaches only the followers of the voter, so elections may fail although enough members run",
        advice,
        [f"{one.label} has no upstream {label}" for one in deaf],
        peer=deaf[0].uuid,
    )


# --- `_cluster` ---


def _expelled(replica_set: ReplicaSet) -> Iterator[Finding]:
    uuids = expelled([one.report for one in replica_set.members if one.report is not None])
    registered = [one for one in replica_set.members if one.report is not None and one.id]
    for member in replica_set.members:
        if member.uuid in uuids:
            yield _not_registered(replica_set, member, [one for one in registered if one is not member])


def _not_registered(replica_set: ReplicaSet, member: Member, others: Sequence[Member]) -> Finding:
    names = " and ".join(one.label for one in others)
    return make(
        replica_set,
        Kind.NOT_REGISTERED,
        Severity.STOPPED,
        member,
        f"{member.label} runs, but is not a member of the replica set",
        f"`_cluster` of {names} has no row for it: it was expelled",
        f"stop it; to bring it back, run `flowstone rebootstrap DIR {for_command(others[0].address)}` on its data "
        f"directory, then start it",
        [f"{member.label} is at {position(member.vclock)}"],
    )
