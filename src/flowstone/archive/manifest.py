"""The manifest of an archive: its instance, its position, its snapshots and its gaps.

The manifest is one JSON file, which is replaced as a whole: a reader sees the old one or the new one.
`docs/reference/archive.md` describes the fields for other programs. The log files decide which rows are durable; they
may be ahead of the manifest.
"""

from __future__ import annotations

import posixpath
from contextlib import suppress

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.outside.disk import Disk

NAME = "manifest.json"
TEMPORARY = NAME + ".new"
FORMAT = "flowstone-archive"
VERSION = 1
SIZE_MAX = 64 * 1024 * 1024
"""Most bytes of a manifest that are read."""

FIRST, INTERVAL, GAP = "first", "interval", "gap"
"""Reasons for a snapshot."""

Lsns = dict[int, int]
"""A vclock as in JSON: replica id → LSN."""


class NotAnArchive(FlowstoneError):
    """A directory is not an archive and cannot become one, or its manifest is damaged or unsupported."""


class ArchivedUpstream(msgspec.Struct, frozen=True):
    """The server that the archive follows: the `uuid` of the instance, its address, and the version in its greeting."""

    uuid: str
    address: str
    version: str


class ArchivedSnapshot(msgspec.Struct, frozen=True):
    """A `.snap` file of the archive. `at` is the time when it was complete, by the clock of the archive."""

    file: str
    vclock: Lsns
    at: float
    reason: str


class Gap(msgspec.Struct, frozen=True):
    """Rows after `after` and up to `until` that the archive does not have; the snapshot at `until` replaces them.

    `missing` has the replica id, the first and the last LSN for each originator.
    """

    after: Lsns
    until: Lsns
    missing: tuple[tuple[int, int, int], ...]
    at: float
    why: str

    def __str__(self) -> str:
        return f"{rows_text(self.missing)} {'is' if _is_one(self.missing) else 'are'} missing"


class ArchiveManifest(msgspec.Struct):
    """The content of the manifest. Rows are durable up to `position`, and settled up to `settled`."""

    replica_uuid: str
    """UUID that the archive subscribes with."""
    instance_uuid: str | None = None
    """Instance UUID in the headers of the files: a server started from the files comes up as this instance."""
    replicaset_uuid: str | None = None
    replica_id: int = 0
    """Replica id of the archive in `_cluster`; 0: anonymous."""
    images_since: Lsns | None = None
    """Rows after this position have images; None: no rows have images."""
    upstream: ArchivedUpstream | None = None
    position: Lsns = {}
    settled: Lsns = {}
    pending_transactions: int = 0
    at: float = 0.0
    """Time of the last write of the manifest."""
    known_until: float = 0.0
    """Time, by the clock of the upstream, up to which the log is complete; 0: unknown. The last row may be later."""
    snapshots: list[ArchivedSnapshot] = []
    gaps: list[Gap] = []
    format: str = FORMAT
    version: int = VERSION


def load(disk: Disk, directory: str) -> ArchiveManifest | None:
    """Return the manifest in `directory`; None if there is none. Raise NotAnArchive if it cannot be used."""
    path = posixpath.join(directory, NAME)
    if disk.kind(path) is None:
        return None
    with disk.open(path) as file:
        data = file.read_at(0, SIZE_MAX)
    try:
        manifest = msgspec.json.decode(data, type=ArchiveManifest)
    except (ValueError, RecursionError) as error:
        raise NotAnArchive(f"{path}: not an archive manifest: {error}", hint="use another directory") from error
    if manifest.format != FORMAT or manifest.version > VERSION:
        what = f"unsupported format {manifest.format!r}, version {manifest.version}"
        raise NotAnArchive(f"{path}: {what}", hint=f"this release supports {FORMAT!r} up to version {VERSION}")
    return manifest


def save(disk: Disk, directory: str, manifest: ArchiveManifest) -> None:
    """Replace the manifest atomically."""
    path, temporary = posixpath.join(directory, NAME), posixpath.join(directory, TEMPORARY)
    with suppress(FileNotFoundError):
        disk.unlink(temporary)
    with disk.create(temporary) as file:
        file.append(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
        file.sync()
    disk.rename(temporary, path)
    disk.sync_directory(directory)


def rows_text(rows: tuple[tuple[int, int, int], ...]) -> str:
    """Return rows as text, such as `LSN 11 to 20 of replica 1, 5 of replica 2`."""
    if not rows:
        return "no rows"
    each = (f"{first} to {last} of replica {number}" if first < last else f"{first} of replica {number}"
            for number, first, last in rows)  # fmt: skip
    return f"LSN {', '.join(each)}"


def _is_one(rows: tuple[tuple[int, int, int], ...]) -> bool:
    return len(rows) == 1 and rows[0][1] == rows[0][2]
