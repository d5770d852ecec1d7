"""Statements on system spaces with decoded values: the building blocks of the functions in `functions.py`.

They are the same statements that a client could send: access rights are checked, and rows are logged as by a real
server's Lua layer. Reads use the system views, writes the base spaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from flowstone.box.access import ADMIN
from flowstone.box.engine import statements
from flowstone.box.engine.space import EngineSpace
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack

Row = tuple[Any, ...]

BY_NAME: Final = 2
"""The index by name of `_vspace`, `_vuser`, `_vfunc` and `_vsequence`."""

BY_OWNER: Final = 1
_LUA_BASE: Final = 1
"""Field numbers in operations of the Lua API count from 1, even in the log."""


def get(txn: BoxTransaction, space: str, *key: Any, index: int = 0) -> Row | None:
    raw = statements.get(txn, txn.space(space), index, pack(key))
    return None if raw is None else unpack(raw)


def select(txn: BoxTransaction, space: str, *key: Any, index: int = 0) -> list[Row]:
    return [unpack(raw) for raw in statements.select(txn, txn.space(space), index, key=pack(key))]


def last(txn: BoxTransaction, space: str, *key: Any) -> Row | None:
    """Return the last row by primary key that is not after `key`; without a key, the last row of all."""
    found = statements.select(txn, txn.space(space), 0, iterator=statements.LE, limit=1, key=pack(key))
    return unpack(found[0]) if found else None


def _system(txn: BoxTransaction, space: str) -> EngineSpace:
    """Return the space to write to; raise Unsupported in an interactive transaction.

    A definition must take effect at once, because the next step of a function relies on it.
    """
    if txn.is_interactive:
        raise errors.Unsupported(
            "An interactive transaction does not support functions that change definitions: "
            "call them outside of it, or write the rows of system spaces"
        )
    return txn.space(space)


def insert(txn: BoxTransaction, space: str, *row: Any) -> None:
    statements.insert(txn, _system(txn, space), pack(row))


def replace(txn: BoxTransaction, space: str, *row: Any) -> None:
    statements.replace(txn, _system(txn, space), pack(row))


def update(txn: BoxTransaction, space: str, key: Row, *operations: Row) -> Row | None:
    """Update a row and return it; `operations` are `("=", field, value)`, with fields counted from 1."""
    raw = statements.update(txn, _system(txn, space), 0, pack(key), pack(operations), _LUA_BASE)
    return None if raw is None else unpack(raw)


def delete(txn: BoxTransaction, space: str, *key: Any) -> Row | None:
    raw = statements.delete(txn, _system(txn, space), 0, pack(key))
    return None if raw is None else unpack(raw)


def auto_increment(txn: BoxTransaction, space: str, *values: Any) -> int:
    """Insert a row of the next free id and the values; return the id."""
    highest = last(txn, space)
    new_id: int = 1 if highest is None else highest[0] + 1
    insert(txn, space, new_id, *values)
    return new_id


@contextmanager
def as_admin(txn: BoxTransaction) -> Iterator[None]:
    """Run a block with the rights of admin, where real servers do so for any user."""
    user, txn.user = txn.user, ADMIN
    try:
        yield
    finally:
        txn.user = user


def revoke_all(txn: BoxTransaction, object_type: str, object_id: int) -> None:
    """Revoke all privileges on an object that is about to be dropped."""
    for row in select(txn, "_vpriv", object_type, object_id, index=2):
        delete(txn, "_priv", row[1], object_type, object_id)
