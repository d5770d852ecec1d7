"""An event loop in a thread of its own, for programs without one: they use coroutines as plain calls.

`run` runs a coroutine in the loop and waits for its result. `lock` protects state that both threads access; code in the
loop holds it while that state is inconsistent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from flowstone.errors import LocalProtocolError

T = TypeVar("T")

Started = Future
"""The future of a coroutine that `start` has submitted to the loop."""


class LoopEnded(LocalProtocolError):
    """The loop accepts no more coroutines, or `close` has cancelled this one."""

    def __init__(self) -> None:
        super().__init__("event loop is closed")


class LoopThread:
    """The loop runs from construction until `close`, which cancels all coroutines and waits for the thread to end.

    The thread is a daemon: it does not keep the program running. Every future of `start` gets a result, an error or a
    cancellation, however the loop ends: a caller never waits for a coroutine that no loop runs.

    `make_error` returns the error of calls that the loop does not complete, because it has ended.
    """

    def __init__(self, name: str = "flowstone-loop", make_error: Callable[[], Exception] = LoopEnded) -> None:
        self.lock = threading.RLock()
        self._make_error = make_error
        self._accepting = threading.Lock()
        """Held while a coroutine is submitted to the loop, and while `_is_closing` is set."""
        self._is_closing = False
        self._unfinished: set[Future[Any]] = set()
        self._begun: Future[asyncio.AbstractEventLoop] = Future()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()
        self._loop = self._begun.result()

    def _live(self) -> None:
        try:
            with asyncio.Runner() as runner:  # its exit cancels the remaining tasks, generators and workers
                try:
                    runner.run(self._until_closed())
                finally:
                    with self._accepting:
                        self._is_closing = True
        finally:
            self._fail_unfinished()

    @property
    def is_closing(self) -> bool:
        """True if the loop accepts no more coroutines."""
        return self._is_closing

    def _fail_unfinished(self) -> None:
        """Fail futures whose coroutines the loop has neither finished nor cancelled, as after a SystemExit."""
        for future in list(self._unfinished):
            with suppress(InvalidStateError):  # the caller has cancelled the future
                future.set_exception(self._make_error())

    async def _until_closed(self) -> None:
        self._begun.set_result(asyncio.get_running_loop())
        await self._end.wait()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in the loop and return its result. If the caller is interrupted, cancel the coroutine.

        Raise the error of `make_error` if the loop is closing or closed, before or while the coroutine runs."""
        if self._thread is threading.current_thread():
            coroutine.close()
            message = "cannot block on the event loop from its own thread"
            raise LocalProtocolError(message, hint="call it from another thread")
        future = self.start(coroutine)
        try:
            return self.result(future)
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Started[T]:
        """Start the coroutine in the loop and return its future; cancelling the future cancels the coroutine.

        Raise the error of `make_error` if the loop is closing or closed. Wait for the future with `result`."""
        with self._accepting:
            if not self._is_closing:
                # The loop starts this coroutine before it handles a later `close`, which then cancels it.
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                self._unfinished.add(future)
                future.add_done_callback(self._unfinished.discard)
                return future
        coroutine.close()
        raise self._make_error()

    def result(self, future: Started[T]) -> T:
        """Wait for a future of `start` and return its result.

        Raise the error of `make_error` if `close` has cancelled it."""
        try:
            return future.result()
        except CancelledError:
            if self._is_closing:
                raise self._make_error() from None
            raise

    def close(self) -> None:
        """Stop the loop and wait for its thread to end. May be called more than once, and from several threads."""
        with self._accepting:
            if not self._is_closing:
                self._is_closing = True
                self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
