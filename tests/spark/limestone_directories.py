"""Limestone data directories for tests, written entry by entry, and a plain model of their state."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from flowstone.limestone.format import catalog, epoch_file, manifest, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, encode, put, remove
from flowstone.outside import production

UUID = "aaaaaaaa-1111-4000-8000-000000000001"
Row = tuple[int, bytes, bytes, int, int, tuple[int, ...]]


def version(major: int, minor: int = 0) -> WriteVersion:
    return WriteVersion(major, minor)


def clear(storage_id: int, major: int, minor: int = 0, kind: EntryType = EntryType.CLEAR_STORAGE) -> Entry:
    return Entry(kind, storage_id, WriteVersion(major, minor))


def snippet(epoch: int, *entries: Entry, is_ended: bool = True, is_void: bool = False) -> bytes:
    begin = EntryType.MARKER_INVALIDATED_BEGIN if is_void else EntryType.MARKER_BEGIN
    end = encode(Marker(EntryType.MARKER_END, epoch)) if is_ended else b""
    return b"".join((encode(Marker(begin, epoch)), *map(encode, entries), end))


class WrittenDirectory:
    """A directory whose sessions the test writes."""

    def __init__(self, path: Path | str, uuid: str = UUID) -> None:
        self.path = str(path)
        os.makedirs(self.path)
        manifest.create(production().disk, self.path, uuid)
        self.sessions: list[tuple[int, tuple[Entry, ...]]] = []

    def session(self, channel: int, epoch: int, *entries: Entry, is_ended: bool = True) -> None:
        self.append(names.pwal(channel), snippet(epoch, *entries, is_ended=is_ended))
        self.sessions.append((epoch, entries))

    def append(self, name: str, data: bytes) -> None:
        with open(f"{self.path}/{name}", "ab") as file:
            file.write(data)

    def durable(self, epoch: int) -> None:
        self.append(names.EPOCH, epoch_file.record(epoch))

    def rotate(self, channel: int = 0, number: int = 0) -> str:
        """Rename the channel's file as rotation does."""
        name = names.pwal(channel)
        there = names.rotated(name, 1_794_772_615_522 + number, 0)
        os.rename(f"{self.path}/{name}", f"{self.path}/{there}")
        return there

    def rotate_as(self, data: bytes, number: int = 1) -> str:
        """Write a file like that of compaction with sessions that are too new for it."""
        there = names.rotated(names.pwal(0), 1_794_772_615_522 + number, 0)
        self.append(there, data)
        return there

    def compact(self, *detached: str, epoch: int) -> None:
        """Compact rotated files as online compaction does."""
        rows = self.state(epoch)
        entries = [put(storage, key, value, version(0), blobs) for storage, key, value, _, _, blobs in rows]
        entries.sort(key=lambda entry: entry.storage_id.to_bytes(8, "little") + entry.key)
        Path(self.path, names.COMPACTED).write_bytes(snippet(0, *entries, is_ended=False))
        listed = Catalog(
            ((names.COMPACTED, 1),), detached, epoch, max((max(row[5], default=0) for row in rows), default=0)
        )
        catalog.write(production().disk, self.path, listed)

    def state(self, epoch: int) -> list[Row]:
        """Return the rows of a cursor at an epoch, by a model that keeps every entry."""
        return model(self.sessions, epoch)


def model(sessions: list[tuple[int, tuple[Entry, ...]]], epoch: int) -> list[Row]:
    entries = [entry for number, each in sessions if number <= epoch for entry in each]
    cleared: dict[int, WriteVersion] = {}
    for entry in entries:
        if entry.type in (EntryType.CLEAR_STORAGE, EntryType.REMOVE_STORAGE):
            cleared[entry.storage_id] = max(cleared.get(entry.storage_id, version(0)), entry.version)
    newest: dict[tuple[int, bytes], Entry] = {}
    for entry in entries:
        if entry.type in (EntryType.NORMAL, EntryType.NORMAL_WITH_BLOB, EntryType.REMOVE):
            known = newest.get((entry.storage_id, entry.key))
            if known is None or known.version <= entry.version:
                newest[entry.storage_id, entry.key] = entry
    return sorted(
        (each.storage_id, each.key, each.value, *each.version, each.blob_ids)
        for each in newest.values()
        if each.type is not EntryType.REMOVE and each.version >= cleared.get(each.storage_id, version(0))
    )


def random_sessions(seed: int, epochs: int, *, size: int = 20, keys: int = 30, is_late: bool = False) -> list[
    tuple[int, int, tuple[Entry, ...]]
]:  # fmt: skip
    """Return channel, epoch and entries of each session.

    With `is_late`, some entries have versions of earlier epochs.
    """
    random = np.random.default_rng(seed)
    found: list[tuple[int, int, tuple[Entry, ...]]] = []
    minor = 0
    for epoch in range(1, epochs + 1):
        for channel in range(2):
            entries: list[Entry] = []
            for _ in range(int(random.integers(1, size))):
                minor += 1
                major = int(random.integers(max(1, epoch - 3), epoch + 1)) if is_late else epoch
                at = version(major, minor | (1 << 63 if random.random() < 0.2 else 0))
                storage = int(random.choice([1, 2, 256, 1 << 33]))
                key = b"key-%d" % random.integers(keys)
                what = random.random()
                if what < 0.02:
                    entries.append(clear(storage, *at))
                elif what < 0.2:
                    entries.append(remove(storage, key, at))
                else:
                    blobs = (minor, minor + 1) if what > 0.9 else ()
                    entries.append(put(storage, key, b"value %d" % minor * int(random.integers(1, 9)), at, blobs))
            found.append((channel, epoch, tuple(entries)))
    return found


def random_directory(
    path: Path | str, seed: int, epochs: int, *, has_tail: bool = True, **options: object
) -> WrittenDirectory:
    """Return a directory whose epochs are all durable, with a torn tail and a session that is not durable."""
    directory = WrittenDirectory(path)
    for channel, epoch, entries in random_sessions(seed, epochs, **options):  # type: ignore[arg-type]
        directory.session(channel, epoch, *entries)
    directory.durable(epochs)
    if not has_tail:
        return directory
    directory.append("pwal_0000", snippet(epochs + 1, put(1, b"undurable", b"", version(epochs + 1))))
    directory.append("pwal_0001", snippet(epochs + 1, put(1, b"torn", b"x" * 99, version(epochs + 1)))[:-30])
    return directory
