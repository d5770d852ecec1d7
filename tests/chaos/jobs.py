"""Operations of clients: add to a set, write and read registers, append to lists.

Keys of registers and lists are replaced after a while, to keep each history short enough to check.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from flowstone.iproto import errors
from tests.chaos.clients import Client, Job
from tests.chaos.lines import Line
from tests.interop.member import Member

READ_SHARE: Final = 0.5
VALUES_PER_KEY: Final = 40
BUCKET_SIZE: Final = 500
NOTHING: Final = ("+", 2, 0)
"""An update that changes nothing."""

APPEND_AT_END: Final = "!", -1


def bucket(value: int) -> int:
    """Return the part of a set that contains an element: each part is checked separately."""
    return value // BUCKET_SIZE


class Adds(Job):
    """Inserts rows, each once; on one `member`, or on the current writer."""

    def __init__(self, workload: str, space: int, member: Member | None = None, **options: Any) -> None:
        super().__init__(workload, space, **options)
        self._member = member

    async def do(self, client: Client) -> None:
        value = self._next()
        member = self._member or client.doors.writer
        await client.perform(
            member, (self.workload, "add", bucket(value), value), lambda line: line.insert(self._space, (value,))
        )


class Registers(Job):
    """Replaces and reads rows on any member, in linearizable transactions."""

    async def do(self, client: Client) -> None:
        if client.random.random() < READ_SHARE:
            await self._read(client)
        else:
            await self._write(client)

    @property
    def _key(self) -> int:
        return self._last // VALUES_PER_KEY

    def _writer(self, client: Client) -> Member:
        return client.doors.writer

    async def _write(self, client: Client) -> None:
        value, key = self._next(), self._key
        await client.perform(
            self._writer(client),
            (self.workload, "write", key, value),
            lambda line: line.replace(self._space, (key, value)),
        )

    async def _read(self, client: Client) -> None:
        key = self._key

        async def read(line: Line) -> int | None:
            rows = await line.read(self._space, key=key)
            return rows[0][1] if rows else None

        await client.perform(client.random.choice(client.doors.members), (self.workload, "read", key, None), read)


class SettledRegisters(Registers):
    """Registers without linearizable transactions, on one member: a read is an update that changes nothing.

    The update is answered when it is settled, together with everything that it read.
    """

    def __init__(self, workload: str, space: int, member: Member, **options: Any) -> None:
        super().__init__(workload, space, **options)
        self._member = member

    def _writer(self, client: Client) -> Member:
        return self._member

    async def _read(self, client: Client) -> None:
        key = self._key

        async def read(line: Line) -> int | None:
            row = await line.update(self._space, key, NOTHING)
            return row[1] if row else None

        await client.perform(self._member, (self.workload, "read", key, None), read)


class Appends(Job):
    """Appends to lists, and reads them like registers."""

    async def do(self, client: Client) -> None:
        key = self._last // VALUES_PER_KEY
        if client.random.random() < READ_SHARE:
            await self._read(client, key)
        else:
            await self._append(client, key)

    async def _append(self, client: Client, key: int) -> None:
        value = self._next()

        async def append(line: Line) -> None:
            with suppress(errors.TupleFound):
                await line.insert(self._space, (key,))
            await line.update(self._space, key, (*APPEND_AT_END, value))

        await client.perform(client.doors.writer, (self.workload, "append", key, value), append)

    async def _read(self, client: Client, key: int) -> None:
        async def read(line: Line) -> list[int]:
            rows = await line.read(self._space, key=key)
            return list(rows[0][1:]) if rows else []

        await client.perform(client.random.choice(client.doors.members), (self.workload, "read", key, None), read)
