"""A client of a replica set, for applications: `async with flowstone.connect(…) as client`.

It writes through the leader, which it finds and follows; `dispatcher.py` decides what is sent again. It keeps no data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flowstone.box.row_forms import RowForm, TupleForm
from flowstone.box.tuples import Tuple
from flowstone.client.batch import store_many
from flowstone.client.connection import Connection
from flowstone.client.dispatcher import Dispatcher
from flowstone.client.pool import Pool, ReadFrom, checked_place
from flowstone.client.spaces import ClientSpace
from flowstone.client.statements import CallOrEval, ClientStatement
from flowstone.client.transaction import ClientTransaction
from flowstone.iproto import errors
from flowstone.iproto.constants import Feature, RequestType
from flowstone.iproto.uri import Uri
from flowstone.outside import Outside

T = TypeVar("T")

Watcher = Callable[[Any], None]
"""Called with the value of a watched key; None while the key has no value."""


@dataclass(frozen=True, slots=True)
class ClientMember:
    """A member as the client sees it. `error` says why it is not connected; `version` is that of its greeting."""

    address: str
    is_connected: bool
    is_leader: bool
    is_read_only: bool
    version: str | None
    error: str | None


class _PlacedSender:
    """Sends statements of a space whose reads go to `place`."""

    def __init__(self, dispatcher: Dispatcher, place: ReadFrom) -> None:
        self._dispatcher = dispatcher
        self._place = place

    def submit(self, statement: ClientStatement[T]) -> asyncio.Future[T]:
        return self._dispatcher.submit(statement, "leader" if statement.is_write else self._place)

    async def store_many(self, type: RequestType, space: int | str, rows: Iterable[Any], form: RowForm[Any]) -> int:
        return await store_many(self._dispatcher, type, space, rows, form)


class Client:
    """A client of a replica set, which `async with flowstone.connect(…)` returns.

    Requests are pipelined: those that are awaited together, as by `asyncio.gather`, are sent with one write. Writes go
    to the leader. A write that a member has certainly not executed is sent again, to the new leader; a write whose
    answer is lost raises OutcomeUnknown, and is never sent twice.

    Example:
        async with flowstone.connect("app:secret@db1:3301,app:secret@db2:3301") as client:
            orders = client.space("orders")
            await orders.insert({"id": 42, "status": "new"})
            print(await orders.get(42))
    """

    def __init__(
        self,
        outside: Outside,
        uris: Sequence[Uri],
        *,
        read_from: ReadFrom,
        connect_timeout: float,
        request_timeout: float,
    ) -> None:
        self._pool = Pool(outside, uris, timeout=connect_timeout, on_leader=self._watch_leader)
        self._dispatcher = Dispatcher(outside, self._pool, timeout=request_timeout)
        self._form = TupleForm()
        self._read_from = checked_place(read_from)
        self._watchers: dict[tuple[str, Watcher], None] = {}
        self._watched: Connection | None = None

    async def open(self) -> None:
        """Connect; raise NoMember, or the error of the only member, if no member can be connected."""
        try:
            await self._pool.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all connections. Requests without an answer fail."""
        await self._dispatcher.close()
        await self._pool.close()

    @property
    def members(self) -> tuple[ClientMember, ...]:
        """The members, in the order given, as the client sees them at the moment."""
        return tuple(
            ClientMember(
                address=member.uri.address,
                is_connected=member.connection is not None,
                is_leader=member is self._pool.leader,
                is_read_only=member.is_read_only,
                version=None if member.connection is None else member.connection.greeting.version_text,
                error=None if member.error is None else str(member.error),
            )
            for member in self._pool.members
        )

    def space(self, space: int | str, *, read_from: ReadFrom | None = None) -> ClientSpace[Tuple]:
        """Return the space with this name or id.

        Args:
            space: Name or id. Whether it exists is found out with the first request.
            read_from: Where reads of this space go, if not as given to `connect`.

        Raises:
            LocalProtocolError: `read_from` is not valid.
        """
        place = self._read_from if read_from is None else checked_place(read_from)
        return ClientSpace(_PlacedSender(self._dispatcher, place), space, self._form)

    def call(
        self, function: str, *arguments: Any, read_from: ReadFrom | None = None
    ) -> asyncio.Future[tuple[Any, ...]]:
        """Call a function of the server.

        Args:
            function: Its name, such as `box.info` or `app.add_order`.
            arguments: Its arguments.
            read_from: If given, the function only reads: it may run on such a member, and again after a failure. By
                default it runs on the leader, and is never sent again once it may have begun.

        Returns:
            The values that the function returns.

        Raises:
            TarantoolError: The function does not exist, may not be called, or raised an error.
            OutcomeUnknown: The connection was lost before the answer.
            NoMember: No member was found in time.
            LocalProtocolError: `read_from` is not valid.
        """
        return self._call(RequestType.CALL, function, arguments, read_from)

    def eval(
        self, expression: str, *arguments: Any, read_from: ReadFrom | None = None
    ) -> asyncio.Future[tuple[Any, ...]]:
        """Evaluate Lua on the server.

        Args:
            expression: The text, such as `return box.space.orders:len()`.
            arguments: Its arguments, `...` in the text.
            read_from: As for `call`.

        Returns:
            The values that the text returns.

        Raises:
            TarantoolError: The server cannot evaluate Lua, or the text raised an error.
            OutcomeUnknown: The connection was lost before the answer.
            NoMember: No member was found in time.
            LocalProtocolError: `read_from` is not valid.
        """
        return self._call(RequestType.EVAL, expression, arguments, read_from)

    def _call(
        self, type: RequestType, text: str, arguments: Sequence[Any], read_from: ReadFrom | None
    ) -> asyncio.Future[tuple[Any, ...]]:
        place: ReadFrom = "leader" if read_from is None else checked_place(read_from)
        return self._dispatcher.submit(CallOrEval(type, text, arguments, is_read=read_from is not None), place)

    def transaction(self, *, isolation: str = "default", timeout: float | None = None) -> ClientTransaction:
        """Return a transaction on the leader, for `async with`.

        Args:
            isolation: `default`, `read-committed`, `read-confirmed`, `best-effort` or `linearizable`.
            timeout: Seconds after which the server rolls it back; by default, its option `txn_timeout`.

        Raises:
            TarantoolError: An argument is not valid.
        """
        return ClientTransaction(self._dispatcher, isolation, timeout)

    def watch(self, key: str, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher` with the value of a key, now and after each change, as broadcast by the leader.

        Another leader has values of its own, which the watcher gets when the leader changes.

        Args:
            key: Such as `box.status`, or a key of `box.broadcast`.
            watcher: Called in the event loop with the value; None while the key has no value.

        Returns:
            A function that ends the watch.

        Raises:
            TarantoolError: The leader is older than 2.10 and has no watchers.
        """
        leader = self._pool.leader
        connection = None if leader is None else leader.connection
        if connection is not None:
            _check_watchers(connection)
        self._watchers[key, watcher] = None
        if self._watched is not None:
            self._watched.watch(key, watcher)

        def unwatch() -> None:
            if self._watchers.pop((key, watcher), watcher) is None and self._watched is not None:
                self._watched.unwatch(key, watcher)

        return unwatch

    def _watch_leader(self) -> None:
        """Watch the new leader instead of the former one."""
        before, leader = self._watched, self._pool.leader
        self._watched = None if leader is None else leader.connection
        if self._watched is not None and not self._watched.has(Feature.WATCHERS):
            self._watched = None
        for key, watcher in self._watchers:
            if before is not None:
                before.unwatch(key, watcher)
            if self._watched is not None:
                self._watched.watch(key, watcher)


def _check_watchers(connection: Connection) -> None:
    if not connection.has(Feature.WATCHERS):
        version = connection.greeting.version_text
        raise errors.Unsupported(f"{connection.address} has version {version}, which does not support watchers")
