"""What a transaction did, for whoever wants to be told: the triggers `on_commit` and `on_rollback` of a node.

Made from the rows for the log, whose content is decoded only when somebody looks at it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

from flowstone.box.transaction import Statement
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import unpack_body

LOG = logging.getLogger("flowstone.node")

Trigger = Callable[[tuple["Change", ...]], None]


class Change:
    """One statement: INSERT, REPLACE, UPDATE, UPSERT or DELETE. What a type does not have is None."""

    def __init__(self, statement: Statement) -> None:
        self._statement = statement

    @property
    def type(self) -> str:
        return RequestType(self._statement.type).name

    @property
    def space(self) -> str | None:
        """The name of the space; None for a row that is about none (NOP)."""
        space = self._statement.space
        return None if space is None else space.name

    @property
    def space_id(self) -> int | None:
        space = self._statement.space
        return None if space is None else space.id

    @cached_property
    def _body(self) -> dict[int, Any]:
        return unpack_body(self._statement.body)

    @property
    def key(self) -> tuple[Any, ...] | None:
        """Of UPDATE and DELETE."""
        return self._body.get(Key.KEY.value)

    @property
    def fields(self) -> tuple[Any, ...] | None:
        """The tuple, of INSERT, REPLACE and UPSERT."""
        return None if self._statement.type == RequestType.UPDATE else self._body.get(Key.TUPLE.value)

    @property
    def operations(self) -> tuple[Any, ...] | None:
        """Of UPDATE and UPSERT."""
        where = Key.TUPLE if self._statement.type == RequestType.UPDATE else Key.OPS
        return self._body.get(where.value)

    def __repr__(self) -> str:
        return f"<{self.type} in {self.space!r}>"


def listener(trigger: Trigger) -> Callable[[tuple[Statement, ...]], None]:
    """What calls `trigger`. Its mistakes are logged: the transaction is over, and nobody could answer for them."""

    def tell(statements: tuple[Statement, ...]) -> None:
        try:
            trigger(tuple(map(Change, statements)))
        except Exception:
            LOG.exception("in a trigger")

    return tell
