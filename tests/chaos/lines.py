"""Connections of clients to members: Flowstone's own, or another library's, behind one interface.

Both raise Flowstone's errors: a server's answer is its `TarantoolError`, everything else `ConnectionFailed`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import asynctnt
from asynctnt.exceptions import TarantoolDatabaseError, TarantoolError

from flowstone.client.connection import Connection, ConnectionFailed
from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import error_of
from flowstone.iproto.uri import Uri
from flowstone.outside import production
from tests.simulation.conversation import Conversation, Row

HOST: Final = "127.0.0.1"
CONNECT_SECONDS: Final = 2.0


class Line(Protocol):
    """An open connection, as guest."""

    async def insert(self, space_id: int, row: Row) -> None: ...

    async def replace(self, space_id: int, row: Row) -> None: ...

    async def update(self, space_id: int, key: int, operation: Row) -> Row | None: ...

    async def read(self, space_id: int, /, *, key: int | None = None) -> list[Row]: ...

    async def close(self) -> None: ...


Dial = Callable[[int, float], Awaitable[Line]]
"""Open a connection to a port; `timeout` limits each answer."""


class OwnLine(Conversation):
    """Uses Flowstone's own connection."""

    async def close(self) -> None:
        await self.connection.close()


async def dial_own(port: int, timeout: float) -> Line:
    connection = await Connection.open(production(), Uri(HOST, port), timeout=CONNECT_SECONDS)
    return OwnLine(connection, timeout)


class ForeignLine:
    """Uses asynctnt, which numbers fields from zero."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def insert(self, space_id: int, row: Row) -> None:
        await _translated(self._connection.insert, space_id, row)

    async def replace(self, space_id: int, row: Row) -> None:
        await _translated(self._connection.replace, space_id, row)

    async def update(self, space_id: int, key: int, operation: Row) -> Row | None:
        name, field, *rest = operation
        answer = await _translated(self._connection.update, space_id, [key], [(name, field - 1, *rest)])
        return tuple(answer.body[0]) if answer.body else None

    async def read(self, space_id: int, /, *, key: int | None = None) -> list[Row]:
        raise NotImplementedError("its servers know no linearizable reads")

    async def close(self) -> None:
        await self._connection.disconnect()


async def dial_foreign(port: int, timeout: float) -> Line:
    connection = asynctnt.Connection(
        host=HOST,
        port=port,
        connect_timeout=CONNECT_SECONDS,
        request_timeout=timeout,
        reconnect_timeout=0,
        fetch_schema=False,
        auto_refetch_schema=False,
        initial_read_buffer_size=1 << 16,
    )
    await _translated(connection.connect)
    return ForeignLine(connection)


async def _translated(request: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    try:
        return await request(*arguments)
    except TarantoolDatabaseError as error:
        raise _answered(error) from error
    except (TarantoolError, OSError) as error:
        raise ConnectionFailed(f"{type(error).__name__}: {error}") from error


def _answered(error: TarantoolDatabaseError) -> FlowstoneError:
    return error_of(error.code, error.message)
