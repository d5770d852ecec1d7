"""An event loop in a thread of its own, for programs that have none: what is async inside is a plain call to them.

`run` hands a coroutine over and waits for its result. What both threads touch is guarded by `lock`, which whoever works
in the loop takes for as long as things are half done.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from flowstone.errors import LocalProtocolError

T = TypeVar("T")


class LoopThread:
    """Starts with its making; `close` cancels what still runs in it and returns when the thread has ended.

    The thread does not keep the program from ending.
    """

    def __init__(self, name: str = "flowstone-loop") -> None:
        self.lock = threading.RLock()
        self._begun: Future[asyncio.AbstractEventLoop] = Future()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()
        self._loop = self._begun.result()

    def _live(self) -> None:
        asyncio.run(self._until_closed())  # which ends tasks, generators and workers that are left over

    async def _until_closed(self) -> None:
        self._begun.set_result(asyncio.get_running_loop())
        await self._end.wait()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises; who is interrupted while waiting cancels it."""
        if self._thread is threading.current_thread():
            coroutine.close()
            raise LocalProtocolError("who is called in the loop must not wait for it", hint="use another thread")
        if not self._thread.is_alive():
            coroutine.close()
            raise LocalProtocolError("the loop has ended")
        result = self.start(coroutine)
        try:
            return result.result()
        except BaseException:
            result.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Let the coroutine run while the caller does something else; whoever cancels the result cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Closing twice is harmless."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()
