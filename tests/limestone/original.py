"""The original's view of a directory: its rules for startup and cursors, as plainly as possible.

Only for directories that the original can open (docs/spec/limestone.md#snapshot). Rows include blob ids.
"""

from __future__ import annotations

import struct

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import catalog, epoch_file, manifest, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import Entry, EntryType, WriteVersion, decode_all, walk
from flowstone.limestone.format.files import read_whole
from flowstone.limestone.format.log_scan import STARTUP, LogScan
from flowstone.limestone.format.manifest import Manifest
from flowstone.outside import Disk

Key = tuple[int, bytes]


def listed(disk: Disk, directory: str) -> Catalog:
    """Return the catalog that the original loads. It replaces a missing file by an empty one, regardless of `.back`."""
    path, back = f"{directory}/{names.CATALOG}", f"{directory}/{names.CATALOG_BACK}"
    data = read_whole(disk, path)
    if data is None:
        return Catalog()
    try:
        return catalog.parse(data, path)
    except DamagedFile:
        return catalog.parse(read_whole(disk, back) or b"", back)


def instance(disk: Disk, directory: str) -> Manifest:
    """Return the manifest that the original opens.

    The original locks the main file first, which must exist; `.back` may replace its content.
    """
    path, back = f"{directory}/{names.MANIFEST}", f"{directory}/{names.MANIFEST_BACK}"
    data = read_whole(disk, path)
    assert data is not None, f"the original takes {directory} for version 0"
    try:
        return manifest.parse(data, path)
    except DamagedFile:
        return manifest.parse(read_whole(disk, back) or b"", back)


def rows(disk: Disk, directory: str) -> list[Entry]:
    """Return the rows of the original's cursor after ready(), with their versions."""
    found = listed(disk, directory)
    winners, cleared = _sorted_entries(disk, directory, found.detached)
    snapshot = {
        key: entry for key, entry in winners.items() if entry.version >= cleared.get(key[0], WriteVersion(0, 0))
    }
    if not found.compacted:
        snapshot = {key: entry for key, entry in snapshot.items() if entry.type is not EntryType.REMOVE}
    compacted = {
        key: entry
        for key, entry in _compacted(disk, directory).items()
        if entry.version >= cleared.get(key[0], WriteVersion(0, 0))
    }
    shown = compacted | snapshot
    return [shown[key] for key in sorted(shown, key=_order) if shown[key].type is not EntryType.REMOVE]


def _order(key: Key) -> bytes:
    return struct.pack("<Q", key[0]) + key[1]


def _sorted_entries(
    disk: Disk, directory: str, detached: tuple[str, ...]
) -> tuple[dict[Key, Entry], dict[int, WriteVersion]]:
    durable = epoch_file.read(disk, directory).durable
    winners: dict[Key, Entry] = {}
    cleared: dict[int, WriteVersion] = {}
    for name in disk.list_directory(directory):
        if not names.is_pwal(name) or name in (names.COMPACTED, *detached):
            continue
        with disk.open(f"{directory}/{name}") as file:
            scan = LogScan(walk(file.read_at, file.size()), durable, STARTUP, is_detached=names.is_detached(name))
            for entry in scan:
                if entry.type in (EntryType.CLEAR_STORAGE, EntryType.REMOVE_STORAGE):
                    cleared[entry.storage_id] = max(cleared.get(entry.storage_id, entry.version), entry.version)
                elif entry.type is not EntryType.ADD_STORAGE:
                    before = winners.get((entry.storage_id, entry.key))
                    if before is None or before.version <= entry.version:
                        winners[entry.storage_id, entry.key] = entry
        assert scan.verdict.is_clean, f"the original does not open {name}: {scan.findings}"
    return winners, cleared


def _compacted(disk: Disk, directory: str) -> dict[Key, Entry]:
    data = read_whole(disk, f"{directory}/{names.COMPACTED}") or b""
    found = [token for token in decode_all(data, names.COMPACTED) if isinstance(token, Entry)]
    return {(entry.storage_id, entry.key): entry for entry in found}
