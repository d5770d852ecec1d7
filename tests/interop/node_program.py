"""`flowstone serve` with an additional function, `interop.transaction`, which runs several statements atomically.

Clients of dialect 2.6 have no streams; on a real server the same is done in Lua. Otherwise the command is unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from flowstone.cli import main
from flowstone.cli.node import process
from flowstone.node.node import Node
from flowstone.node.transactions import Transaction


class ProgrammedNode(Node):
    """A node with the additional function."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("interop.transaction", self._transaction)

    async def _transaction(self, steps: tuple[tuple[Any, ...], ...]) -> None:
        async with self.transaction() as transaction:
            for kind, *arguments in steps:
                _STATEMENTS[kind](transaction, *arguments)


def _insert(transaction: Transaction, space: int, fields: tuple[Any, ...]) -> None:
    transaction.space(space).insert(fields)


def _replace(transaction: Transaction, space: int, fields: tuple[Any, ...]) -> None:
    transaction.space(space).replace(fields)


def _update(transaction: Transaction, space: int, key: tuple[Any, ...], operations: tuple[Any, ...]) -> None:
    transaction.space(space).update(key, _from_zero(operations))


def _upsert(transaction: Transaction, space: int, fields: tuple[Any, ...], operations: tuple[Any, ...]) -> None:
    transaction.space(space).upsert(fields, _from_zero(operations))


def _delete(transaction: Transaction, space: int, key: tuple[Any, ...]) -> None:
    transaction.space(space).delete(key)


_STATEMENTS: dict[str, Callable[..., None]] = {
    "insert": _insert,
    "replace": _replace,
    "update": _update,
    "upsert": _upsert,
    "delete": _delete,
}


def _from_zero(operations: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Steps count fields and characters from one, as Lua does; programs in Python count from zero."""
    return [
        (op, _less(field), _less(rest[0]), *rest[1:]) if op == ":" else (op, _less(field), *rest)
        for op, field, *rest in operations
    ]


def _less(number: Any) -> Any:
    return number - 1 if isinstance(number, int) and number > 0 else number


if __name__ == "__main__":
    setattr(process, "Node", ProgrammedNode)  # noqa: B010 - which mypy takes for a mistake otherwise
    sys.exit(main())
