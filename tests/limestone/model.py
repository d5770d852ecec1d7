"""The expected content of a store, computed as simply as possible: sessions in order of creation, rows by full scan.

The model has no files, channels or replicas. `tests/limestone/test_crashes_everywhere.py` compares it with the disks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowstone.limestone.format.entries import Entry, EntryType

Row = tuple[int, bytes, bytes]


@dataclass
class Session:
    """The entries of one session.

    `is_ending`: its end was requested, so the session may be durable from then on.
    """

    epoch: int
    entries: list[Entry] = field(default_factory=list)
    is_ending: bool = False
    is_ended: bool = False
    is_aborted: bool = False


@dataclass
class Model:
    """All sessions of a store, and the largest epoch that was reported durable."""

    sessions: list[Session] = field(default_factory=list)
    reported: int = 0

    def begin(self, epoch: int) -> Session:
        session = Session(epoch)
        self.sessions.append(session)
        return session

    def start(self) -> None:
        """Start a new life of the store: epochs reported without sessions are not on disk, and may be reused."""
        self.reported = self.must_be_durable()

    def forget(self, durable_epoch: int) -> None:
        """Apply a crash: drop the later epochs."""
        self.sessions = [session for session in self.sessions if session.epoch <= durable_epoch]

    def rows(self, durable_epoch: int) -> list[Row]:
        """Return the rows of a cursor if exactly the epochs up to this one are durable."""
        entries = [
            entry
            for session in self.sessions
            if session.epoch <= durable_epoch and not session.is_aborted
            for entry in session.entries
        ]
        return rows_of(entries)

    def last_epoch(self) -> int:
        """Return the largest epoch with an ended session."""
        return max((session.epoch for session in self.sessions if session.is_ended), default=0)

    def must_be_durable(self) -> int:
        """Return the epoch that a store must still have after a crash: the last reported one with a session."""
        ended = [session.epoch for session in self.sessions if session.is_ended]
        return max((epoch for epoch in ended if epoch <= self.reported), default=0)

    def unfinished(self, durable_epoch: int) -> list[Session]:
        """Return the sessions that cannot be durable because their end was never requested."""
        return [
            session
            for session in self.sessions
            if session.epoch <= durable_epoch and not session.is_ending and not session.is_aborted
        ]


def rows_of(entries: list[Entry]) -> list[Row]:
    """Return the puts that no newer entry replaced, removed or cleared, in cursor order."""
    found = []
    for entry in entries:
        is_put = entry.type in (EntryType.NORMAL, EntryType.NORMAL_WITH_BLOB)
        if is_put and not any(_hides(other, entry) for other in entries):
            found.append((entry.storage_id, entry.key, entry.value))
    return sorted(found, key=lambda row: (row[0].to_bytes(8, "little"), row[1]))


def _hides(other: Entry, entry: Entry) -> bool:
    if other.storage_id != entry.storage_id or other.version <= entry.version:
        return False
    if other.type in (EntryType.CLEAR_STORAGE, EntryType.REMOVE_STORAGE):
        return True
    return other.type is not EntryType.ADD_STORAGE and other.key == entry.key
