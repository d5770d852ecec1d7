"""The log file of one channel of a replica. Makes whole sessions durable and removes unfinished sessions.

Uses the Disk that is passed in. `begin`, `add` and `end` only collect; `flush` and `abandon` block, so they run in a
worker, and nothing else uses the channel meanwhile. A crash at any point leaves a file that the original can read:

* A begin marker is written separately. No data is written after a marker before the marker is complete, so an epoch is
  never read from a torn marker.
* An interrupted session of a durable epoch would look like damage. Such a session is written as invalidated, synced,
  and made valid by one byte. `hide` does that to sessions whose epoch is about to become durable before their end.

With `compatible`, markers have epoch 0, as the original's replica writes them, and neither rule applies. Never knows
connections or the durable epoch: `replica.py` does.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from flowstone.limestone.format.entries import EntryType, Marker, encode
from flowstone.outside import Disk, File

SPILL: Final = 1 << 20
"""Bytes of a session that are kept in memory before they are put into the file."""

_VALID: Final = bytes((EntryType.MARKER_BEGIN,))
_INVALIDATED: Final = bytes((EntryType.MARKER_INVALIDATED_BEGIN,))


@dataclass
class ReceivedSession:
    """One session. `offset`: position of its begin marker. `is_hidden`: the marker is invalid until the last byte of
    the session is synced. `marker`: the begin marker, until it is written to the file."""

    epoch: int
    offset: int
    is_hidden: bool = False
    marker: list[bytes] = field(default_factory=list, repr=False, compare=False)


@dataclass
class _Writes:
    """Data to be written: one list per write, because a begin marker must be written separately."""

    parts: list[list[bytes]] = field(default_factory=lambda: [[]])
    size: int = 0

    def add(self, data: bytes) -> None:
        self.parts[-1].append(data)
        self.size += len(data)

    def add_apart(self, data: bytes) -> list[bytes]:
        """Add a separate write and return it. Until it is written, the caller may change it, but not its size."""
        written = [data]
        self.parts += [written, []]
        self.size += len(data)
        return written


class ReplicaChannel:
    """Opens the file when something is to be written and keeps it open until `close`, which may be called any time."""

    def __init__(self, disk: Disk, directory: str, name: str, *, compatible: bool = False) -> None:
        self.name = name
        self.lock = asyncio.Lock()
        """Held from the begin of a session until it is on disk or gone, and by who renames the file."""
        self.writing = asyncio.Lock()
        """Held while a worker writes to the file."""
        self.session: ReceivedSession | None = None
        """The session that has begun and not ended."""
        self.ended: list[ReceivedSession] = []
        """Sessions that have ended and are not on disk yet."""
        self._disk = disk
        self._directory = directory
        self._path = f"{directory}/{name}"
        self._compatible = compatible
        self._file: File | None = None
        self._is_new = False
        self._size = 0
        """Written size of the file."""
        self._whole_size = 0
        """End offset of the last flushed session. After an error, the file is truncated to this offset."""
        self._writes = _Writes()

    @property
    def buffered(self) -> int:
        """Bytes that are in memory only."""
        return self._writes.size

    def begin(self, epoch: int, durable_epoch: int) -> None:
        assert self.session is None
        if self._file is None:
            self._open()
        written = 0 if self._compatible else epoch
        is_hidden = not self._compatible and epoch <= durable_epoch
        kind = EntryType.MARKER_INVALIDATED_BEGIN if is_hidden else EntryType.MARKER_BEGIN
        offset = self._size + self._writes.size
        marker = self._writes.add_apart(encode(Marker(kind, written)))
        self.session = ReceivedSession(epoch, offset, is_hidden, marker)

    def add(self, entries: bytes) -> None:
        """Add entries in the form of the file, without markers."""
        assert self.session is not None
        self._writes.add(entries)

    def end(self) -> None:
        """End the session with the epoch of its begin message, whatever epoch the end message has."""
        assert self.session is not None
        epoch = 0 if self._compatible else self.session.epoch
        self._writes.add(encode(Marker(EntryType.MARKER_END, epoch)))
        self.ended.append(self.session)
        self.session = None

    def unhidden(self, epoch: int) -> list[ReceivedSession]:
        """Return the incomplete or unsynced sessions up to this epoch that a recovery would take for valid."""
        if self._compatible:
            return []
        unfinished = self.ended if self.session is None else [*self.ended, self.session]
        return [session for session in unfinished if session.epoch <= epoch and not session.is_hidden]

    def hide(self, sessions: list[ReceivedSession]) -> None:
        """Mark these `unhidden` sessions, durably, as invalid until they have ended and are synced.

        Blocks if a session is in the file already. After an OSError some may still be valid."""
        written = [session.offset for session in sessions if session.offset < self._size]
        if written:
            self._disk.overwrite(self._path, _INVALIDATED, *written)
        for session in sessions:
            if session.offset >= self._size:
                session.marker[0] = _INVALIDATED + session.marker[0][1:]
            session.is_hidden = True

    def flush(self, sync: bool) -> list[ReceivedSession]:
        """Write everything to the file. With `sync`, return the ended sessions, which are durable now.

        On OSError, what was not flushed before is lost, and removed from the file if possible."""
        try:
            self._write()
            if not sync:
                return []
            assert self._file is not None
            self._file.sync()
            if self._is_new:
                self._disk.sync_directory(self._directory)
                self._is_new = False
            ended, self.ended = self.ended, []
            hidden = [session.offset for session in ended if session.is_hidden]
            if hidden:
                self._disk.overwrite(self._path, _VALID, *hidden)
            self._whole_size = self._size if self.session is None else self.session.offset
            return ended
        except OSError:
            with suppress(OSError):  # the next recovery finds what cannot be taken away now
                self._cut(self._whole_size)
            self._forget()
            raise

    def abandon(self) -> None:
        """Remove the sessions that have not ended or were never flushed."""
        self.session, self.ended, self._writes = None, [], _Writes()
        if self._file is not None and self._size > self._whole_size:
            self._cut(self._whole_size)

    def close(self) -> None:
        """Close the file, which may be renamed then. No session may be open or unflushed."""
        assert self.session is None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        exists = self._disk.kind(self._path) == "file"
        self._file = self._disk.append_to(self._path) if exists else self._disk.create(self._path)
        self._is_new = self._is_new or not exists
        self._size = self._whole_size = self._file.size()

    def _write(self) -> None:
        assert self._file is not None
        writes, self._writes = self._writes, _Writes()
        for parts in writes.parts:
            if parts:
                self._file.append(*parts)
                self._size += sum(map(len, parts))

    def _cut(self, size: int) -> None:
        assert self._file is not None
        self._file.truncate(size)
        self._size = size
        self._file.sync()

    def _forget(self) -> None:
        self.session, self.ended, self._writes = None, [], _Writes()
        self.close()
