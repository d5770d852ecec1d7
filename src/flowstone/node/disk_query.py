"""Queries of a disk that may hang: a network file system whose server is away answers after minutes, or never.

A query that hangs holds a worker until the disk answers, and the log is written by the same few workers. Whoever asks
meanwhile waits for that query instead of starting another one, and nobody waits longer than a time limit.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from flowstone.outside import Outside

NO_ANSWER: Final = "the disk does not answer"

FREE_SPACE_SECONDS: Final = 1.0
"""Limit for the free space, which takes microseconds: short enough that a report with it is in time for who asks."""

USAGE_SECONDS: Final = 3.0
"""Limit for the sizes of all files, of which there may be thousands: less than probes and scrapers usually wait."""

T = TypeVar("T")


class DiskQuery(Generic[T]):
    """One kind of query, of which at most one is under way."""

    def __init__(self) -> None:
        self._under_way: asyncio.Task[T | OSError] | None = None

    async def get(self, outside: Outside, query: Callable[..., T], *arguments: object, timeout: float) -> T:
        """Return the result of `query(*arguments)`, run by a worker, or of the one that is under way.

        Raises its OSError, and TimeoutError, which is an OSError, too, after `timeout` seconds.
        """
        if self._under_way is None or self._under_way.done():
            work = _answer(outside, query, arguments)
            self._under_way = asyncio.get_running_loop().create_task(work, name="query of the disk")
        try:
            async with asyncio.timeout(timeout):
                found = await asyncio.shield(self._under_way)
        except TimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, NO_ANSWER) from error
        if isinstance(found, OSError):
            raise found
        return found


async def _answer(outside: Outside, query: Callable[..., T], arguments: tuple[object, ...]) -> T | OSError:
    """Return an error of the disk rather than raise it: it may come when nobody waits for it any more."""
    try:
        return await outside.blocking(query, *arguments)
    except OSError as error:
        return error
