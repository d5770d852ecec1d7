"""Errors of Limestone data directories, their files and their peers.

Every error names the file or message, the offset in it, and a remedy if there is one.
"""

from __future__ import annotations

from flowstone.errors import FlowstoneError, LocalProtocolError, RemoteProtocolError


class LimestoneError(FlowstoneError):
    """An error of a Limestone data directory, datastore or replica."""


class DamagedFile(LimestoneError, RemoteProtocolError):
    """A file contains bytes, at `offset`, that its format does not allow."""

    def __init__(self, path: str, offset: int, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{path} is damaged at byte {offset}: {reason}", hint=hint)
        self.path = path
        self.offset = offset
        self.reason = reason


class UnsupportedFormat(LimestoneError, RemoteProtocolError):
    """A data directory has an unknown format, or none."""


class BadMessage(LimestoneError, RemoteProtocolError):
    """A peer sent a message that violates the replication protocol; its connection is closed."""


class WrongTime(LimestoneError, LocalProtocolError):
    """A call to a datastore or log channel is not allowed in its current state. Nothing has changed."""


class DatastoreFailed(LimestoneError):
    """A datastore could not write, sync or replicate, and has stopped. Epochs that were reported durable are durable.

    Reopened, it contains every epoch that was reported durable, and nothing of epochs that were not recorded."""


class BadMetadata(LimestoneError, RemoteProtocolError):
    """The definition of a Tsurugi table cannot be read: it is damaged, or of an unsupported version or type."""


class BadRow(LimestoneError, RemoteProtocolError):
    """The key or value of an entry does not have the format that its Tsurugi table defines."""


class NoSuchTable(LimestoneError):
    """A log has no Tsurugi table of this name at this epoch."""
