"""An HTTP server in a thread of its own, for programs without an event loop, such as a Spark job."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from flowstone.web.server import WebServer


class BackgroundServer:
    """`with BackgroundServer(make) as web`: run the server that `make` returns until the block ends.

    An error while the server starts is raised on entry.
    """

    def __init__(self, make: Callable[[], WebServer]) -> None:
        self._make = make
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="http", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._error: Exception | None = None
        self.url = ""

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self._make() as web:
                self.url = web.url
                self._started.set()
                await self._stopping.wait()
        except Exception as error:
            self._error = error
        finally:
            self._started.set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
