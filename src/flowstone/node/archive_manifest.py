"""The manifest of an archive: whose log it is, how far it goes, which snapshots it has and what is missing.

One JSON file that is replaced as a whole, so that a reader finds the old one or the new one. It says what the names of
the files cannot; `docs/reference/archive.md` tells the fields to those who read it from elsewhere. What is durable is
decided by the log files, which may be ahead of it by what came since it was last written.
"""

from __future__ import annotations

import posixpath
from contextlib import suppress

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock

NAME = "manifest.json"
TEMPORARY = NAME + ".new"
FORMAT = "flowstone-archive"
VERSION = 1
SIZE_MAX = 64 * 1024 * 1024

FIRST, INTERVAL, GAP = "first", "interval", "gap"
"""Why a snapshot was taken."""

Lsns = dict[int, int]
"""A vclock as JSON has it: replica id → LSN."""


class NotAnArchive(FlowstoneError):
    """A directory, or its manifest, is not what an archive leaves behind, or cannot be one."""


class Upstream(msgspec.Struct, frozen=True):
    """Whom the archive follows: `uuid` of the instance, where it was reached, and what its greeting says."""

    uuid: str
    address: str
    version: str


class Snapshot(msgspec.Struct, frozen=True):
    """A `.snap` of the archive; `at` is when it was complete, by the clock of the archive."""

    file: str
    vclock: Lsns
    at: float
    reason: str


class Gap(msgspec.Struct, frozen=True):
    """Rows behind `after` and up to `until` that the archive does not have: the snapshot of `until` stands for them.

    `missing` has the LSNs, first and last, of each originator.
    """

    after: Lsns
    until: Lsns
    missing: tuple[tuple[int, int, int], ...]
    at: float
    why: str

    def __str__(self) -> str:
        return f"{rows_text(self.missing)} {'is' if _is_one(self.missing) else 'are'} missing"


class Manifest(msgspec.Struct):
    """What is known of an archive. `position` is durable, `settled` can no longer be withdrawn."""

    replica_uuid: str
    """As whom the archive subscribes."""
    instance_uuid: str | None = None
    """Whose files these are, as their headers say: a server that is started from them comes up as this instance."""
    replicaset_uuid: str | None = None
    replica_id: int = 0
    """Its number in `_cluster`; 0: anonymous."""
    images_since: Lsns | None = None
    """Rows behind this position have the tuples that they changed; None: rows are as they came."""
    upstream: Upstream | None = None
    position: Lsns = {}
    settled: Lsns = {}
    pending_transactions: int = 0
    at: float = 0.0
    """When this was written."""
    known_until: float = 0.0
    """By the clock of the upstream: nothing that it wrote up to then is missing at the end of the log. The time of the
    last row may be later; 0: that is all that is known."""
    snapshots: list[Snapshot] = []
    gaps: list[Gap] = []
    format: str = FORMAT
    version: int = VERSION


def load(disk: Disk, directory: str) -> Manifest | None:
    """The manifest of the archive in `directory`; None where there is none."""
    path = posixpath.join(directory, NAME)
    if disk.kind(path) is None:
        return None
    with disk.open(path) as file:
        data = file.read_at(0, SIZE_MAX)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (ValueError, RecursionError) as error:
        raise NotAnArchive(f"{path}: not the manifest of an archive: {error}", hint="name another directory") from error
    if manifest.format != FORMAT or manifest.version > VERSION:
        what = f"a manifest of format {manifest.format!r}, version {manifest.version}"
        raise NotAnArchive(f"{path}: {what}", hint=f"this release reads {FORMAT!r} up to version {VERSION}")
    return manifest


def save(disk: Disk, directory: str, manifest: Manifest) -> None:
    """Puts the manifest in place of the old one; either is there whole, whatever happens."""
    path, temporary = posixpath.join(directory, NAME), posixpath.join(directory, TEMPORARY)
    with suppress(FileNotFoundError):
        disk.unlink(temporary)
    with disk.create(temporary) as file:
        file.append(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
        file.sync()
    disk.rename(temporary, path)
    disk.sync_directory(directory)


def missing_rows(have: VClock, need: VClock) -> tuple[tuple[int, int, int], ...]:
    """The LSNs, first and last, of each originator that lie behind `have` and up to `need`."""
    return tuple((number, have.get(number) + 1, lsn) for number, lsn in need if number and lsn > have.get(number))


def rows_text(rows: tuple[tuple[int, int, int], ...]) -> str:
    """Those LSNs in words."""
    if not rows:
        return "no rows"
    each = (f"{first} to {last} of replica {number}" if first < last else f"{first} of replica {number}"
            for number, first, last in rows)  # fmt: skip
    return f"LSN {', '.join(each)}"


def _is_one(rows: tuple[tuple[int, int, int], ...]) -> bool:
    return len(rows) == 1 and rows[0][1] == rows[0][2]
