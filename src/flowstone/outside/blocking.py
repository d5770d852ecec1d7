"""Worker threads: the only place where work leaves the calling thread.

`blocking(fn, …)` is for a call that would hold up the event loop (an fsync, a kernel run over a large
block); `blocking.map` is for synchronous callers whose function releases the GIL. Neither is meant
for work that waits on other work handed to the same workers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")

# The machines that CI and most operators run this on have at least two cores, and a decode kernel is
# bound by memory bandwidth soon after; callers who know better say so.
DEFAULT_WORKERS = 2


class Blocking(Protocol):
    """Running something elsewhere, and waiting for it in order."""

    async def __call__(self, fn: Callable[..., T], *args: object) -> T:
        """Run `fn(*args)` in a worker and return what it returns or raise what it raises.

        A cancelled caller stops waiting; the call itself runs to its end."""
        ...

    def map(
        self, fn: Callable[[Item], T], items: Iterable[Item], workers: int = DEFAULT_WORKERS
    ) -> Generator[T, None, None]:
        """Results of `fn` over `items`, in the order of `items`, computed by `workers` threads.

        `items` is consumed in the caller's thread, at most `2 * workers` ahead of the result being
        returned. An exception of `fn` or `items` is raised in its turn, after the results before it.
        However the iteration ends, nothing is running any more when `close()` has returned."""
        ...


class ThreadBlocking:
    """Worker threads of this process."""

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
                    # Held back until the results of the items before it have been handed out.
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
