"""The worker threads of one store or replica. Neither a cancelled caller nor a shutdown leaves a worker running.

Wraps the `blocking` of an Outside. A worker cannot be cancelled, so a cancelled caller (by a timeout, by Ctrl-C) waits
for its worker, and keeps its locks until then; `close` waits for all workers before the directory is released. Work
that must not delay a cancelled caller runs in a task of its own, which the caller awaits through a shield.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from flowstone.outside import Blocking, Outside
from flowstone.outside.blocking import DEFAULT_WORKERS
from flowstone.outside.worker import to_its_end

T = TypeVar("T")
Item = TypeVar("Item")


class Workers:
    """A Blocking that tracks its workers. `refusal` makes the error for calls after `close`."""

    def __init__(self, blocking: Blocking, refusal: Callable[[], Exception]) -> None:
        self._blocking = blocking
        self._refusal = refusal
        self._is_closed = False
        self._running: dict[asyncio.Future[Any], None] = {}

    async def __call__(self, fn: Callable[..., T], *args: object) -> T:
        return await to_its_end(self._run(fn, *args))

    async def _run(self, fn: Callable[..., T], *args: object) -> T:
        if self._is_closed:
            raise self._refusal()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[ended] = None
        try:
            return await self._blocking(fn, *args)
        finally:
            del self._running[ended]
            ended.set_result(None)

    def map(
        self, fn: Callable[[Item], T], items: Iterable[Item], workers: int = DEFAULT_WORKERS
    ) -> Generator[T, None, None]:
        return self._blocking.map(fn, items, workers)

    async def close(self) -> None:
        """Refuse new work, and wait for running workers."""
        self._is_closed = True
        while self._running:
            await asyncio.shield(next(iter(self._running)))


def with_workers(outside: Outside, refusal: Callable[[], Exception]) -> tuple[Outside, Workers]:
    """Return a copy of `outside` whose workers are tracked, and their tracker."""
    workers = Workers(outside.blocking, refusal)
    return replace(outside, blocking=workers), workers
