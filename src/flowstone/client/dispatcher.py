"""Requests of a client on their way to members: sent at once where possible, and again where that is safe.

A request is sent again only if it was certainly not executed: if it never left, or a member refused it before executing
it (read-only, loading, another schema version). A read can always be sent again. Any other loss of a write's answer is
reported as OutcomeUnknown: a client never writes twice.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from flowstone.box.row_forms import RowMismatch
from flowstone.box.schema import UnknownSpace
from flowstone.client.connection import ConnectionFailed
from flowstone.client.member import PoolMember
from flowstone.client.pool import Pool, ReadFrom
from flowstone.client.statements import CallOrEval, ClientStatement
from flowstone.errors import FlowstoneError, OutcomeUnknown
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.packet import Response
from flowstone.outside import Outside

T = TypeVar("T")

PAUSE_SECONDS: Final = 0.02
"""Pause before a request that was refused or lost is sent again."""

REFUSED: Final = frozenset(
    {
        errors.Readonly.code,
        errors.Loading.code,
        errors.SyncQueueUnclaimed.code,
        errors.SyncQueueForeign.code,
    }
)
"""Errors of a member that does not lead. The statement was not executed."""

UNKNOWN: Final = frozenset({errors.SyncQuorumTimeout.code, errors.SyncRollback.code})
"""Errors after which a new leader may still confirm the transaction (docs/reference/replication.md)."""


class Closed(FlowstoneError):
    """The client is closed."""


class Attempt(Generic[T]):
    """A request, and the future of its result. It is pending at one connection at a time."""

    __slots__ = ("_dispatcher", "deadline", "future", "has_new_schema", "member", "place", "schema", "statement")

    def __init__(self, dispatcher: Dispatcher, statement: ClientStatement[T], place: ReadFrom, deadline: float) -> None:
        self._dispatcher = dispatcher
        self.statement = statement
        self.place = place
        self.deadline = deadline
        self.future: asyncio.Future[T] = asyncio.Future(loop=dispatcher.loop)
        self.has_new_schema = False
        """True if the schema was read for this request."""

    def send(self, member: PoolMember) -> None:
        """Send the request to `member`, whose schema is known if the request needs it."""
        schema, connection = member.schema, member.connection
        if connection is None or (schema is None and self.statement.needs_schema):
            self._dispatcher.send_later(self)
            return
        self.member, self.schema = member, schema
        try:
            body = self.statement.body(schema)  # type: ignore[arg-type]
        except (TarantoolError, UnknownSpace, RowMismatch) as error:
            self._misfit(error)
            return
        except FlowstoneError as error:
            self.fail(error)
            return
        version = schema.version if schema is not None and self.statement.needs_schema else 0
        connection.submit(self.statement.type, body, self, schema_version=version)

    def answered(self, response: Response) -> None:
        if self.future.done():  # the caller was cancelled
            return
        if not response.is_error:
            try:
                result = self.statement.result(response.body, self.schema)  # type: ignore[arg-type]
            except RowMismatch as error:
                self.fail(error)
            else:
                self.future.set_result(result)
            return
        self._rejected(response.bare_error())

    def _rejected(self, error: TarantoolError) -> None:
        if isinstance(error, errors.WrongSchemaVersion) and self.schema is not None:
            self.member.forget_schema(self.schema)
            self._dispatcher.send_later(self)
        elif error.code in REFUSED:
            self._refused(error)
        elif error.code in UNKNOWN and self.statement.is_write:
            self.fail(self._unknown(error), error)
        else:
            self.fail(error)

    def _refused(self, error: TarantoolError) -> None:
        """Send the request to another member. A function may have done something before it was refused."""
        self.member.refuse(error)
        if isinstance(self.statement, CallOrEval) and self.statement.is_write:
            self.fail(error)
        else:
            self._dispatcher.send_later(self, pause=True)

    def failed(self, sync: int, error: FlowstoneError, *, was_sent: bool) -> None:
        if self.future.done():
            return
        if was_sent and self.statement.is_write:
            self.fail(self._unknown(error), error)
        elif self._dispatcher.is_over(self.deadline):
            self.fail(error)
        else:
            self._dispatcher.send_later(self, pause=True)

    def fail(self, error: FlowstoneError, cause: FlowstoneError | None = None) -> None:
        """Complete the future with an error."""
        if not self.future.done():
            error.__cause__ = cause
            self.future.set_exception(error)

    def _misfit(self, error: FlowstoneError) -> None:
        """Handle a statement that does not fit the schema: someone may have changed it since it was read."""
        if self.has_new_schema or self.schema is None:
            self.fail(error)
            return
        self.has_new_schema = True
        self.member.forget_schema(self.schema)
        self._dispatcher.send_later(self)

    def _unknown(self, error: FlowstoneError) -> OutcomeUnknown:
        name = RequestType(self.statement.type).name
        hint = "read the data to find out; the client does not send a write twice"
        return OutcomeUnknown(f"outcome of {name} at {self.member.uri.address} is unknown: {error.message}", hint=hint)


class Dispatcher:
    """Sends the requests of one client. `timeout` is the time in which a request must be answered."""

    def __init__(self, outside: Outside, pool: Pool, *, timeout: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = outside.clock
        self.pool = pool
        self._timeout = timeout
        self._tasks: dict[asyncio.Task[None], Attempt[Any]] = {}
        self._is_closed = False

    def submit(self, statement: ClientStatement[T], place: ReadFrom) -> asyncio.Future[T]:
        """Send a request, and return the future of its result."""
        attempt = Attempt(self, statement, place, self.clock.monotonic() + self._timeout)
        member = self.pool.choose(place)
        if member is None or self._is_closed:
            self.send_later(attempt)
        else:
            attempt.send(member)
        return attempt.future

    def deadline(self) -> float:
        """Return the deadline of a request that begins now."""
        return self.clock.monotonic() + self._timeout

    def is_over(self, deadline: float) -> bool:
        return self.clock.monotonic() >= deadline

    def send_later(self, attempt: Attempt[Any], *, pause: bool = False) -> None:
        """Send the request when there is a member for it, and its schema is known."""
        if self._is_closed:
            attempt.fail(Closed("client is closed"))
            return
        task = self.loop.create_task(self._send_later(attempt, pause=pause))
        self._tasks[task] = attempt
        task.add_done_callback(self._tasks.pop)

    async def _send_later(self, attempt: Attempt[Any], *, pause: bool) -> None:
        try:
            async with asyncio.timeout(max(0.0, attempt.deadline - self.clock.monotonic())):
                if pause:
                    await self.clock.sleep(PAUSE_SECONDS)
                member = await self._ready(attempt.place, needs_schema=attempt.statement.needs_schema)
        except TimeoutError:
            attempt.fail(self.pool.missing(attempt.place))
        except FlowstoneError as error:
            attempt.fail(error)
        else:
            if not attempt.future.done():
                attempt.send(member)

    async def leader(self) -> PoolMember:
        """Wait until statements can be sent to the leader, and return it. Raise NoMember if there is none in time."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._ready("leader", needs_schema=True)
        except TimeoutError:
            raise self.pool.missing("leader") from None

    async def _ready(self, place: ReadFrom, *, needs_schema: bool) -> PoolMember:
        """Wait for a member that can be sent a request."""
        while True:
            member = await self.pool.find(place)
            connection = member.connection
            if connection is not None and not connection.is_lost:
                if not needs_schema or member.schema is not None:
                    return member
                with suppress(ConnectionFailed):
                    await member.read_schema(connection)
                    continue
            await self.clock.sleep(PAUSE_SECONDS)

    async def close(self) -> None:
        """Fail the requests that are not sent yet. Those that are sent fail with their connections."""
        self._is_closed = True
        tasks = dict(self._tasks)
        for task, attempt in tasks.items():
            task.cancel()
            attempt.fail(Closed("client is closed"))
            attempt.future.exception()  # mark it as retrieved: not every request is awaited
        await asyncio.gather(*tasks, return_exceptions=True)
