"""The manifest: which formats a data directory is written in, and its identity. It is the lock file, too.

`parse` and `encode` are pure; what is done to the file goes through the Disk one is handed, and in place, because a
lock is on the file and not on its name (reference: manifest and lock). Never compares identities: no peer does.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from flowstone.limestone import names
from flowstone.limestone.errors import DamagedFile, LimestoneError, UnsupportedFormat
from flowstone.limestone.files import read_or_back, read_whole, write_whole
from flowstone.outside import Disk, Lock

FORMAT_VERSION: Final = "1.1"
"""Of the manifest itself; 1.0 had no instance_uuid."""

PERSISTENT_FORMAT_VERSION: Final = 7
END_MARKERS_SINCE: Final = 6
"""The persistent format from which on a session has an end marker."""

ATTEMPTS_MAX: Final = 10
"""How often a manifest is looked for that others rename."""

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Manifest:
    """What a manifest says. `instance_uuid` is None in those of format 1.0."""

    instance_uuid: str | None
    persistent_format_version: int = PERSISTENT_FORMAT_VERSION
    format_version: str = FORMAT_VERSION

    @property
    def is_current(self) -> bool:
        return self.persistent_format_version == PERSISTENT_FORMAT_VERSION and self.format_version == FORMAT_VERSION

    @property
    def has_end_markers(self) -> bool:
        """Whether a session without an end marker is one that never ended."""
        return self.persistent_format_version >= END_MARKERS_SINCE

    def migrated(self, fresh_uuid: str) -> Manifest:
        """The same directory in the current formats; `fresh_uuid` is for one that has none yet."""
        return Manifest(self.instance_uuid or fresh_uuid)


def encode(manifest: Manifest) -> bytes:
    """The bytes as the real program writes them: compact, keys sorted, no newline."""
    fields: dict[str, Any] = {
        "format_version": manifest.format_version,
        "persistent_format_version": manifest.persistent_format_version,
    }
    if manifest.instance_uuid is not None:
        fields["instance_uuid"] = manifest.instance_uuid
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()


def parse(data: bytes, path: str) -> Manifest:
    """What these bytes say; `path` is for the messages only."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedFile(path, 0, "it is no JSON") from None
    if not isinstance(fields, dict):
        raise DamagedFile(path, 0, "it is no JSON object")
    version, persistent = fields.get("format_version"), fields.get("persistent_format_version")
    uuid = fields.get("instance_uuid")
    if version not in ("1.0", FORMAT_VERSION):
        raise UnsupportedFormat(f"{path}: format_version {_short(version)} is not supported", hint="1.0 and 1.1 are")
    if type(persistent) is not int or not 1 <= persistent <= PERSISTENT_FORMAT_VERSION:
        raise UnsupportedFormat(
            f"{path}: persistent_format_version {_short(persistent)} is not supported",
            hint=f"1 to {PERSISTENT_FORMAT_VERSION} are",
        )
    if version == FORMAT_VERSION and not (isinstance(uuid, str) and _UUID.fullmatch(uuid)):
        raise DamagedFile(path, 0, f"instance_uuid {_short(uuid)} is no UUID")
    return Manifest(uuid if version == FORMAT_VERSION else None, persistent, version)


def _short(value: object) -> str:
    return repr(value)[:40]


def create(disk: Disk, directory: str, instance_uuid: str) -> Manifest:
    """Make the manifest of a new directory, which may hold directories but no files."""
    refuse_files(disk, directory)
    manifest = Manifest(instance_uuid)
    write_whole(disk, f"{directory}/{names.MANIFEST}", encode(manifest))
    disk.sync_directory(directory)
    return manifest


def refuse_files(disk: Disk, directory: str) -> None:
    """A data directory is made of nothing but directories."""
    for name in disk.list_directory(directory):
        if disk.kind(f"{directory}/{name}") == "file":
            raise LimestoneError(
                f"cannot make a data directory of {directory}: it holds {name}, and no manifest",
                hint="choose an empty directory, or put its limestone-manifest.json back",
            )


def read(disk: Disk, directory: str) -> Manifest | None:
    """What the manifest says, or its copy where a migration was cut short; None where there is neither."""
    return read_or_back(disk, f"{directory}/{names.MANIFEST}", f"{directory}/{names.MANIFEST_BACK}", parse)


def lock(disk: Disk, directory: str) -> Lock:
    """Take the directory: AlreadyLocked if somebody has it, FileNotFoundError if it has no manifest.

    It is the file that is locked, by whatever name: where a migration was cut short that may be the copy. Who had it
    before may have given it another name between our two steps, and let go: then it is looked for again."""
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
    raise LimestoneError(f"the manifest of {directory} is replaced all the time", hint="see who else uses it")


def settle(disk: Disk, directory: str) -> None:
    """End a migration that was cut short: a copy replaces a manifest that cannot be read, and is gone after that.

    Only while the lock is held, which stays on the manifest: else a migration that goes on would be taken for one."""
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
    """Put a manifest in the place of an older one. At every moment one of the two files can be read."""
    path, back = f"{directory}/{names.MANIFEST}", f"{directory}/{names.MANIFEST_BACK}"
    write_whole(disk, back, encode(manifest))
    disk.sync_directory(directory)
    write_whole(disk, path, encode(manifest))
    disk.unlink(back)
    disk.sync_directory(directory)
