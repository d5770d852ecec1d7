"""Actions of the limbo, and the errors that it reports to clients and appliers, with the texts of real servers.

`limbo.py` returns the actions in the order in which `node/` has to carry them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.replication.limbo.queue import LimboEntry, T
from flowstone.replication.limbo.split_brain import SettlingRequest


@dataclass(frozen=True, slots=True)
class Commit(Generic[T]):
    """Commit these entries, in this order."""

    entries: tuple[LimboEntry[T], ...]
    is_proven: bool = True
    """False if a PROMOTE or DEMOTE decided that a quorum may not have yet: answer clients only after Proven."""


@dataclass(frozen=True, slots=True)
class Proven(Generic[T]):
    """Answer the clients of these committed entries: a quorum has the PROMOTE or DEMOTE that committed them."""

    entries: tuple[LimboEntry[T], ...]


@dataclass(frozen=True, slots=True)
class Undo(Generic[T]):
    """Undo this entry and report the error to its client. Newer entries are undone before older ones."""

    entry: LimboEntry[T]
    error: TarantoolError


@dataclass(frozen=True, slots=True)
class Write:
    """Write this control row to the log, then call `request_written` or `request_failed`.

    If the origin is this instance, it is a new row of ours; else write the row as it was received.
    """

    request: SettlingRequest


@dataclass(frozen=True, slots=True)
class WriteNop:
    """Write a NOP in place of this control row, which changes nothing. The limbo needs no report of the outcome."""

    request: SettlingRequest


@dataclass(frozen=True, slots=True)
class Reject:
    """Reject this control row and stop its applier: the sender's history differs from ours, or a write failed."""

    request: SettlingRequest
    error: TarantoolError


@dataclass(frozen=True, slots=True)
class Transferred:
    """The queue has a new owner, or none. Ends the `promote` or `demote` that wrote `request`, if it is ours."""

    request: SettlingRequest


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """`promote` or `demote` failed and has no effect."""

    error: TarantoolError


@dataclass(frozen=True, slots=True)
class Cleared:
    """`clear_synchro_queue` is done."""


Action = Commit[T] | Proven[T] | Undo[T] | Write | WriteNop | Reject | Transferred | TransferFailed | Cleared


def quorum_timeout() -> TarantoolError:
    """Return the error of the transaction whose timeout expired."""
    return errors.SyncQuorumTimeout("Quorum collection for a synchronous transaction is timed out")


def sync_rollback() -> TarantoolError:
    """Return the error of a transaction rolled back because of an earlier one, or by another instance."""
    return errors.SyncRollback("A rollback for a synchronous transaction is received")


def write_failure() -> TarantoolError:
    return errors.WalIo("Failed to write to disk")


def not_the_owner(owner_id: int, *, is_empty: bool) -> TarantoolError:
    """Return the error of a transaction that does not come from `owner_id`; `is_empty`: no entry is pending."""
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
    """Return the error of a local promotion or demotion that was overtaken by a promotion of `owner_id`."""
    return errors.InterferingPromote(f"Instance with replica id {owner_id} was promoted first")


def quorum_wait(quorum: int, acks: int) -> TarantoolError:
    """Return the error of a promotion or demotion that timed out."""
    return errors.QuorumWait(f"Couldn't wait for quorum {quorum}: timed out with {acks} acks")
