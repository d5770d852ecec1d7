"""Disk queries that may hang: a network file system whose server is down answers after minutes, or never.

A hanging query occupies a worker until the disk answers, and the same few workers write the log. So callers share the
running query instead of starting another one, and no caller waits longer than its timeout.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from flowstone.outside import Outside

NO_ANSWER: Final = "the disk does not answer"

FREE_SPACE_SECONDS: Final = 1.0
"""Timeout for the free space, which usually takes microseconds. The timeout is short, so that it does not delay
reports."""

USAGE_SECONDS: Final = 3.0
"""Timeout for the sizes of all files, of which there may be thousands. Shorter than usual timeouts of scrapers."""

T = TypeVar("T")


class DiskQuery(Generic[T]):
    """One kind of query, of which at most one runs at a time."""

    def __init__(self) -> None:
        self._under_way: asyncio.Task[T | OSError] | None = None

    async def get(self, outside: Outside, query: Callable[..., T], *arguments: object, timeout: float) -> T:
        """Run `query(*arguments)` in a worker and return its result; if a query is running already, return its result.

        Raise OSError if the query fails, and TimeoutError, which is an OSError, after `timeout` seconds.
        """
        if self._under_way is None or self._under_way.done():
            work = _answer(outside, query, arguments)
            self._under_way = asyncio.get_running_loop().create_task(work, name="disk query")
        try:
            async with asyncio.timeout(timeout):
                found = await asyncio.shield(self._under_way)
        except TimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, NO_ANSWER) from error
        if isinstance(found, OSError):
            raise found
        return found


async def _answer(outside: Outside, query: Callable[..., T], arguments: tuple[object, ...]) -> T | OSError:
    """Run the query. Return an OSError instead of raising it: all callers may have timed out."""
    try:
        return await outside.blocking(query, *arguments)
    except OSError as error:
        return error
