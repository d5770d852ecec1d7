"""What is wrong with the elements of one list or set that somebody read, whatever others have read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from tests.simulation.history import Operation


def impossible(read: Operation, writes: Mapping[Hashable, Operation], done: str) -> Iterator[str]:
    """In words. `writes` has who wrote each element, once; `done` is what they did to it, such as "added"."""
    found: tuple[Hashable, ...] = tuple(read.result)
    for number, element in enumerate(found):
        write = writes.get(element)
        if element in found[:number]:
            yield f"{element} is there twice: {read}"
        elif write is None:
            yield f"{element} is there, which nobody {done}: {read}"
        elif write.is_failed:
            yield f"{element} is there, which could not be {done}: {write}; {read}"
        elif read.returned is not None and read.returned < write.invoked:
            yield f"{element} was there before it was {done}: {read}; {write}"
