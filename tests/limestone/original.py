"""What the real program would show of a directory: its rules of start and cursor, as plainly as they can be said.

Only for directories that it opens (reference: ready(), snapshot, cursor). Blob ids are shown with the rows.
"""

from __future__ import annotations

import struct

from flowstone.limestone import catalog, epoch_file, names
from flowstone.limestone.entries import Entry, EntryType, WriteVersion, decode_all, walk
from flowstone.limestone.files import read_whole
from flowstone.limestone.scan import STARTUP, Scan
from flowstone.outside import Disk

Key = tuple[int, bytes]


def rows(disk: Disk, directory: str) -> list[Entry]:
    """What its cursor shows after ready(); the versions are those it has."""
    listed = catalog.read(disk, directory) or catalog.Catalog()
    winners, cleared = _sorted_entries(disk, directory, listed.detached)
    snapshot = {
        key: entry for key, entry in winners.items() if entry.version >= cleared.get(key[0], WriteVersion(0, 0))
    }
    if not listed.compacted:
        snapshot = {key: entry for key, entry in snapshot.items() if entry.type is not EntryType.REMOVE}
    found = _compacted(disk, directory)
    found = {key: entry for key, entry in found.items() if entry.version >= cleared.get(key[0], WriteVersion(0, 0))}
    shown = found | snapshot
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
            scan = Scan(walk(file.read_at, file.size()), durable, STARTUP, is_detached=names.is_detached(name))
            for entry in scan:
                if entry.type in (EntryType.CLEAR_STORAGE, EntryType.REMOVE_STORAGE):
                    cleared[entry.storage_id] = max(cleared.get(entry.storage_id, entry.version), entry.version)
                elif entry.type is not EntryType.ADD_STORAGE:
                    before = winners.get((entry.storage_id, entry.key))
                    if before is None or before.version <= entry.version:
                        winners[entry.storage_id, entry.key] = entry
        assert scan.verdict.is_clean, f"the real program does not open this: {name}: {scan.findings}"
    return winners, cleared


def _compacted(disk: Disk, directory: str) -> dict[Key, Entry]:
    data = read_whole(disk, f"{directory}/{names.COMPACTED}") or b""
    found = [token for token in decode_all(data, names.COMPACTED) if isinstance(token, Entry)]
    return {(entry.storage_id, entry.key): entry for entry in found}
