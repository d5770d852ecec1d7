"""The epoch file, a list of records of durable epochs.

`parse` is pure; reading and writing use the Disk that is passed in, and block (`docs/spec/limestone.md#epoch-file`).
The largest record counts, not the last. A torn record at the end was never reported as durable, so it is not damage:
the original cannot open such a directory, Flowstone cuts the record off. Never decides when an epoch is durable.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import names
from flowstone.limestone.format.entries import EntryType, Marker, encode
from flowstone.limestone.format.files import read_whole, replace
from flowstone.outside import Disk

RECORD_SIZE: Final = 9
REPLACED_EVERY: Final = 100
"""Number of writes of a process after which the file is replaced by one with a single record."""

_RECORD: Final = struct.Struct("<BQ")


@dataclass(frozen=True)
class Epochs:
    """The content of an epoch file.

    `durable`: the largest epoch of its sound records. `sound_size`: their end offset, where a writer appends.
    `is_torn`: they are followed by the rest of an incomplete write. `is_damaged` is true if other data follows the
    records; `salvaged` is the largest epoch in all bytes that still look like a record.
    """

    durable: int
    sound_size: int
    is_torn: bool = False
    is_damaged: bool = False
    salvaged: int = 0


def record(epoch: int) -> bytes:
    return encode(Marker(EntryType.MARKER_DURABLE, epoch))


def parse(data: bytes) -> Epochs:
    """Parse the bytes of an epoch file; never fails."""
    durable = sound_size = 0
    for offset in range(0, len(data) - RECORD_SIZE + 1, RECORD_SIZE):
        kind, epoch = _RECORD.unpack_from(data, offset)
        if kind != EntryType.MARKER_DURABLE:
            break
        durable, sound_size = max(durable, epoch), offset + RECORD_SIZE
    rest = data[sound_size:]
    if not rest:
        return Epochs(durable, sound_size)
    if (len(rest) < RECORD_SIZE and rest[0] == EntryType.MARKER_DURABLE) or not any(rest):
        return Epochs(durable, sound_size, is_torn=True, salvaged=durable)
    return Epochs(durable, sound_size, is_damaged=True, salvaged=max(durable, *records(rest), 0))


def records(rest: bytes) -> list[int]:
    """Return the epochs of the records at multiples of the record size; other bytes are skipped."""
    whole = rest[: len(rest) // RECORD_SIZE * RECORD_SIZE]
    return [epoch for kind, epoch in _RECORD.iter_unpack(whole) if kind == EntryType.MARKER_DURABLE]


def read(disk: Disk, directory: str) -> Epochs:
    """Read the epoch file; if it is empty or missing, read the rotated ones. Raise DamagedFile if it is damaged."""
    found = _read(disk, f"{directory}/{names.EPOCH}")
    if found.sound_size:
        return found
    others = [name for name in disk.list_directory(directory) if names.is_epoch_file(name) and name != names.EPOCH]
    durable = max((_read(disk, f"{directory}/{name}").durable for name in others), default=0)
    return Epochs(durable, found.sound_size, found.is_torn)


def _read(disk: Disk, path: str) -> Epochs:
    found = parse(read_whole(disk, path) or b"")
    if found.is_damaged:
        raise DamagedFile(
            path,
            found.sound_size,
            "invalid epoch record",
            hint=f"repair the directory: the largest epoch in intact records is {found.durable}; "
            f"including damaged records it is {found.salvaged}",
        )
    return found


class EpochWriter:
    """Writes durable epochs; each survives a power failure once `write` has returned. One per directory."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._path = f"{directory}/{names.EPOCH}"
        self._writes = 0

    @classmethod
    def open(cls, disk: Disk, directory: str) -> EpochWriter:
        """Open the file for appending after the last sound record; remove a torn record, create a missing file.

        Raise DamagedFile if the file is damaged otherwise."""
        writer = cls(disk, directory)
        if disk.kind(f"{directory}/{names.EPOCH_TEMPORARY}") == "file":
            disk.unlink(f"{directory}/{names.EPOCH_TEMPORARY}")
        if disk.kind(writer._path) is None:
            disk.create(writer._path).close()
        found = _read(disk, writer._path)
        with disk.append_to(writer._path) as file:
            if found.is_torn:
                file.truncate(found.sound_size)
            # Data that a killed process wrote may not be on disk yet, and all later records rely on it.
            file.sync()
        disk.sync_directory(directory)
        return writer

    def write(self, epoch: int) -> None:
        self._writes += 1
        if self._writes % REPLACED_EVERY == 0:
            replace(self._disk, self._directory, names.EPOCH, names.EPOCH_TEMPORARY, record(epoch))
            return
        with self._disk.append_to(self._path) as file:
            size = file.size()
            try:
                file.append(record(epoch))
                file.sync()
            except OSError:
                file.truncate(size)
                raise
