"""A client for programs without an event loop: `with flowstone.connect(…) as client`.

The client runs in an event loop in its own thread. Calls may come from any thread; those of several threads are
pipelined on the same connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from flowstone.box.arguments import Operations
from flowstone.box.tuples import Tuple
from flowstone.client.client import Client, ClientMember, Watcher
from flowstone.client.pool import ReadFrom
from flowstone.client.spaces import ClientIndex, ClientSpace
from flowstone.client.statements import LIMIT_MAX
from flowstone.client.transaction import ClientTransaction
from flowstone.outside.loop_thread import LoopThread

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")


def _wait(thread: LoopThread, request: Callable[[], asyncio.Future[T]]) -> T:
    async def ask() -> T:
        return await request()

    return thread.run(ask())


class BlockingClientIndex(Generic[R]):
    """An index of a space, as plain calls: `client.space("orders").index("by_status")`. See `ClientIndex`."""

    def __init__(self, index: ClientIndex[R], thread: LoopThread) -> None:
        self._index = index
        self._thread = thread

    def get(self, key: Any) -> R | None:
        """Return the row with this key of a unique index; None if there is none. See `ClientIndex.get`."""
        return _wait(self._thread, lambda: self._index.get(key))

    def select(self, key: Any = (), *, iterator: str | int = "EQ", limit: int = LIMIT_MAX, offset: int = 0) -> list[R]:
        """Return the rows that match `key`, in the order of the index. See `ClientIndex.select`."""
        return _wait(self._thread, lambda: self._index.select(key, iterator=iterator, limit=limit, offset=offset))

    def update(self, key: Any, operations: Operations) -> R | None:
        """Change the row with this key, and return the new one. See `ClientIndex.update`."""
        return _wait(self._thread, lambda: self._index.update(key, operations))

    def delete(self, key: Any) -> R | None:
        """Delete the row with this key, and return it. See `ClientIndex.delete`."""
        return _wait(self._thread, lambda: self._index.delete(key))

    def __repr__(self) -> str:
        return repr(self._index)


class BlockingClientSpace(BlockingClientIndex[R]):
    """A space as plain calls: `client.space("orders")`. See `ClientSpace`."""

    _index: ClientSpace[R]

    def __init__(self, space: ClientSpace[R], thread: LoopThread) -> None:
        super().__init__(space, thread)

    def index(self, index: int | str) -> BlockingClientIndex[R]:
        """Return the index with this name or id."""
        return BlockingClientIndex(self._index.index(index), self._thread)

    def as_(self, kind: type[S]) -> BlockingClientSpace[S]:
        """Return the space with rows as objects of `kind`. See `ClientSpace.as_`."""
        return BlockingClientSpace(self._index.as_(kind), self._thread)

    def insert(self, row: Any) -> R:
        """Insert a row, and return it as stored. See `ClientSpace.insert`."""
        return _wait(self._thread, lambda: self._index.insert(row))

    def replace(self, row: Any) -> R:
        """Insert a row, or replace the row with the same primary key. See `ClientSpace.replace`."""
        return _wait(self._thread, lambda: self._index.replace(row))

    def upsert(self, row: Any, operations: Operations) -> None:
        """Insert a row, or apply operations to the row with its primary key. See `ClientSpace.upsert`."""
        return _wait(self._thread, lambda: self._index.upsert(row, operations))

    def insert_many(self, rows: Iterable[Any]) -> int:
        """Insert rows, pipelined. See `ClientSpace.insert_many`; the rows are read in the thread of the client."""
        return self._thread.run(self._index.insert_many(rows))

    def replace_many(self, rows: Iterable[Any]) -> int:
        """Insert or replace rows, pipelined. See `ClientSpace.replace_many`."""
        return self._thread.run(self._index.replace_many(rows))


class BlockingClientTransaction:
    """A transaction on the leader, as plain calls. See `ClientTransaction`."""

    def __init__(self, transaction: ClientTransaction, thread: LoopThread) -> None:
        self._transaction = transaction
        self._thread = thread

    def space(self, space: int | str) -> BlockingClientSpace[Tuple]:
        """Return the space with this name or id, inside the transaction."""
        return BlockingClientSpace(self._transaction.space(space), self._thread)


class BlockingClient:
    """A client of a replica set, which `with flowstone.connect(…)` returns.

    It has the methods of `Client` as plain calls, which may be called from any thread. Watchers are called in the
    thread of the client; other calls wait for that thread, and raise LocalProtocolError in a watcher.

    Example:
        with flowstone.connect("app:secret@db1:3301,app:secret@db2:3301") as client:
            orders = client.space("orders")
            orders.insert({"id": 42, "status": "new"})
            print(orders.get(42))
    """

    def __init__(self, client: Client, thread: LoopThread) -> None:
        self._client = client
        self._thread = thread

    @property
    def members(self) -> tuple[ClientMember, ...]:
        """The members, in the order given, as the client sees them at the moment."""
        return self._client.members

    def space(self, space: int | str, *, read_from: ReadFrom | None = None) -> BlockingClientSpace[Tuple]:
        """Return the space with this name or id. See `Client.space`."""
        return BlockingClientSpace(self._client.space(space, read_from=read_from), self._thread)

    def call(self, function: str, *arguments: Any, read_from: ReadFrom | None = None) -> tuple[Any, ...]:
        """Call a function of the server, and return its values. See `Client.call`."""
        return _wait(self._thread, lambda: self._client.call(function, *arguments, read_from=read_from))

    def eval(self, expression: str, *arguments: Any, read_from: ReadFrom | None = None) -> tuple[Any, ...]:
        """Evaluate Lua on the server, and return its values. See `Client.eval`."""
        return _wait(self._thread, lambda: self._client.eval(expression, *arguments, read_from=read_from))

    @contextmanager
    def transaction(
        self, *, isolation: str = "default", timeout: float | None = None
    ) -> Iterator[BlockingClientTransaction]:
        """Return a transaction on the leader, for `with`. See `Client.transaction`."""
        transaction = self._client.transaction(isolation=isolation, timeout=timeout)
        self._thread.run(transaction.__aenter__())
        try:
            yield BlockingClientTransaction(transaction, self._thread)
        except BaseException as error:
            self._thread.run(transaction.__aexit__(type(error), error, error.__traceback__))
            raise
        else:
            self._thread.run(transaction.__aexit__(None, None, None))

    def watch(self, key: str, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher` with the value of a key, now and after each change. See `Client.watch`."""

        async def watch() -> Callable[[], None]:
            return self._client.watch(key, watcher)

        unwatch = self._thread.run(watch())

        async def end() -> None:
            unwatch()

        return lambda: self._thread.run(end())
