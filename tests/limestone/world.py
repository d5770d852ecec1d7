"""An Outside around any disk, whose workers run in the caller: store operations in one order, until a power loss."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import TypeVar

from flowstone.outside import Disk, Outside, production

T = TypeVar("T")
Item = TypeVar("Item")


class Inline:
    """Runs work immediately, in the caller."""

    async def __call__(self, fn: Callable[..., T], *args: object) -> T:
        return fn(*args)

    def map(self, fn: Callable[[Item], T], items: Iterable[Item], workers: int = 1) -> Generator[T, None, None]:
        yield from map(fn, items)


def outside_on(disk: Disk) -> Outside:
    return replace(production(), disk=disk, blocking=Inline())
