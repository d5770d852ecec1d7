"""What can be wrong with a Limestone data directory, its files and its peers.

Every error names the file or the message, where in it, and where there is one the way out.
"""

from __future__ import annotations

from flowstone.errors import FlowstoneError, LocalProtocolError, RemoteProtocolError


class LimestoneError(FlowstoneError):
    """Something about a Limestone data directory."""


class DamagedFile(LimestoneError, RemoteProtocolError):
    """A file holds bytes that its format forbids, from `offset` on."""

    def __init__(self, path: str, offset: int, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{path} is damaged at byte {offset}: {reason}", hint=hint)
        self.path = path
        self.offset = offset
        self.reason = reason


class UnsupportedFormat(LimestoneError, RemoteProtocolError):
    """A data directory of a format that we do not know, or of none."""


class BadMessage(LimestoneError, RemoteProtocolError):
    """A peer sent what the replication protocol forbids; its connection is closed."""


class WrongTime(LimestoneError, LocalProtocolError):
    """A datastore or a log channel was asked for what it cannot do now. Nothing has been changed."""


class DatastoreFailed(LimestoneError):
    """A datastore could not write, sync or replicate, and does nothing more. What was reported durable is durable.

    Opened anew, it holds every epoch that was reported, and nothing of an epoch that was not recorded."""
