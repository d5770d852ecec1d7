"""Health of a replica set: all members are up and follow, there is a leader, and no member lags.

Pure. Returns one line per problem; causes and advice are left to `explain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flowstone.observation.findings.connection_findings import connection_findings, is_cut_off
from flowstone.observation.findings.disk_findings import disk_findings
from flowstone.observation.findings.wording import rows_text
from flowstone.observation.replica_set import BEHIND_SECONDS, Link, Member, ReplicaSet, most_behind
from flowstone.observation.report import Unreachable

JOINING: Final = frozenset(
    "connected auth ready register registered wait_snapshot fetch_snapshot fetched_snapshot final_join joined".split()
)
"""States of a link that is being established."""


def complaints(replica_set: ReplicaSet) -> tuple[str, ...]:
    """Return one line per problem of the replica set; nothing if it is healthy."""
    return (
        *_of_set(replica_set),
        *_of_members(replica_set),
        *_of_links(replica_set),
        *(finding.what for finding in connection_findings(replica_set)),
    )


def _of_set(one: ReplicaSet) -> Iterator[str]:
    if _nobody_sees(one):
        return
    if one.failover == "election" and not one.leader:
        yield f"no leader in term {one.term}"
    elif one.master == "no":
        yield "no member is writable"
    queue = one.queue
    if queue is not None and queue.len and (queue.age or 0) > BEHIND_SECONDS:
        yield f"synchronous transactions pending: {queue.len}, the oldest for {queue.age:.0f} s"


def _nobody_sees(one: ReplicaSet) -> bool:
    """Return True if no member that answered can know about the others."""
    return all(is_cut_off(member) for member in one.members if member.report is not None)


def _of_members(one: ReplicaSet) -> Iterator[str]:
    for member in one.members:
        if member.unreachable is not None:
            yield f"{member.label} {_silence(member.unreachable)}"
        elif member.report is None:
            if member.id and not _is_heard_of(one, member) and not _nobody_sees(one):
                yield f"{member.label} has no connection to any other member"
        elif member.report.status != "running":
            yield f"{member.label} has status {member.report.status}, not running"
        if member.report is not None:
            yield from (finding.what for finding in disk_findings(one, member, member.report))
        if member.copy is not None:
            yield f"two processes run as one member: {member.label} and {member.copy}"


def _silence(one: Unreachable) -> str:
    state = "denies access" if one.is_denied else "is unreachable"
    return f"{state}: {one.reason.removeprefix(f'cannot connect to {one.address}: ')}"


def _is_heard_of(one: ReplicaSet, member: Member) -> bool:
    return any(link.is_following for link in one.links if member.uuid in (link.follower, link.master))


def _of_links(one: ReplicaSet) -> Iterator[str]:
    away = {member.uuid for member in one.members if member.report is None and not _is_heard_of(one, member)}
    for link in one.links:
        if not _goes_on(link) and not {link.follower, link.master} & away:  # `_of_members` reports those
            reason = f", {link.message}" if link.message else ""
            yield f"{one.label_of(link.follower)} does not follow {one.label_of(link.master)}: {link.status}{reason}"
    for link in most_behind(filter(_goes_on, one.links)):
        far = f"{rows_text(link.lag_lsn or 0)} and {link.lag:.0f} s"
        yield f"{one.label_of(link.follower)} lags {one.label_of(link.master)} by {far}"


def _goes_on(link: Link) -> bool:
    return link.is_following or link.status in JOINING
