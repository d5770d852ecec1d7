"""The writes to the log files of a store that are in progress, in any thread: the directory is released after them.

Relies on the guard that the threads of the store share. A store that is no longer open starts no writes, so it can wait
for those in progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class Writers:
    """`check` raises when writing is no longer allowed. It is called with the guard held."""

    def __init__(self, guard: AbstractContextManager[Any], check: Callable[[], None]) -> None:
        self._guard = guard
        self._check = check
        self._count = 0
        self._waiting: asyncio.Future[None] | None = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context for a write or sync, in any thread."""
        with self._guard:
            self._check()
            self._count += 1
        try:
            yield
        finally:
            with self._guard:
                self._count -= 1
                if not self._count and self._waiting is not None:
                    self._waiting.get_loop().call_soon_threadsafe(_wake, self._waiting)

    async def all_done(self) -> None:
        """Wait until all writers have finished. Called when no new writer is admitted."""
        with self._guard:
            if not self._count:
                return
            self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
