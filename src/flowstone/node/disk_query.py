"""Disk queries that may hang: a network file system whose server is down answers after minutes, or never.

A hanging query occupies a worker until the disk answers, and the same few workers write the log. So callers share the
query that is running instead of starting another one, and no caller waits longer than its time limit.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from flowstone.outside import Outside

NO_ANSWER: Final = "the disk does not answer"

FREE_SPACE_SECONDS: Final = 1.0
"""Time limit for the free space, which usually takes microseconds. Short, so that reports with it are in time."""

USAGE_SECONDS: Final = 3.0
"""Time limit for the sizes of all files, perhaps thousands. Less than probes and scrapers usually wait."""

T = TypeVar("T")


class DiskQuery(Generic[T]):
    """One kind of query; at most one of them runs at a time."""

    def __init__(self) -> None:
        self._under_way: asyncio.Task[T | OSError] | None = None

    async def get(self, outside: Outside, query: Callable[..., T], *arguments: object, timeout: float) -> T:
        """Return the result of `query(*arguments)`, run by a worker, or of the query that is running already.

        Raises OSError if the query fails, and TimeoutError, which is an OSError, after `timeout` seconds.
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
    """Return an OSError rather than raise it: there may be no caller left to retrieve it."""
    try:
        return await outside.blocking(query, *arguments)
    except OSError as error:
        return error
