"""Judges the directories of tests: servers must start from each of them, with the same rows.

Directories of 2.6 are booted by a real 2.6. Those of newer dialects are read by `recovery.py`, and booted by the real
servers that FLOWSTONE_TARANTOOL names, with the same result.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.interop.versions import binaries, is_fit
from tests.judges.files import LogFile, Unreadable, list_files
from tests.judges.real_server import booted
from tests.judges.recovery import ROLLBACK, Verdict, recovered

FLAGS_SINCE = (2, 8, 1)
"""Earlier rows lack the synchronous flag, and only a server of that version can interpret them."""

_SPACE_ID, _TUPLE, _SPACE, _FLAGS = 0x10, 0x21, 280, 5
"""Keys of a row's body, the id of `_space`, and the field of its tuples that has a space's flags."""

Rows = dict[int, frozenset[Any]]


class Refused(AssertionError):
    """A server refuses to start from a directory, or recovers different rows than another server."""


def judge(directory: Path) -> Verdict:
    """Return the data that servers recover from `directory`, which is not changed; raise Refused if one fails.

    Returns no rows if undecidable: for 2.6, if there is no server of that version, or none can recover the directory.
    """
    try:
        snapshots, logs = list_files(directory)
    except Unreadable as error:
        raise Refused(f"{directory}: {error}") from error
    version = (logs or snapshots)[-1].version
    is_old = () < version < FLAGS_SINCE
    newest = _loadable_by_2_6(snapshots, logs) if is_old else snapshots[-1]
    if newest is None:
        return Verdict(None)
    verdicts = {} if is_old else {"the judge": recovered(directory)}
    for binary in binaries():
        if is_fit(binary.version, "<2.11" if is_old else ">=2.11"):
            verdicts[f"Tarantool {binary}"] = _boot(binary.path, directory, newest)
            if not is_old:
                verdicts[f"the judge as {binary}"] = recovered(directory, binary.version)
    for name, verdict in verdicts.items():
        if verdict.refusal is not None:
            raise Refused(f"{name} refuses {directory}: {verdict.refusal}")
    first, *others = verdicts.items() if verdicts else [("nobody", Verdict(None))]
    for name, verdict in others:
        if verdict != first[1]:
            raise Refused(f"{name} has other rows from {directory} than {first[0]}: {_difference(first[1], verdict)}")
    return first[1]


def judge_all(directories: Mapping[str, Path], *, same: bool = True) -> dict[str, Verdict]:
    """Judge each directory; with `same`, all must have the same rows in the spaces of users."""
    verdicts = {name: judge(directory) for name, directory in directories.items()}
    known = [(name, verdict) for name, verdict in verdicts.items() if verdict.rows]
    if same and known:
        (first, verdict), *others = known
        for name, other in others:
            if user_rows(verdict) != user_rows(other):
                raise Refused(f"{name} and {first} recover to different rows: {_difference(verdict, other)}")
    return verdicts


def refusal_of(directory: Path) -> str | None:
    """Return the reason why servers do not start from `directory`, by the judge alone; None if they do, or if
    undecidable.

    Empty directories and files of 2.6 are undecidable.
    """
    if not any(directory.glob("*.snap")) or any(directory.glob("*.vylog")):
        return None
    try:
        snapshots, logs = list_files(directory)
        if () < (logs or snapshots)[-1].version < FLAGS_SINCE:
            return None
    except Unreadable as error:
        return str(error)
    return recovered(directory).refusal


def user_rows(verdict: Verdict) -> Rows:
    return {number: rows for number, rows in verdict.rows.items() if number >= 512}


def _loadable_by_2_6(snapshots: Sequence[LogFile], logs: Sequence[LogFile]) -> LogFile | None:
    """Return the newest snapshot that 2.6.0 can start from; None if it can start from none of them.

    2.6.0 refuses some of its own directories: if a ROLLBACK follows a snapshot with rows of that space, or if a
    snapshot has more than one row of synchronous spaces (it queues each of them, and waits for a quorum of the second
    in vain). An older snapshot serves as well if all logs since then exist.
    """
    if any(row.type == ROLLBACK for log in logs for row in log.rows()):
        return None
    for snapshot in reversed(snapshots):
        if _count_synchronous_rows(snapshot) <= 1:
            is_covered = snapshot is snapshots[-1] or any(log.signature <= snapshot.signature for log in logs)
            return snapshot if is_covered else None
    return None


def _count_synchronous_rows(snapshot: LogFile) -> int:
    spaces: set[int] = set()
    count = 0
    for row in snapshot.rows():
        space_id, values = row.body[_SPACE_ID], row.body[_TUPLE]
        if space_id == _SPACE and values[_FLAGS].get(b"is_sync"):
            spaces.add(values[0])
        count += space_id in spaces
    return count


def _boot(binary: str, directory: Path, newest: LogFile) -> Verdict:
    """Boot a copy of `directory` without the snapshots after `newest`."""
    place = Path(tempfile.mkdtemp(prefix="judge-"))
    try:
        return booted(binary, directory, place / "copy", newest=newest.path.name)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _difference(one: Verdict, other: Verdict) -> str:
    parts: list[str] = []
    for number in sorted({*one.rows, *other.rows}):
        rows, theirs = one.rows.get(number, frozenset()), other.rows.get(number, frozenset())
        if rows != theirs:
            some = sorted(rows ^ theirs, key=repr)[:3]
            parts.append(f"space {number}: {len(rows - theirs)} and {len(theirs - rows)} alone, such as {some}")
    places = [(each.vclock, each.owner_id, each.queue_length) for each in (one, other)]
    return "; ".join(parts) or f"vclock, owner and queue {places[0]} and {places[1]}"
