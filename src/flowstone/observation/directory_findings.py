"""What is wrong with directories of log files, each for itself and compared with each other.

Goes by what `directory.py` has seen. What keeps a server from starting is `stopped`; what costs a follower its history
is a warning.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Final

from flowstone.observation.directory import Directory, digests_of, transactions_behind
from flowstone.observation.finding import Finding, Kind, Severity
from flowstone.observation.fork import Alone, Fork, are_used_twice, common_point, unlogged
from flowstone.observation.link_causes import END_ONE, quoted
from flowstone.observation.wording import bytes_text, position, rows_text
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import LogGap
from flowstone.xlog.reader import EndingKind
from flowstone.xlog.transactions import CONTROL_TYPES

SPACE_MIN: Final = 16 << 20
"""Below so many bytes a server is about to stop: a log is written in pieces, and a row may be large."""

COMPARED_MAX: Final = 1000
"""Transactions of each side behind the fork point that are read; all are counted on the way."""

FORCE: Final = "`force_recovery = true` (`--force-recovery`) starts without what is damaged"


KEEP_ONE: Final = (
    "decide which side to keep, save what only the other one has (`flowstone cat`), and let that one join anew: "
    "`flowstone rebootstrap DIR URI`"
)

COVERED: Final = (
    "a server starts from the snapshot all the same, but members that need these rows must join anew, and no moment "
    "between can be restored; if logs were moved away, bring them back"
)
"""What to do about rows that are in no log, and in the newest snapshot."""


def directory_findings(directory: Directory) -> list[Finding]:
    """What is wrong with one."""
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
    return f"`flowstone rebootstrap {directory.path} URI`, and start it"


def _severity(directory: Directory, path: str) -> Severity:
    """What a server needs to start is worse than what only a follower may ask for."""
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
            f"at {places[0]}" + (f", and in {len(places) - 1} places more" if len(places) > 1 else ""),
            f"take the data from another member: {_rejoin(directory)}. If there is none: {FORCE}, and "
            f"`flowstone cat --force` reads what is left",
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
    """The end of what is being written right now is not torn, it is not there yet."""
    newest = directory.logs[-1].path if directory.logs else None
    for path, ending in directory.report.endings.items():
        if ending.kind is not EndingKind.TORN or (path == newest and directory.is_in_use):
            continue
        is_last = path == newest
        advice = (
            "nothing, if a crash is known of: a server that starts here leaves the torn block out, and what was in it "
            "was acknowledged to nobody unless wal_mode was `none` or the disk lied"
            if is_last
            else "the rows behind it are missing from this history: take them from another member"
        )
        yield _make(
            directory,
            Kind.TORN_LOG,
            Severity.WARNING if is_last else _severity(directory, path),
            f"{path} ends in the middle of a block",
            f"it is whole up to byte {ending.offset}, the {ending.lost} bytes behind that mean nothing: {ending.what}",
            advice,
            [f"{path}: torn at byte {ending.offset}, {ending.lost} bytes lost"],
        )


def _gaps(directory: Directory) -> Iterator[Finding]:
    """What an instance did not log because it joined anew is missing from nothing but an archive."""
    for gap in directory.report.gaps:
        is_covered = directory.has_snapshot_of(VClock(gap.need))
        if is_covered and not directory.is_archive and not directory.lacks_file_before(gap.path):
            continue
        yield _make(
            directory,
            Kind.LOG_GAP,
            Severity.WARNING if is_covered else _severity(directory, gap.path),
            f"rows are missing before {gap.path}",
            f"the logs before it end at {position(gap.have)}, it begins at {position(gap.need)}: {_missing(gap)}"
            + ("; the newest snapshot has what they did" if is_covered else ""),
            COVERED
            if is_covered
            else f"bring the missing .xlog files back, or take the data from another member: {_rejoin(directory)}. "
            f"{FORCE}",
            [gap.message],
        )


def _missing(gap: LogGap) -> str:
    count = sum(last - first + 1 for _, first, last in gap.missing)
    ranges = ", ".join(f"{first}…{last} of replica {number}" for number, first, last in gap.missing)
    return f"{rows_text(count)} ({ranges})" if gap.missing else "nobody knows how many"


def _snapshots(directory: Directory) -> Iterator[Finding]:
    newest = directory.listing.newest_snapshot()
    if newest is None and not directory.has_definitions:
        yield _make(
            directory,
            Kind.NO_SNAPSHOT,
            Severity.STOPPED,
            f"there is no snapshot in {directory.path}: no server can start from it",
            f"its logs begin at {position(directory.start.to_mapping())}, and what was there before is in no file",
            "bring the newest .snap file back (memtx_dir may be another directory than wal_dir), or let it join anew",
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
        f"{position(directory.end_of_logs.to_mapping())}: what was written in between is in no log here",
        COVERED,
    )


def _is_log_lost(directory: Directory) -> bool:
    """Behind the last log there is more than one snapshot: who made the first of them went on in a log of that name.

    With one alone the instance has joined anew, and has not written since.
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
            f"files of several instances are mixed in {directory.path}",
            f"it belongs to instance {directory.instance_uuid}; {files} is of {directory.foreign[0][1]}",
            "move the foreign files away, each instance needs a directory of its own",
            [f"{file.path}: written by instance {uuid}" for file, uuid in directory.foreign],
        )


def _leftovers(directory: Directory) -> Iterator[Finding]:
    if directory.listing.leftovers and not directory.is_in_use:
        names = ", ".join(posixpath.basename(path) for path in directory.listing.leftovers[:5])
        yield _make(
            directory,
            Kind.LEFTOVER_FILES,
            Severity.WARNING,
            f"files were left half written in {directory.path}",
            f"{names}: a process ended while it wrote a snapshot or began a log",
            "no server reads them: they can be deleted",
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
        else f"the disk of {directory.path} has no room for one snapshot more",
        f"{bytes_text(free)} are free where {directory.path} is; the newest snapshot has {bytes_text(snapshot_size)}",
        "free space there: see who keeps old logs (`flowstone explain URI`, finding `retention`), delete snapshots "
        "before the newest two, or let it have a larger disk; then start the server again if its replication has "
        "stopped",
        [f"free: {free} bytes"],
    )


def _undecided(directory: Directory) -> Iterator[Finding]:
    """While a process runs on it, what waits is its business."""
    first = directory.report.first_pending
    if first is None or directory.is_in_use:
        return
    replica_id, lsn = first
    yield _make(
        directory,
        Kind.UNDECIDED,
        Severity.WARNING,
        f"{rows_text(directory.report.rows_pending)} at the end of the log in {directory.path} are without a verdict",
        f"the synchronous transaction {replica_id}:{lsn} and what stands behind it is neither confirmed nor rolled "
        f"back in this log; the queue belongs to replica {directory.owner_id or replica_id}, term {directory.term}",
        "start the members: the owner, or whoever is promoted next, decides about it. Do not take it for committed",
        [f"first without a verdict: {replica_id}:{lsn}"],
    )


# --- several ---


def compare(outside: Outside, directories: Sequence[Directory]) -> list[Finding]:
    """Where the histories of two directories part, and who runs as one member, for each two of them."""
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
    """Where the two part, and whether the same number was given to different rows."""
    first, second = digests_of(outside, ours), digests_of(outside, theirs)
    point = common_point(ours.end, theirs.end, first, second)
    sides = []
    for directory, rows in ((ours, first), (theirs, second)):
        transactions, schema, is_whole = transactions_behind(outside, directory, point, COMPARED_MAX)
        missing = unlogged(directory.end, point, rows)
        sides.append(Alone(directory.path, transactions, schema, is_whole, missing))
    return Fork(point, (sides[0], sides[1])), are_used_twice(first, second)


def _run_as_one(ours: Directory, theirs: Directory) -> bool:
    """A copy that nobody runs on is a backup; and an archive is of the instance that it follows."""
    return ours.instance_uuid == theirs.instance_uuid is not None and all(
        one.is_in_use and not one.is_archive for one in (ours, theirs)
    )


def _copied(outside: Outside, ours: Directory, theirs: Directory) -> Finding:
    fork, _ = fork_of(outside, ours, theirs)
    why = f"both are of instance {ours.instance_uuid}: one is a copy of the other, and a process runs on each"
    if fork.is_fork:
        why += f"; {fork.sentence()}"
    return _make(
        ours,
        Kind.COPIED_INSTANCE,
        Severity.STOPPED,
        f"two processes run as one member: on {ours.path} and on {theirs.path}",
        why,
        END_ONE + (", and save what only it has (`flowstone cat`)" if fork.is_fork else ""),
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
        why += ". The same numbers stand for different rows: " + (
            "both are of one instance, and processes have run on each"
            if ours.instance_uuid == theirs.instance_uuid
            else "one of them has lost rows and written others in their place"
        )
    collisions = fork.collisions()
    if not is_contradiction and collisions:
        why += f". Both have written the key {collisions[0]}" + (
            f", and {len(collisions) - 1} keys more" if len(collisions) > 1 else ""
        )
    is_stuck = is_contradiction or any(side.unlogged for side in fork.sides)
    yield _make(
        ours,
        Kind.SPLIT_BRAIN if is_contradiction else Kind.FORKED,
        Severity.STOPPED if is_stuck else Severity.WARNING,
        f"the histories of {ours.path} and {theirs.path} part",
        why,
        KEEP_ONE if is_contradiction else _together(fork, is_colliding=bool(collisions)),
        fork.evidence(),
        peer=theirs.path,
    )


def _together(fork: Fork, *, is_colliding: bool) -> str:
    """How two come together where nothing contradicts."""
    silent = [side for side in fork.sides if side.unlogged]
    if not silent and is_colliding:
        return (
            "let the two follow each other with `replication_skip_conflict = true` on both, then set it back, and "
            "`replace` the right tuple of each of these keys: else the first INSERT of one stops them"
        )
    if not silent:
        return "let the two follow each other: each takes what it lacks, if no keys collide"
    ours, theirs = fork.sides
    told = " and ".join(f"{side.label} has no log of {side.unlogged_text}" for side in silent)
    if len(silent) == 2 or is_colliding:
        return f"the two cannot follow each other: {told}, so {KEEP_ONE}"
    one, other = (ours, theirs) if ours.unlogged else (theirs, ours)
    return (
        f"{other.label} cannot follow: {told}. Let {one.label} follow {other.label} until it has what it lacks; "
        f"{other.label} then has nothing alone, and joins anew by itself when it is restarted to follow {one.label}"
    )


def _other_set(ours: Directory, theirs: Directory) -> Finding:
    return _make(
        ours,
        Kind.WRONG_CLUSTER,
        Severity.WARNING,
        f"{ours.path} and {theirs.path} are of different replica sets",
        f"{ours.path} is of {ours.replicaset_uuid}, {theirs.path} of {theirs.replicaset_uuid}",
        "one of them cannot follow the other; they have no common history",
        peer=theirs.path,
    )
