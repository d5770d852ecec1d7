"""Worker threads: the only place where work leaves the calling thread.

`blocking(fn, …)` is for calls that would block the event loop (an fsync, a kernel over a large block); `blocking.map`
is for synchronous callers whose function releases the GIL. Do not use either for work that waits for other work of the
same workers: it can deadlock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")

DEFAULT_WORKERS = 2
"""Most machines have at least two cores, and more threads do not help a decode kernel much: it is soon bound by memory
bandwidth."""


class Blocking(Protocol):
    """Runs functions in worker threads."""

    async def __call__(self, fn: Callable[..., T], *args: object) -> T:
        """Run `fn(*args)` in a worker; return its result or raise its exception.

        If the caller is cancelled, it stops waiting, but the call runs to its end."""
        ...

    def map(
        self, fn: Callable[[Item], T], items: Iterable[Item], workers: int = DEFAULT_WORKERS
    ) -> Generator[T, None, None]:
        """Yield the results of `fn` for each of `items`, in order, computed by `workers` threads.

        `items` is consumed in the caller's thread, at most `2 * workers` items ahead of the current result. An
        exception of `fn` or `items` is raised in order, after the results before it. However the iteration ends, no
        call is running when `close()` returns."""
        ...


class ThreadBlocking:
    """Runs functions in threads of this process."""

    async def __call__(self, fn: Callable[..., T], *args: object) -> T:
        return await asyncio.to_thread(fn, *args)

    def map(
        self, fn: Callable[[Item], T], items: Iterable[Item], workers: int = DEFAULT_WORKERS
    ) -> Generator[T, None, None]:
        if workers < 1:
            raise ValueError(f"map needs at least one worker, not {workers}")
        return _ordered_map(fn, items, workers)


def _ordered_map(fn: Callable[[Item], T], items: Iterable[Item], workers: int) -> Generator[T, None, None]:
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="flowstone-map")
    in_flight: deque[Future[T]] = deque()
    source = iter(items)
    try:
        failure: Exception | None = None
        while True:
            while failure is None and len(in_flight) < 2 * workers:
                try:
                    item = next(source)
                except StopIteration:
                    break
                except Exception as error:
                    # Raised below, after the results of the items before it.
                    failure = error
                else:
                    in_flight.append(pool.submit(fn, item))
            if not in_flight:
                if failure is not None:
                    raise failure
                return
            yield in_flight.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
