"""The changes of a transaction, as passed to the triggers of a node and of a replica inside a program.

A change wraps a row of the log, which is decoded only when an attribute is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

from flowstone.box.engine.paths import parse_path
from flowstone.box.engine.transaction import Statement
from flowstone.box.tuples import Tuple, field_numbers
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.row import Row

LOG = logging.getLogger("flowstone.node")

Trigger = Callable[[tuple["Change", ...]], None]
"""Called with the changes of a transaction of a node."""


class Change:
    """One statement of a transaction: INSERT, REPLACE, UPDATE, UPSERT or DELETE.

    An attribute that a statement does not have is None.

    Example:
        @node.on_commit
        def committed(changes):
            for change in changes:
                print(change.type, change.space, change.key, change.fields, change.operations)
    """

    def __init__(self, statement: Statement) -> None:
        self._statement = statement

    @property
    def type(self) -> str:
        """The name of the statement, such as `INSERT`."""
        return RequestType(self._statement.type).name

    @property
    def space(self) -> str | None:
        """The name of the space; None for a row without a space (NOP)."""
        space = self._statement.space
        return None if space is None else space.name

    @property
    def space_id(self) -> int | None:
        """The id of the space; None for a row without a space (NOP)."""
        space = self._statement.space
        return None if space is None else space.id

    @cached_property
    def _body(self) -> dict[int, Any]:
        return unpack_body(self._statement.body)

    @property
    def key(self) -> tuple[Any, ...] | None:
        """The key of an UPDATE or DELETE, in the index that it uses."""
        return self._body.get(Key.KEY.value)

    @property
    def fields(self) -> tuple[Any, ...] | None:
        """The tuple of an INSERT, REPLACE or UPSERT."""
        return None if self._statement.type == RequestType.UPDATE else self._body.get(Key.TUPLE.value)

    @property
    def operations(self) -> tuple[Any, ...] | None:
        """The operations of an UPDATE or UPSERT."""
        where = Key.TUPLE if self._statement.type == RequestType.UPDATE else Key.OPS
        return self._body.get(where.value)

    def __repr__(self) -> str:
        return f"<{self.type} in {self.space!r}>"


class SettledChange(Change):
    """A change that can no longer be rolled back, as a replica reports it, with the old and the new tuple.

    `replica_id`, `lsn` and `timestamp` are taken from the row. `old` is None for an insertion, `new` for a deletion.
    Two more types, TRUNCATE and DROP, have neither: all tuples of the space are deleted.

    Example:
        @replica.on_change
        def changed(changes):
            for change in changes:
                print(change.type, change.space, change.key, change.old, change.new, change.lsn)
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
        """The name of the statement, such as `INSERT`, or `TRUNCATE` or `DROP`."""
        return self._type or super().type

    @property
    def old(self) -> Tuple | None:
        """The tuple before the change; None for an insertion."""
        return self._tuple(self._old)

    @property
    def new(self) -> Tuple | None:
        """The tuple after the change; None for a deletion."""
        return self._tuple(self._new)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        space = self._statement.space
        return field_numbers(space.format.field_names) if space is not None else {}

    def _tuple(self, raw: bytes | None) -> Tuple | None:
        return None if raw is None else Tuple(raw, self._numbers)

    @property
    def key(self) -> tuple[Any, ...] | None:
        """The primary key of the tuple, even if the statement used another index; None for TRUNCATE and DROP."""
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
    """Return a listener that calls `trigger` and logs its exceptions: the outcome of the transaction is final."""

    def tell(statements: tuple[Statement, ...]) -> None:
        try:
            trigger(tuple(map(Change, statements)))
        except Exception:
            LOG.exception("transaction trigger failed")

    return tell
