"""Checks whether a set kept its promises: compares the final data with the answers to clients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Final

from flowstone.iproto.msgpack import unpack
from tests.chaos.jobs import bucket
from tests.chaos.seats import LISTS, NAMES, OWN_REGISTERS, OWN_SETS, REGISTERS, SETS, Seats
from tests.interop.member import REPLICATOR, Member
from tests.served_node import PASSWORD
from tests.simulation.checkers import append, register
from tests.simulation.checkers import set as no_loss
from tests.simulation.history import FINAL, History, by_key

Check = Callable[[History, str], list[str]]
CHECKS: Final[dict[int, Check]] = {
    SETS: no_loss.check,
    OWN_SETS: no_loss.check,
    REGISTERS: register.check,
    OWN_REGISTERS: register.check,
    LISTS: append.check,
}
SECRETS: Final = PASSWORD, REPLICATOR[1]


def read_finally(seats: Seats, history: History) -> None:
    """Add the rows of every member to the history, as final reads."""
    spaces = (*seats.synchronous, *seats.asynchronous)
    for member in seats.members:
        for space in spaces:
            _read_space(member, space, history)


def _read_space(member: Member, space: int, history: History) -> None:
    workload = NAMES[space]
    found: dict[Hashable, list[int]] = {}
    for key, *values in map(unpack, member.tuples(space)):
        if space in (SETS, OWN_SETS):
            found.setdefault(bucket(key), []).append(key)
        else:
            found[key] = values
    for key in dict.fromkeys([*found, *by_key(history.of(workload))]):
        operation = history.invoke(FINAL, workload, "read", key, member=member.name)
        seen = found.get(key, [])
        history.ok(operation, (seen[0] if seen else None) if space in (REGISTERS, OWN_REGISTERS) else seen)


def broken_promises(seats: Seats, history: History) -> Iterator[str]:
    """Yield the violations as text."""
    for space in (*seats.synchronous, *seats.asynchronous):
        for operations in by_key(history.of(NAMES[space])).values():
            part = History()
            part.operations = operations
            yield from CHECKS[space](part, NAMES[space])


def lost(seats: Seats, history: History) -> int:
    """Return the number of acknowledged rows that some member lacks."""
    count = 0
    for space in (SETS, OWN_SETS):
        added = {one.value for one in history.of(NAMES[space]) if one.kind == "add" and one.is_ok}
        if added:
            count += sum(len(added - {unpack(raw)[0] for raw in member.tuples(space)}) for member in seats.members)
    return count


def slips(seats: Seats) -> Iterator[str]:
    """Yield messages that must not occur in the logs of nodes."""
    for node in seats.nodes:
        said = node.log()
        if "Traceback" in said:
            yield f"something unforeseen happened in {node}: {said[said.index('Traceback') :][:2000]}"
        if any(secret in said for secret in SECRETS):
            yield f"{node} has told a secret"
