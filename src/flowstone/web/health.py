"""The health of a process, for probes and for people: whether it is ready, and what is wrong.

Pure. `is_ready` is about this process: it does its job. `reasons` list more: problems that will soon make it fail, or
that keep others from following it. An unreachable peer is not a reason, because its own probe reports that, unless it
is the leader, keeps the node from being ready, or was the last one connected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from flowstone.node.statistics import DiskUsage, Statistics
from flowstone.observation.findings.connection_findings import (
    has_upstreams,
    is_alone,
    is_master,
    lacks_upstreams,
    other_members,
)
from flowstone.observation.findings.disk_findings import FREE_BYTES_MIN
from flowstone.observation.places import place_of
from flowstone.observation.replica_set import FOLLOWING, missing_row_count
from flowstone.observation.report import Report
from flowstone.web.peer_complaints import Complaint


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is the status of a node, or the connection state of an archive or a mirror."""

    state: str
    is_ready: bool
    reasons: tuple[str, ...] = ()

    @property
    def is_well(self) -> bool:
        return self.is_ready and not self.reasons


_STARTING: Final = "node has not started yet"
_ORPHAN: Final = "node is an orphan: it is not in sync with enough peers and accepts no writes"
_NO_UPSTREAM: Final = "node follows no other member"
_ALONE: Final = f"{_NO_UPSTREAM} and has no followers"
_LACKS_ROWS: Final = f"{_NO_UPSTREAM} and lacks rows that its followers have"


def starting_health(*, has_data: bool, complaints: Sequence[Complaint]) -> Health:
    """Return the health of a node that is still starting. With `has_data` it waits for its peers and can be read
    meanwhile: it is an orphan."""
    reasons = (_ORPHAN if has_data else _STARTING, *dict.fromkeys(complaint.text for complaint in complaints))
    return Health(state="orphan" if has_data else "starting", is_ready=False, reasons=reasons)


def node_health(
    report: Report, statistics: Statistics, usage: DiskUsage | OSError, complaints: Sequence[Complaint] = ()
) -> Health:
    """Return the health of a running node.

    `usage` is the error if the disk could not be queried; `complaints` are the latest log messages about its peers.
    """
    wal = statistics.wal.failure
    outcast = _of_membership(report)
    reasons = [
        *_of_status(report),
        *outcast,
        *_of_followers(report),
        *_of_leader(report),
        *_of_upstreams(report),
        *_of_complaints(report, complaints),
        *([f"WAL write failed: {wal}"] if wal is not None else []),
        *_of_disk(usage),
    ]
    is_ready = report.status == "running" and wal is None and not outcast
    return Health(state=report.status, is_ready=is_ready, reasons=tuple(reasons))


def _of_status(report: Report) -> list[str]:
    if report.status == "orphan":
        return [_ORPHAN]
    return [] if report.status == "running" else [f"node is {report.status}"]


def _of_membership(report: Report) -> list[str]:
    """Return why the node receives no rows although no link fails: it was expelled, or follows no other member."""
    if report.status != "running":
        return []
    if not report.id:
        is_anonymous = (report.cfg or {"replication_anon": True}).get("replication_anon", False)
        return [] if is_anonymous else ["node is not a member of its replica set: it was expelled"]
    if lacks_upstreams(report):
        return [f"{_ALONE if is_alone(report) else _NO_UPSTREAM}: it gets no rows"]
    return [_LACKS_ROWS] if _lacks_rows(report) else []


def _of_followers(report: Report) -> list[str]:
    """Return a warning if a master has no connected replica: its new rows have no copy. It keeps accepting writes."""
    if report.status != "running" or not report.id or not (is_alone(report) and is_master(report)):
        return []
    return [f"{_ALONE}: no replica has its new rows"]


def _lacks_rows(report: Report) -> bool:
    """Return True if the node has no upstream, and a follower has acknowledged rows that the node does not have."""
    sides = [peer.downstream for peer in other_members(report) if peer.downstream is not None]
    return not has_upstreams(report) and any(
        side.status in FOLLOWING and missing_row_count(side.vclock, report.vclock) for side in sides
    )


def _of_leader(report: Report) -> list[str]:
    """Return a reason if there is no leader, or no connection to it.

    The second check is needed because a node without a quorum starts no new term and reports a dead leader forever.
    """
    mode, election = (report.cfg or {}).get("election_mode", "off"), report.election
    if election is None or mode == "off":
        return []
    if not election.leader:
        return [f"no leader in term {election.term}"]
    sides = [peer.upstream for peer in report.replication if peer.id == election.leader]
    is_connected = election.leader == report.id or any(side and side.status in FOLLOWING for side in sides)
    return [] if is_connected else [f"no connection to the leader of term {election.term}, replica {election.leader}"]


def _of_upstreams(report: Report) -> list[str]:
    """Return a reason for each upstream that is stopped: it does not reconnect by itself."""
    sides = [(peer.id, peer.upstream) for peer in report.replication if peer.upstream is not None]
    return [
        f"replication from replica {replica_id} is stopped: {side.message or side.status}"
        for replica_id, side in sides
        if side.status == "stopped"
    ]


def _of_complaints(report: Report, complaints: Sequence[Complaint]) -> list[str]:
    """Return the complaints about peers that are not among the upstreams of the report: they belong to another replica
    set, or have never answered. For an orphan, include reasons about members, because they explain why it is an
    orphan."""
    upstreams = [peer.upstream for peer in report.replication if peer.upstream is not None]
    statuses = {place_of(side.peer): side.status for side in upstreams if side.peer is not None}
    told: dict[str, None] = {}
    for complaint in complaints:
        status = statuses.get(place_of(complaint.address))
        if report.status == "orphan":
            is_reason = status not in (*FOLLOWING, "stopped")
        else:
            is_reason = status is None and complaint.is_final
        if is_reason:
            told[complaint.text] = None
    return list(told)


def _of_disk(usage: DiskUsage | OSError) -> list[str]:
    if isinstance(usage, OSError):
        place = f"{usage.filename}: " if usage.filename else ""
        return [f"cannot read the data directory: {place}{usage.strerror or usage}"]
    free = {"wal_dir": usage.wal_free_bytes, "memtx_dir": usage.memtx_free_bytes}
    return [
        f"disk of {name} is nearly full: {room // 1024**2} MiB free"
        for name, room in free.items()
        if room < FREE_BYTES_MIN
    ]
