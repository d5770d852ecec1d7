"""Violations in the elements of one list or set read, independent of other reads."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from tests.simulation.history import Operation


def impossible(read: Operation, writes: Mapping[Hashable, Operation], done: str) -> Iterator[str]:
    """Return violations as text.

    `writes` maps each element to the one operation that wrote it; `done` is a verb such as "added".
    """
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
