"""What is wrong with who may write: quorums, elections, the queue of synchronous transactions and its owner.

Pure; a part of `explanation.py`. Servers of 2.6 show no queue: there the option `replication_synchro_quorum` is all
there is to go by.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from flowstone.observation.connection_findings import is_alive, is_cut_off
from flowstone.observation.finding import Finding, Kind, Severity
from flowstone.observation.replica_set import FOLLOWING, Member, ReplicaSet
from flowstone.observation.report import Report
from flowstone.observation.wording import expel_command, make, position, promote, seconds_text

WAIT_SECONDS: Final = 2.0
"""A transaction that waits for its quorum longer than this is slow, where the quorum is there."""


class _Quorum(NamedTuple):
    """What one member can count on: `there` are those that would acknowledge its rows, itself among them."""

    member: Member
    needed: int
    there: int
    missing: tuple[Member, ...]


def queue_findings(replica_set: ReplicaSet) -> Iterator[Finding]:
    """At most one of no leader, lost quorum, two owners and read-only, which bring each other about; and the queue."""
    answered = [(member, member.report) for member in replica_set.members if member.report is not None]
    # The term, vote and queue of a server that does not know that it was expelled do not count.
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
    """None where no quorum is asked for: nobody else is needed, or synchronous transactions are not for this one."""
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
    """Yield a finding if those that commit synchronous transactions lack a quorum; in 2.6 any writable member may."""
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
    """Return the owner of the queue, or, where no queue is shown, the writable members that some member follows.

    A replica is writable by default, but synchronous transactions are not meant for one that nobody follows, unless no
    other member is writable."""
    owners = [(member, report) for member, report in reports if report.queue and 0 < report.id == report.queue.owner]
    writers = [(member, report) for member, report in reports if report.queue is None and not report.ro]
    followed = {link.master for link in replica_set.links}
    return owners + ([one for one in writers if one[0].uuid in followed] or writers)


def _lost_quorum(replica_set: ReplicaSet, quorum: _Quorum, report: Report) -> Finding:
    label, names = quorum.member.label, ", ".join(one.label for one in quorum.missing) or "nobody"
    queue = report.queue
    waiting = f"; {_waiting_text(queue.len, queue.age)}" if queue is not None and queue.len else ""
    evidence = [f"quorum {quorum.needed}, there are {quorum.there}"]
    if queue is not None:
        evidence.append(f"queue of {label}: {queue.len} waiting, owner {queue.owner}, term {queue.term}")
    return make(
        replica_set,
        Kind.QUORUM_LOST,
        Severity.STOPPED,
        quorum.member,
        f"{label} has lost its quorum: no synchronous transaction is committed{waiting}",
        f"{quorum.needed} members must have a row before it counts, and only {quorum.there} of them can: "
        f"{names} missing",
        _without_the_missing(replica_set, quorum, report),
        evidence,
    )


def lost_quorum(replica_set: ReplicaSet) -> Finding | None:
    """Why nobody commits, and the way out of it, for who finds no member that can be written to."""
    return next((one for one in queue_findings(replica_set) if one.kind is Kind.QUORUM_LOST), None)


def _without_the_missing(replica_set: ReplicaSet, quorum: _Quorum, report: Report) -> str:
    """The order matters: who has no quorum can expel nobody, and is elected by nobody."""
    label, gone = quorum.member.label, [one for one in quorum.missing if not is_alive(replica_set, one)]
    left = sum(1 for one in replica_set.members if one.id) - len(gone)
    # What shows no queue may be too old for formulas, too.
    usual = f"{left // 2 + 1}" if report.queue is None else "`N / 2 + 1`"
    if not quorum.missing:
        return f"nobody is missing: set `replication_synchro_quorum` on {label} to {usual}"
    stopped = " and ".join(one.label for one in quorum.missing if one not in gone)
    let_follow = f"let {stopped} follow {label} again: what keeps it from that is told, too" if stopped else ""
    if not gone:
        return let_follow
    names = " and ".join(one.label for one in gone)
    setting = f"replication_synchro_quorum = {quorum.there}"
    how = f"`box.cfg{{{setting}}}`"
    if report.is_flowstone:
        how = f"`{setting}` in its file, then SIGHUP; or CALL `box.cfg` with it"
    leads = "" if replica_set.leader else _elected(quorum.member, report)
    expelled = " and ".join(expel_command(replica_set, one) for one in gone)
    back = "" if usual == f"{quorum.there}" else f"; then set `replication_synchro_quorum` back to {usual}"
    return (
        f"{let_follow}{'; ' if let_follow else ''}bring {names} back. Only if gone for good, so that nobody can start "
        f"it again, in this order: lower the quorum to what is left, on {label}: {how}{leads}; then expel who is gone: "
        f"{expelled}{back}. With a lowered quorum, committed transactions can be lost"
    )


def _elected(member: Member, report: Report) -> str:
    """What else it takes for `member` to lead."""
    mode = (report.cfg or {}).get("election_mode", "off")
    if mode == "candidate":
        return ", and wait until it is elected"
    if mode == "voter":
        return ", with `election_mode` set to candidate, and wait until it is elected"
    return f", and promote it: {promote(member)}" if mode == "manual" else ""


def _waiting_text(count: int, age: float | None) -> str:
    some = "1 transaction waits" if count == 1 else f"{count} transactions wait"
    return f"{some}, the first for {seconds_text(age)}" if age else some


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
        "enough voters are there: an election is under way, or none of them gets a majority because they do not all "
        "follow each other"
        if candidates
        else "no member stands for election by itself: election_mode is `candidate` nowhere"
    )
    member, report = _furthest(replica_set, reports)
    yield make(
        replica_set,
        Kind.NO_LEADER,
        Severity.STOPPED,
        member,
        "the set has no leader: it takes no writes",
        why,
        f"see that every member follows every other; {_let_lead(member, report)}",
        [_election_text(one, report) for one, report in reports],
    )


def _furthest(replica_set: ReplicaSet, reports: _Reports) -> tuple[Member, Report]:
    """Return the member to promote: preferably one that may lead, then one with followers, then the one with most rows.

    A member that lacks rows would roll them back on the others; a member without followers gets no votes.
    """
    followed = {link.master for link in replica_set.links}
    return max(reports, key=lambda one: (_may_lead(*one), one[0].uuid in followed, one[1].signature))


def _may_lead(member: Member, report: Report) -> bool:
    return bool(member.id) and (report.cfg or {}).get("election_mode", "candidate") in ("candidate", "manual")


def _let_lead(member: Member, report: Report) -> str:
    """Raft refuses to promote a voter."""
    if (report.cfg or {}).get("election_mode") == "voter":
        return f"set `election_mode` to candidate on {member.label}, which has most"
    return f"promote who has most: {promote(member)}"


def _election_text(member: Member, report: Report) -> str:
    election = report.election
    mode = (report.cfg or {}).get("election_mode", "unknown")
    if election is None:
        return f"{member.label}: no elections"
    return f"{member.label}: {election.state} in term {election.term}, vote {election.vote}, election_mode {mode}"


def _abandoned(replica_set: ReplicaSet, reports: _Reports) -> Iterator[Finding]:
    """What waits was written by somebody who is not there to decide about it."""
    queue = replica_set.queue
    if queue is None or not queue.len:
        return
    owner = next((one for one in replica_set.members if one.id == queue.owner and queue.owner), None)
    if owner is not None:
        is_followed = any(link.master == owner.uuid and link.is_following for link in replica_set.links)
        if owner.report is not None or is_followed:
            return
    label = owner.label if owner is not None else "nobody"
    holder, report = _furthest(replica_set, reports)
    yield make(
        replica_set,
        Kind.QUEUE_ABANDONED,
        Severity.STOPPED,
        holder,
        f"{_waiting_text(queue.len, queue.age)} for a verdict, and its owner is not there",
        f"the queue of synchronous transactions belongs to {label}"
        + (f" (replica {queue.owner}) since term {queue.term}, which does not answer" if owner is not None else ""),
        f"bring {label} back, or {_let_lead(holder, report)}: that confirms what a quorum has and takes back the rest "
        f"(2.6: `box.ctl.clear_synchro_queue()` there)",
        [_queue_text(one, each) for one, each in reports],
        peer=owner.uuid if owner is not None else None,
    )


def _two_owners(replica_set: ReplicaSet, reports: _Reports) -> Iterator[Finding]:
    """Two that each believe to own the queue, or to lead: they have not heard of each other yet."""
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
        f"{names} each hold themselves for the one that may write",
        f"{newer.label} has the newer term {_term(newest)}, and {member.label}, still in term {_term(report)}, has not "
        f"heard of it: they do not reach each other",
        f"send no writes to {member.label}, and let the two reach each other again. What {member.label} has committed "
        f"alone meanwhile makes a split brain of it when they meet: save it (`flowstone cat`)",
        [_queue_text(one, each) for one, each in owners],
        peer=newer.uuid,
    )


def _term(report: Report) -> int:
    """In which it became what it holds itself for: of terms that came since, it has only heard."""
    if report.queue is not None and report.queue.owner == report.id:
        return report.queue.term
    return report.election.term if report.election is not None else 0


def _queue_text(member: Member, report: Report) -> str:
    queue = report.queue
    owner = f"owner {queue.owner} since term {queue.term}, {queue.len} waiting" if queue is not None else "no queue"
    return f"{member.label}: {owner}; at {position(report.vclock)}"


def _read_only(replica_set: ReplicaSet, reports: _Reports) -> Iterator[Finding]:
    """Nobody takes writes, by the word of every member."""
    registered = [one for one in replica_set.members if one.id]
    if len(reports) < len(registered) or any(not report.ro for _, report in reports):
        return
    if any(report.status in ("orphan", "loading") for _, report in reports):
        return
    member, report = _furthest(replica_set, reports)
    reasons = {report.ro_reason for _, report in reports}
    unclaimed = any(report.queue is not None and not report.queue.owner for _, report in reports)
    if reasons == {"config"} or reasons == {None}:
        why, advice = "`read_only` is set on every member", "`box.cfg{read_only = false}` on the one that shall lead"
    elif unclaimed:
        why, advice = "nobody owns the queue of synchronous transactions", _let_lead(member, report)
    else:
        why = "each has a reason of its own: " + ", ".join(f"{one.label}: {r.ro_reason}" for one, r in reports)
        advice = _let_lead(member, report)
    told = [f"{one.label}: ro_reason {report.ro_reason}" for one, report in reports]
    what = "no member of the set takes writes"
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
        f"{_waiting_text(queue.len, queue.age)} for a quorum, although its members are there",
        f"{queue.quorum or 'enough'} members must acknowledge, and are slow to",
        "see which of them is behind, and the disks and the network of those",
        [f"queue at {owner.label}: {queue.len} waiting, owner {queue.owner}, term {queue.term}, age {queue.age}"],
    )
