"""Linearizability of a set: no element is missing before its removal or present after it.

Operations are `add` and `remove` (of `value`; a removal returns whether the element was present) and `read` (`result`
is the content; `value` is the requested element, or None for all). Every element is added once. Reads with the key
`GLANCE` promise less: their result may be stale, but each element in it was confirmed, so every later read returns it
unless it is removed.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise
from typing import Final

from tests.simulation.checkers.elements import impossible
from tests.simulation.history import History, Operation

GLANCE: Final = "glance"


def check(history: History, workload: str = "set") -> list[str]:
    """Return the violations as text; empty if the history is linearizable."""
    operations = history.of(workload)
    adds = {operation.value: operation for operation in operations if operation.kind == "add"}
    removals = [operation for operation in operations if operation.kind == "remove" and _may_remove(operation)]
    all_reads = [operation for operation in operations if operation.kind == "read" and operation.is_ok]
    reads = [read for read in all_reads if read.key != GLANCE]
    problems = [problem for read in all_reads for problem in impossible(read, adds, "added")]
    problems += _back(adds, removals, reads)
    removed = {removal.value: removal.invoked for removal in reversed(removals)}
    problems += _missing(adds, all_reads, reads, removed)
    problems += _contradictory(reads, frozenset(removed))
    return [f"{workload}: {problem}" for problem in problems]


def _may_remove(removal: Operation) -> bool:
    return not removal.is_failed and not (removal.is_ok and not removal.result)


def _back(adds: dict[Hashable, Operation], removals: list[Operation], reads: list[Operation]) -> list[str]:
    """Return elements whose removal was acknowledged and that a later read returned."""
    gone = {removal.value: removal for removal in removals if removal.is_ok and _is_over(adds[removal.value], removal)}
    return [
        f"{element} is there again after it was removed: {gone[element]}; {read}"
        for read in reads
        for element in read.result
        if element in gone and _returned(gone[element]) < read.invoked
    ]


def _is_over(add: Operation, removal: Operation) -> bool:
    """Return True if `add` can have no effect after `removal`."""
    return add.is_ok and _returned(add) < removal.invoked


def _missing(
    adds: dict[Hashable, Operation], all_reads: list[Operation], reads: list[Operation], removed: dict[Hashable, int]
) -> list[str]:
    """Return elements that were acknowledged or read, and that a later read lacks although it ended before their
    removal began (`removed`)."""
    witnesses = {element: add for element, add in adds.items() if add.is_ok}
    for read in sorted(all_reads, key=_returned):
        for element in read.result:
            known = witnesses.get(element)
            if known is None or _returned(read) < _returned(known):
                witnesses[element] = read
    return [
        f"{element} is missing: {witness}; {read}"
        for read in reads
        for element, witness in witnesses.items()
        if _returned(witness) < read.invoked
        and _asks_for(read, element)
        and element not in read.result
        and (element not in removed or _returned(read) < removed[element])
    ]


def _contradictory(reads: list[Operation], removed: frozenset[Hashable]) -> list[str]:
    """Return contradictions: of two reads of everything, one must contain the other, except for removed elements."""
    whole = [(frozenset(read.result) - removed, read) for read in reads if read.value is None]
    whole.sort(key=lambda found: len(found[0]))
    return [
        f"each of two reads has what the other lacks: {smaller}; {larger}"
        for (few, smaller), (many, larger) in pairwise(whole)
        if not few <= many
    ]


def _returned(operation: Operation) -> int:
    assert operation.returned is not None, "the outcome is known"
    return operation.returned


def _asks_for(read: Operation, element: Hashable) -> bool:
    return read.value is None or element in read.value
