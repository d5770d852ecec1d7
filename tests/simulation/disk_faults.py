"""Disk faults: slow or full disks, failing writes, syncs and reads, and bit rot.

A node with a failing disk may reject requests or stop, with an error that says so; it must not return wrong data. When
the disk works again, an operator restarts stopped nodes. A node that detects bit rot refuses to start, is expelled, and
is replaced by a new member. A set can spare one member at a time for that, and never the permanent owner of the queue.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.xlog.errors import XlogError
from tests.simulation.disk import Storage
from tests.simulation.membership_faults import is_spare, replace_member, resume_replication
from tests.simulation.process_faults import duration, running, some
from tests.simulation.replica_set import ReplicaSet
from tests.simulation.simulation import BLOCKING_SECONDS, Crashed

SLOW_SECONDS: Final = ((0.01, 0.1), (0.05, 0.5), (0.5, 2.0))
"""Ranges of the delay of a slow disk, in seconds."""

BYTES_LEFT_MAX: Final = 5_000
FULL_BYTES_LEFT_MAX: Final = 300
FULL_SECONDS: Final = (15.0, 40.0)
"""Durations for which a disk stays full."""

FLIPS_MAX: Final = 4
RETRY_SECONDS: Final = 0.5
START_SECONDS: Final = 60.0
READING: Final = ("open", "read_at", "list_directory")


async def slow_disk(replica_set: ReplicaSet, rng: Random) -> bool:
    """Delay all operations of some disks."""
    machines = [replica_set.sim.machine(name) for name in some(rng, replica_set.names)]
    machines = [machine for machine in machines if machine.blocking_seconds == BLOCKING_SECONDS]
    before = sum(machine.blocking_calls for machine in machines)
    for machine in machines:
        machine.blocking_seconds = rng.choice(SLOW_SECONDS)
    try:
        await replica_set.sim.sleep(duration(rng))
    finally:
        for machine in machines:
            machine.blocking_seconds = BLOCKING_SECONDS
    return sum(machine.blocking_calls for machine in machines) > before


async def full_disk(replica_set: ReplicaSet, rng: Random) -> bool:
    """Fill the disks up to a few bytes, and later remove the files."""
    names = some(rng, replica_set.names)
    storages = [replica_set.sim.storage(name) for name in names]
    taken = [max(storage.room - rng.randrange(BYTES_LEFT_MAX), 0) for storage in storages]
    before = _failures(storages)
    for storage, size in zip(storages, taken, strict=True):
        storage.room -= size
    try:
        await replica_set.sim.sleep(duration(rng))
    finally:
        for storage, size in zip(storages, taken, strict=True):
            storage.room += size
    await _look_after(replica_set, names)
    return _failures(storages) > before


async def full_for_long(replica_set: ReplicaSet, rng: Random) -> bool:
    """Keep one disk full until an operator makes room.

    Meanwhile the node reports that it cannot write, and does not lead (see `disk_reports.py`); it is not restarted if
    it stops. The permanent master is never chosen.
    """
    sim = replica_set.sim
    masters = [] if replica_set.plan.has_elections else replica_set.members[:1]
    names = [name for name in running(replica_set) if name not in masters]
    if not names:
        return False
    name = rng.choice(names)
    storage = sim.storage(name)
    taken = max(storage.room - rng.randrange(FULL_BYTES_LEFT_MAX), 0)
    before = storage.failure_count
    storage.room -= taken
    try:
        await sim.sleep(rng.uniform(*FULL_SECONDS))
    finally:
        storage.room += taken
    await _look_after(replica_set, [name])
    return storage.failure_count > before


async def failing_write(replica_set: ReplicaSet, rng: Random) -> bool:
    """Make appends fail, or the creation, renaming or removal of files."""
    operations = rng.choice([("append",), ("create",), ("rename",), ("unlink",), ("append", "truncate")])
    return await _fail(replica_set, rng, operations, some(rng, replica_set.names))


async def failing_sync(replica_set: ReplicaSet, rng: Random) -> bool:
    """Make a sync fail: the data is not durable, and later syncs do not write it."""
    operations = rng.choice([("sync",), ("sync_directory",), ("sync", "sync_directory")])
    return await _fail(replica_set, rng, operations, some(rng, replica_set.names))


async def read_errors(replica_set: ReplicaSet, rng: Random) -> bool:
    """Make reads fail: for replicas that lag, and for nodes that start."""
    if rng.random() < 0.5 and (names := running(replica_set)):
        replica_set.sim.kill(name := rng.choice(names))
        _, had_effect = await asyncio.gather(replica_set.restart(name), _fail(replica_set, rng, READING, [name]))
        await replica_set.restart(name)
        return had_effect
    return await _fail(replica_set, rng, READING, some(rng, replica_set.names))


async def _fail(replica_set: ReplicaSet, rng: Random, operations: tuple[str, ...], names: list[str]) -> bool:
    storages = [storage for name in names if not (storage := replica_set.sim.storage(name)).broken]
    before = _failures(storages)
    for storage in storages:
        storage.broken.update(operations)
    try:
        await replica_set.sim.sleep(duration(rng))
    finally:
        for storage in storages:
            storage.broken.clear()
    await _look_after(replica_set, names)
    return _failures(storages) > before


async def _look_after(replica_set: ReplicaSet, names: list[str]) -> None:
    """Repair the disks, and restart what has failed."""
    await replica_set.sim.sleep(RETRY_SECONDS)
    await asyncio.gather(*(resume_replication(replica_set, name) for name in names))


def _failures(storages: list[Storage]) -> int:
    return sum(storage.failure_count for storage in storages)


async def bit_rot(replica_set: ReplicaSet, rng: Random) -> bool:
    """Change a file of one member while it is down.

    The member must detect that at its start, or behave correctly: then it did not need the file, and an operator
    repairs it before another process reads it. At the end the file is always repaired, for the final checks.
    """
    sim = replica_set.sim
    names = [name for name in running(replica_set) if name in replica_set.members and is_spare(replica_set, name)]
    if not names:
        return False
    name = rng.choice(names)
    sim.kill(name)
    path = _choose_file(sim.storage(name), rng)
    if path is None:
        await replica_set.restart(name)
        return False
    storage = sim.storage(name)
    size, read_before = len(storage.find(path).data), storage.reads[path]
    flips = [(rng.randrange(size), rng.randrange(8)) for _ in range(rng.randint(1, FLIPS_MAX))]
    places = list(dict.fromkeys(flips))
    sim.trace.note(name, f"{path} rots at {places}")
    _flip(storage, path, places)
    storage.is_rotten = True
    if not await _is_right(replica_set, name):
        await replace_member(replica_set, rng, name)
    else:
        await sim.sleep(duration(rng))
    _flip(storage, path, places)
    storage.is_rotten = False
    return storage.reads[path] > read_before


def _choose_file(storage: Storage, rng: Random) -> str | None:
    """Choose a file, except the newest log: its end may be lost in a crash, which a reader cannot distinguish from bit
    rot."""
    newest = max((path for path in storage.names if path.endswith(".xlog")), default="")
    paths = [path for path, inode in storage.names.items() if inode.data and path != newest]
    return rng.choice(paths) if paths else None


def _flip(storage: Storage, path: str, places: list[tuple[int, int]]) -> None:
    inode = storage.names.get(path) or storage.removed.get(path)
    if inode is not None:
        for offset, bit in places:
            inode.rot(offset, bit)


async def _is_right(replica_set: ReplicaSet, name: str) -> bool:
    """Return True if a node starts with its current disk.

    Other faults may stop it or delay its start for a while. A start means that the rot is in the text of a header,
    which no checksum covers.
    """
    sim = replica_set.sim
    end = sim.now + START_SECONDS
    while not sim.is_ready(name):
        if sim.now > end:
            return False
        if not sim.is_running(name):
            try:
                await sim.restart(name)
            except XlogError as error:
                sim.trace.note(name, f"is damaged: {error}")
                return False
            except (FlowstoneError, OSError, Crashed) as error:
                sim.trace.note(name, f"does not start: {error}")
        await sim.sleep(RETRY_SECONDS)
    return True
