"""Errors that end an archive, with the advice that an operator needs.

`replication/applier/states.py` says how an applier reacts to an error; this module says what the error means to an
operator.
"""

from __future__ import annotations

import errno
from typing import Final

from flowstone.archive.manifest import rows_text
from flowstone.client import rights
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.node.upstream.members import MemberLacksRows
from flowstone.replication.applier.states import code_of
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed

FOR_OPERATORS: Final = frozenset(
    {errors.AccessDenied.code, errors.NoSuchUser.code, errors.CredsMismatch.code, errors.Cfg.code}
)
"""Errors that an operator has to fix. They end an archive that has not followed yet. If they occur later, the archive
retries."""

_LOGIN: Final = "check the user and the password"
_EXPELLED: Final = "the archive was expelled from the replica set: start a new archive in another directory"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_HINTS: Final = {
    errors.NoSuchUser.code: _LOGIN,
    errors.CredsMismatch.code: _LOGIN,
    errors.ReplicasetUuidMismatch.code: "use a server of that replica set, or another directory",
    errors.UnknownReplica.code: _EXPELLED,
    errors.TooEarlySubscribe.code: _EXPELLED,
    errors.ReplicaMax.code: "archive without registering, or remove a member from _cluster",
    errors.Readonly.code: "register at a writable server, or archive without registering",
}


class ArchiveRefused(FlowstoneError):
    """The upstream rejects the archive, or must not be followed."""


class UpstreamLostTail(ArchiveRefused, MemberLacksRows):
    """The upstream has lost rows that the archive has. `missing` lists them."""

    def __init__(self, address: str, theirs: VClock, ours: VClock) -> None:
        self.theirs = theirs
        self.missing = theirs.missing_rows(ours)
        super().__init__(
            f"{address} has lost rows that are in this archive: {rows_text(self.missing)}"
            f" (server is at {theirs}, archive at {ours})",
            hint="restore the server from the archive, or start a new archive in another directory; if the server is"
            " only lagging, start the archive again when the server has caught up",
        )


class LogsCollected(FlowstoneError):
    """The upstream no longer has the rows that the archive needs next."""


class RowsMissing(ArchiveRefused):
    """The upstream no longer has the next rows, and the caller does not allow the archive to continue without them."""

    def __init__(self, address: str, why: str, ours: VClock, oldest: VClock | None) -> None:
        self.missing = ours.missing_rows(oldest) if oldest is not None else ()
        what = rows_text(self.missing) if self.missing else f"rows after {ours}"
        super().__init__(
            f"{address} no longer has {what}, which the archive needs next: {why}",
            hint="set failOnDataLoss=false to continue with a new snapshot;"
            " register=true makes the server keep its logs",
        )


def explained(error: FlowstoneError, uri: str, replicaset_uuid: str | None) -> FlowstoneError:
    """Return the error of the server at `uri` with advice for the operator; the archive belongs to
    `replicaset_uuid`."""
    if isinstance(error, WriteFailed):
        what = "free space" if error.errno in _FULL else "repair the disk"
        return ArchiveRefused(f"cannot archive: {error.message}", hint=f"{what} and start the archive again")
    if not isinstance(error, TarantoolError):
        return error
    what = error.message
    if error.code == errors.ReplicasetUuidMismatch.code:
        what = f"the server belongs to another replica set than this archive ({replicaset_uuid})"
    hint = _HINTS.get(error.code, error.hint)
    if error.code == errors.AccessDenied.code:
        hint = rights.to_replicate(user_of(uri))
    return ArchiveRefused(f"cannot archive {uri}: {what}", hint=hint)


def user_of(uri: str) -> str | None:
    """Return the user of a URI without password; None if there is none."""
    user, at, _ = uri.rpartition("@")
    return user if at else None


def is_gap(error: FlowstoneError) -> bool:
    """True if the error means that the upstream no longer has the next rows. Version 2.6 has no error code for it."""
    if isinstance(error, LogsCollected) or code_of(error) == errors.XlogGap.code:
        return True
    return isinstance(error, TarantoolError) and "Missing .xlog file" in error.message
