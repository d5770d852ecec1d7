"""Which of Tsurugi's tables an entry of a log file belongs to, by the definitions that were in force at its epoch.

Uses the Disk that is passed in, and blocks. Reads all log files of a directory once, for the entries of the metadata
storage only.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from flowstone.limestone.errors import BadMetadata
from flowstone.limestone.format.entries import Entry, EntryType, WriteVersion
from flowstone.limestone.tools import listing
from flowstone.limestone.tools.listing import Listed
from flowstone.limestone.tsurugi.definitions import METADATA_STORAGE, SqlTable
from flowstone.limestone.tsurugi.metadata import SYSTEM_SEQUENCES, defined_storage, parse_metadata
from flowstone.outside import Disk


class _Definition(NamedTuple):
    epoch: int
    version: WriteVersion
    table: SqlTable | BadMetadata | None


class TableEntries:
    """The tables of a directory by storage and epoch. A definition counts if its epoch is durable."""

    def __init__(self, disk: Disk, directory: str, durable_epoch: int) -> None:
        self._definitions: dict[int, list[_Definition]] = {}
        for name in listing.files(disk, directory):
            for listed in listing.listing(disk, directory, name, durable_epoch):
                self._take(listed)
        for found in self._definitions.values():
            found.sort(key=lambda each: each[:2])

    def _take(self, listed: Listed) -> None:
        entry = listed.token
        if not isinstance(entry, Entry) or entry.storage_id != METADATA_STORAGE or not listed.is_durable:
            return
        if entry.type is EntryType.REMOVE:
            return
        table: SqlTable | BadMetadata | None
        try:
            storage_id = defined_storage(entry.value)
            found = parse_metadata(entry.value)
            table = found if isinstance(found, SqlTable) and found.name != SYSTEM_SEQUENCES else None
        except BadMetadata as error:
            storage_id, table = int.from_bytes(entry.value[:8], "little"), error
        self._definitions.setdefault(storage_id, []).append(_Definition(listed.epoch or 0, entry.version, table))

    def table_of(self, listed: Listed) -> SqlTable | BadMetadata | None:
        """Return the table of an entry, or why its definition cannot be read; None if the entry is of no table."""
        entry = listed.token
        if not isinstance(entry, Entry):
            return None
        found = self._definitions.get(entry.storage_id, [])
        place = bisect_right(found, listed.epoch or 0, key=lambda each: each.epoch)
        return found[place - 1].table if place else None
