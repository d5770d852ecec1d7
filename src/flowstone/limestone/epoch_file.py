"""The epoch file: which epoch is durable, record by record.

`parse` is pure; reading and writing go through the Disk one is handed, and block (reference: epoch file). The largest
record counts, not the last. A torn record at the end was never reported to anybody, so it is no damage: unlike the
original, which cannot open such a directory, we cut it off. Never decides when an epoch is durable.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from flowstone.limestone import names
from flowstone.limestone.entries import EntryType, Marker, encode
from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.files import read_whole, replace
from flowstone.outside import Disk

RECORD_SIZE: Final = 9
REPLACED_EVERY: Final = 100
"""Every so many writes of a process the file is replaced by one of a single record."""

_RECORD: Final = struct.Struct("<BQ")


@dataclass(frozen=True)
class Epochs:
    """What an epoch file says.

    `durable`: the largest epoch of its sound records. `sound_size`: where those end, and an appender goes on.
    `is_torn`: behind them is the rest of a write that was cut short. `is_damaged`: behind them is something else, and
    `salvaged` is the largest epoch among whatever records there still look like one.
    """

    durable: int
    sound_size: int
    is_torn: bool = False
    is_damaged: bool = False
    salvaged: int = 0


def record(epoch: int) -> bytes:
    return encode(Marker(EntryType.MARKER_DURABLE, epoch))


def parse(data: bytes) -> Epochs:
    """What these bytes of an epoch file say; any bytes say something."""
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
    """The epochs of what looks like a record and stands where records stand, in a piece that begins with one."""
    whole = rest[: len(rest) // RECORD_SIZE * RECORD_SIZE]
    return [epoch for kind, epoch in _RECORD.iter_unpack(whole) if kind == EntryType.MARKER_DURABLE]


def read(disk: Disk, directory: str) -> Epochs:
    """What the epoch file says; where it is empty or missing, all that were put aside. DamagedFile if it is."""
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
            "no record of an epoch is there",
            hint=f"repair the directory: the sound records say epoch {found.durable}, all of them {found.salvaged}",
        )
    return found


class EpochWriter:
    """Writes durable epochs, each survives a loss of power when `write` has returned. One per directory."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._path = f"{directory}/{names.EPOCH}"
        self._writes = 0

    @classmethod
    def open(cls, disk: Disk, directory: str) -> EpochWriter:
        """A writer behind the last sound record; what a crash left behind that is removed. The file is made if missing.

        DamagedFile if there is more wrong with it than that."""
        writer = cls(disk, directory)
        if disk.kind(f"{directory}/{names.EPOCH_TEMPORARY}") == "file":
            disk.unlink(f"{directory}/{names.EPOCH_TEMPORARY}")
        if disk.kind(writer._path) is None:
            disk.create(writer._path).close()
        found = _read(disk, writer._path)
        with disk.append_to(writer._path) as file:
            if found.is_torn:
                file.truncate(found.sound_size)
            # What a killed process has written may be in the kernel's memory only, and all behind this relies on it.
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
