"""The state that entries add up to, computed plainly, to compare with the compiled code.

For each key, the entry with the highest write version counts, unless its storage was cleared later
(docs/spec/limestone.md#winning-entry). The input is the entries that count, in any order; of two entries with the same
version the later one wins.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final

from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, encode

_STORAGE: Final = struct.Struct("<Q")
_ZERO: Final = WriteVersion(0, 0)
_BEGIN: Final = Marker(EntryType.MARKER_BEGIN, 0)


def sort_key(entry: Entry) -> bytes:
    """The order of snapshots, compacted files and cursors: the storage id as on disk, then the key."""
    return _STORAGE.pack(entry.storage_id) + entry.key


class Snapshot:
    """The state after all entries added so far."""

    def __init__(self) -> None:
        self.cleared: dict[int, WriteVersion] = {}
        """Per storage, the version at which it was last cleared or removed."""
        self.max_blob_id = 0
        """The largest blob id of any entry, so that no id is reused."""
        self._winners: dict[tuple[int, bytes], Entry] = {}
        self._compacted: dict[tuple[int, bytes], Entry] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """Add entries of log files."""
        winners, cleared = self._winners, self.cleared
        for entry in entries:
            kind = entry.type
            if kind is EntryType.NORMAL or kind is EntryType.REMOVE or kind is EntryType.NORMAL_WITH_BLOB:
                key = (entry.storage_id, entry.key)
                before = winners.get(key)
                if before is None or before.version <= entry.version:
                    winners[key] = entry
                self._note_blobs(entry)
            elif kind is not EntryType.ADD_STORAGE:
                before_cleared = cleared.get(entry.storage_id, _ZERO)
                cleared[entry.storage_id] = max(before_cleared, entry.version)

    def add_compacted(self, entries: Iterable[Entry]) -> None:
        """Add entries of a compacted file; any entry of a log file is newer."""
        for entry in entries:
            self._compacted[entry.storage_id, entry.key] = entry
            self._note_blobs(entry)

    def _note_blobs(self, entry: Entry) -> None:
        if entry.blob_ids:
            self.max_blob_id = max(self.max_blob_id, *entry.blob_ids)

    def rows(self) -> list[Entry]:
        """Return the rows of a cursor: the remaining puts of log files and compacted file, in key order."""
        newest = self._compacted | self._winners
        return sorted((entry for entry in self._alive(newest.values()) if not _is_remove(entry)), key=sort_key)

    def changes(self, *, with_removes: bool) -> list[Entry]:
        """Return the content of a snapshot file: the winners among the entries of log files, in key order.

        Removes are needed in a directory with a compacted file, because they hide its copy of the key.
        """
        found = self._alive(self._winners.values())
        return sorted((entry for entry in found if with_removes or not _is_remove(entry)), key=sort_key)

    def _alive(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        cleared = self.cleared
        return (entry for entry in entries if entry.version >= cleared.get(entry.storage_id, _ZERO))


def _is_remove(entry: Entry) -> bool:
    return entry.type is EntryType.REMOVE


def encode_snapshot(changes: Iterable[Entry]) -> bytes:
    """Encode `data/snapshot`: a begin marker of epoch 0 and the entries, without an end marker."""
    return b"".join((encode(_BEGIN), *map(encode, changes)))


def encode_compacted(rows: Iterable[Entry]) -> bytes:
    """Encode a compacted file: like a snapshot, but with versions older than those of any log file."""
    return encode_snapshot(row._replace(version=_ZERO) for row in rows)
