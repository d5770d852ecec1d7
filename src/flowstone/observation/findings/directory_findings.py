"""Findings about directories of log files: about each of them, and about pairs of them.

Relies on what `observation/log_directory.py` has read. A problem that keeps a server from starting is `stopped`; one
that only affects followers and restores is a warning.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Final

from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.findings.fork import Alone, Fork, are_used_twice, common_point, unlogged
from flowstone.observation.findings.link_causes import END_ONE, quoted
from flowstone.observation.findings.wording import bytes_text, position, rows_text
from flowstone.observation.log_directory import Directory, digests_of, transactions_behind
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import LogGap
from flowstone.xlog.reader import EndingKind
from flowstone.xlog.transactions import CONTROL_TYPES

SPACE_MIN: Final = 16 << 20
"""Free bytes below which a server is about to stop: a log is written in chunks, and a row may be large."""

COMPARED_MAX: Final = 1000
"""Limit of transactions after the fork point that are kept of each side."""

FORCE: Final = "`force_recovery = true` (`--force-recovery`) starts a server without the damaged or missing rows"

KEEP_ONE: Final = (
    "decide which side to keep, save the rows that only the other side has (`flowstone cat`), and rejoin the other "
    "side: `flowstone rebootstrap DIR URI`"
)

COVERED: Final = (
    "a server still starts from the snapshot, but members that need these rows must rejoin, and no moment in between "
    "can be restored; if logs were moved away, bring them back"
)
"""Advice about rows that are in the newest snapshot, but in no log."""


def directory_findings(directory: Directory) -> list[Finding]:
    """Return the findings about one directory."""
    return [
        *_damage(directory),
        *_torn(directory),
        *_gaps(directory),
        *_snapshots(directory),
        *_mixed(directory),
        *_leftovers(directory),
        *_space(directory),
        *_undecided(directory),
    ]


def _make(
    directory: Directory,
    kind: Kind,
    severity: Severity,
    what: str,
    why: str,
    advice: str,
    evidence: Iterable[str] = (),
    *,
    peer: str | None = None,
) -> Finding:
    return Finding(
        kind=kind,
        severity=severity,
        member=directory.path,
        label=directory.path,
        what=what,
        why=why,
        advice=advice,
        evidence=tuple(evidence),
        replicaset=directory.replicaset_uuid,
        peer=peer,
    )


def _rejoin(directory: Directory) -> str:
    return f"`flowstone rebootstrap {directory.path} URI`, then start the server"


def _severity(directory: Directory, path: str) -> Severity:
    """Return `stopped` for a file that a server needs to start, `warning` for one that only followers may request."""
    return Severity.STOPPED if path in directory.needed() else Severity.WARNING


def _damage(directory: Directory) -> Iterator[Finding]:
    found: dict[str, list[str]] = {}
    for error in directory.unreadable:
        found.setdefault(error.path, []).append(f"byte {error.offset or 0}: {quoted(error.message)}")
    for skipped in (*directory.report.skipped, *directory.report.unread):
        found.setdefault(skipped.path, []).append(f"bytes {skipped.offset} to {skipped.end}: {quoted(skipped.why)}")
    for path, places in found.items():
        places = list(dict.fromkeys(places))
        yield _make(
            directory,
            Kind.DAMAGED_LOG,
            _severity(directory, path),
            f"{path} is damaged",
            f"at {places[0]}" + (f", and in {len(places) - 1} more places" if len(places) > 1 else ""),
            f"take the data from another member: {_rejoin(directory)}. If no other member has the data: {FORCE}, and "
            f"`flowstone cat --force` prints the readable rows",
            [f"{path}: {place}" for place in places],
        )
    if directory.failure is not None and not found:
        yield _make(
            directory,
            Kind.DAMAGED_LOG,
            Severity.STOPPED,
            f"the log in {directory.path} cannot be read to its end",
            quoted(directory.failure.message),
            directory.failure.hint or "take the data from another member",
        )


def _torn(directory: Directory) -> Iterator[Finding]:
    """Yield files that end within a block, except the log that a running process is writing."""
    newest = directory.logs[-1].path if directory.logs else None
    for path, ending in directory.report.endings.items():
        if ending.kind is not EndingKind.TORN or (path == newest and directory.is_in_use):
            continue
        is_last = path == newest
        advice = (
            "nothing to do after a crash: a server that starts here skips the torn block, and no client got an "
            "acknowledgement for its rows unless wal_mode was `none` or the disk lost confirmed writes"
            if is_last
            else "the rows after the torn block are missing from this history: take them from another member"
        )
        yield _make(
            directory,
            Kind.TORN_LOG,
            Severity.WARNING if is_last else _severity(directory, path),
            f"{path} ends in the middle of a block",
            f"it is intact up to byte {ending.offset}; the last {ending.lost} bytes are not a complete block: "
            f"{ending.what}",
            advice,
            [f"{path}: torn at byte {ending.offset}, {ending.lost} bytes lost"],
        )


def _gaps(directory: Directory) -> Iterator[Finding]:
    """Yield gaps between logs. Rows that a rejoining instance received in a snapshot are a gap only in an archive."""
    for gap in directory.report.gaps:
        is_covered = directory.has_snapshot_of(VClock(gap.need))
        if is_covered and not directory.is_archive and not directory.lacks_file_before(gap.path):
            continue
        yield _make(
            directory,
            Kind.LOG_GAP,
            Severity.WARNING if is_covered else _severity(directory, gap.path),
            f"rows are missing before {gap.path}",
            f"the logs before it end at {position(gap.have)}, but it starts at {position(gap.need)}; missing are "
            f"{_missing(gap)}" + ("; the newest snapshot covers these rows" if is_covered else ""),
            COVERED
            if is_covered
            else f"restore the missing .xlog files, or take the data from another member: {_rejoin(directory)}. "
            f"Without them, {FORCE}",
            [gap.message],
        )


def _missing(gap: LogGap) -> str:
    count = sum(last - first + 1 for _, first, last in gap.missing)
    ranges = ", ".join(f"{first}…{last} of replica {number}" for number, first, last in gap.missing)
    return f"{rows_text(count)} ({ranges})" if gap.missing else "an unknown number of rows"


def _snapshots(directory: Directory) -> Iterator[Finding]:
    newest = directory.listing.newest_snapshot()
    if newest is None and not directory.has_definitions:
        yield _make(
            directory,
            Kind.NO_SNAPSHOT,
            Severity.STOPPED,
            f"no snapshot in {directory.path}: no server can start from it",
            f"its logs start at {position(directory.start.to_mapping())}, and no file contains the data before that",
            "bring the newest .snap file back (memtx_dir may differ from wal_dir), or rejoin the instance",
        )
    if newest is None or not directory.logs or newest.path in {error.path for error in directory.unreadable}:
        return
    at = VClock(newest.meta.vclock).without_zero()
    if at <= directory.end_of_logs or not (directory.is_archive or _is_log_lost(directory)):
        return
    yield _make(
        directory,
        Kind.LOG_GAP,
        Severity.WARNING,
        f"the newest snapshot in {directory.path} is newer than all logs",
        f"{posixpath.basename(newest.path)} is at {position(at.to_mapping())}, the logs end at "
        f"{position(directory.end_of_logs.to_mapping())}: the rows in between are in no log here",
        COVERED,
    )


def _is_log_lost(directory: Directory) -> bool:
    """Return True if more than one snapshot is newer than the last log.

    An instance continues after a snapshot in a log of the same name, so the log of the first of them is lost. A single
    newer snapshot means that the instance rejoined and has not written since.
    """
    last = directory.logs[-1].signature
    return sum(snapshot.signature > last for snapshot in directory.listing.snapshots) > 1


def _mixed(directory: Directory) -> Iterator[Finding]:
    if directory.foreign:
        files = ", ".join(posixpath.basename(file.path) for file, _ in directory.foreign[:5])
        yield _make(
            directory,
            Kind.MIXED_DIRECTORY,
            Severity.STOPPED,
            f"{directory.path} contains files of several instances",
            f"it belongs to instance {directory.instance_uuid}, but also contains files of {directory.foreign[0][1]}: "
            f"{files}",
            "move the foreign files away: each instance needs a directory of its own",
            [f"{file.path}: written by instance {uuid}" for file, uuid in directory.foreign],
        )


def _leftovers(directory: Directory) -> Iterator[Finding]:
    if directory.listing.leftovers and not directory.is_in_use:
        names = ", ".join(posixpath.basename(path) for path in directory.listing.leftovers[:5])
        yield _make(
            directory,
            Kind.LEFTOVER_FILES,
            Severity.WARNING,
            f"{directory.path} contains incomplete files",
            f"a process exited while it was writing a snapshot or creating a log: {names}",
            "delete them: no server reads them",
            directory.listing.leftovers,
        )


def _space(directory: Directory) -> Iterator[Finding]:
    newest = directory.listing.newest_snapshot()
    snapshot_size = newest.disk.size(newest.path) if newest is not None else 0
    free = directory.free_space
    if free >= max(SPACE_MIN, snapshot_size):
        return
    is_full = free < SPACE_MIN
    yield _make(
        directory,
        Kind.DISK_FULL,
        Severity.STOPPED if is_full else Severity.WARNING,
        f"the disk of {directory.path} is full"
        if is_full
        else f"the disk of {directory.path} has no room for another snapshot",
        f"{bytes_text(free)} are free for {directory.path}; the newest snapshot takes {bytes_text(snapshot_size)}",
        "free space: find the member that old logs are kept for (`flowstone explain URI`, finding `retention`), delete "
        "all snapshots but the newest two, or enlarge the disk; then restart the server if its replication has stopped",
        [f"free: {free} bytes"],
    )


def _undecided(directory: Directory) -> Iterator[Finding]:
    """Yield pending synchronous transactions, unless a running process may still settle them."""
    first = directory.report.first_pending
    if first is None or directory.is_in_use:
        return
    replica_id, lsn = first
    yield _make(
        directory,
        Kind.UNDECIDED,
        Severity.WARNING,
        f"the log in {directory.path} ends with {rows_text(directory.report.rows_pending)} of pending transactions",
        f"the synchronous transaction {replica_id}:{lsn} and all rows after it are neither confirmed nor rolled back "
        f"in this log; the queue belongs to replica {directory.owner_id or replica_id}, term {directory.term}",
        "start the members: the owner of the queue, or the member that is promoted next, confirms these transactions "
        "or rolls them back. Do not treat them as committed",
        [f"first pending transaction: {replica_id}:{lsn}"],
    )


# --- several ---


def compare(outside: Outside, directories: Sequence[Directory]) -> list[Finding]:
    """Return the findings about each pair of directories: diverged histories, and processes that run as one member."""
    found: list[Finding] = []
    for ours, theirs in combinations(directories, 2):
        if outside.disk.real_path(ours.path) == outside.disk.real_path(theirs.path):
            continue
        if _run_as_one(ours, theirs):
            found.append(_copied(outside, ours, theirs))
        elif ours.replicaset_uuid and theirs.replicaset_uuid and ours.replicaset_uuid != theirs.replicaset_uuid:
            found.append(_other_set(ours, theirs))
        else:
            found += _parted(outside, ours, theirs)
    return found


def fork_of(outside: Outside, ours: Directory, theirs: Directory) -> tuple[Fork, bool]:
    """Return where the two histories diverge, and whether the same LSNs denote different rows."""
    first, second = digests_of(outside, ours), digests_of(outside, theirs)
    point = common_point(ours.end, theirs.end, first, second)
    sides = []
    for directory, rows in ((ours, first), (theirs, second)):
        transactions, schema, is_whole = transactions_behind(outside, directory, point, COMPARED_MAX)
        missing = unlogged(directory.end, point, rows)
        sides.append(Alone(directory.path, transactions, schema, is_whole, missing))
    return Fork(point, (sides[0], sides[1])), are_used_twice(first, second)


def _run_as_one(ours: Directory, theirs: Directory) -> bool:
    """Return True if a process runs on each of two copies of an instance's directory.

    A copy on which no process runs is a backup; an archive carries the UUID of the instance that it follows.
    """
    return ours.instance_uuid == theirs.instance_uuid is not None and all(
        one.is_in_use and not one.is_archive for one in (ours, theirs)
    )


def _copied(outside: Outside, ours: Directory, theirs: Directory) -> Finding:
    fork, _ = fork_of(outside, ours, theirs)
    why = f"both belong to instance {ours.instance_uuid}: one is a copy of the other, and a process runs on each"
    if fork.is_fork:
        why += f"; {fork.sentence()}"
    return _make(
        ours,
        Kind.COPIED_INSTANCE,
        Severity.STOPPED,
        f"two processes run as one member: on {ours.path} and on {theirs.path}",
        why,
        END_ONE + ("; first save the rows that only it has (`flowstone cat`)" if fork.is_fork else ""),
        fork.evidence() if fork.is_fork else (),
        peer=theirs.path,
    )


def _parted(outside: Outside, ours: Directory, theirs: Directory) -> Iterator[Finding]:
    fork, is_twice = fork_of(outside, ours, theirs)
    if not fork.is_fork:
        return
    decided = any(one.rows[0].type in CONTROL_TYPES for side in fork.sides for one in side.transactions)
    is_contradiction = is_twice or decided
    why = fork.sentence()
    if is_twice:
        why += ". The same LSNs denote different rows: " + (
            "both belong to one instance, and processes have written to each"
            if ours.instance_uuid == theirs.instance_uuid
            else "one side lost rows and wrote others under their LSNs"
        )
    collisions = fork.collisions()
    if not is_contradiction and collisions:
        why += f". Both sides have written the key {collisions[0]}" + (
            f", and {len(collisions) - 1} more keys" if len(collisions) > 1 else ""
        )
    is_stuck = is_contradiction or any(side.unlogged for side in fork.sides)
    yield _make(
        ours,
        Kind.SPLIT_BRAIN if is_contradiction else Kind.FORKED,
        Severity.STOPPED if is_stuck else Severity.WARNING,
        f"the histories of {ours.path} and {theirs.path} have diverged",
        why,
        KEEP_ONE if is_contradiction else _together(fork, is_colliding=bool(collisions)),
        fork.evidence(),
        peer=theirs.path,
    )


def _together(fork: Fork, *, is_colliding: bool) -> str:
    """Return how to merge two histories that do not contradict each other."""
    silent = [side for side in fork.sides if side.unlogged]
    if not silent and is_colliding:
        return (
            "let the two follow each other with `replication_skip_conflict = true` on both (otherwise the first INSERT "
            "of such a key stops them), then set it back, and `replace` the right tuple of each of these keys"
        )
    if not silent:
        return "let the two follow each other: each receives the rows that it lacks, unless keys collide"
    ours, theirs = fork.sides
    told = " and ".join(f"{side.label} has no log of {side.unlogged_text}" for side in silent)
    if len(silent) == 2 or is_colliding:
        return f"the two cannot follow each other: {told}; {KEEP_ONE}"
    one, other = (ours, theirs) if ours.unlogged else (theirs, ours)
    return (
        f"{other.label} cannot follow: {told}. Let {one.label} follow {other.label} until it has all rows of "
        f"{other.label}; then restart {other.label} as a follower of {one.label}: it rejoins by itself, as it has no "
        f"rows that {one.label} lacks"
    )


def _other_set(ours: Directory, theirs: Directory) -> Finding:
    return _make(
        ours,
        Kind.WRONG_CLUSTER,
        Severity.WARNING,
        f"{ours.path} and {theirs.path} belong to different replica sets",
        f"{ours.path} belongs to {ours.replicaset_uuid}, {theirs.path} to {theirs.replicaset_uuid}",
        "check the paths: instances of different replica sets have no common history and cannot follow each other",
        peer=theirs.path,
    )
