"""DDL on `_schema` and `_cluster`: the replica set's UUID and its registered members."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from flowstone.box import system
from flowstone.iproto import errors

if TYPE_CHECKING:
    from flowstone.box.engine.transaction import BoxTransaction

VCLOCK_MAX: Final = 32
"""Number of vclock components; component 0 is for local rows."""

_IDS: Final = frozenset(map(str, range(1, VCLOCK_MAX)))

_UUID_KEYS: Final = ("cluster", "replicaset_uuid")
"""Keys of `_schema` with the replica set UUID: up to 2.11, and since 3.0."""

_FIRST_TO_REPEAT: Final = 3
"""First major version in which several operations of an UPSERT may change one field."""

_NAME_FIELD: Final = 2
"""Field of `_cluster` with the instance name, since 3.0."""

FORMER_MEMBER: Final = "flowstone_former_member_"
"""Prefix of keys in `_schema` that end in the id of a former member; the row holds its UUID. Each former member has its
own row, so that rows of two masters do not overwrite each other. Real servers keep these rows and ignore them."""

Row = tuple[Any, ...] | None
Undo = Callable[[], None] | None


def change_schema(transaction: BoxTransaction, old: Row, new: Row) -> Undo:
    """Check a change of `_schema`: the replica set UUID is immutable.

    The schema version and records of former members update the box; other keys have no effect.
    """
    row = old or new
    if row is not None and row[0] == "version":
        return _change_version(transaction, new)
    if row is not None and row[0].startswith(FORMER_MEMBER):
        return _change_former(transaction, row[0], new)
    if row is None or row[0] not in _UUID_KEYS:
        return None
    is_removed = new is None and not transaction.box.is_recovering  # an upgrade to 3.0 removes the older key
    if is_removed or (old is not None and new is not None and old[1:] != new[1:]):
        raise errors.ReplicasetUuidIsRo("Can't reset replica set UUID: it is already assigned")
    if new is None:
        return None
    _check_uuid(new[1] if len(new) > 1 else None)
    return None


def _change_version(transaction: BoxTransaction, new: Row) -> Undo:
    """Apply a new schema version; the semantics of UPSERT depend on it."""
    box, before = transaction.box, transaction.box.repeats_updates
    major = new[1] if new is not None and len(new) > 1 else None
    box.repeats_updates = isinstance(major, int) and major >= _FIRST_TO_REPEAT

    def undo() -> None:
        box.repeats_updates = before

    return undo


def change_cluster(transaction: BoxTransaction, old: Row, new: Row) -> Undo:
    """Check a change of `_cluster`, and record members that are removed or get another UUID.

    The UUID of a member may change only if it has a name and the row was accepted by a 3.x server, which identifies
    members by name. A row without a valid id and UUID is rejected, regardless of its source.
    """
    row = new or old
    if row is None:
        return None
    if row[0] == 0:
        raise errors.ReplicaIdIsReserved("Can't initialize replica id with a reserved value 0")
    if row[0] >= VCLOCK_MAX:
        raise errors.ReplicaMax(f"Replica count limit reached: {row[0]}")
    if row[0] == transaction.box.replica_id and not transaction.box.is_recovering:
        raise errors.LocalInstanceIdIsReadOnly(f"The local instance id {row[0]} is read-only")
    if new is None:
        return _note_former(transaction, old)
    _check_uuid(new[1])
    if UUID(new[1]).int == 0:
        raise errors.InvalidUuid(f"Invalid UUID: {new[1]}")
    has_name = old is not None and len(old) > _NAME_FIELD and old[_NAME_FIELD] is not None
    is_renewed = has_name and transaction.box.is_recovering
    if old is not None and UUID(old[1]) != UUID(new[1]) and not is_renewed:
        raise errors.Unsupported("Space _cluster does not support updates of instance uuid")
    return _note_former(transaction, old) if old is not None and UUID(old[1]) != UUID(new[1]) else None


def _note_former(transaction: BoxTransaction, row: Row) -> Undo:
    """Record that the instance of this row is no longer a member: its id must not be assigned to another member.

    The expelling transaction also writes the record to `_schema`, so that snapshots and later members have it: the
    vclock does not show a member if none of its rows has arrived here.
    """
    if row is None:
        return None
    box, number, uuid = transaction.box, int(row[0]), UUID(row[1])
    if not box.is_recovering:
        transaction.put_along(box.space(system.SCHEMA_ID), (f"{FORMER_MEMBER}{number}", str(uuid)))
    if (number, uuid) in box.deleted_members:
        return None
    box.deleted_members.add((number, uuid))
    return lambda: box.deleted_members.discard((number, uuid))


def _change_former(transaction: BoxTransaction, key: str, new: Row) -> Undo:
    """Apply a record of a former member; a malformed record is ignored."""
    recorded, number = transaction.box.recorded_members, key.removeprefix(FORMER_MEMBER)
    if number not in _IDS:
        return None
    before = recorded.pop(int(number), None)
    with suppress(ValueError, IndexError):
        if new is not None:
            recorded[int(number)] = UUID(str(new[1]))

    def undo() -> None:
        recorded.pop(int(number), None)
        if before is not None:
            recorded[int(number)] = before

    return undo


def _check_uuid(text: object) -> None:
    try:
        UUID(str(text))
    except ValueError:
        raise errors.InvalidUuid(f"Invalid UUID: {text}") from None
