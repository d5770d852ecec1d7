"""Spaces and indexes of a client: `client.space("orders")`, or inside a transaction.

Every method sends a request, and returns a future: await it, or gather many, which are then sent with one write. A
handle refers to a space by name or id; whether the space exists is found out with the first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from flowstone.box.arguments import Operations
from flowstone.box.row_forms import ObjectForm, RowForm
from flowstone.client.statements import LIMIT_MAX, ClientStatement, Get, Select, Store, UpdateOrDelete, Upsert
from flowstone.iproto.constants import RequestType

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")


class Sender(Protocol):
    """Sends statements: to members of the set, or on the stream of a transaction."""

    def submit(self, statement: ClientStatement[T]) -> asyncio.Future[T]: ...

    async def store_many(self, type: RequestType, space: int | str, rows: Iterable[Any], form: RowForm[Any]) -> int: ...


class ClientIndex(Generic[R]):
    """An index of a space, on the servers of the client: `client.space("orders").index("by_status")`.

    Rows are `Tuple`, unless the space was made with `as_`.

    Example:
        late = await client.space("orders").index("by_status").select("late", limit=10)
    """

    def __init__(self, sender: Sender, space: int | str, index: int | str, form: RowForm[R]) -> None:
        self._sender = sender
        self._space = space
        self._index = index
        self._form = form

    def get(self, key: Any) -> asyncio.Future[R | None]:
        """Return the row with this key of a unique index; None if there is none.

        Args:
            key: The value of a single part, or a tuple or list of all parts.

        Raises:
            TarantoolError: The key does not fit the index, or the index is not unique.
            UnknownSpace: The space does not exist, or the user may not see it.
            NoMember: No member that `read_from` allows was found in time.
        """
        return self._sender.submit(Get(self._space, self._index, key, self._form))

    def select(
        self, key: Any = (), *, iterator: str | int = "EQ", limit: int = LIMIT_MAX, offset: int = 0
    ) -> asyncio.Future[list[R]]:
        """Return the rows that match `key`, in the order of the index.

        Args:
            key: The value of the first part, or a tuple or list of the first parts; an empty key matches all rows.
            iterator: Name or number as in Tarantool: EQ, ALL, GE, GT, or in reverse order REQ, LE, LT.
            limit: Return at most this many rows.
            offset: Skip this many rows.

        Raises:
            TarantoolError: An argument does not fit the index.
            UnknownSpace: The space does not exist, or the user may not see it.
            NoMember: No member that `read_from` allows was found in time.
        """
        return self._sender.submit(
            Select(self._space, self._index, key, iterator=iterator, limit=limit, offset=offset, form=self._form)
        )

    def update(self, key: Any, operations: Operations) -> asyncio.Future[R | None]:
        """Change the row with this key of a unique index.

        Args:
            key: The value of a single part, or a tuple or list of all parts.
            operations: The new values by name, as `{"stock": 3}`, or operations of Tarantool's UPDATE, such as
                `[("-", "stock", 1)]`.

        Returns:
            The new row; None if no row has the key.

        Raises:
            TarantoolError: The key does not fit the index, or the server rejects the new row.
            OutcomeUnknown: The connection was lost before the answer.
            NoMember: No leader was found in time; nothing was changed.
        """
        return self._sender.submit(UpdateOrDelete(self._space, self._index, key, operations, self._form))

    def delete(self, key: Any) -> asyncio.Future[R | None]:
        """Delete the row with this key of a unique index.

        Returns:
            The deleted row; None if no row has the key.

        Raises:
            TarantoolError: The key does not fit the index, or the server refuses.
            OutcomeUnknown: The connection was lost before the answer.
            NoMember: No leader was found in time; nothing was changed.
        """
        return self._sender.submit(UpdateOrDelete(self._space, self._index, key, None, self._form))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._index!r} of {self._space!r}>"


class ClientSpace(ClientIndex[R]):
    """A space on the servers of the client. Reads, updates and deletes use the primary index.

    Example:
        orders = client.space("orders")
        await orders.insert({"id": 42, "status": "new"})
        await orders.update(42, {"status": "paid"})
        print(await orders.get(42), await orders.select(limit=10))
    """

    def __init__(self, sender: Sender, space: int | str, form: RowForm[R]) -> None:
        super().__init__(sender, space, 0, form)

    def index(self, index: int | str) -> ClientIndex[R]:
        """Return the index with this name or id."""
        return ClientIndex(self._sender, self._space, index, self._form)

    def as_(self, kind: type[S]) -> ClientSpace[S]:
        """Return the space with rows as objects of `kind`.

        Methods that store a row take an object, a mapping or a sequence, and check it against the class before it is
        sent. A row that does not fit raises RowMismatch, which names the field, what was expected and what came.

        Args:
            kind: A dataclass or `msgspec.Struct` whose fields have names of the format.

        Raises:
            LocalProtocolError: `kind` is no such class.
        """
        return ClientSpace(self._sender, self._space, ObjectForm(kind))

    def insert(self, row: Any) -> asyncio.Future[R]:
        """Insert a row.

        Args:
            row: The fields in the order of the format, or by name, or an object after `as_`.

        Returns:
            The row as stored, with values from a sequence.

        Raises:
            TarantoolError: A unique index already has the key (error 3, ER_TUPLE_FOUND), or the server rejects the row.
            OutcomeUnknown: The connection was lost before the answer.
            NoMember: No leader was found in time; nothing was stored.
            RowMismatch: The row does not fit the class of `as_`.
        """
        return self._sender.submit(Store(RequestType.INSERT, self._space, row, self._form))

    def replace(self, row: Any) -> asyncio.Future[R]:
        """Insert a row, or replace the row with the same primary key.

        Args:
            row: As for `insert`.

        Returns:
            The row as stored.

        Raises:
            TarantoolError: Another unique index already has the key, or the server rejects the row.
            OutcomeUnknown: The connection was lost before the answer.
            NoMember: No leader was found in time; nothing was stored.
            RowMismatch: The row does not fit the class of `as_`.
        """
        return self._sender.submit(Store(RequestType.REPLACE, self._space, row, self._form))

    def upsert(self, row: Any, operations: Operations) -> asyncio.Future[None]:
        """Insert a row, or apply `operations` to the row that already has its primary key.

        Args:
            row: As for `insert`.
            operations: As for `update`.

        Raises:
            TarantoolError: The server rejects the row or the operations.
            OutcomeUnknown: The connection was lost before the answer.
            NoMember: No leader was found in time; nothing was stored.
            RowMismatch: The row does not fit the class of `as_`.
        """
        return self._sender.submit(Upsert(self._space, row, operations, self._form))

    async def insert_many(self, rows: Iterable[Any]) -> int:
        """Insert rows, pipelined, each as a transaction of its own.

        Args:
            rows: Rows as for `insert`. They are read as they are sent, so a generator of millions needs little memory.

        Returns:
            The number of rows.

        Raises:
            RowsFailed: Some rows are not stored, or not surely; its `errors` has an error for each. Outside of a
                transaction, all others are stored.
        """
        return await self._sender.store_many(RequestType.INSERT, self._space, rows, self._form)

    async def replace_many(self, rows: Iterable[Any]) -> int:
        """Insert or replace rows, pipelined, each as a transaction of its own.

        Args:
            rows: As for `insert_many`.

        Returns:
            The number of rows.

        Raises:
            RowsFailed: As for `insert_many`.
        """
        return await self._sender.store_many(RequestType.REPLACE, self._space, rows, self._form)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._space!r}>"
