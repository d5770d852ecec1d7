"""A disk that stops a worker before one of its operations until it is resumed, to leave time to cancel the caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flowstone.outside import Outside, production
from flowstone.outside.disk import SystemDisk

COUNTED = ("open", "create", "append_to", "overwrite", "rename", "link", "unlink", "make_directory", "sync_directory")
DEADLINE_SECONDS = 10.0
PAUSE_SECONDS = 0.01
"""How long to wait for an event that must not occur."""


class StoppableDisk(SystemDisk):
    """Counts the operations of all threads except the one that created the disk."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.may_go_on = threading.Event()
        self._home = threading.current_thread()
        self._left = 0
        self._unless: str | None = None
        self._lock = threading.Lock()

    def stop_at(self, number: int, *, unless: str | None = None) -> None:
        """Stop the worker before the operation with this number, counted from now.

        `unless`: operations on files of this name are not counted.
        """
        self._unless = unless
        self.stopped.clear()
        self.may_go_on.clear()
        self._left = number

    def _pass(self, path: str) -> None:
        if threading.current_thread() is self._home or path.rpartition("/")[2] == self._unless:
            return
        with self._lock:
            self._left -= 1
            stops = self._left == 0
        if stops:
            self.stopped.set()
            assert self.may_go_on.wait(DEADLINE_SECONDS)

    async def until_stopped(self, work: asyncio.Future[Any]) -> bool:
        """Return False if the work ended before that operation."""
        stopped = asyncio.ensure_future(asyncio.to_thread(self.stopped.wait, DEADLINE_SECONDS))
        await asyncio.wait([stopped, work], return_when=asyncio.FIRST_COMPLETED)
        has_stopped = self.stopped.is_set()
        self.stopped.set()
        await stopped
        return has_stopped

    def outside(self) -> Outside:
        return replace(production(), disk=self)


def _counted(name: str) -> Callable[..., Any]:
    method = getattr(SystemDisk, name)

    def call(self: StoppableDisk, path: str, *arguments: Any) -> Any:
        self._pass(path)
        return method(self, path, *arguments)

    return call


for _name in COUNTED:
    setattr(StoppableDisk, _name, _counted(_name))


async def cancelled(work: asyncio.Future[Any]) -> None:
    """Cancel the caller, which may have to wait for the worker."""
    work.cancel()
    await asyncio.sleep(0)


async def is_waiting(work: asyncio.Future[Any]) -> bool:
    await asyncio.wait([work], timeout=PAUSE_SECONDS)
    return not work.done()
