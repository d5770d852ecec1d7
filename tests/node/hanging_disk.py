"""A disk whose free-space query hangs, as on a network file system without its server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

from flowstone.outside.disk import SystemDisk


class HangingDisk(SystemDisk):
    """Behaves like the real disk, except inside `hanging()`. `waiting` counts unanswered queries."""

    def __init__(self) -> None:
        self._may_answer = Event()
        self._may_answer.set()
        self.waiting = 0

    @contextmanager
    def hanging(self) -> Iterator[None]:
        self._may_answer.clear()
        try:
            yield
        finally:
            self._may_answer.set()

    def free_space(self, path: str) -> int:
        self.waiting += 1
        self._may_answer.wait()
        self.waiting -= 1
        return super().free_space(path)
