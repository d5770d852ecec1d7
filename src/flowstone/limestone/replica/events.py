"""Events of a replica. As JSON, each is an object with its kind in `event`.

`docs/reference/limestone.md` describes the fields.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """An event; `str` returns a sentence for a log."""


class Listening(Event, frozen=True):
    """The directory is open and sound, and the replica accepts masters."""

    directory: str
    endpoint: str
    instance_uuid: str
    durable_epoch: int
    compatible: bool

    def __str__(self) -> str:
        manner = ", compatible with the original" if self.compatible else ""
        return f"replica in {self.directory} listens at {self.endpoint}, durable epoch {self.durable_epoch}{manner}"


class MasterConnected(Event, frozen=True, tag="connected"):
    """A master has opened its control channel."""

    peer: str

    def __str__(self) -> str:
        return f"master {self.peer} connected"


class Identified(Event, frozen=True):
    """A Flowstone master has identified itself; the original never does."""

    peer: str
    instance_uuid: str
    durable_epoch: int

    def __str__(self) -> str:
        return f"master {self.peer} is {self.instance_uuid}, at epoch {self.durable_epoch}"


class MasterDisconnected(Event, frozen=True, tag="disconnected"):
    """The session of a master has ended. `durable_epoch`: the durable epoch of the replica."""

    peer: str
    durable_epoch: int

    def __str__(self) -> str:
        return f"master {self.peer} disconnected, durable epoch {self.durable_epoch}"


class Resumed(Event, frozen=True):
    """A master resumes after this epoch."""

    instance_uuid: str
    epoch: int

    def __str__(self) -> str:
        return f"following {self.instance_uuid} after epoch {self.epoch}"


class Seeding(Event, frozen=True):
    """A master sends all its data; the old data is put aside until the new data is durable."""

    instance_uuid: str
    epoch: int

    def __str__(self) -> str:
        return f"seeding from {self.instance_uuid} up to epoch {self.epoch}; old data put aside"


class Seeded(Event, frozen=True):
    """A seeding has completed, and the old data has been deleted."""

    instance_uuid: str
    epoch: int

    def __str__(self) -> str:
        return f"seeded from {self.instance_uuid} up to epoch {self.epoch}"


class ReplicaRestored(Event, frozen=True, tag="restored"):
    """The old data has been restored, because a seeding did not complete."""

    durable_epoch: int

    def __str__(self) -> str:
        return f"seeding did not complete: old data restored, durable epoch {self.durable_epoch}"


class EpochsWithdrawn(Event, frozen=True, tag="withdrawn"):
    """Sessions of epochs that never became durable were invalidated before another master is served."""

    sessions: int
    durable_epoch: int

    def __str__(self) -> str:
        return f"{self.sessions} session(s) after epoch {self.durable_epoch} withdrawn: they never became durable"


class MasterRefused(Event, frozen=True, tag="refused"):
    """A connection was closed because of a message, or because its request could not be executed."""

    peer: str
    code: int | None
    reason: str

    def __str__(self) -> str:
        code = f"error {self.code}: " if self.code is not None else ""
        return f"connection from {self.peer} closed: {code}{self.reason}"


class ReplicaCompacted(Event, frozen=True, tag="compacted"):
    """Log files were compacted up to this epoch."""

    epoch: int
    files: int

    def __str__(self) -> str:
        return f"{self.files} log file(s) compacted up to epoch {self.epoch}"


class Failed(Event, frozen=True):
    """A background operation has failed. Durable data is not affected."""

    reason: str

    def __str__(self) -> str:
        return self.reason


class ReplicaStopped(Event, frozen=True, tag="stopped"):
    durable_epoch: int

    def __str__(self) -> str:
        return f"stopped at epoch {self.durable_epoch}"
