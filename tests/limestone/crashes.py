"""A simulated disk that fails or loses power at any operation of a task, with any loss of unsynced data."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from flowstone.outside import Disk
from tests.conftest import FULL
from tests.simulation.disk import Loss, SimulatedDisk, Storage
from tests.simulation.loop import Died, Life
from tests.simulation.trace import Trace

DIRECTORY = "/data"
SEEDS = 200 if FULL else 12


def fresh(seed: int = 0) -> tuple[Storage, Disk]:
    machine = Storage("disk", Trace(lambda: 0.0), random.Random(seed))
    disk = mounted(machine)
    disk.make_directory(DIRECTORY)
    return machine, disk


def mounted(machine: Storage) -> Disk:
    return SimulatedDisk(machine, Life("process"))


@contextmanager
def one_failure(machine: Storage, number: int) -> Iterator[Callable[[], bool]]:
    """Make one disk operation fail: the one with this number, counted from 1. Yield whether it has failed."""
    check, count = machine.check, 0

    def fail_once(operation: str, path: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise OSError(errno.EIO, "Input/output error", path)
        check(operation, path)

    with patch.object(machine, "check", fail_once):
        yield lambda: count >= number


def crashed(prepare: Callable[[Disk], None], work: Callable[[Disk], None]) -> Iterator[tuple[Disk, bool]]:
    """Yield the disk after each crash of `work`, starting from the state made by `prepare`.

    The second value is True for the last disk, on which `work` completed without a crash.
    """
    for seed in range(SEEDS):
        operations, is_done = 0, False
        while not is_done:
            machine, disk = fresh(seed)
            prepare(disk)
            operations += 1
            is_done = _survives(machine, work, operations)
            machine.crash(Loss.ANY)
            yield mounted(machine), is_done


def _survives(machine: Storage, work: Callable[[Disk], None], operations: int) -> bool:
    life = Life("process")

    def die() -> None:
        life.is_dead = True

    machine.die_after(operations, die)
    try:
        work(SimulatedDisk(machine, life))
    except Died:
        return False
    machine.spare()
    return True
