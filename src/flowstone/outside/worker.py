"""Work in worker threads that its caller always waits for, so that its files can be closed safely afterwards.

A worker cannot be cancelled. A cancelled caller (by a timeout, by Ctrl-C) waits for its worker, and keeps its locks
until then. Work that must not delay a cancelled caller runs in a task of its own, which the caller awaits through a
shield.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from flowstone.outside import Outside
from flowstone.outside.blocking import DEFAULT_WORKERS, Blocking

T = TypeVar("T")
Item = TypeVar("Item")


async def by_worker(outside: Outside, work: Callable[..., T], *arguments: object) -> T:
    """Run `work` as `outside.blocking` does, but let a cancelled caller wait for the worker: they share files."""
    return await _to_its_end(asyncio.get_running_loop().create_task(outside.blocking(work, *arguments)))


async def _to_its_end(task: asyncio.Task[T]) -> T:
    """Await `task` to its end even if the caller is cancelled; then re-raise the cancellation."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(BaseException):
                await asyncio.shield(task)
        raise


class Workers:
    """A Blocking whose callers wait for their workers, and whose owner can wait for all of them.

    `refusal` makes the error for calls after `close`."""

    def __init__(self, blocking: Blocking, refusal: Callable[[], Exception]) -> None:
        self._blocking = blocking
        self._refusal = refusal
        self._is_closed = False
        self._running: set[asyncio.Task[Any]] = set()

    async def __call__(self, fn: Callable[..., T], *args: object) -> T:
        task = asyncio.get_running_loop().create_task(self._run(fn, *args))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await _to_its_end(task)

    async def _run(self, fn: Callable[..., T], *args: object) -> T:
        if self._is_closed:
            raise self._refusal()
        return await self._blocking(fn, *args)

    def map(
        self, fn: Callable[[Item], T], items: Iterable[Item], workers: int = DEFAULT_WORKERS
    ) -> Generator[T, None, None]:
        return self._blocking.map(fn, items, workers)

    async def close(self) -> None:
        """Refuse new work, and wait for running workers."""
        self._is_closed = True
        while self._running:
            await asyncio.wait(self._running)


def with_workers(outside: Outside, refusal: Callable[[], Exception]) -> tuple[Outside, Workers]:
    """Return a copy of `outside` whose workers are tracked, and their tracker."""
    workers = Workers(outside.blocking, refusal)
    return replace(outside, blocking=workers), workers
