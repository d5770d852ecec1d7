"""Why a replica is stopped or behind, from what the servers report: replica sets in, findings out.

Pure, and cheap enough to be called with every look at the servers: what it concludes, it concludes from one moment.
Whatever needs a question more (the rows of a conflict, how fast somebody catches up, the files) is for
`investigation.py`, which begins with what is found here. What a server says is data of any shape: nothing is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from flowstone.observation.connection_findings import connection_findings, is_cut_off
from flowstone.observation.disk_findings import disk_findings
from flowstone.observation.finding import Finding, Kind, Severity
from flowstone.observation.link_causes import END_ONE, Between, Cause, cause_of, conflict_in, log_not_written, quoted
from flowstone.observation.queue_findings import queue_findings
from flowstone.observation.replica_set import FOLLOWING, Link, Member, ReplicaSet, missing_rows, most_behind
from flowstone.observation.report import Consumer, Peer, Report
from flowstone.observation.wording import expel, make, position, rows_text, seconds_text

FAILED: Final = frozenset({"stopped", "disconnected", "loading"})

SILENT_SECONDS: Final = 2.0
"""Who is followed is heard every `replication_timeout`, a second unless told otherwise."""

RETENTION_ROWS: Final = 10_000
"""So many rows kept for a member are worth a word beside the reason for which it does not take them."""

SKEW_SECONDS: Final = 2.0
SKEW_MAX: Final = 1e8
"""A lag of years is that of who has heard nothing yet, or of heartbeats that tell no time."""

_MUTUAL: Final = {
    Kind.UNREACHABLE: "do not reach each other",
    Kind.SPLIT_BRAIN: "have gone different ways, and do not follow each other",
}
"""What two members may say of each other, in words for both."""

_ORDER: Final = {severity: number for number, severity in enumerate(Severity)}


def explain(sets: Sequence[ReplicaSet]) -> tuple[Finding, ...]:
    """What is wrong, the worst first; empty where nothing is."""
    findings = [finding for replica_set in sets for finding in _of_set(replica_set)]
    return in_order(findings)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first, and causes before what they bring about, which is the order of the kinds.

    A lost quorum is before its causes: until it is there again, nobody is expelled, and nothing else is put right.
    """
    kinds = [Kind.QUORUM_LOST, *(kind for kind in Kind if kind is not Kind.QUORUM_LOST)]
    return tuple(sorted(findings, key=lambda one: (_ORDER[one.severity], kinds.index(one.kind))))


def _of_set(replica_set: ReplicaSet) -> Iterator[Finding]:
    for member in replica_set.members:
        if member.unreachable is not None:
            yield _unreachable(replica_set, member)
        elif member.report is not None:
            yield from _of_member(replica_set, member, member.report)
        elif _is_seen_by_nobody(replica_set, member):
            yield _gone(replica_set, member)
    links = list(_of_links(replica_set))
    yield from links
    told = {(finding.kind, finding.member) for finding in links}
    yield from (one for one in connection_findings(replica_set) if (one.kind, one.member) not in told)
    is_split = any(finding.kind is Kind.SPLIT_BRAIN for finding in links)
    yield from (one for one in queue_findings(replica_set) if not (is_split and one.kind is Kind.TWO_OWNERS))


# --- members ---


def _unreachable(replica_set: ReplicaSet, member: Member) -> Finding:
    """We cannot ask it. Others may reach it all the same."""
    assert member.unreachable is not None
    reason, hint = member.unreachable.reason, member.unreachable.hint
    label = member.label
    evidence = [f"asked at {member.unreachable.address}: {quoted(reason)}", *_links_told(replica_set, member)]
    is_alive = any(link.is_following for link in _links_of(replica_set, member))
    if member.unreachable.is_denied:
        kind = cause_of(reason, Between("flowstone", label)).kind
        kind = kind if kind in (Kind.NO_RIGHTS, Kind.WRONG_PASSWORD) else Kind.NO_RIGHTS
        what, why = f"{label} cannot be asked how it is", f"it refuses us: {quoted(reason)}"
        advice = hint or "check user and password, and grant the user the right to call `box.info`"
        return make(replica_set, kind, Severity.WARNING, member, what, why, advice, evidence)
    if is_alive:
        what, why = f"{label} does not answer us, but replicates", f"from here: {quoted(reason)}; members reach it"
        advice = hint or "check the address, and whether its port is open from here"
        return make(replica_set, Kind.UNREACHABLE, Severity.WARNING, member, what, why, advice, evidence)
    if cause_of(reason, Between("flowstone", label)).kind is Kind.STARTING:
        what, why = f"{label} is starting", f"it answers: {quoted(reason)}"
        advice = "wait; its log tells how far it is, and who does not let it join"
        return make(replica_set, Kind.STARTING, Severity.WARNING, member, what, why, advice, evidence)
    if "refused" in reason:
        state, look = "it does not run, or listens elsewhere", "start it, or see its log for why it ended"
    else:
        state = "it hangs, or the way to it is cut"
        look = "see whether its process or its machine stands still, and whether its port is open from here"
    advice = hint or f"{look}; if it is gone for good, {expel(replica_set, member)}"
    what, why = f"{label} is not there", f"{quoted(reason)}: {state}"
    return make(replica_set, Kind.UNREACHABLE, Severity.STOPPED, member, what, why, advice, evidence)


def _is_seen_by_nobody(replica_set: ReplicaSet, member: Member) -> bool:
    """Nobody whom it could follow, and nobody who could follow it, has a connection; we have asked all of them."""
    if not member.id or any(True for _ in _links_of(replica_set, member)):
        return False
    answered = {one.uuid for one in replica_set.members if one.report is not None}
    if all(is_cut_off(one) for one in replica_set.members if one.report is not None):
        return False  # no member that answered could have seen it
    return all(link.master in answered for link in replica_set.links)


def _gone(replica_set: ReplicaSet, member: Member) -> Finding:
    return make(
        replica_set,
        Kind.UNREACHABLE,
        Severity.WARNING,
        member,
        f"{member.label} is a member of the set, and nobody has a connection with it",
        f"it is row {member.id} of `_cluster`, and no server that was asked follows it or is followed by it",
        f"start it; if it is gone for good, {expel(replica_set, member)}",
        [],
    )


def _of_member(replica_set: ReplicaSet, member: Member, report: Report) -> Iterator[Finding]:
    # An expelled member must neither continue alone nor expel others: it is reported as not registered.
    is_expelled = bool(report.id) and not member.id
    if report.status == "orphan" and not is_expelled:
        yield _orphan(replica_set, member, report)
    elif report.status == "loading":
        what = f"{member.label} is starting"
        advice = "wait; its log tells how far it is"
        yield make(replica_set, Kind.STARTING, Severity.WARNING, member, what, "it reads its files", advice, [])
    yield from disk_findings(replica_set, member, report)
    if member.copy is not None:
        yield _copied(replica_set, member, member.copy)
    if report.gc is not None and not is_expelled:
        for consumer in report.gc.consumers:
            yield from _retention(replica_set, member, report, consumer)
    for peer in report.replication:
        yield from _clock_skew(replica_set, member, peer)


def _copied(replica_set: ReplicaSet, member: Member, other: str) -> Finding:
    """Both may follow at first, and each then loses what the other writes: nobody keeps two rows with one number."""
    what = f"two processes run as one member: {member.label} and {other}"
    why = f"both have the UUID {member.uuid}: one runs on a copy of the other's data directory"
    return make(replica_set, Kind.COPIED_INSTANCE, Severity.STOPPED, member, what, why, END_ONE, [])


def _orphan(replica_set: ReplicaSet, member: Member, report: Report) -> Finding:
    waiting = [peer for peer in report.replication if peer.upstream and peer.upstream.status != "follow"]
    names = ", ".join(replica_set.label_of(peer.uuid) for peer in waiting)
    why = (
        f"it has not caught up with {names}"
        if waiting
        else "it has reached too few of the servers in its `replication` since it started; those that it never "
        "reached are not shown by `box.info`"
    )
    advice = (
        "bring back whom it waits for, or correct `replication` there; to go on without them: "
        "`box.cfg{replication_connect_quorum = 0}` (2.6 to 2.10, bootstrap_strategy legacy), or leave them out of "
        "`replication`"
    )
    told = [_upstream_told(replica_set, peer) for peer in waiting]
    what = f"{member.label} is an orphan: it takes no writes"
    return make(replica_set, Kind.ORPHAN, Severity.STOPPED, member, what, why, advice, told)


def _retention(replica_set: ReplicaSet, member: Member, report: Report, consumer: Consumer) -> Iterator[Finding]:
    """Logs are kept for a member that does not take them."""
    uuid = consumer.replica_uuid
    peer = next((one for one in report.replication if one.uuid == uuid), None)
    if uuid is None or peer is None or (peer.downstream is not None and peer.downstream.status in FOLLOWING):
        return
    kept = missing_rows(report.vclock, consumer.vclock)
    if kept == 0:
        return
    gone = replica_set.member(uuid)
    is_told = gone is not None and (gone.report is not None or gone.unreachable is not None)
    if is_told and kept < RETENTION_ROWS:
        return  # what is in its way is told, or that it is not there
    label = replica_set.label_of(uuid)
    yield make(
        replica_set,
        Kind.RETENTION,
        Severity.WARNING,
        member,
        f"{member.label} keeps its logs for {label}, which does not follow it: its disk will fill",
        f"{label} has the rows up to {position(consumer.vclock)}; the {rows_text(kept)} behind that, up to "
        f"{position(report.vclock)}, may not be deleted until it takes them or is no member any more",
        f"bring {label} back; if it is gone for good, {expel(replica_set, gone)}",
        [f"box.info.gc() of {member.label}: consumer {quoted(consumer.name)} at {position(consumer.vclock)}"],
        peer=uuid,
    )


def _clock_skew(replica_set: ReplicaSet, member: Member, peer: Peer) -> Iterator[Finding]:
    """Rows and heartbeats come right now, and carry a time that is not now."""
    upstream = peer.upstream
    if upstream is None or upstream.status not in FOLLOWING or upstream.lag is None or peer.uuid == member.uuid:
        return
    lag, idle = upstream.lag, upstream.idle or 0.0
    link = next((one for one in replica_set.links_to(member.uuid) if one.master == peer.uuid), None)
    is_late = lag > SKEW_SECONDS + idle and link is not None and link.lag_lsn == 0
    back = _lag_back(replica_set, member, peer)
    if is_late and back is not None and back >= -SKEW_SECONDS:
        return  # the rows were late: with wrong clocks, the lag in the other direction would be negative
    if not (lag < -SKEW_SECONDS or is_late) or abs(lag) > SKEW_MAX:
        return
    label = replica_set.label_of(peer.uuid)
    ahead = "ahead of" if lag < 0 else "behind"
    yield make(
        replica_set,
        Kind.CLOCK_SKEW,
        Severity.WARNING,
        member,
        f"the clocks of {label} and {member.label} differ: the lag in seconds is wrong by that",
        f"what came {seconds_text(idle)} ago carries a time {seconds_text(abs(lag))} {'ahead' if lag < 0 else 'ago'}: "
        f"the clock of {label} is {ahead} that of {member.label}",
        "let both machines take their time from NTP. Rows are not harmed by it, but a server that starts stays an "
        "orphan for as long as the lag is above `replication_sync_lag`",
        [_upstream_told(replica_set, peer)],
        peer=peer.uuid,
    )


def _lag_back(replica_set: ReplicaSet, member: Member, peer: Peer) -> float | None:
    """Return the lag of `member`'s rows at `peer`; None if `peer` does not follow it, or did not answer."""
    other = replica_set.member(peer.uuid)
    peers = other.report.replication if other is not None and other.report is not None else ()
    sides = (one.upstream for one in peers if one.uuid == member.uuid)
    return next((side.lag for side in sides if side is not None and side.status in FOLLOWING), None)


# --- links ---


def _of_links(replica_set: ReplicaSet) -> Iterator[Finding]:
    unreached: dict[str, list[Link]] = {}
    going: list[tuple[Link, Member, Member]] = []
    parted: dict[tuple[str, str], Finding] = {}
    for link in replica_set.links:
        follower, master = replica_set.member(link.follower), replica_set.member(link.master)
        if follower is None or master is None or _is_told_already(follower):
            continue
        if link.status in FAILED or (link.message and not link.is_following):
            finding = _failed(replica_set, link, follower, master)
            if finding.kind is Kind.COPIED_INSTANCE and follower.copy is not None:
                continue  # it is told with both addresses
            if finding.kind is Kind.UNREACHABLE and master.report is None:
                unreached.setdefault(master.uuid, []).append(link)
            elif finding.kind in _MUTUAL:
                parted[link.follower, link.master] = finding
            else:
                yield finding
        else:
            going.append((link, follower, master))
    worst = most_behind(link for link, _, _ in going)
    yield from (_behind(replica_set, *one) for one in going if one[0] in worst)
    yield from _parted(parted)
    for uuid, links in unreached.items():
        master = replica_set.member(uuid)
        if master is not None and master.unreachable is None:
            yield _not_there(replica_set, master, links)


def _parted(found: dict[tuple[str, str], Finding]) -> Iterator[Finding]:
    """Two that say the same of each other are one finding."""
    for (follower, master), finding in found.items():
        back = found.get((master, follower))
        if back is None or back.kind is not finding.kind:
            yield finding
        elif follower < master:
            what = f"{finding.label} and {back.label} {_MUTUAL[finding.kind]}"
            evidence = tuple(dict.fromkeys((*finding.evidence, *back.evidence)))
            same, _, rest = back.why.partition("; ")
            more = rest if rest and finding.why.startswith(same) else back.why
            yield msgspec.structs.replace(finding, what=what, why=f"{finding.why}; {more}", evidence=evidence)


def _is_told_already(follower: Member) -> bool:
    """A master's word on a follower that does not answer anyhow; and anonymous ones come and go."""
    return follower.report is None and (follower.unreachable is not None or not follower.id)


def _failed(replica_set: ReplicaSet, link: Link, follower: Member, master: Member) -> Finding:
    """The follower says why; or the master, of one that we have not asked."""
    side = _side(follower, master)
    between = between_of(replica_set, follower, master)
    message = link.message or f"the link is {link.status}, and nobody says why"
    is_silent = link.message is None and link.status == "stopped" and follower.report is not None
    cause = log_not_written(between) if is_silent else cause_of(message, between, side)
    if follower.report is None and cause.kind is Kind.REPLICATION_STOPPED:
        cause = cause_of("closed by the other side", between)
    evidence = [
        f"{_teller(follower, master)}: {link.status}: {quoted(message if side is None else f'{message}: {side}')}"
    ]
    evidence += [f"{one.label} is at {position(one.vclock)}" for one in (follower, master) if one.vclock]
    if follower.report is None and cause.kind is Kind.UNREACHABLE:
        cause = _gone_away(replica_set, follower, master, message)
    return make(
        replica_set,
        cause.kind,
        cause.severity,
        follower,
        f"{follower.label} does not follow {master.label}",
        cause.why,
        cause.advice,
        evidence,
        peer=master.uuid,
    )


def _gone_away(replica_set: ReplicaSet, follower: Member, master: Member, message: str) -> Cause:
    """A connection that ended, by the word of the master alone: it answers, so it is the follower that is not there."""
    why = f"its connection to {master.label} ended ({quoted(message)}); it was not asked: its address is not known here"
    advice = (
        f"see whether {follower.label} runs, and its log for why it ended or cannot come back: full disk, wrong "
        f"password; `flowstone explain` with its address, too, says more. If it is gone for good, "
        f"{expel(replica_set, follower)}"
    )
    return Cause(Kind.UNREACHABLE, Severity.STOPPED, why, advice)


def between_of(replica_set: ReplicaSet, follower: Member, master: Member) -> Between:
    """Who cannot follow whom, with what of the set it depends on what may be done about it."""
    return Between(
        follower.label,
        master.label,
        master.address,
        follower.address,
        replica_set.uuid,
        # Of a master that did not answer nobody knows whom it follows.
        gets_back=master.report is None or replica_set.gets_rows_of(master.uuid, follower.uuid),
        conflicting=tuple(replica_set.label_of(link.follower) for link in replica_set.links if _is_conflict(link)),
        is_node=follower.report.is_flowstone if follower.report is not None else None,
    )


def _is_conflict(link: Link) -> bool:
    return not link.is_following and conflict_in(link.message or "") is not None


def _teller(follower: Member, master: Member) -> str:
    """Whose word it is."""
    return f"upstream at {follower.label}" if follower.report is not None else f"downstream at {master.label}"


def _side(follower: Member, master: Member) -> str | None:
    """What the operating system said."""
    report, other = (follower.report, master) if follower.report is not None else (master.report, follower)
    peer = next((one for one in report.replication if one.uuid == other.uuid), None) if report is not None else None
    if peer is None:
        return None
    side = peer.upstream if follower.report is not None else peer.downstream
    return side.system_message if side is not None else None


def _not_there(replica_set: ReplicaSet, master: Member, links: Sequence[Link]) -> Finding:
    """One finding for a member that several cannot reach, and that we were not told to ask."""
    followers = ", ".join(replica_set.label_of(link.follower) for link in links)
    reasons = "; ".join(dict.fromkeys(quoted(link.message or link.status) for link in links))
    return make(
        replica_set,
        Kind.UNREACHABLE,
        Severity.STOPPED,
        master,
        f"{master.label} is not there",
        f"{followers} cannot reach it: {reasons}",
        f"start it, or see its log for why it ended; if it is gone for good, {expel(replica_set, master)}",
        _links_told(replica_set, master),
    )


def _behind(replica_set: ReplicaSet, link: Link, follower: Member, master: Member) -> Finding:
    lag, idle, missing = link.lag or 0.0, link.idle or 0.0, link.lag_lsn or 0
    if idle >= SILENT_SECONDS:
        why = f"it has heard nothing from {master.label} for {seconds_text(idle)}: the way is cut or clogged, or the "
        why += f"process of {master.label} stands still"
    else:
        why = f"rows come, the last of them {seconds_text(idle)} ago, but later than they are written: it applies them "
        why += "more slowly than they come, or the network is too slow for them"
    return make(
        replica_set,
        Kind.BEHIND,
        Severity.BEHIND,
        follower,
        f"{follower.label} is behind {master.label} by {rows_text(missing)} and {seconds_text(lag)}",
        why,
        f"see load and disk of {follower.label} and the network between the two; `flowstone explain` with both "
        f"addresses measures how fast it catches up",
        [f"{one.label} is at {position(one.vclock)}" for one in (follower, master)],
        peer=master.uuid,
    )


# --- words ---


def _links_of(replica_set: ReplicaSet, member: Member) -> Iterator[Link]:
    return (link for link in replica_set.links if member.uuid in (link.follower, link.master))


def _links_told(replica_set: ReplicaSet, member: Member) -> list[str]:
    return [
        f"{replica_set.label_of(link.follower)} from {replica_set.label_of(link.master)}: {link.status}"
        + (f": {quoted(link.message)}" if link.message else "")
        for link in _links_of(replica_set, member)
    ]


def _upstream_told(replica_set: ReplicaSet, peer: Peer) -> str:
    assert peer.upstream is not None
    upstream = peer.upstream
    times = f"lag {seconds_text(upstream.lag or 0.0)}, idle {seconds_text(upstream.idle or 0.0)}"
    said = f": {quoted(upstream.message)}" if upstream.message else ""
    return f"upstream {replica_set.label_of(peer.uuid)}: {upstream.status}, {times}{said}"
