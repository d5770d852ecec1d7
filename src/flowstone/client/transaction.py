"""Transactions of a client: a stream of the leader, on which statements are executed together or not at all.

Servers from 2.10 on have streams. Nothing of a transaction is sent twice; if the connection is lost before COMMIT was
sent, the server rolls the transaction back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from flowstone.box.row_forms import RowForm, TupleForm
from flowstone.box.tuples import Tuple
from flowstone.client.batch import RowsFailed
from flowstone.client.connection import ConnectionFailed
from flowstone.client.dispatcher import UNKNOWN, Dispatcher
from flowstone.client.known_schema import KnownSchema
from flowstone.client.spaces import ClientSpace
from flowstone.client.statements import ClientStatement, Store
from flowstone.errors import FlowstoneError, LocalProtocolError, OutcomeUnknown
from flowstone.iproto import errors
from flowstone.iproto.constants import Feature, Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import EMPTY_BODY, Response

T = TypeVar("T")

ISOLATIONS: Final = {"default": 0, "read-committed": 1, "read-confirmed": 2, "best-effort": 3, "linearizable": 4}
"""Isolation levels, by their names in `box.begin{txn_isolation = …}`, and their numbers in the protocol."""


class _Request(Generic[T]):
    """A request on the stream, and the future of its result; without a statement, of its response."""

    __slots__ = ("_schema", "_statement", "deadline", "future", "was_sent")

    def __init__(self, statement: ClientStatement[T] | None, schema: KnownSchema, deadline: float) -> None:
        self._statement = statement
        self._schema = schema
        self.deadline = deadline
        self.was_sent = True
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def answered(self, response: Response) -> None:
        if self.future.done():
            return
        if response.is_error:
            self.future.set_exception(response.bare_error())
        elif self._statement is None:
            self.future.set_result(None)  # type: ignore[arg-type]
        else:
            try:
                self.future.set_result(self._statement.result(response.body, self._schema))
            except FlowstoneError as error:
                self.future.set_exception(error)

    def failed(self, sync: int, error: FlowstoneError, *, was_sent: bool) -> None:
        self.was_sent = was_sent
        if not self.future.done():
            self.future.set_exception(error)


class ClientTransaction:
    """A transaction on the leader: its statements are committed together when the block ends, or not at all.

    An exception in the block rolls the transaction back. The end of the block raises TransactionConflict if another
    transaction has changed what this one has read, and OutcomeUnknown if the answer to the commit is lost.

    Example:
        async with client.transaction() as transaction:
            products = transaction.space("products")
            if (product := await products.get(1)) is not None and product.stock:
                await products.update(1, [("-", "stock", 1)])
                await transaction.space("orders").insert({"id": 42, "product": 1})
    """

    def __init__(self, dispatcher: Dispatcher, isolation: str, timeout: float | None) -> None:
        if isolation not in ISOLATIONS:
            raise errors.IllegalParams(f"Illegal parameters, txn_isolation must be one of {', '.join(ISOLATIONS)}")
        if timeout is not None and not timeout > 0:
            raise errors.IllegalParams("Illegal parameters, timeout must be a number greater than 0")
        self._dispatcher = dispatcher
        self._options: dict[int, Any] = {}
        if isolation != "default":
            self._options[Key.TXN_ISOLATION.value] = ISOLATIONS[isolation]
        if timeout is not None:
            self._options[Key.TIMEOUT.value] = float(timeout)
        self._form = TupleForm()
        self._stream_id = 0
        self._is_open = False
        self._sent: list[asyncio.Future[Any]] = []

    async def __aenter__(self) -> Self:
        """Begin the transaction on the leader.

        Raises:
            NoMember: No leader was found in time.
            TarantoolError: The server is older than 2.10 and has no transactions for clients.
            LocalProtocolError: The transaction was already used.
        """
        if self._stream_id:
            raise LocalProtocolError("transaction was already used", hint="call transaction() again")
        member = await self._dispatcher.leader()
        connection, schema = member.connection, member.schema
        assert connection is not None
        assert schema is not None
        if not connection.has(Feature.STREAMS, Feature.TRANSACTIONS):
            version = connection.greeting.version_text
            raise errors.Unsupported(
                f"{connection.address} has version {version}, which has no transactions for clients",
                hint="call a function of the server, or use 2.10 or newer",
            )
        self._member, self._connection, self._schema = member, connection, schema
        self._stream_id = connection.next_stream_id()
        await self._control(RequestType.BEGIN, pack(self._options)).future
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await asyncio.gather(*self._sent)
        except BaseException:
            await self._roll_back()
            raise
        await (self._commit() if error is None else self._roll_back())

    def space(self, space: int | str) -> ClientSpace[Tuple]:
        """Return the space with this name or id, inside the transaction."""
        self._check_open()
        return ClientSpace(self, space, self._form)

    def submit(self, statement: ClientStatement[T]) -> asyncio.Future[T]:
        """Send a statement on the stream, and return the future of its result."""
        self._check_open()
        request = _Request(statement, self._schema, self._dispatcher.deadline())
        try:
            body = statement.body(self._schema)
        except FlowstoneError as error:
            self._member.forget_schema(self._schema)  # it may be out of date: the next transaction reads it again
            request.future.set_exception(error)
            return request.future
        self._sent = [future for future in self._sent if not future.done()]
        self._sent.append(request.future)
        version = self._schema.version
        self._connection.submit(statement.type, body, request, stream_id=self._stream_id, schema_version=version)
        return request.future

    async def store_many(self, type: RequestType, space: int | str, rows: Iterable[Any], form: RowForm[Any]) -> int:
        """Store rows on the stream; see `ClientSpace.insert_many`."""
        futures = [self.submit(Store(type, space, row, form)) for row in rows]
        results = await asyncio.gather(*futures, return_exceptions=True)
        failed = {number: error for number, error in enumerate(results) if isinstance(error, FlowstoneError)}
        if failed:
            raise RowsFailed(failed, len(results))
        return len(results)

    def _control(self, type: RequestType, body: bytes = EMPTY_BODY) -> _Request[None]:
        request: _Request[None] = _Request(None, self._schema, self._dispatcher.deadline())
        self._connection.submit(type, body, request, stream_id=self._stream_id)
        return request

    async def _commit(self) -> None:
        self._check_open()
        self._is_open = False
        commit = self._control(RequestType.COMMIT)
        try:
            await commit.future
        except (errors.TarantoolError, ConnectionFailed) as error:
            if isinstance(error, errors.WrongSchemaVersion):
                self._member.forget_schema(self._schema)
            is_lost = isinstance(error, ConnectionFailed) and commit.was_sent
            if is_lost or (isinstance(error, errors.TarantoolError) and error.code in UNKNOWN):
                address = self._connection.address
                raise OutcomeUnknown(f"outcome of COMMIT at {address} is unknown: {error.message}") from error
            raise

    async def _roll_back(self) -> None:
        """Roll back; without an answer there is nothing to do: the server rolls back when the connection ends."""
        self._is_open = False
        if self._connection.failure is None:
            await asyncio.gather(self._control(RequestType.ROLLBACK).future, return_exceptions=True)

    def _check_open(self) -> None:
        if not self._is_open:
            raise errors.NoTransaction("No active transaction")
