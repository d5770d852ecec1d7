"""Boxes in their state after bootstrap, for the tests of DDL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from flowstone.box.bootstrap import bootstrap_rows
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto.msgpack import pack, unpack

ADMIN = 1


def bootstrapped(dialect: Dialect = Dialect.V2_6) -> Box:
    """Return a box with the rows of a bootstrapped replica set."""
    box = Box(dialect)
    recover(box, list(bootstrap_rows(dialect, UUID(int=1), UUID(int=2))))
    return box


def recover(box: Box, rows: list[tuple[int, bytes]]) -> None:
    """Insert rows as from a snapshot: trusted, unchecked."""
    box.is_recovering = True
    transaction = box.begin()
    for space_id, raw in rows:
        statements.insert(transaction, box.space(space_id), raw)
    box.is_recovering = False


def run(box: Box, change: Callable[..., Any], *arguments: Any, user: int = ADMIN, **options: Any) -> Any:
    """Return the result of `change`; roll it back if it fails."""
    transaction = box.begin(user)
    try:
        return change(transaction, *arguments, **options)
    except BaseException:
        transaction.rollback()
        raise


def insert(transaction: BoxTransaction, space: str | int, *values: Any) -> Any:
    return unpack(statements.insert(transaction, transaction.space(space), pack(values)))


def replace(transaction: BoxTransaction, space: str | int, *values: Any) -> Any:
    return unpack(statements.replace(transaction, transaction.space(space), pack(values)))


def delete(transaction: BoxTransaction, space: str | int, *key: Any) -> None:
    statements.delete(transaction, transaction.space(space), 0, pack(key))


def rows(box: Box, space: str | int, *key: Any, user: int = ADMIN, index: int = 0) -> list[Any]:
    """Return the decoded tuples of a space, by key or all."""
    iterator = 0 if key else 2
    found = statements.select(box.begin(user), box.space(space), index, iterator=iterator, key=pack(key))
    return [unpack(raw) for raw in found]
