"""The second connection to a newer upstream, which watches its ballot.

`replication/applier/ballot_watch.py` implements the protocol. The connection lasts until the applier subscribes. It is
never retried: an error is raised to the applier, which needs the ballot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from flowstone.client.connection import READ_SIZE
from flowstone.outside import Stream
from flowstone.replication.applier.ballot_watch import BallotWatch
from flowstone.replication.applier.states import ConnectionLost
from flowstone.replication.messages import Ballot


class BallotWatching:
    """Watches from `first`, which returns the first ballot, to `end`; later ballots are passed to `on_ballot`."""

    def __init__(
        self, address: str, connect: Callable[[], Awaitable[Stream]], on_ballot: Callable[[Ballot], None]
    ) -> None:
        self._address = address
        self._connect = connect
        self._on_ballot = on_ballot
        self._first: asyncio.Future[Ballot] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def first(self, seconds: float) -> Ballot:
        """Connect and return the first ballot; raise ConnectionLost, or another error, if none arrives in `seconds`."""
        self._task = asyncio.get_running_loop().create_task(self._keep_watching())
        try:
            async with asyncio.timeout(seconds):
                return await self._first
        except TimeoutError as error:
            raise ConnectionLost(f"no ballot from {self._address} within {seconds:g} s") from error

    async def end(self) -> None:
        """Stop watching and close the connection."""
        if self._task is not None:
            self._task.cancel()
            # Shielded, so that a cancellation of the applier is not mistaken for that of the watch.
            await asyncio.gather(asyncio.shield(self._task), return_exceptions=True)

    async def _keep_watching(self) -> None:
        try:
            await self._watch_until_lost()
        except Exception as error:  # any error, or `first` would wait until its timeout
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
                await stream.drain()  # stop reading from a peer that does not read
            raise ConnectionLost(f"{self._address} closed the connection")
        finally:
            await stream.close()
