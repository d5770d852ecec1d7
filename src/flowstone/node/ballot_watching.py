"""The second connection to a newer upstream, on which its ballot is watched; `replication/ballot_watch.py` reads it.

Lives as long as an applier decides about its peer, which is until it subscribes. Never tries again: whoever needs a
ballot hears what is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from flowstone.node.connection import READ_SIZE
from flowstone.outside import Stream
from flowstone.replication.applier import ConnectionLost
from flowstone.replication.ballot_watch import BallotWatch
from flowstone.replication.messages import Ballot


class BallotWatching:
    """Begins when `first` is called; every later ballot goes to `on_ballot`, until `end`."""

    def __init__(
        self, address: str, connect: Callable[[], Awaitable[Stream]], on_ballot: Callable[[Ballot], None]
    ) -> None:
        self._address = address
        self._connect = connect
        self._on_ballot = on_ballot
        self._first: asyncio.Future[Ballot] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def first(self, seconds: float) -> Ballot:
        """The first ballot, or what keeps it from us."""
        self._task = asyncio.get_running_loop().create_task(self._keep_watching())
        try:
            async with asyncio.timeout(seconds):
                return await self._first
        except TimeoutError as error:
            raise ConnectionLost(f"{self._address} tells no ballot") from error

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            # Whoever stops the applier meanwhile cancels us: that must not be taken for the end of the watch.
            await asyncio.gather(asyncio.shield(self._task), return_exceptions=True)

    async def _keep_watching(self) -> None:
        try:
            await self._watch_until_lost()
        except Exception as error:  # else the applier would wait for a ballot that does not come
            if not self._first.done():
                self._first.set_exception(error)

    async def _watch_until_lost(self) -> None:
        watch = BallotWatch(self._address)
        stream = await self._connect()
        try:
            while data := await stream.read(READ_SIZE):
                watch.receive(data)
                while (ballot := watch.next_ballot()) is not None:
                    if self._first.done():
                        self._on_ballot(ballot)
                    else:
                        self._first.set_result(ballot)
                stream.write(watch.data_to_send())
                await stream.drain()  # no more is read from who reads no answers
            raise ConnectionLost(f"{self._address} closed the connection")
        finally:
            await stream.close()
