"""Findings about the disk of a node: a log that cannot be written, or too little space for the next one.

Pure; a part of `observation/explanation.py`. Only nodes report their disk; a real server shows nothing until a follower
stops, which `link_causes.py` explains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.findings.link_causes import set_again
from flowstone.observation.findings.wording import bytes_text, make
from flowstone.observation.replica_set import Member, ReplicaSet
from flowstone.observation.report import Report

FREE_BYTES_MIN: Final = 256 * 1024 * 1024
"""Size of one log with the default `wal_max_size`: with less free space, the next log may not fit."""

_NO_ROOM: Final = re.compile(r"No space left on device|Disk quota exceeded|File too large")


def disk_findings(replica_set: ReplicaSet, member: Member, report: Report) -> Iterator[Finding]:
    """Yield at most one finding: log not writable, directory not readable, or disk nearly full."""
    if report.wal is not None:
        yield _failing(replica_set, member, report)
    elif report.disk is not None:
        yield from _room(replica_set, member, report)


def _failing(replica_set: ReplicaSet, member: Member, report: Report) -> Finding:
    assert report.wal is not None
    failure, failures = report.wal.failure, report.wal.failures
    is_full = _NO_ROOM.search(failure) is not None
    times = "1 write has" if failures == 1 else f"{failures} writes have"
    # A stopped upstream sends no more rows, so no further write would show that the disk works again.
    stopped = [peer.uuid for peer in report.replication if peer.upstream and peer.upstream.status == "stopped"]
    look = (
        f"free space on the disk with the logs of {member.label}"
        if is_full
        else f"check the disk of {member.label} and the system log"
    )
    if stopped:
        names = " and ".join(map(replica_set.label_of, stopped))
        result = f"Each was rolled back, and replication from {names} has stopped: it does not resume by itself"
        advice = f"{look}, then {set_again(member.label, member.address)}"
    else:
        result = "Each was rolled back, and its client got an error"
        advice = f"{look}; the next write shows whether the log works again"
    return make(
        replica_set,
        Kind.DISK_FULL if is_full else Kind.LOG_FAILING,
        Severity.STOPPED,
        member,
        f"{member.label} cannot write its log",
        f"the last write failed: {failure}; {times} failed since it started. {result}",
        advice,
        [f"{member.label}: {times} failed, the last one with {failure}"],
    )


def _room(replica_set: ReplicaSet, member: Member, report: Report) -> Iterator[Finding]:
    disk = report.disk
    assert disk is not None
    if disk.failure is not None:
        what = f"{member.label} cannot read its directories"
        advice = f"check the disk of {member.label} and the permissions of its directories"
        yield make(replica_set, Kind.LOG_FAILING, Severity.WARNING, member, what, disk.failure, advice, [])
        return
    free = {"wal_dir": disk.wal_free_bytes, "memtx_dir": disk.memtx_free_bytes}
    short = {name: room for name, room in free.items() if room is not None and room < FREE_BYTES_MIN}
    if short:
        rooms = " and ".join(f"{bytes_text(room)} left for {name}" for name, room in short.items())
        yield make(
            replica_set,
            Kind.DISK_FULL,
            Severity.WARNING,
            member,
            f"the disk of {member.label} is nearly full",
            f"{rooms}, less than the {bytes_text(FREE_BYTES_MIN)} that one log may take",
            f"free space on the disk with the data of {member.label} before writes fail",
            [],
        )
