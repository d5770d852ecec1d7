"""File operations in a worker that the caller always waits for, so that the files can be closed safely afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from flowstone.outside import Outside

T = TypeVar("T")


async def by_worker(outside: Outside, work: Callable[..., T], *arguments: object) -> T:
    """Run `work` as `outside.blocking` does, but let a cancelled caller wait for the worker: they share files."""
    return await to_its_end(outside.blocking(work, *arguments))


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even if the caller is cancelled; then re-raise the cancellation."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(BaseException):
                await asyncio.shield(task)
        raise
