"""The settled transactions of a replica as an async iterator: `async for changes in replica.changes()`.

A stream has a buffer. While the buffer of a stream is full, the replica reads nothing from its upstream. A stream never
skips a change without an error. The replica has only weak references to its streams: one that nobody reads any more
does not stop the replica.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.node.changes import SettledChange

BUFFER_TRANSACTIONS: Final = 1000
"""Default size of the buffer: some seconds of a usual load, and little memory."""


class ChangesMissed(FlowstoneError):
    """A snapshot has replaced the data, so the single changes since the last ones are not known."""


class ChangeStream:
    """An async iterator over settled transactions, each as a list of changes. `Replica.changes` returns it.

    It ends when the replica is stopped, and raises an error when changes are missing.

    Example:
        async for changes in replica.changes():
            for change in changes:
                print(change.type, change.space, change.key, change.old, change.new)
    """

    def __init__(self, buffer: int, on_room: Callable[[], None], on_discard: Callable[[], None]) -> None:
        """Call `on_room` when a full buffer has room again, and `on_discard`, in any thread, at collection."""
        self._buffer = buffer
        self._on_room = on_room
        self._changes: deque[list[SettledChange]] = deque()
        self._arrived = asyncio.Event()
        self._is_ended = False
        self._error: FlowstoneError | None = None
        self._finalizer = weakref.finalize(self, on_discard)
        self._finalizer.atexit = False

    @property
    def is_full(self) -> bool:
        """True if the replica has to wait before it reads on."""
        return len(self._changes) >= self._buffer and not self._is_ended

    def put(self, changes: list[SettledChange]) -> None:
        """Add a transaction."""
        if not self._is_ended:
            self._changes.append(changes)
            self._arrived.set()

    def end(self, error: FlowstoneError | None = None) -> None:
        """Add the end: the iteration stops after the buffered transactions, with `error` if there is one."""
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self._finalizer.detach()  # a stream that has ended is never full
            self._arrived.set()

    def close(self) -> None:
        """Discard the buffer and end the iteration, so that the replica no longer waits for the reader."""
        self._changes.clear()
        self.end()
        self._on_room()

    def __aiter__(self) -> ChangeStream:
        return self

    async def __anext__(self) -> list[SettledChange]:
        """Return the next transaction.

        Raises:
            ChangesMissed: A snapshot has replaced the data.
            CannotFollow: The upstream can no longer be followed.
        """
        while not self._changes:
            if self._is_ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        was_full = self.is_full
        changes = self._changes.popleft()
        if was_full:
            self._on_room()
        return changes
