"""A client's connection to one member: requests of IPROTO, with client-side timeouts.

Reads that need a guarantee are transactions of isolation `linearizable` if the dialect has streams. In 2.6 a plain read
may return data that is rolled back later, so a read is an update without effect: it is answered when a quorum has it,
and thereby everything that it read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from flowstone.box.engine.transaction import Isolation
from flowstone.client.connection import Connection
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack

ALL: Final = 2
"""The iterator ALL."""
LIMIT: Final = 2**32 - 1

Row = tuple[Any, ...]


class NotCommitted(FlowstoneError):
    """A transaction ended before COMMIT was sent; see the cause."""


class Conversation:
    """A connection to a member; `timeout` applies to each request."""

    def __init__(self, connection: Connection, timeout: float) -> None:
        self.connection = connection
        self._timeout = timeout
        self._stream_id = 0

    async def _request(self, type: RequestType, body: dict[int, Any], stream_id: int = 0) -> list[Row]:
        answer = await self.connection.request(type, pack(body), stream_id=stream_id, timeout=self._timeout)
        rows: list[Row] = list(answer.get(Key.DATA, ()))
        return rows

    async def replace(self, space_id: int, row: Row) -> None:
        await self._request(RequestType.REPLACE, {Key.SPACE_ID.value: space_id, Key.TUPLE.value: row})

    async def insert(self, space_id: int, row: Row) -> None:
        await self._request(RequestType.INSERT, {Key.SPACE_ID.value: space_id, Key.TUPLE.value: row})

    async def update(self, space_id: int, key: int, operation: Row) -> Row | None:
        """Apply one operation to one row; return the new row."""
        rows = await self._request(RequestType.UPDATE, _update(space_id, key, operation))
        return rows[0] if rows else None

    async def delete(self, space_id: int, key: int) -> bool:
        """Delete a row; return False if there was none: then nothing is written, and no quorum is needed."""
        body = {Key.SPACE_ID.value: space_id, Key.INDEX_ID.value: 0, Key.KEY.value: (key,)}
        return bool(await self._request(RequestType.DELETE, body))

    async def select(self, space_id: int) -> list[Row]:
        """Return all rows, as this member has them now."""
        return await self._request(RequestType.SELECT, _select(space_id))

    async def read(
        self, *space_ids: int, key: int | None = None, isolation: Isolation = Isolation.LINEARIZABLE
    ) -> list[Row]:
        """Read a key, or all rows of the spaces, in a linearizable transaction; with another isolation, as this member
        has them."""
        self._stream_id += 1
        connection = self.connection
        begin = {Key.TXN_ISOLATION.value: isolation.value, Key.TIMEOUT.value: self._timeout}
        sent = [
            connection.send(type, pack(body), stream_id=self._stream_id)
            for type, body in (
                (RequestType.BEGIN, begin),
                *((RequestType.SELECT, _select(space_id, key)) for space_id in space_ids),
                (RequestType.COMMIT, {}),
            )
        ]
        answers = [connection.values(await connection.answer(future, timeout=self._timeout + 1)) for future in sent]
        return [row for answer in answers[1:-1] for row in answer[Key.DATA]]

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Commit at the end of the block. Earlier errors are raised as NotCommitted."""
        self._stream_id += 1
        transaction = Transaction(self, self._stream_id)
        try:
            await transaction.request(RequestType.BEGIN, {})
            yield transaction
        except FlowstoneError as error:
            self.connection.send(RequestType.ROLLBACK, stream_id=transaction.stream_id)
            raise NotCommitted(str(error)) from error
        await transaction.request(RequestType.COMMIT, {})


class Transaction:
    """Statements of a stream, each answered before the next is sent."""

    def __init__(self, conversation: Conversation, stream_id: int) -> None:
        self._conversation = conversation
        self.stream_id = stream_id

    async def request(self, type: RequestType, body: dict[int, Any]) -> list[Row]:
        return await self._conversation._request(type, body, self.stream_id)

    async def get(self, space_id: int, key: int) -> Row | None:
        rows = await self.request(RequestType.SELECT, _select(space_id, key))
        return rows[0] if rows else None

    async def replace(self, space_id: int, row: Row) -> None:
        await self.request(RequestType.REPLACE, {Key.SPACE_ID.value: space_id, Key.TUPLE.value: row})


def _select(space_id: int, key: int | None = None) -> dict[int, Any]:
    return {
        Key.SPACE_ID.value: space_id,
        Key.INDEX_ID.value: 0,
        Key.LIMIT.value: LIMIT,
        Key.OFFSET.value: 0,
        Key.ITERATOR.value: ALL if key is None else 0,
        Key.KEY.value: () if key is None else (key,),
    }


def _update(space_id: int, key: int, operation: Row) -> dict[int, Any]:
    return {
        Key.SPACE_ID.value: space_id,
        Key.INDEX_ID.value: 0,
        Key.INDEX_BASE.value: 1,
        Key.KEY.value: (key,),
        Key.TUPLE.value: (operation,),
    }
