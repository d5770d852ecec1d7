"""An Outside around any disk, whose workers are the caller: what a store does, in one order, until power goes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import TypeVar

from flowstone.outside import Disk, Outside, production

T = TypeVar("T")
Item = TypeVar("Item")


class Inline:
    """Work is done by who asks for it, at once."""

    async def __call__(self, fn: Callable[..., T], *args: object) -> T:
        return fn(*args)

    def map(self, fn: Callable[[Item], T], items: Iterable[Item], workers: int = 1) -> Generator[T, None, None]:
        yield from map(fn, items)


def outside_on(disk: Disk) -> Outside:
    return replace(production(), disk=disk, blocking=Inline())
