"""Judges the promises of reports (docs/reference/findings.md): no problem without a finding, and no false alarm.

Every registered member reaches the leader's vclock within PROMISE_SECONDS, or a finding gives the reason. If every
member runs, follows and has all rows, there is no finding.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flowstone.iproto.uri import parse_uri
from flowstone.observation.explanation import explain
from flowstone.observation.findings.connection_findings import is_cut_off
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.replica_set import Member, ReplicaSet, missing_row_count, replica_sets
from flowstone.observation.report import VClock
from flowstone.observation.survey import Survey
from flowstone.outside import production

PROMISE_SECONDS: Final = 30.0
ANSWER_SECONDS: Final = 2.0
LOOKS: Final = 3
"""A finding must be missing in this many consecutive polls: members answer one by one, and one poll may fall
in between.
"""

OF_FOLLOWERS: Final = frozenset(
    {
        # The link for the rows of `member` has failed.
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
        Kind.REPLICATION_STOPPED,
        # There is no such link, or rows arrive too slowly.
        Kind.NOT_FOLLOWING,
        Kind.BEHIND,
        # `member` does not run, cannot be queried, or has not caught up since its start.
        Kind.UNREACHABLE,
        Kind.STARTING,
        Kind.ORPHAN,
        Kind.COPIED_INSTANCE,
        # `member` cannot write rows to its log.
        Kind.DISK_FULL,
        Kind.LOG_FAILING,
        # `member` does not know the new owner of the queue.
        Kind.TWO_OWNERS,
    }
)
"""Findings that explain why rows do not reach `Finding.member`."""

IF_STOPPED: Final = frozenset({Kind.DISK_FULL, Kind.LOG_FAILING})
"""Of these, only severity `stopped` explains anything: a nearly full disk takes all rows, and so does one whose free
space cannot be determined. All nodes under chaos have small disks, and therefore a permanent warning."""

OF_PAIRS: Final = frozenset({Kind.SPLIT_BRAIN, Kind.UNREACHABLE, Kind.TWO_OWNERS, Kind.LOST_ROWS})
"""One finding for two members that do not follow each other: it explains `Finding.peer`, too, if that one does not
follow `Finding.member` either. Rows that `peer` has lost are rows that it lacks."""

NEVER: Final = frozenset(
    {
        # Missing votes, retained logs and wrong clocks do not affect the transfer of rows.
        Kind.NOT_FOLLOWED,
        Kind.RETENTION,
        Kind.CLOCK_SKEW,
        # There are no commits or writes: rows in the leader's log are still sent to its followers.
        Kind.QUORUM_LOST,
        Kind.QUEUE_WAITS,
        Kind.QUEUE_ABANDONED,
        Kind.NO_LEADER,
        Kind.READ_ONLY,
        # These findings are about files, which are not checked here.
        Kind.DAMAGED_LOG,
        Kind.TORN_LOG,
        Kind.NO_SNAPSHOT,
        Kind.MIXED_DIRECTORY,
        Kind.LEFTOVER_FILES,
        Kind.UNDECIDED,
        Kind.FORKED,
        # This finding is about a lake.
        Kind.MISFITS,
    }
)
"""Findings that do not explain why a member lacks rows."""

OF_READINESS: Final = frozenset({Kind.ORPHAN, Kind.DISK_FULL, Kind.LOG_FAILING, Kind.NOT_FOLLOWING, Kind.UNREACHABLE})
"""Findings of severity `stopped` that make a node not ready. A node does not learn by itself that it was expelled while
it was away, or that another process has its UUID."""


def is_explained(replica_set: ReplicaSet, member: Member, findings: Sequence[Finding]) -> bool:
    """Return True if a finding says why rows do not reach the member."""
    return any(_explains(finding, replica_set, member) for finding in findings)


def _explains(finding: Finding, replica_set: ReplicaSet, member: Member) -> bool:
    if finding.kind not in OF_FOLLOWERS:
        return False
    if finding.kind in IF_STOPPED and finding.severity is not Severity.STOPPED:
        return False
    if finding.member == member.uuid:
        return True
    return finding.kind in OF_PAIRS and finding.peer == member.uuid and not _follows(replica_set, member, finding)


def _follows(replica_set: ReplicaSet, member: Member, finding: Finding) -> bool:
    links = replica_set.links_to(member.uuid)
    return any(link.is_following for link in links if link.master == finding.member)


def target_of(replica_set: ReplicaSet) -> VClock:
    """Return the position that every member has to reach: the leader's, or the largest of all."""
    leader = next((one for one in replica_set.members if one.is_leader and one.report is not None), None)
    return leader.vclock if leader is not None else replica_set.vclock


def is_whole(replica_set: ReplicaSet) -> bool:
    """Return True if the set is whole: every registered member answers and runs, is the only one with its UUID, follows
    its configured upstreams, has all rows, and requires no quorum larger than the set. Only a master has an empty
    `replication`, and no expelled member runs.
    """
    registered = [one for one in replica_set.members if one.id]
    reports = [one.report for one in registered if one.report is not None]
    masters = [one for one in registered if one.report is not None and one.report.upstreams_configured == 0]
    return (
        not any(one.copy for one in registered)
        and len(masters) <= 1
        and all(one.is_leader or one.mode == "rw" for one in masters)
        and not any(one.report is not None and one.report.id and not one.id for one in replica_set.members)
        and all((report.quorum_of(len(registered)) or 0) <= len(registered) for report in reports)
        and all(one.report is not None and one.report.status == "running" for one in registered)
        and all(link.is_following for link in replica_set.links)
        and not any(missing_row_count(replica_set.vclock, one.vclock) for one in registered)
        and replica_set.master != "no"
        and not (replica_set.queue is not None and replica_set.queue.len)
        and bool(replica_set.failover != "election" or replica_set.leader)
    )


def false_alarms(replica_set: ReplicaSet, findings: Sequence[Finding]) -> list[str]:
    """Return the false alarms: findings about a whole set, except that a disk is nearly full; clock skew on one
    machine; and missing votes of members that do not vote, or whose votes arrive.
    """
    is_calm = is_whole(replica_set)
    ours = [finding for finding in findings if finding.replicaset == replica_set.uuid]
    false = [
        finding
        for finding in ours
        if finding.kind is Kind.CLOCK_SKEW or (is_calm and finding.severity is not Severity.WARNING)
    ]
    false += [
        finding
        for finding in (*ours, *_seen_by_each(replica_set))
        if finding.kind is Kind.NOT_FOLLOWED and not _is_unheard(replica_set, finding)
    ]
    return [f"false alarm {finding.kind.value}: {finding.what}; {finding.why}" for finding in false]


def false_readiness(replica_set: ReplicaSet, findings: Sequence[Finding], ready: Mapping[str, bool]) -> list[str]:
    """Return nodes that are ready although a finding prevents them from serving, or not ready in a whole set.

    `ready` is what `/health/ready` answered, by the address of the node.
    """
    found, is_calm = [], is_whole(replica_set)
    for member in replica_set.members:
        is_ready = ready.get(member.address or "")
        stopped = [finding for finding in findings if _is_about_itself(finding, member)]
        if is_ready:
            found += [f"{member.label} is ready, but found is {one.kind.value}: {one.what}" for one in stopped]
        elif is_ready is False and is_calm and not stopped:
            found.append(f"{member.label} is not ready, and its replica set is whole")
    return found


def _is_about_itself(finding: Finding, member: Member) -> bool:
    """Return True if the finding prevents the node from serving, whatever its peers do: a failed link does not."""
    if finding.member != member.uuid or finding.severity is not Severity.STOPPED or finding.kind not in OF_READINESS:
        return False
    return finding.peer is None or (finding.kind is Kind.NOT_FOLLOWING and is_cut_off(member))


def _seen_by_each(replica_set: ReplicaSet) -> list[Finding]:
    """Return the false findings of `explain` if only one member answers, for each member: it must not guess."""
    reports = [member.report for member in replica_set.members if member.report is not None]
    return [finding for report in reports for finding in explain(replica_sets([report]))]


def _is_unheard(replica_set: ReplicaSet, finding: Finding) -> bool:
    """Return True if `peer` of the finding votes, is not loading, and has no link to `member`, which is registered.

    If only one member answers, it is unknown whether `member` votes; if all answer, it must.
    """
    heard = replica_set.member(finding.peer) if finding.peer is not None else None
    member = replica_set.member(finding.member)
    if heard is None or heard.report is None or heard.report.status == "loading" or not _may_vote(heard):
        return False
    if member is None or not member.id or not ("if it votes" in finding.what or _may_vote(member)):
        return False
    return (finding.peer, finding.member) not in {(link.follower, link.master) for link in replica_set.links}


def _may_vote(member: Member) -> bool:
    return member.report is not None and (member.report.cfg or {}).get("election_mode", "off") != "off"


@dataclass
class _Due:
    target: VClock
    since: float
    unexplained: int = 0


class Promise:
    """Judges polls in order; `broken` lists broken promises, each once.

    `explained` counts how often a finding was needed: a member lagged for longer than `seconds`. Without any, nothing
    was tested.
    """

    def __init__(self, *, seconds: float = PROMISE_SECONDS) -> None:
        self.broken: list[str] = []
        self.explained = 0
        self._seconds = seconds
        self._due: dict[str, _Due] = {}
        self._alarms: dict[str, int] = {}

    def look(
        self,
        sets: Sequence[ReplicaSet],
        findings: Sequence[Finding],
        now: float,
        ready: Mapping[str, bool] | None = None,
    ) -> None:
        """Judge one poll; `ready` has the answers of `/health/ready` by address, if nodes were queried."""
        alarms = [alarm for one in sets for alarm in false_alarms(one, findings)]
        alarms += [alarm for one in sets for alarm in false_readiness(one, findings, ready or {})]
        self._alarms = {alarm: self._alarms.get(alarm, 0) + 1 for alarm in alarms}
        self._tell(alarm for alarm, count in self._alarms.items() if count == LOOKS)
        for one in sets:
            target = target_of(one)
            for member in one.members:
                if member.id:
                    self._judge(one, member, target, findings, now)

    def is_pending(self) -> bool:
        """Return True if a later poll may find a broken promise."""
        return bool(self._alarms) or any(due.unexplained for due in self._due.values())

    def _judge(
        self, replica_set: ReplicaSet, member: Member, target: VClock, findings: Sequence[Finding], now: float
    ) -> None:
        due = self._due.get(member.uuid)
        # A leader that lost rows, or a new one that never had them, is not a reference position.
        if due is None or not missing_row_count(due.target, member.vclock) or missing_row_count(due.target, target):
            due = self._due[member.uuid] = _Due(target, now)
        missing = missing_row_count(due.target, member.vclock)
        if not missing or is_explained(replica_set, member, findings):
            self.explained += bool(missing) and now - due.since > self._seconds
            due.unexplained = 0
            return
        due.unexplained += 1
        if due.unexplained >= LOOKS and now - due.since > self._seconds:
            told = ", ".join(f"{each.kind.value} {each.label}" for each in findings) or "nothing"
            lag = f"lacks {missing} rows for {now - due.since:.0f} s"
            self._tell([f"no finding explains {member.label}, which {lag} (found: {told})"])
            due.since = now

    def _tell(self, broken: Iterator[str] | list[str]) -> None:
        self.broken += [text for text in broken if text not in self.broken]


async def watch(addresses: Sequence[str], promise: Promise, is_over: Callable[[], bool], pause: float = 1.0) -> None:
    """Poll the servers until `is_over`, at least once, and let `promise` judge."""
    survey = Survey(production(), [parse_uri(address) for address in addresses], timeout=ANSWER_SECONDS)
    try:
        while True:
            sets = await survey.look()
            promise.look(sets, explain(sets), time.monotonic())
            if is_over():
                break
            await asyncio.sleep(pause)
    finally:
        await survey.close()


def broken_promises(addresses: Sequence[str], *, seconds: float = PROMISE_SECONDS, pause: float = 0.2) -> list[str]:
    """Poll until no lag is unexplained, at least once; return the broken promises."""
    promise = Promise(seconds=seconds)

    def is_over() -> bool:
        return bool(promise.broken) or not promise.is_pending()

    asyncio.run(watch(addresses, promise, is_over, pause))
    return promise.broken
