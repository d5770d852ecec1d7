"""What a replica tells whoever watches it, one message per event; as JSON each is an object with its kind in `event`.

`docs/reference/limestone.md` tells the fields.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """`str` of one is a sentence for a person."""


class Listening(Event, frozen=True):
    """The directory is ours and sound, and masters are let in."""

    directory: str
    endpoint: str
    instance_uuid: str
    durable_epoch: int
    compatible: bool

    def __str__(self) -> str:
        manner = ", compatible with the original" if self.compatible else ""
        return f"replica in {self.directory}, at epoch {self.durable_epoch}, listening at {self.endpoint}{manner}"


class Connected(Event, frozen=True):
    """A master has opened its control channel."""

    peer: str

    def __str__(self) -> str:
        return f"master {self.peer} connected"


class Identified(Event, frozen=True):
    """A master of ours has said who it is; the original never does."""

    peer: str
    instance_uuid: str
    durable_epoch: int

    def __str__(self) -> str:
        return f"master {self.peer} is {self.instance_uuid}, at epoch {self.durable_epoch}"


class Disconnected(Event, frozen=True):
    """A master session has ended. `durable_epoch`: what it has brought that stays."""

    peer: str
    durable_epoch: int

    def __str__(self) -> str:
        return f"master {self.peer} is gone; epoch {self.durable_epoch} is durable"


class Resumed(Event, frozen=True):
    """A master goes on behind this epoch."""

    instance_uuid: str
    epoch: int

    def __str__(self) -> str:
        return f"following {self.instance_uuid} from epoch {self.epoch} on"


class Seeding(Event, frozen=True):
    """A master sends all it has; what was here is put aside until that is durable."""

    instance_uuid: str
    epoch: int

    def __str__(self) -> str:
        return f"taking the data of {self.instance_uuid} at epoch {self.epoch}; what was here is put aside"


class Seeded(Event, frozen=True):
    """What was put aside is deleted."""

    instance_uuid: str
    epoch: int

    def __str__(self) -> str:
        return f"the data of {self.instance_uuid} is here up to epoch {self.epoch}"


class Restored(Event, frozen=True):
    """What was put aside for a seeding that never came to its end is back."""

    durable_epoch: int

    def __str__(self) -> str:
        return f"a seeding never came to its end: what was here before is back, at epoch {self.durable_epoch}"


class Withdrawn(Event, frozen=True):
    """Sessions of epochs that never became durable were invalidated before another master is served."""

    sessions: int
    durable_epoch: int

    def __str__(self) -> str:
        return f"{self.sessions} session(s) beyond epoch {self.durable_epoch} were withdrawn: they never became durable"


class Refused(Event, frozen=True):
    """A connection was closed because of what came over it, or because of what could not be done about that."""

    peer: str
    code: int | None
    reason: str

    def __str__(self) -> str:
        code = f"error {self.code}: " if self.code is not None else ""
        return f"connection of {self.peer} closed: {code}{self.reason}"


class Compacted(Event, frozen=True):
    """Log files were compacted up to this epoch."""

    epoch: int
    files: int

    def __str__(self) -> str:
        return f"{self.files} log file(s) compacted, up to epoch {self.epoch}"


class Failed(Event, frozen=True):
    """Something that nobody waits for could not be done. What is durable is not touched by it."""

    reason: str

    def __str__(self) -> str:
        return self.reason


class Stopped(Event, frozen=True):
    durable_epoch: int

    def __str__(self) -> str:
        return f"stopped at epoch {self.durable_epoch}"
