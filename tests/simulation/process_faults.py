"""Process and machine faults: kills, power losses, deaths in the middle of a write, suspensions, clock jumps.

Each fault lasts a while, restarts the nodes that it stopped, and returns whether it took effect: a running node went
down. A power loss is only harmless if the log is synced (`Plan.is_durable`); otherwise these faults kill processes and
leave the machines running.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from random import Random
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.node.upstream.applier import TIMEOUT_INFINITY
from flowstone.replication.applier.states import ApplierState
from tests.simulation.disk import Loss
from tests.simulation.replica_set import ReplicaSet
from tests.simulation.simulation import BLOCKING_SECONDS, Crashed

OPERATIONS_MAX: Final = 100
"""Number of disk operations within which a process dies that is to die in one."""

FUSE_SECONDS: Final = 10.0
"""Time limit for those operations."""

WRITING_SHARE: Final = 0.8
WRITING_SECONDS: Final = 2.0
"""How often nodes die while they write, and how long to wait for a write."""

ELECTION_SECONDS: Final = 10.0
"""Time within which a member votes in an election."""

CONFIRM_SECONDS: Final = 4.0
ANSWER_SECONDS: Final = 0.02
"""How long to wait for a verdict, and how long it takes until a client has its answer."""

LATE_SECONDS: Final = (0.05, 0.5)
"""Delay of slow disks."""

RECOVERIES_MAX: Final = 3
RECOVERY_OPERATIONS_MAX: Final = 10
"""How often a machine loses power during its start, and within how many disk operations."""

DEAF_SHARE: Final = 0.5
DEAF_LATENCY: Final = (1.0, 1.2)
FAR_LATENCY: Final = (0.3, 0.4)
"""How often a replaced leader learns of that late, how late, and its latency to other members."""

OVERTAKE_SECONDS: Final = 5.0
OVERTAKE_ROUNDS: Final = 4

JUMP_SECONDS_MAX: Final = 1e8


def duration(rng: Random) -> float:
    """Return the duration of a fault: often shorter than any timeout, sometimes longer than all."""
    return rng.uniform(*rng.choice([(0.05, 1.0), (0.5, 4.0), (3.0, 10.0)]))


def running(replica_set: ReplicaSet) -> list[str]:
    return [name for name in replica_set.names if replica_set.sim.is_running(name)]


def some(rng: Random, names: list[str]) -> list[str]:
    """Choose usually one of the names, sometimes several or all; none if `names` is empty."""
    return rng.sample(names, min(len(names), rng.choice([1, 1, 1, 1, 2, 2, 3, len(names)])))


async def kill(replica_set: ReplicaSet, rng: Random) -> bool:
    """Kill processes; their kernels close the connections."""
    return await _fell(replica_set, rng, some(rng, running(replica_set)), [Loss.NOTHING])


async def stop(replica_set: ReplicaSet, rng: Random) -> bool:
    """Stop processes in order, with requests in flight and other faults active."""
    sim = replica_set.sim
    names = some(rng, [name for name in replica_set.names if sim.is_ready(name) and not sim.is_frozen(name)])
    ended = await asyncio.gather(*(_stop(replica_set, name) for name in names))
    await sim.sleep(duration(rng))
    await asyncio.gather(*(_raise(replica_set, rng, name) for name in names))
    return any(ended)


async def _stop(replica_set: ReplicaSet, name: str) -> bool:
    failure_count = replica_set.sim.storage(name).failure_count
    try:
        await replica_set.sim.stop(name)
    except Crashed:  # another fault has stopped the node
        return False
    except (FlowstoneError, OSError) as error:
        replica_set.judge(name, f"ends with an error: {error}", failure_count)
    return True


async def power_loss(replica_set: ReplicaSet, rng: Random) -> bool:
    """Cut the power of machines without notice; unsynced data may be lost."""
    return await _fell(replica_set, rng, some(rng, running(replica_set)), _losses(replica_set))


async def power_loss_of_all(replica_set: ReplicaSet, rng: Random) -> bool:
    """Cut the power of all machines at once: each must have kept its promises by itself."""
    return await _fell(replica_set, rng, running(replica_set), _losses(replica_set))


async def power_loss_in_election(replica_set: ReplicaSet, rng: Random) -> bool:
    """Cut the power of the leader, and of a voter as soon as it has voted for another candidate: it must keep that
    vote."""
    sim, leader = replica_set.sim, replica_set.leader()
    if leader is None:
        return False
    before = {name: _vote(replica_set, name) for name in replica_set.ready()}
    sim.crash(leader, Loss.UNSYNCED)

    def voters() -> list[str]:
        return [name for name in replica_set.ready() if _vote(replica_set, name) not in (None, before.get(name))]

    fallen: list[str] = []
    with suppress(TimeoutError):
        await sim.until(voters, seconds=ELECTION_SECONDS, what="a member votes")
        fallen = voters()
    for name in fallen:
        sim.crash(name, Loss.UNSYNCED)
    await sim.sleep(duration(rng) / 4)
    await asyncio.gather(*(_raise(replica_set, rng, name) for name in (leader, *fallen)))
    return bool(fallen)


def _vote(replica_set: ReplicaSet, name: str) -> tuple[int, int] | None:
    """Return the vote of a member in its term, if any."""
    raft = replica_set.sim.node(name)._instance.elections.raft
    return (raft.term, raft._vote) if raft._vote else None


async def power_loss_at_confirm(replica_set: ReplicaSet, rng: Random) -> bool:
    """Slow down all disks except the leader's; once it has confirmed a transaction, cut the power of all members.

    The leader restarts last: the others must have what it told its clients.
    """
    sim, leader = replica_set.sim, replica_set.leader()
    if leader is None:
        return False
    machines = [sim.machine(name) for name in replica_set.members if name != leader]
    machines = [machine for machine in machines if machine.blocking_seconds == BLOCKING_SECONDS]
    for machine in machines:
        machine.blocking_seconds = LATE_SECONDS
    try:
        has_confirmed = await until_confirmed(replica_set, leader, seconds=CONFIRM_SECONDS)
        await sim.sleep(ANSWER_SECONDS)
        fallen = [name for name in replica_set.members if sim.is_running(name)]
        for name in fallen:
            sim.crash(name, Loss.UNSYNCED)
    finally:
        for machine in machines:
            machine.blocking_seconds = BLOCKING_SECONDS
    await asyncio.gather(*(_raise(replica_set, rng, name) for name in fallen if name != leader))
    await sim.sleep(duration(rng))
    await replica_set.restart(leader)
    return has_confirmed


async def until_confirmed(replica_set: ReplicaSet, leader: str, *, seconds: float) -> bool:
    """Wait until a leader confirms a transaction; return False if it stops before that."""
    sim = replica_set.sim
    limbo = sim.node(leader)._instance.queue.limbo
    before = limbo.confirmed_lsn
    with suppress(TimeoutError):
        await sim.until(lambda: not sim.is_ready(leader) or limbo.confirmed_lsn > before, seconds=seconds)
    return limbo.confirmed_lsn > before


async def _fell(replica_set: ReplicaSet, rng: Random, names: list[str], losses: list[Loss]) -> bool:
    if rng.random() < WRITING_SHARE:
        names = await _until_writing(replica_set, rng, names)
    for name in names:
        replica_set.sim.storage(name).is_ordered = rng.random() < 0.5
        replica_set.sim.crash(name, rng.choice(losses))
    await replica_set.sim.sleep(duration(rng))
    await asyncio.gather(*(_raise(replica_set, rng, name) for name in names))
    return bool(names)


async def _until_writing(replica_set: ReplicaSet, rng: Random, names: list[str]) -> list[str]:
    """Wait until the disks of some nodes are busy; return the nodes that still run."""
    sim, count = replica_set.sim, rng.randint(1, max(len(names), 1))
    with suppress(TimeoutError):
        await sim.until(lambda: sum(bool(sim.machine(name).jobs) for name in names) >= count, seconds=WRITING_SECONDS)
    return [name for name in names if sim.is_running(name)]


def _losses(replica_set: ReplicaSet) -> list[Loss]:
    return [Loss.UNSYNCED, Loss.ANY, Loss.ANY] if replica_set.plan.is_durable else [Loss.NOTHING]


async def _raise(replica_set: ReplicaSet, rng: Random, name: str) -> None:
    """Restart a machine after a random delay."""
    await replica_set.sim.sleep(rng.uniform(0, 1))
    await replica_set.restart(name)


async def crash_in_disk_operation(replica_set: ReplicaSet, rng: Random) -> bool:
    """Kill a process or machine in the middle of a disk operation, and perhaps again during recovery."""
    names = running(replica_set)
    if not names:
        return False
    name = rng.choice(names)
    if not await _burn(replica_set, rng, name):
        return False
    await replica_set.sim.sleep(duration(rng) / 2)
    if rng.random() < 0.5:
        again = asyncio.ensure_future(_burn(replica_set, rng, name))
        await replica_set.restart(name)
        await again
    await replica_set.restart(name)
    return True


async def _burn(replica_set: ReplicaSet, rng: Random, name: str) -> bool:
    """Return True if the process reached the operation in which it was to die."""
    sim, burnt = replica_set.sim, asyncio.Event()
    sim.storage(name).is_ordered = rng.random() < 0.5
    loss = rng.choice([Loss.NOTHING, *_losses(replica_set)])

    def blow() -> None:
        burnt.set()
        sim.crash(name, loss)

    operations = int(OPERATIONS_MAX ** rng.random())
    sim.storage(name).die_after(operations, blow)
    try:
        async with asyncio.timeout(FUSE_SECONDS):
            await burnt.wait()
    except TimeoutError:
        sim.storage(name).spare()
    return burnt.is_set()


async def power_loss_in_recovery(replica_set: ReplicaSet, rng: Random) -> bool:
    """Cut the power of machines while they write, and again while they recover their files."""
    sim = replica_set.sim
    names = await _until_writing(replica_set, rng, some(rng, running(replica_set)))
    for name in names:
        sim.storage(name).is_ordered = rng.random() < 0.5
        sim.crash(name, rng.choice(_losses(replica_set)))
    await sim.sleep(duration(rng) / 4)
    cut = await asyncio.gather(*(_cut_recovery(replica_set, Random(rng.getrandbits(64)), name) for name in names))
    await asyncio.gather(*(_raise(replica_set, rng, name) for name in names))
    return any(cut)


async def _cut_recovery(replica_set: ReplicaSet, rng: Random, name: str) -> bool:
    """Return True if the machine went down at least once during its start."""
    sim, fallen = replica_set.sim, 0

    def fall(loss: Loss) -> None:
        nonlocal fallen
        fallen += not sim.is_ready(name)
        sim.crash(name, loss)

    for _ in range(rng.randint(1, RECOVERIES_MAX)):
        if sim.is_running(name):  # another fault has restarted it
            break
        loss = rng.choice(_losses(replica_set))
        sim.storage(name).die_after(rng.randint(1, RECOVERY_OPERATIONS_MAX), partial(fall, loss))
        await replica_set.restart(name)
        sim.storage(name).spare()
    return fallen > 0


async def overtake(replica_set: ReplicaSet, rng: Random) -> bool:
    """Promote another member while the leader keeps working and learns of that late or soon.

    The latency from both to all others is high and their disks are slow, so that the others get the last rows of both
    after they have voted. The effect grows with the size of the set, so large sets repeat it.
    """
    rounds = 1 if replica_set.majority < 4 else OVERTAKE_ROUNDS
    return any([await _overtake_once(replica_set, rng) for _ in range(rounds)])


async def _overtake_once(replica_set: ReplicaSet, rng: Random) -> bool:
    sim, leader = replica_set.sim, replica_set.leader()
    heirs = [name for name in replica_set.ready() if name != leader]
    if leader is None or not heirs:
        return False
    heir = rng.choice(heirs)
    others = [name for name in replica_set.members if name not in (leader, heir)]
    machines = [sim.machine(name) for name in others]
    machines = [machine for machine in machines if machine.blocking_seconds == BLOCKING_SECONDS]
    far = [sim.internet.link(name, other) for name in (leader, heir) for other in others]
    deaf = [sim.internet.link(name, leader) for name in replica_set.names if name != leader]
    links = [(link, FAR_LATENCY) for link in far]
    if rng.random() < DEAF_SHARE:
        links += [(link, DEAF_LATENCY) for link in deaf]
    links = [(link, latency) for link, latency in links if link.is_calm]
    for machine in machines:
        machine.blocking_seconds = LATE_SECONDS
    for link, latency in links:
        link.latency = latency
    before = _queue_term(replica_set, heir)
    try:
        with suppress(FlowstoneError, Crashed, TimeoutError):
            await sim.sleep(rng.choice([0.0, rng.uniform(0.1, 1.0)]))
            if not sim.is_ready(heir):  # another fault has ended it (seed 1000769)
                return False
            async with asyncio.timeout(OVERTAKE_SECONDS):
                await sim.on(heir, sim.node(heir).promote())
            await sim.until(lambda: _queue_term(replica_set, heir) > before, seconds=OVERTAKE_SECONDS)
        await sim.sleep(duration(rng) / 4)
        return sim.is_ready(heir) and _queue_term(replica_set, heir) > before
    finally:
        for machine in machines:
            machine.blocking_seconds = BLOCKING_SECONDS
        for link, _ in links:
            link.calm()


def _queue_term(replica_set: ReplicaSet, name: str) -> int:
    """Return the term in which a member became the owner of the queue; 0 if it is not the owner."""
    if not replica_set.sim.is_ready(name):
        return 0
    limbo = replica_set.sim.node(name)._instance.queue.limbo
    return limbo.term if limbo.is_owner else 0


async def pause(replica_set: ReplicaSet, rng: Random) -> bool:
    """Suspend and resume processes: their clocks have jumped, and their state is stale."""
    sim = replica_set.sim
    names = [name for name in running(replica_set) if not sim.is_frozen(name)]
    names = some(rng, names)
    for name in names:
        sim.freeze(name)
    try:
        await sim.sleep(duration(rng))
    finally:
        held = sum([sim.thaw(name) for name in names])
    return held > 0


def jump(rng: Random) -> float:
    """Return the error of a wall clock in seconds: some seconds or years, ahead or behind."""
    return rng.choice([-1, 1]) * JUMP_SECONDS_MAX ** rng.random()


async def clock_jump(replica_set: ReplicaSet, rng: Random) -> bool:
    """Let the wall clocks of some machines jump and later return; a node may start in between.

    It took effect if a node considers another one lagging because of it, and does not follow it.
    """
    sim = replica_set.sim
    names = some(rng, replica_set.names)
    jumps = [(sim.machine(name), jump(rng)) for name in names]
    for machine, seconds in jumps:
        machine.wall_skew += seconds
    try:
        if rng.random() < 0.7 and sim.is_running(names[0]):
            sim.kill(names[0])
            await replica_set.restart(names[0])
        await sim.sleep(duration(rng))
        return any(_is_misled(replica_set, name) for name in replica_set.names)
    finally:
        for machine, seconds in jumps:
            machine.wall_skew -= seconds


def _is_misled(replica_set: ReplicaSet, name: str) -> bool:
    """Return True if a node has all rows of another but still waits for it."""
    if not replica_set.sim.is_ready(name):
        return False
    appliers = replica_set.sim.node(name)._parts.replication._appliers.values()
    return any(each.state is ApplierState.SYNC and each.sync_lag < each.lag < TIMEOUT_INFINITY for each in appliers)
