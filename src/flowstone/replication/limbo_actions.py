"""What the limbo wants done. `limbo.py` returns these, in the order in which they are to be done; `node/` does them.

Also the errors that clients and appliers are told, in the words of real servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.replication.limbo_queue import Entry, T
from flowstone.replication.split_brain import Request


@dataclass(frozen=True, slots=True)
class Commit(Generic[T]):
    """These are facts, in this order."""

    entries: tuple[Entry[T], ...]
    is_proven: bool = True
    """If not, clients must not be told yet: a PROMOTE has decided, and a majority may not have read it. See Proven."""


@dataclass(frozen=True, slots=True)
class Proven(Generic[T]):
    """Clients of these may be told that they are facts: a quorum has the PROMOTE that made them so."""

    entries: tuple[Entry[T], ...]


@dataclass(frozen=True, slots=True)
class Undo(Generic[T]):
    """This never happened: take it back now, and tell whoever waits for it why. Newer ones have come before."""

    entry: Entry[T]
    error: TarantoolError


@dataclass(frozen=True, slots=True)
class Write:
    """To the log with this row, and then `request_written` or `request_failed`.

    If its origin is this instance, it is a new row of ours; else the row goes as it was received.
    """

    request: Request


@dataclass(frozen=True, slots=True)
class WriteNop:
    """What this row says is known: a NOP goes into the log in its place. Nothing more is to be told about it."""

    request: Request


@dataclass(frozen=True, slots=True)
class Reject:
    """This row must not be written; whoever sent it has another history than we have."""

    request: Request
    error: TarantoolError


@dataclass(frozen=True, slots=True)
class Transferred:
    """The queue has another owner, or none. Ends the `promote` or `demote` that made `request`."""

    request: Request


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """`promote` or `demote` has ended without effect."""

    error: TarantoolError


@dataclass(frozen=True, slots=True)
class Cleared:
    """`clear_synchro_queue` has ended."""


Action = Commit[T] | Proven[T] | Undo[T] | Write | WriteNop | Reject | Transferred | TransferFailed | Cleared


def quorum_timeout() -> TarantoolError:
    """For the transaction that waited too long."""
    return errors.SyncQuorumTimeout("Quorum collection for a synchronous transaction is timed out")


def sync_rollback() -> TarantoolError:
    """For one that goes with another, or by somebody else's verdict."""
    return errors.SyncRollback("A rollback for a synchronous transaction is received")


def write_failure() -> TarantoolError:
    return errors.WalIo("Failed to write to disk")


def not_the_owner(owner_id: int, *, is_empty: bool) -> TarantoolError:
    """For a transaction of an instance that is not `owner_id`, whose queue `is_empty`."""
    if owner_id == 0:
        return errors.SyncQueueUnclaimed("The synchronous transaction queue doesn't belong to any instance")
    if is_empty:
        return errors.SyncQueueForeign(
            f"The synchronous transaction queue belongs to other instance with id {owner_id}"
        )
    return errors.UncommittedForeignSyncTxns(
        f"Found uncommitted sync transactions from other instance with id {owner_id}"
    )


def queue_full() -> TarantoolError:
    return errors.SyncQueueFull("The synchronous transaction queue is full")


def promoted_first(owner_id: int) -> TarantoolError:
    """For a promotion or demotion of ours that another one has overtaken."""
    return errors.InterferingPromote(f"Instance with replica id {owner_id} was promoted first")


def quorum_wait(quorum: int, acks: int) -> TarantoolError:
    """For one that waited too long."""
    return errors.QuorumWait(f"Couldn't wait for quorum {quorum}: timed out with {acks} acks")
