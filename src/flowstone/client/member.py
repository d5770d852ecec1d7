"""One member of a replica set, as a client sees it: its connection, whether it accepts writes, how fresh it is.

A member is connected again and again until `close`. VOTE, which needs no rights, is asked at intervals; servers that
have watchers report changes of their role at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any, Final

from flowstone.client.connection import Connection
from flowstone.client.known_schema import KnownSchema, read_schema
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Feature, RequestType
from flowstone.iproto.uri import Uri
from flowstone.outside import Outside
from flowstone.replication.applier.ballot_watch import decode_vote
from flowstone.replication.vclock import VClock

POLL_SECONDS: Final = 0.5
"""Interval of VOTE, and so the resolution of timeouts and of `read_from`."""

RECONNECT_SECONDS, RECONNECT_SECONDS_MAX = 0.2, 2.0
"""Pause before a member is connected again; it doubles with each failure."""

REFUSED_SECONDS: Final = 1.0
"""How long a member that refused a write comes after the others, although it calls itself writable."""


class PoolMember:
    """A member. `on_change` is called when it is connected or lost, and with each of its reports."""

    def __init__(self, outside: Outside, uri: Uri, *, timeout: float, on_change: Callable[[PoolMember], None]) -> None:
        self.uri = uri
        self.connection: Connection | None = None
        self.schema: KnownSchema | None = None
        self.error: FlowstoneError | None = None
        """Why the member is not connected; None before the first attempt has ended."""
        self.is_read_only = True
        self.term = 0
        self.vclock = VClock()
        self.asked = -inf
        """When `vclock` was asked for, by the monotonic clock: the member may have been ahead of it since."""
        self.fresh_as_of = -inf
        """A moment at which the leader had nothing that this member lacks."""
        self.refused = -inf
        """When the member last refused a write, and why."""
        self.refusal: FlowstoneError | None = None
        self._outside = outside
        self._timeout = timeout
        self._on_change = on_change
        self._reading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._live(), name=f"client of {self.uri.address}")

    async def close(self) -> None:
        """Close the connection, and stop connecting."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def is_tried(self) -> bool:
        """True if the member was connected, or an attempt has failed."""
        return self.connection is not None or self.error is not None

    def refuse(self, error: FlowstoneError) -> None:
        """Note that the member has refused a write."""
        self.is_read_only, self.refusal = True, error
        self.refused = self._outside.clock.monotonic()
        self._on_change(self)

    def forget_schema(self, schema: KnownSchema) -> None:
        """Read the schema again before the next use: `schema` is out of date."""
        if self.schema is schema:
            self.schema = None

    async def read_schema(self, connection: Connection) -> None:
        """Read the schema if it is not known. Callers that come at the same time share one reading."""
        async with self._reading:
            if self.schema is None and connection is self.connection:
                schema = await read_schema(connection, timeout=self._timeout)
                if connection is self.connection:
                    self.schema = schema

    async def _live(self) -> None:
        pause = RECONNECT_SECONDS
        while True:
            try:
                async with await Connection.open(self._outside, self.uri, timeout=self._timeout) as connection:
                    pause = RECONNECT_SECONDS
                    await self._observe(connection)
            except FlowstoneError as error:
                self.error = error
            finally:
                self.connection, self.schema, self.is_read_only, self.refusal = None, None, True, None
                self.fresh_as_of = self.asked = -inf
            self._on_change(self)
            await self._outside.clock.sleep(pause)
            pause = min(2 * pause, RECONNECT_SECONDS_MAX)

    async def _observe(self, connection: Connection) -> None:
        """Report the state of the member until the connection is lost; then raise its error."""
        lost = asyncio.Event()
        connection.on_lost = lost.set
        connection.hurry()
        await self._ask(connection)
        self.connection, self.error = connection, None
        self._on_change(self)
        if connection.has(Feature.WATCHERS):
            connection.watch("box.status", self._told)
            connection.watch("box.election", self._told)
        while connection.failure is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await lost.wait()
            connection.expire(self._outside.clock.monotonic())
            await self._ask(connection)
            self._on_change(self)
        raise connection.failure

    async def _ask(self, connection: Connection) -> None:
        asked = self._outside.clock.monotonic()
        response = await connection.answer(connection.send(RequestType.VOTE), timeout=self._timeout)
        ballot = decode_vote(response, connection.greeting)
        if ballot is not None:
            self.is_read_only = ballot.is_ro or ballot.is_ro_cfg or ballot.is_loading
            self.vclock, self.asked = ballot.vclock.without_zero(), asked

    def _told(self, value: Any) -> None:
        """Take the value of `box.status` or `box.election`. Absent entries are those of other versions."""
        if isinstance(value, dict):
            self.is_read_only = value.get("is_ro", self.is_read_only) is not False
            term = value.get("term")
            self.term = term if isinstance(term, int) else self.term
            self._on_change(self)
