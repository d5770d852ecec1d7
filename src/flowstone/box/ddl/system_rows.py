"""Lookups for DDL: the space that a row refers to, and rows of system spaces that refer to an object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowstone.box import system
from flowstone.iproto import errors

if TYPE_CHECKING:
    from flowstone.box.engine.space import EngineSpace
    from flowstone.box.engine.transaction import BoxTransaction

_EQ = 0
_PRIVILEGES_BY_OBJECT = 2


def space_of(transaction: BoxTransaction, space_id: int) -> EngineSpace:
    """Return the space that a row refers to; raise NoSuchSpace if it does not exist."""
    space = transaction.box.spaces.get(space_id)
    if space is None:
        raise errors.NoSuchSpace(f"Space '{space_id}' does not exist")
    return space


def has_rows(transaction: BoxTransaction, space_id: int, index_id: int, *key: Any) -> bool:
    """Return True if the system space has a row with this full or partial key; False if space or index is missing."""
    space = transaction.box.spaces.get(space_id)
    index = space.indexes.get(index_id) if space is not None else None
    if index is None:
        return False
    return next(iter(transaction.scan(index, index.key.span(_EQ, key))), None) is not None


def has_grants(transaction: BoxTransaction, object_type: str, object_id: int) -> bool:
    """Return True if a user or role has a privilege on the object."""
    return has_rows(transaction, system.PRIV_ID, _PRIVILEGES_BY_OBJECT, object_type, object_id)
