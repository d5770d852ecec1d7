"""What a transaction did, for whoever wants to be told: triggers of a node, and of a replica in a program.

Made from the rows for the log, whose content is decoded only when somebody looks at it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

from flowstone.box.paths import parse_path
from flowstone.box.transaction import Statement
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.row import Row
from flowstone.node.tuples import Tuple, field_numbers

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


class SettledChange(Change):
    """A change that can no longer be taken back: where it comes from, and the tuple before (`old`) and after (`new`).

    Of an insertion `old` is None, of a deletion `new`. TRUNCATE and DROP, which no statement is, have neither: all
    tuples of the space went.
    """

    def __init__(
        self, statement: Statement, row: Row, old: bytes | None = None, new: bytes | None = None, *, type: str = ""
    ) -> None:
        super().__init__(statement)
        self._type = type
        self._old, self._new = old, new
        self.replica_id = row.replica_id
        self.lsn = row.lsn
        self.timestamp = row.timestamp

    @property
    def type(self) -> str:
        return self._type or super().type

    @property
    def old(self) -> Tuple | None:
        return self._tuple(self._old)

    @property
    def new(self) -> Tuple | None:
        return self._tuple(self._new)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        space = self._statement.space
        return field_numbers(space.format.field_names) if space is not None else {}

    def _tuple(self, raw: bytes | None) -> Tuple | None:
        return None if raw is None else Tuple(raw, self._numbers)

    @property
    def key(self) -> tuple[Any, ...] | None:
        """The primary key of the tuple, whatever the statement named it by."""
        space, found = self._statement.space, self.new or self.old
        if space is None or space.primary is None or found is None:
            return None
        return tuple(_field(found.values, part.field, part.path) for part in space.primary.definition.parts)

    def __repr__(self) -> str:
        return f"<{self.type} in {self.space!r}: {self.old} → {self.new}>"


def _field(values: tuple[Any, ...], number: int, path: str | None) -> Any:
    value = values[number]
    for step in parse_path(path or ""):
        value = value[step]
    return value


def listener(trigger: Trigger) -> Callable[[tuple[Statement, ...]], None]:
    """What calls `trigger`. Its mistakes are logged: the transaction is over, and nobody could answer for them."""

    def tell(statements: tuple[Statement, ...]) -> None:
        try:
            trigger(tuple(map(Change, statements)))
        except Exception:
            LOG.exception("in a trigger")

    return tell
