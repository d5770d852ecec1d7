"""Explains from the reports of servers why a replica has stopped or lags: replica sets in, findings out.

Pure, and cheap enough to run on every survey, as it relies on one moment only. `investigation.py` starts from these
findings and adds what takes further queries (the rows of a conflict, the rate of catching up, the files). Servers may
report data of any shape; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from flowstone.observation.findings.connection_findings import connection_findings, is_cut_off
from flowstone.observation.findings.disk_findings import disk_findings
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.findings.lag_findings import lag_findings
from flowstone.observation.findings.link_causes import (
    END_ONE,
    Between,
    Cause,
    cause_of,
    conflict_in,
    log_not_written,
    quoted,
)
from flowstone.observation.findings.queue_findings import queue_findings
from flowstone.observation.findings.wording import expel, make, position, rows_text, seconds_text, set_option
from flowstone.observation.replica_set import FOLLOWING, Link, Member, ReplicaSet, missing_row_count, most_behind
from flowstone.observation.report import Report, ReportedConsumer, ReportedPeer

SILENT_SECONDS: Final = 2.0
"""Idle time after which a link counts as silent: masters send a heartbeat every `replication_timeout`, usually 1 s."""

RETENTION_ROWS: Final = 10_000
"""From this number of kept rows on, `retention` is reported in addition to the reason why the member lacks them."""

SKEW_SECONDS: Final = 2.0
SKEW_MAX: Final = 1e8
"""A lag of years is no skew: the follower has received nothing yet, or heartbeats without a timestamp."""

_MUTUAL: Final = {
    Kind.UNREACHABLE: "cannot reach each other",
    Kind.SPLIT_BRAIN: "have diverged and do not follow each other",
}
"""Problems that two members may report of each other, worded for both."""

_ORDER: Final = {severity: number for number, severity in enumerate(Severity)}


def explain(sets: Sequence[ReplicaSet]) -> tuple[Finding, ...]:
    """Return the findings about the replica sets, the worst first."""
    findings = [finding for replica_set in sets for finding in _of_set(replica_set)]
    return in_order(findings)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort the findings: the worst first, and causes before their consequences, which is the order of the kinds.

    A lost quorum comes before its causes: until it is restored, no member can be expelled and nothing else repaired.
    """
    kinds = [Kind.QUORUM_LOST, *(kind for kind in Kind if kind is not Kind.QUORUM_LOST)]
    return tuple(sorted(findings, key=lambda one: (_ORDER[one.severity], kinds.index(one.kind))))


def _of_set(replica_set: ReplicaSet) -> list[Finding]:
    found = list(_of_causes(replica_set))
    return [*found, *lag_findings(replica_set, found)]


def _of_causes(replica_set: ReplicaSet) -> Iterator[Finding]:
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
    """Report a member that could not be queried from here; other members may still reach it."""
    assert member.unreachable is not None
    reason, hint = member.unreachable.reason, member.unreachable.hint
    label = member.label
    evidence = [f"query to {member.unreachable.address}: {quoted(reason)}", *_links_told(replica_set, member)]
    is_alive = any(link.is_following for link in _links_of(replica_set, member))
    if member.unreachable.is_denied:
        kind = cause_of(reason, Between("flowstone", label)).kind
        kind = kind if kind in (Kind.NO_RIGHTS, Kind.WRONG_PASSWORD) else Kind.NO_RIGHTS
        what, why = f"{label} cannot be queried", f"it denies access: {quoted(reason)}"
        advice = hint or "check user and password, and grant the user the right to call `box.info`"
        return make(replica_set, kind, Severity.WARNING, member, what, why, advice, evidence)
    if is_alive:
        what = f"{label} replicates, but does not answer queries from here"
        why = f"the query failed: {quoted(reason)}; other members reach it"
        advice = hint or "check the address, and whether its port is open from here"
        return make(replica_set, Kind.UNREACHABLE, Severity.WARNING, member, what, why, advice, evidence)
    if cause_of(reason, Between("flowstone", label)).kind is Kind.STARTING:
        what, why = f"{label} is starting", f"it answers: {quoted(reason)}"
        advice = "wait; its log shows the progress, and which member refuses its join"
        return make(replica_set, Kind.STARTING, Severity.WARNING, member, what, why, advice, evidence)
    if "refused" in reason:
        state, look = "it does not run, or listens elsewhere", "start it, or check its log for why it exited"
    else:
        state = "it hangs, or the network to it is broken"
        look = "check whether its process or its machine hangs, and whether its port is open from here"
    advice = hint or f"{look}; if it is gone for good, {expel(replica_set, member)}"
    what, why = f"{label} is unreachable", f"{quoted(reason)}: {state}"
    return make(replica_set, Kind.UNREACHABLE, Severity.STOPPED, member, what, why, advice, evidence)


def _is_seen_by_nobody(replica_set: ReplicaSet, member: Member) -> bool:
    """Return True if no server has a link with the member, and all masters, which would show one, were queried."""
    if not member.id or any(True for _ in _links_of(replica_set, member)):
        return False
    answered = {one.uuid for one in replica_set.members if one.report is not None}
    if all(is_cut_off(one) for one in replica_set.members if one.report is not None):
        return False  # no member that answered could know of a link
    return all(link.master in answered for link in replica_set.links)


def _gone(replica_set: ReplicaSet, member: Member) -> Finding:
    return make(
        replica_set,
        Kind.UNREACHABLE,
        Severity.WARNING,
        member,
        f"{member.label} is a member of the replica set, but has no connection to any other member",
        f"it has id {member.id} in `_cluster`, but none of the queried servers follows it or is followed by it",
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
        advice = "wait; its log shows the progress"
        yield make(replica_set, Kind.STARTING, Severity.WARNING, member, what, "it is reading its files", advice, [])
    yield from disk_findings(replica_set, member, report)
    if member.copy is not None:
        yield _copied(replica_set, member, member.copy)
    if report.gc is not None and not is_expelled:
        for consumer in report.gc.consumers:
            yield from _retention(replica_set, member, report, consumer)
    for peer in report.replication:
        yield from _clock_skew(replica_set, member, peer)


def _copied(replica_set: ReplicaSet, member: Member, other: str) -> Finding:
    """Report two processes with one UUID.

    Both may follow at first, but then each loses the rows of the other: no member keeps two rows with one LSN.
    """
    what = f"two processes run as one member: {member.label} and {other}"
    why = f"both have the UUID {member.uuid}: one runs on a copy of the other's data directory"
    return make(replica_set, Kind.COPIED_INSTANCE, Severity.STOPPED, member, what, why, END_ONE, [])


def _orphan(replica_set: ReplicaSet, member: Member, report: Report) -> Finding:
    waiting = [peer for peer in report.replication if peer.upstream and peer.upstream.status != "follow"]
    names = ", ".join(replica_set.label_of(peer.uuid) for peer in waiting)
    why = (
        f"it has not caught up with {names}"
        if waiting
        else "it has reached too few of the servers in its `replication` since it started; `box.info` does not show "
        "servers that it never reached"
    )
    advice = (
        f"start the servers that it waits for, or correct its `replication`; to continue without them: "
        f"{set_option(member.address, 'replication_connect_quorum', 0)} (2.6 to 2.10, bootstrap_strategy legacy), or "
        f"remove them from its `replication`"
    )
    told = [_upstream_told(replica_set, peer) for peer in waiting]
    what = f"{member.label} is an orphan: it accepts no writes"
    return make(replica_set, Kind.ORPHAN, Severity.STOPPED, member, what, why, advice, told)


def _retention(
    replica_set: ReplicaSet, member: Member, report: Report, consumer: ReportedConsumer
) -> Iterator[Finding]:
    """Find logs that are kept for a member that does not receive them."""
    uuid = consumer.replica_uuid
    peer = next((one for one in report.replication if one.uuid == uuid), None)
    if uuid is None or peer is None or (peer.downstream is not None and peer.downstream.status in FOLLOWING):
        return
    kept = missing_row_count(report.vclock, consumer.vclock)
    if kept == 0:
        return
    gone = replica_set.member(uuid)
    is_told = gone is not None and (gone.report is not None or gone.unreachable is not None)
    if is_told and kept < RETENTION_ROWS:
        return  # another finding says that it is unreachable, or why it does not follow
    label = replica_set.label_of(uuid)
    yield make(
        replica_set,
        Kind.RETENTION,
        Severity.WARNING,
        member,
        f"{member.label} keeps its logs for {label}, which does not follow it: its disk will fill",
        f"{label} has the rows up to {position(consumer.vclock)}; the logs with the next {rows_text(kept)}, up to "
        f"{position(report.vclock)}, are not deleted until {label} receives these rows or is expelled",
        f"bring {label} back; if it is gone for good, {expel(replica_set, gone)}",
        [f"box.info.gc() of {member.label}: consumer {quoted(consumer.name)} at {position(consumer.vclock)}"],
        peer=uuid,
    )


def _clock_skew(replica_set: ReplicaSet, member: Member, peer: ReportedPeer) -> Iterator[Finding]:
    """Report rows and heartbeats that arrive now, but carry a timestamp of another time."""
    upstream = peer.upstream
    if upstream is None or upstream.status not in FOLLOWING or upstream.lag is None or peer.uuid == member.uuid:
        return
    lag, idle = upstream.lag, upstream.idle or 0.0
    link = next((one for one in replica_set.links_to(member.uuid) if one.master == peer.uuid), None)
    is_late = lag > SKEW_SECONDS + idle and link is not None and link.lag_lsn == 0
    back = _lag_back(replica_set, member, peer)
    if is_late and back is not None and back >= -SKEW_SECONDS:
        return  # the rows are late: if the clocks differed, the lag in the other direction would be negative
    if not (lag < -SKEW_SECONDS or is_late) or abs(lag) > SKEW_MAX:
        return
    label = replica_set.label_of(peer.uuid)
    when, theirs, ours = ("in the future", "fast", "slow") if lag < 0 else ("in the past", "slow", "fast")
    yield make(
        replica_set,
        Kind.CLOCK_SKEW,
        Severity.WARNING,
        member,
        f"the clocks of {label} and {member.label} differ: the lag in seconds is wrong by the difference",
        f"the last message, received {seconds_text(idle)} ago, has a timestamp {seconds_text(abs(lag))} {when}: the "
        f"clock of {label} is {theirs}, or that of {member.label} is {ours}",
        "synchronize the clocks of both machines with NTP. Rows are not affected, but a server that starts stays an "
        "orphan while the lag exceeds `replication_sync_lag`",
        [_upstream_told(replica_set, peer)],
        peer=peer.uuid,
    )


def _lag_back(replica_set: ReplicaSet, member: Member, peer: ReportedPeer) -> float | None:
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
        if link.is_failed:
            finding = _failed(replica_set, link, follower, master)
            if finding.kind is Kind.COPIED_INSTANCE and follower.copy is not None:
                continue  # `_copied` reports it with both addresses
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
    """Merge the findings of two members that report the same problem of each other."""
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
    """Return True if the link needs no finding: the follower is reported as unreachable, or is anonymous."""
    return follower.report is None and (follower.unreachable is not None or not follower.id)


def _failed(replica_set: ReplicaSet, link: Link, follower: Member, master: Member) -> Finding:
    """Report a failed link by the follower's message, or by the master's if the follower was not queried."""
    side = _side(follower, master)
    between = between_of(replica_set, follower, master)
    message = link.message or f"the link is {link.status}, without a message"
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
    """Return the cause of a lost connection that only the master reports: the master runs, so the follower is down."""
    why = f"its connection to {master.label} ended ({quoted(message)}); it was not queried: its address is unknown here"
    advice = (
        f"check whether {follower.label} runs, and its log for why it exited or cannot reconnect (full disk, wrong "
        f"password); add its address to `flowstone explain` to find out more. If it is gone for good, "
        f"{expel(replica_set, follower)}"
    )
    return Cause(Kind.UNREACHABLE, Severity.STOPPED, why, advice)


def between_of(replica_set: ReplicaSet, follower: Member, master: Member) -> Between:
    """Describe a failed link, with everything about the set that the advice depends on."""
    return Between(
        follower.label,
        master.label,
        master.address,
        follower.address,
        replica_set.uuid,
        # The upstreams of a master that did not answer are unknown.
        gets_back=master.report is None or replica_set.gets_rows_of(master.uuid, follower.uuid),
        conflicting=tuple(replica_set.label_of(link.follower) for link in replica_set.links if _is_conflict(link)),
    )


def _is_conflict(link: Link) -> bool:
    return not link.is_following and conflict_in(link.message or "") is not None


def _teller(follower: Member, master: Member) -> str:
    """Return which end of the link reports the message."""
    return f"upstream at {follower.label}" if follower.report is not None else f"downstream at {master.label}"


def _side(follower: Member, master: Member) -> str | None:
    """Return the message of the operating system, if the link reports one."""
    report, other = (follower.report, master) if follower.report is not None else (master.report, follower)
    peer = next((one for one in report.replication if one.uuid == other.uuid), None) if report is not None else None
    if peer is None:
        return None
    side = peer.upstream if follower.report is not None else peer.downstream
    return side.system_message if side is not None else None


def _not_there(replica_set: ReplicaSet, master: Member, links: Sequence[Link]) -> Finding:
    """Report a member that others cannot reach and that was not queried, once for all of them."""
    followers = ", ".join(replica_set.label_of(link.follower) for link in links)
    reasons = "; ".join(dict.fromkeys(quoted(link.message or link.status) for link in links))
    return make(
        replica_set,
        Kind.UNREACHABLE,
        Severity.STOPPED,
        master,
        f"{master.label} is unreachable",
        f"{followers} cannot reach it: {reasons}",
        f"start it, or check its log for why it exited; if it is gone for good, {expel(replica_set, master)}",
        _links_told(replica_set, master),
    )


def _behind(replica_set: ReplicaSet, link: Link, follower: Member, master: Member) -> Finding:
    lag, idle, missing = link.lag or 0.0, link.idle or 0.0, link.lag_lsn or 0
    if idle >= SILENT_SECONDS:
        why = f"it has received nothing from {master.label} for {seconds_text(idle)}: the network is broken or "
        why += f"congested, or the process of {master.label} hangs"
    else:
        why = f"rows arrive, the last one {seconds_text(idle)} ago, but late: it applies them more slowly than they "
        why += "arrive, or the network is too slow"
    return make(
        replica_set,
        Kind.BEHIND,
        Severity.BEHIND,
        follower,
        f"{follower.label} lags {master.label} by {rows_text(missing)} and {seconds_text(lag)}",
        why,
        f"check the load and the disk of {follower.label}, and the network between the two; `flowstone explain` with "
        f"both addresses measures how fast it catches up",
        [f"{one.label} is at {position(one.vclock)}" for one in (follower, master)],
        peer=master.uuid,
    )


# --- evidence ---


def _links_of(replica_set: ReplicaSet, member: Member) -> Iterator[Link]:
    return (link for link in replica_set.links if member.uuid in (link.follower, link.master))


def _links_told(replica_set: ReplicaSet, member: Member) -> list[str]:
    return [
        f"{replica_set.label_of(link.follower)} from {replica_set.label_of(link.master)}: {link.status}"
        + (f": {quoted(link.message)}" if link.message else "")
        for link in _links_of(replica_set, member)
    ]


def _upstream_told(replica_set: ReplicaSet, peer: ReportedPeer) -> str:
    assert peer.upstream is not None
    upstream = peer.upstream
    times = f"lag {seconds_text(upstream.lag or 0.0)}, idle {seconds_text(upstream.idle or 0.0)}"
    said = f": {quoted(upstream.message)}" if upstream.message else ""
    return f"upstream {replica_set.label_of(peer.uuid)}: {upstream.status}, {times}{said}"
