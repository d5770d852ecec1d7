"""Findings about write availability: quorums, elections, the queue of synchronous transactions and its owner.

Pure; a part of `observation/explanation.py`. Servers of 2.6 show no queue; for them only the option
`replication_synchro_quorum` is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from flowstone.observation.findings.connection_findings import is_alive, is_cut_off
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.findings.wording import (
    call,
    expel_command,
    make,
    position,
    promote,
    seconds_text,
    set_option,
)
from flowstone.observation.replica_set import FOLLOWING, Member, ReplicaSet
from flowstone.observation.report import Report

WAIT_SECONDS: Final = 2.0
"""Age from which on a pending transaction is reported although the quorum is available."""


class _Quorum(NamedTuple):
    """The quorum of one member: how many it needs, how many are available including itself, and the missing members."""

    member: Member
    needed: int
    there: int
    missing: tuple[Member, ...]


def queue_findings(replica_set: ReplicaSet) -> Iterator[Finding]:
    """Yield findings about the quorum, the leader and the queue.

    A missing leader, read-only members and a slow queue are not reported if they follow from a lost quorum, an
    abandoned queue or two owners.
    """
    answered = [(member, member.report) for member in replica_set.members if member.report is not None]
    # The term, vote and queue of an expelled server do not count, even if the server does not know of its expulsion.
    reports = [one for one in answered if one[0].id] or answered
    # A member without upstreams cannot tell whether the others have a quorum and a leader.
    reports = [one for one in reports if not is_cut_off(one[0])]
    if not reports:
        return
    found = [
        *_lost_quorums(replica_set, reports),
        *_abandoned(replica_set, reports),
        *_two_owners(replica_set, reports),
    ]
    yield from found
    if not found:
        leaderless = list(_no_leader(replica_set, reports))
        yield from leaderless or _read_only(replica_set, reports)
    yield from _waiting(replica_set, reports, is_explained=bool(found))


_Reports = list[tuple[Member, Report]]


def _quorum_of(replica_set: ReplicaSet, member: Member, report: Report) -> _Quorum | None:
    """Return the quorum of a member; None if it is unknown or the member alone is enough."""
    needed = _needed(replica_set, report)
    if needed is None or needed <= 1:
        return None
    following = {peer.uuid for peer in report.replication if peer.downstream and peer.downstream.status in FOLLOWING}
    registered = [one for one in replica_set.members if one.id and one.uuid != member.uuid]
    missing = tuple(one for one in registered if one.uuid not in following)
    return _Quorum(member, needed, 1 + len(registered) - len(missing), missing)


def _needed(replica_set: ReplicaSet, report: Report) -> int | None:
    if report.queue is not None and report.queue.quorum is not None:
        return report.queue.quorum
    return report.quorum_of(sum(1 for one in replica_set.members if one.id))


def _lost_quorums(replica_set: ReplicaSet, reports: _Reports) -> Iterator[Finding]:
    """Yield a finding if a member that commits synchronous transactions, or an election, lacks its quorum."""
    for member, report in _committers(replica_set, reports):
        quorum = _quorum_of(replica_set, member, report)
        if quorum is not None and quorum.there < quorum.needed:
            yield _lost_quorum(replica_set, quorum, report)
            return
    if not _holds_elections(reports) or replica_set.leader:
        return
    voters = [member for member in replica_set.members if member.id and is_alive(replica_set, member)]
    member, report = _furthest(replica_set, reports)
    needed = _needed(replica_set, report) or len(voters) // 2 + 1
    if len(voters) < needed:
        missing = tuple(one for one in replica_set.members if one.id and one not in voters)
        yield _lost_quorum(replica_set, _Quorum(member, needed, len(voters), missing), report)


def _committers(replica_set: ReplicaSet, reports: _Reports) -> _Reports:
    """Return the owner of the queue, or, if no queue is shown, the writable members that another member follows.

    In 2.6, which shows no queue, every writable member may commit synchronous transactions. A replica is writable by
    default, too, so members without followers count only if no other member is writable.
    """
    owners = [(member, report) for member, report in reports if report.queue and 0 < report.id == report.queue.owner]
    writers = [(member, report) for member, report in reports if report.queue is None and not report.ro]
    followed = {link.master for link in replica_set.links}
    return owners + ([one for one in writers if one[0].uuid in followed] or writers)


def _lost_quorum(replica_set: ReplicaSet, quorum: _Quorum, report: Report) -> Finding:
    label, names = quorum.member.label, ", ".join(one.label for one in quorum.missing) or "none"
    queue = report.queue
    waiting = f"; {_waiting_text(queue.len, queue.age)}" if queue is not None and queue.len else ""
    available = "1 member is" if quorum.there == 1 else f"{quorum.there} members are"
    evidence = [f"quorum {quorum.needed}, available members {quorum.there}"]
    if queue is not None:
        evidence.append(f"queue of {label}: {queue.len} pending, owner {queue.owner}, term {queue.term}")
    return make(
        replica_set,
        Kind.QUORUM_LOST,
        Severity.STOPPED,
        quorum.member,
        f"{label} has lost its quorum: it cannot commit synchronous transactions{waiting}",
        f"the quorum is {quorum.needed}, but only {available} available; missing: {names}",
        _without_the_missing(replica_set, quorum, report),
        evidence,
    )


def lost_quorum(replica_set: ReplicaSet) -> Finding | None:
    """Return the finding about a lost quorum, if any, for callers that find no writable member."""
    return next((one for one in queue_findings(replica_set) if one.kind is Kind.QUORUM_LOST), None)


def _without_the_missing(replica_set: ReplicaSet, quorum: _Quorum, report: Report) -> str:
    """Return the advice to restore the quorum, in this order: without a quorum, no member is elected or expelled."""
    label, gone = quorum.member.label, [one for one in quorum.missing if not is_alive(replica_set, one)]
    left = sum(1 for one in replica_set.members if one.id) - len(gone)
    # A server that shows no queue may be too old to support formulas.
    usual = f"{left // 2 + 1}" if report.queue is None else "N / 2 + 1"
    address, option = quorum.member.address, "replication_synchro_quorum"
    if not quorum.missing:
        return f"all members are available: lower the quorum on {label}: {set_option(address, option, usual)}"
    stopped = " and ".join(one.label for one in quorum.missing if one not in gone)
    let_follow = f"let {stopped} follow {label} again: another finding says why replication stopped" if stopped else ""
    if not gone:
        return let_follow
    names = " and ".join(one.label for one in gone)
    how = set_option(address, option, quorum.there)
    leads = "" if replica_set.leader else _elected(quorum.member, report)
    expelled = " and ".join(expel_command(replica_set, one) for one in gone)
    back = "" if usual == f"{quorum.there}" else f"; then set the quorum back: {set_option(address, option, usual)}"
    return (
        f"{let_follow}{'; ' if let_follow else ''}bring {names} back. Only if gone for good and never to be started "
        f"again, in this order: lower the quorum to the remaining members, on {label}: {how}{leads}; then expel the "
        f"missing members: {expelled}{back}. With a lowered quorum, committed transactions can be lost"
    )


def _elected(member: Member, report: Report) -> str:
    """Return what else makes `member` the leader."""
    mode = (report.cfg or {}).get("election_mode", "off")
    if mode == "candidate":
        return ", and wait until it is elected"
    if mode == "voter":
        command = set_option(member.address, "election_mode", "candidate")
        return f", with `election_mode` set to candidate ({command}), and wait until it is elected"
    return f", and promote it: {promote(member)}" if mode == "manual" else ""


def _waiting_text(count: int, age: float | None) -> str:
    some = "1 transaction is pending" if count == 1 else f"{count} transactions are pending"
    return f"{some}, the oldest for {seconds_text(age)}" if age else some


def _holds_elections(reports: _Reports) -> bool:
    modes = [(report.cfg or {}).get("election_mode") for _, report in reports]
    if any(mode is not None for mode in modes):
        return any(mode in ("candidate", "voter", "manual") for mode in modes)
    return any(report.election is not None and report.election.state != "follower" for _, report in reports)


def _no_leader(replica_set: ReplicaSet, reports: _Reports) -> Iterator[Finding]:
    if not _holds_elections(reports) or replica_set.leader:
        return
    candidates = [
        member for member, report in reports if (report.cfg or {}).get("election_mode", "candidate") == "candidate"
    ]
    why = (
        "enough voters are available: an election is in progress, or no candidate gets a majority because the members "
        "do not all follow each other"
        if candidates
        else "no member is a candidate: `election_mode` is `candidate` on none of them"
    )
    member, report = _furthest(replica_set, reports)
    yield make(
        replica_set,
        Kind.NO_LEADER,
        Severity.STOPPED,
        member,
        "the replica set has no leader: it accepts no writes",
        why,
        f"make sure that every member follows all others; {_let_lead(member, report)}",
        [_election_text(one, report) for one, report in reports],
    )


def _furthest(replica_set: ReplicaSet, reports: _Reports) -> tuple[Member, Report]:
    """Return the member to promote: one that may lead before others, then one with followers, then most rows.

    A member that lacks rows would roll them back on the others; a member without followers gets no votes.
    """
    followed = {link.master for link in replica_set.links}
    return max(reports, key=lambda one: (_may_lead(*one), one[0].uuid in followed, one[1].signature))


def _may_lead(member: Member, report: Report) -> bool:
    return bool(member.id) and (report.cfg or {}).get("election_mode", "candidate") in ("candidate", "manual")


def _let_lead(member: Member, report: Report) -> str:
    """Return the advice to make `member` the leader. Raft rejects the promotion of a voter."""
    if (report.cfg or {}).get("election_mode") == "voter":
        command = set_option(member.address, "election_mode", "candidate")
        return f"set `election_mode` to candidate on {member.label}, which has the most rows ({command})"
    return f"promote the member with the most rows: {promote(member)}"


def _election_text(member: Member, report: Report) -> str:
    election = report.election
    mode = (report.cfg or {}).get("election_mode", "unknown")
    if election is None:
        return f"{member.label}: no elections"
    return f"{member.label}: {election.state} in term {election.term}, vote {election.vote}, election_mode {mode}"


def _abandoned(replica_set: ReplicaSet, reports: _Reports) -> Iterator[Finding]:
    """Yield a finding if synchronous transactions are pending and the owner of the queue is gone."""
    queue = replica_set.queue
    if queue is None or not queue.len:
        return
    owner = next((one for one in replica_set.members if one.id == queue.owner and queue.owner), None)
    if owner is not None:
        is_followed = any(link.master == owner.uuid and link.is_following for link in replica_set.links)
        if owner.report is not None or is_followed:
            return
    label = owner.label if owner is not None else "the owner"
    whose = "no known member"
    if owner is not None:
        whose = f"{label} (replica {queue.owner}) since term {queue.term}, but {label} does not answer"
    holder, report = _furthest(replica_set, reports)
    yield make(
        replica_set,
        Kind.QUEUE_ABANDONED,
        Severity.STOPPED,
        holder,
        f"{_waiting_text(queue.len, queue.age)}, and the owner of the queue is gone",
        f"the queue of synchronous transactions belongs to {whose}",
        f"bring {label} back, or {_let_lead(holder, report)}: this confirms the transactions that a quorum has and "
        f"rolls back the rest (2.6: {call(holder.address, 'box.ctl.clear_synchro_queue')})",
        [_queue_text(one, each) for one, each in reports],
        peer=owner.uuid if owner is not None else None,
    )


def _two_owners(replica_set: ReplicaSet, reports: _Reports) -> Iterator[Finding]:
    """Yield a finding if two members each act as the leader or as the owner of the queue."""
    owners = [
        (member, report)
        for member, report in reports
        if report.id
        and (
            (report.queue is not None and report.queue.owner == report.id and not report.ro)
            or (report.election is not None and report.election.state == "leader")
        )
    ]
    if len(owners) < 2:
        return
    owners.sort(key=lambda one: _term(one[1]))
    (member, report), (newer, newest) = owners[0], owners[-1]
    names = " and ".join(one.label for one, _ in owners)
    yield make(
        replica_set,
        Kind.TWO_OWNERS,
        Severity.STOPPED,
        member,
        f"{names} each act as the leader",
        f"{newer.label} has the newer term {_term(newest)}, but {member.label} is still in term {_term(report)}: they "
        f"cannot reach each other",
        f"send no writes to {member.label}, and restore the connection between the two. Transactions that "
        f"{member.label} has committed alone will cause a split brain when they reconnect: save them (`flowstone cat`)",
        [_queue_text(one, each) for one, each in owners],
        peer=newer.uuid,
    )


def _term(report: Report) -> int:
    """Return the term in which the member became owner or leader; it may only have heard of later terms."""
    if report.queue is not None and report.queue.owner == report.id:
        return report.queue.term
    return report.election.term if report.election is not None else 0


def _queue_text(member: Member, report: Report) -> str:
    queue = report.queue
    owner = f"owner {queue.owner} since term {queue.term}, {queue.len} pending" if queue is not None else "no queue"
    return f"{member.label}: {owner}; at {position(report.vclock)}"


def _read_only(replica_set: ReplicaSet, reports: _Reports) -> Iterator[Finding]:
    """Yield a finding if every member reports itself as read-only."""
    registered = [one for one in replica_set.members if one.id]
    if len(reports) < len(registered) or any(not report.ro for _, report in reports):
        return
    if any(report.status in ("orphan", "loading") for _, report in reports):
        return
    member, report = _furthest(replica_set, reports)
    reasons = {report.ro_reason for _, report in reports}
    unclaimed = any(report.queue is not None and not report.queue.owner for _, report in reports)
    if reasons == {"config"} or reasons == {None}:
        why, advice = (
            "`read_only` is set on every member",
            f"choose the new master: {set_option(member.address, 'read_only', False)}",
        )
    elif unclaimed:
        why, advice = "no member owns the queue of synchronous transactions", _let_lead(member, report)
    else:
        why = "the members report different reasons: " + ", ".join(f"{one.label}: {r.ro_reason}" for one, r in reports)
        advice = _let_lead(member, report)
    told = [f"{one.label}: ro_reason {report.ro_reason}" for one, report in reports]
    what = "no member is writable"
    yield make(replica_set, Kind.READ_ONLY, Severity.WARNING, member, what, why, advice, told)


def _waiting(replica_set: ReplicaSet, reports: _Reports, *, is_explained: bool) -> Iterator[Finding]:
    queue = replica_set.queue
    if is_explained or queue is None or not queue.len or (queue.age or 0.0) < WAIT_SECONDS:
        return
    owner = next((one for one, report in reports if report.id == queue.owner), reports[0][0])
    yield make(
        replica_set,
        Kind.QUEUE_WAITS,
        Severity.BEHIND,
        owner,
        f"{_waiting_text(queue.len, queue.age)}, although the quorum is available",
        f"the quorum{f' of {queue.quorum} members' if queue.quorum else ''} is slow to acknowledge",
        "find the member that lags, and check its disk and its network",
        [f"queue of {owner.label}: {queue.len} pending, owner {queue.owner}, term {queue.term}, age {queue.age}"],
    )
