"""Why a server cannot be archived, in words that whoever runs the archive can act on.

What other errors mean to an applier is in `replication/applier.py`; here is what they mean to an operator.
"""

from __future__ import annotations

import errno
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.node import rights
from flowstone.node.archive_manifest import missing_rows, rows_text
from flowstone.replication.applier import code_of
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed

FOR_OPERATORS: Final = frozenset(
    {errors.AccessDenied.code, errors.NoSuchUser.code, errors.CredsMismatch.code, errors.Cfg.code}
)
"""Errors that somebody has to put right: the end at the start; later, when it has worked before, they may pass."""

_LOGIN: Final = "check the user and the password"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_HINTS: Final = {
    errors.NoSuchUser.code: _LOGIN,
    errors.CredsMismatch.code: _LOGIN,
    errors.ReplicasetUuidMismatch.code: "name a server of that replica set, or another directory",
    errors.UnknownReplica.code: "it was expelled from the replica set: begin a new archive in another directory",
    errors.TooEarlySubscribe.code: "it was expelled from the replica set: begin a new archive in another directory",
    errors.ReplicaMax.code: "archive without registering, or remove a member from _cluster",
    errors.Readonly.code: "register at a server that may be written to, or archive without registering",
}


class ArchiveRefused(FlowstoneError):
    """The upstream does not let us follow it, or must not be followed."""


class UpstreamLostTail(ArchiveRefused):
    """The archive has rows that the upstream no longer has: it was set back. `missing` names them."""

    def __init__(self, address: str, theirs: VClock, ours: VClock) -> None:
        self.theirs = theirs
        self.missing = missing_rows(theirs, ours)
        super().__init__(
            f"{address} has lost rows that are in this archive: {rows_text(self.missing)}"
            f" (it is at {theirs}, the archive at {ours})",
            hint="bring it back from the archive, or begin a new archive in another directory; if it is a replica that"
            " is only behind, start again when it has caught up",
        )


class LogsCollected(FlowstoneError):
    """The upstream no longer has rows that the archive needs next."""


class RowsMissing(ArchiveRefused):
    """Rows that were to come next are gone, and going on without them was not allowed."""

    def __init__(self, address: str, why: str, ours: VClock, oldest: VClock | None) -> None:
        self.missing = missing_rows(ours, oldest) if oldest is not None else ()
        what = rows_text(self.missing) if self.missing else f"rows behind {ours}"
        super().__init__(
            f"{address} no longer has {what}, which come next: {why}",
            hint="set failOnDataLoss=false to go on with a new snapshot; register=true makes the server keep its logs",
        )


def explained(error: FlowstoneError, uri: str, replicaset_uuid: str | None) -> FlowstoneError:
    """The error of a server at `uri` as whoever runs the archive, which is of `replicaset_uuid`, can use it."""
    if isinstance(error, WriteFailed):
        what = "free space" if error.errno in _FULL else "put the disk right"
        return ArchiveRefused(f"cannot archive: {error.message}", hint=f"{what} and start it again")
    if not isinstance(error, TarantoolError):
        return error
    what = error.message
    if error.code == errors.ReplicasetUuidMismatch.code:
        what = f"it is of another replica set than this archive, which is of {replicaset_uuid}"
    hint = _HINTS.get(error.code, error.hint)
    if error.code == errors.AccessDenied.code:
        hint = rights.to_replicate(user_of(uri))
    return ArchiveRefused(f"cannot archive {uri}: {what}", hint=hint)


def user_of(uri: str) -> str | None:
    """Who logs in with a URI whose password is left out; None: nobody."""
    user, at, _ = uri.rpartition("@")
    return user if at else None


def is_gap(error: FlowstoneError) -> bool:
    """Whether the upstream has collected rows that we need next. A server of 2.6 has no number for that."""
    if isinstance(error, LogsCollected) or code_of(error) == errors.XlogGap.code:
        return True
    return isinstance(error, TarantoolError) and "Missing .xlog file" in error.message
