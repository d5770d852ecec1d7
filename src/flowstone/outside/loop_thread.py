"""An event loop in a thread of its own, for programs that have none: what is async inside is a plain call to them.

`run` hands a coroutine over and waits for its result. What both threads touch is guarded by `lock`, which whoever works
in the loop takes for as long as things are half done.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from flowstone.errors import LocalProtocolError

T = TypeVar("T")

Started = Future
"""The type of a coroutine that `start` has handed to the loop."""


class LoopEnded(LocalProtocolError):
    """The loop accepts no coroutines any more, or `close` has cancelled this one."""

    def __init__(self) -> None:
        super().__init__("the loop has ended")


class LoopThread:
    """Starts with its making; `close` cancels what still runs in it and returns when the thread has ended.

    The thread does not keep the program from ending. Every future of `start` gets a result, an error or a cancellation,
    however the loop ends: a caller never waits for a coroutine that no loop runs.
    """

    def __init__(self, name: str = "flowstone-loop") -> None:
        self.lock = threading.RLock()
        self._accepting = threading.Lock()
        """Held while a coroutine is handed to the loop, and while `_is_closing` is set."""
        self._is_closing = False
        self._unfinished: set[Future[Any]] = set()
        self._begun: Future[asyncio.AbstractEventLoop] = Future()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()
        self._loop = self._begun.result()

    def _live(self) -> None:
        try:
            with asyncio.Runner() as runner:  # which ends tasks, generators and workers that are left over
                try:
                    runner.run(self._until_closed())
                finally:
                    with self._accepting:
                        self._is_closing = True
        finally:
            self._fail_unfinished()

    def _fail_unfinished(self) -> None:
        """Fail futures whose coroutines the loop has neither finished nor cancelled, as after a SystemExit."""
        for future in list(self._unfinished):
            with suppress(InvalidStateError):  # its caller has cancelled it
                future.set_exception(LoopEnded())

    async def _until_closed(self) -> None:
        self._begun.set_result(asyncio.get_running_loop())
        await self._end.wait()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in the loop and return its result; an interrupted caller cancels it.

        Raises LoopEnded if the loop is closing or closed, before the coroutine begins or while it runs."""
        if self._thread is threading.current_thread():
            coroutine.close()
            raise LocalProtocolError("who is called in the loop must not wait for it", hint="use another thread")
        future = self.start(coroutine)
        try:
            return self.result(future)
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Started[T]:
        """Start the coroutine in the loop and return its future; cancelling the future cancels the coroutine.

        Raises LoopEnded if the loop is closing or closed. `result` waits for the future."""
        with self._accepting:
            if not self._is_closing:
                # The loop starts this coroutine before it handles a later `close`, which then cancels it.
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                self._unfinished.add(future)
                future.add_done_callback(self._unfinished.discard)
                return future
        coroutine.close()
        raise LoopEnded

    def result(self, future: Started[T]) -> T:
        """Wait for a future of `start`; raise LoopEnded if `close` has cancelled it."""
        try:
            return future.result()
        except CancelledError:
            if self._is_closing:
                raise LoopEnded from None
            raise

    def close(self) -> None:
        """Stop the loop and wait until its thread has ended. May be called twice, and from several threads."""
        with self._accepting:
            if not self._is_closing:
                self._is_closing = True
                self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
