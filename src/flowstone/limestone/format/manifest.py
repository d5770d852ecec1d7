"""The manifest: the formats and the identity of a data directory. It is also the lock file.

`parse` and `encode` are pure. Changes go through the Disk that is passed in, and in place, because the lock is on the
file and not on its name (`docs/spec/limestone.md#manifest-and-lock`). Never compares identities: no peer does.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from flowstone.limestone.errors import DamagedFile, LimestoneError, UnsupportedFormat
from flowstone.limestone.format import names
from flowstone.limestone.format.files import read_or_back, read_whole, write_whole
from flowstone.outside import Disk, Lock

FORMAT_VERSION: Final = "1.1"
"""Version of the manifest itself; 1.0 had no instance_uuid."""

PERSISTENT_FORMAT_VERSION: Final = 7
END_MARKERS_SINCE: Final = 6
"""The first persistent format with end markers of sessions."""

ATTEMPTS_MAX: Final = 10
"""Number of attempts to lock a manifest that other processes rename."""

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest. `instance_uuid` is None in format 1.0."""

    instance_uuid: str | None
    persistent_format_version: int = PERSISTENT_FORMAT_VERSION
    format_version: str = FORMAT_VERSION

    @property
    def is_current(self) -> bool:
        return self.persistent_format_version == PERSISTENT_FORMAT_VERSION and self.format_version == FORMAT_VERSION

    @property
    def has_end_markers(self) -> bool:
        """True if a session without an end marker never ended."""
        return self.persistent_format_version >= END_MARKERS_SINCE

    def migrated(self, fresh_uuid: str) -> Manifest:
        """Return the manifest in the current formats; `fresh_uuid` is used if it has no identity yet."""
        return Manifest(self.instance_uuid or fresh_uuid)


def encode(manifest: Manifest) -> bytes:
    """Encode the manifest as the original does: compact, keys sorted, no newline."""
    fields: dict[str, Any] = {
        "format_version": manifest.format_version,
        "persistent_format_version": manifest.persistent_format_version,
    }
    if manifest.instance_uuid is not None:
        fields["instance_uuid"] = manifest.instance_uuid
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()


def parse(data: bytes, path: str) -> Manifest:
    """Parse a manifest; `path` is for messages only."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedFile(path, 0, "content is not JSON") from None
    if not isinstance(fields, dict):
        raise DamagedFile(path, 0, "content is not a JSON object")
    version, persistent = fields.get("format_version"), fields.get("persistent_format_version")
    uuid = fields.get("instance_uuid")
    if version not in ("1.0", FORMAT_VERSION):
        raise UnsupportedFormat(
            f"{path}: format_version {_short(version)} is not supported", hint="supported versions are 1.0 and 1.1"
        )
    if type(persistent) is not int or not 1 <= persistent <= PERSISTENT_FORMAT_VERSION:
        raise UnsupportedFormat(
            f"{path}: persistent_format_version {_short(persistent)} is not supported",
            hint=f"supported versions are 1 to {PERSISTENT_FORMAT_VERSION}",
        )
    if version == FORMAT_VERSION and not (isinstance(uuid, str) and _UUID.fullmatch(uuid)):
        raise DamagedFile(path, 0, f"instance_uuid {_short(uuid)} is not a UUID")
    return Manifest(uuid if version == FORMAT_VERSION else None, persistent, version)


def _short(value: object) -> str:
    return repr(value)[:40]


def create(disk: Disk, directory: str, instance_uuid: str) -> Manifest:
    """Create the manifest of a new directory, which may contain directories but no files."""
    refuse_files(disk, directory)
    manifest = Manifest(instance_uuid)
    write_whole(disk, f"{directory}/{names.MANIFEST}", encode(manifest))
    disk.sync_directory(directory)
    return manifest


def refuse_files(disk: Disk, directory: str) -> None:
    """Raise LimestoneError if the directory contains a file: a new data directory must not."""
    for name in disk.list_directory(directory):
        if disk.kind(f"{directory}/{name}") == "file":
            raise LimestoneError(
                f"cannot create a data directory in {directory}: it contains {name}, but no manifest",
                hint="choose an empty directory, or restore its limestone-manifest.json",
            )


def read(disk: Disk, directory: str) -> Manifest | None:
    """Read the manifest, or its copy if a migration was interrupted; return None if neither exists."""
    return read_or_back(disk, f"{directory}/{names.MANIFEST}", f"{directory}/{names.MANIFEST_BACK}", parse)


def lock(disk: Disk, directory: str) -> Lock:
    """Lock the directory. Raise AlreadyLocked if it is in use, FileNotFoundError if it has no manifest.

    The lock is on the file, not on its name; after an interrupted migration that may be the copy. If the previous owner
    renamed the file and released the lock between our two steps, the file is looked up again."""
    path, back = f"{directory}/{names.MANIFEST}", f"{directory}/{names.MANIFEST_BACK}"
    for _ in range(ATTEMPTS_MAX):
        place = back if disk.kind(path) is None and disk.kind(back) == "file" else path
        try:
            held = disk.lock_file(place)
        except FileNotFoundError:
            if disk.kind(path) is None and disk.kind(back) is None:
                raise
            continue
        if held.is_at(place) and (place == path or disk.kind(path) is None):
            return held
        held.release()
    raise LimestoneError(f"manifest of {directory} keeps changing", hint="check which other processes use it")


def settle(disk: Disk, directory: str) -> None:
    """Complete an interrupted migration: the copy replaces an unreadable manifest, and is then deleted.

    Call it only while holding the lock, which stays on the manifest; otherwise a running migration would look
    interrupted."""
    path, back = f"{directory}/{names.MANIFEST}", f"{directory}/{names.MANIFEST_BACK}"
    kept = read_whole(disk, back)
    if kept is None:
        return
    data = read_whole(disk, path)
    if data is None:
        parse(kept, back)
        disk.rename(back, path)
    else:
        try:
            parse(data, path)
        except DamagedFile:
            parse(kept, back)
            write_whole(disk, path, kept)
        disk.unlink(back)
    disk.sync_directory(directory)


def migrate(disk: Disk, directory: str, manifest: Manifest) -> None:
    """Replace an older manifest. At every moment one of the two files can be read."""
    path, back = f"{directory}/{names.MANIFEST}", f"{directory}/{names.MANIFEST_BACK}"
    write_whole(disk, back, encode(manifest))
    disk.sync_directory(directory)
    write_whole(disk, path, encode(manifest))
    disk.unlink(back)
    disk.sync_directory(directory)
