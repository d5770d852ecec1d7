"""Link faults: cuts and black holes, in one direction or both, between groups; slow, lossy and clogged links.

Each fault takes healthy links, lasts a while, and heals them. It took effect if a packet, a connection or a connection
attempt on them was delayed, duplicated, reset or lost. Duplication is limited to what TCP allows: see `link`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from random import Random
from typing import Final

from tests.simulation.link import Fault, Link
from tests.simulation.process_faults import CONFIRM_SECONDS, duration, until_confirmed
from tests.simulation.replica_set import ReplicaSet

CLIENTS: Final = "scenario"
"""The host where all clients are."""

Direction = tuple[str, str]

SUCCESSION_SECONDS: Final = 20.0
"""How long a leader stays isolated while it has no successor."""

CONFIRM_SHARE: Final = 0.7
VERDICT_LATENCIES: Final = ((0.05, 0.06), (0.2, 0.24), (0.4, 0.48))
"""How often a deposed leader has just confirmed a transaction, and the latency of its packets then."""

FLAPS: Final = (3, 12)
SLOW_LATENCIES: Final = ((0.01, 0.05), (0.05, 0.5), (0.5, 1.5))


def hosts(replica_set: ReplicaSet) -> list[str]:
    return [*replica_set.names, CLIENTS]


def both_ways(pairs: Iterable[Direction]) -> list[Direction]:
    return [direction for one, other in pairs for direction in ((one, other), (other, one))]


def across(group: Iterable[str], other_group: Iterable[str]) -> list[Direction]:
    """Return all links between two groups."""
    other_names = list(other_group)
    return both_ways((one, other) for one in group for other in other_names)


def loner(rng: Random, replica_set: ReplicaSet) -> str:
    """Return one member, often the leader: it continues until it notices, while the others elect another leader."""
    leader = replica_set.leader()
    return leader if leader is not None and rng.random() < 0.6 else rng.choice(replica_set.names)


def some_pairs(rng: Random, replica_set: ReplicaSet) -> list[Direction]:
    """Return one or more pairs of hosts, or one node and all others, with or without clients."""
    names = hosts(replica_set)
    if rng.random() < 0.5:
        alone, others = loner(rng, replica_set), rng.choice([names, replica_set.names, replica_set.names])
        return [(alone, other) for other in others if other != alone]
    pairs = list(combinations(names, 2))
    return rng.sample(pairs, min(len(pairs), rng.choice([1, 1, 2, 4])))


# --- nothing passes ---


async def cut(replica_set: ReplicaSet, rng: Random) -> bool:
    """Reset connections and reject new ones."""
    return await _break(replica_set, both_ways(some_pairs(rng, replica_set)), Fault.CUT, duration(rng))


async def black_hole(replica_set: ReplicaSet, rng: Random) -> bool:
    """Drop packets in both directions without an error."""
    return await _break(replica_set, both_ways(some_pairs(rng, replica_set)), Fault.BLACK_HOLE, duration(rng))


async def one_way(replica_set: ReplicaSet, rng: Random) -> bool:
    """Drop packets in one direction."""
    directions = [rng.choice([(one, other), (other, one)]) for one, other in some_pairs(rng, replica_set)]
    return await _break(replica_set, directions, Fault.BLACK_HOLE, duration(rng))


async def partition(replica_set: ReplicaSet, rng: Random) -> bool:
    """Split the set in two; clients reach one part or both."""
    first = loner(rng, replica_set)
    names = [first, *rng.sample([name for name in replica_set.names if name != first], len(replica_set.names) - 1)]
    size = rng.randint(1, len(names) - 1)
    one, other = names[:size], names[size:]
    for group in rng.choice([[], [one], [other]]):
        group.append(CLIENTS)
    return await _break(replica_set, across(one, other), rng.choice(list(Fault)), duration(rng))


async def bridge(replica_set: ReplicaSet, rng: Random) -> bool:
    """Split the set into two parts that share one member."""
    _, *names = rng.sample(replica_set.members, len(replica_set.members))
    half = len(names) // 2
    return await _break(replica_set, across(names[:half], names[half:]), rng.choice(list(Fault)), duration(rng))


async def flapping(replica_set: ReplicaSet, rng: Random) -> bool:
    """Break and heal links repeatedly."""
    directions, fault = both_ways(some_pairs(rng, replica_set)), rng.choice(list(Fault))
    had_effect = False
    for _ in range(rng.randint(*FLAPS)):
        had_effect |= await _break(replica_set, directions, fault, rng.uniform(0.05, 1))
        await replica_set.sim.sleep(rng.uniform(0.05, 1))
    return had_effect


async def depose(replica_set: ReplicaSet, rng: Random) -> bool:
    """Isolate the leader from all other members until one of them leads, and a while longer; clients reach all.

    Usually the leader has just confirmed a transaction, and no other member knows of that yet.
    """
    deposed = replica_set.leader()
    if deposed is None:
        return False
    others = [name for name in replica_set.names if name != deposed]
    links = [replica_set.sim.internet.link(deposed, name) for name in others]
    links = [link for link in links if link.is_calm] if rng.random() < CONFIRM_SHARE else []
    latency = rng.choice(VERDICT_LATENCIES)
    for link in links:
        link.latency = latency
    try:
        if links:
            await until_confirmed(replica_set, deposed, seconds=CONFIRM_SECONDS)
        return await _replace(replica_set, rng, deposed, others)
    finally:
        for link in links:
            link.calm()


async def _replace(replica_set: ReplicaSet, rng: Random, deposed: str, others: list[str]) -> bool:
    with _broken(replica_set, across([deposed], others), rng.choice(list(Fault))):
        with suppress(TimeoutError):
            await replica_set.until(lambda: replica_set.leader() not in (None, deposed), seconds=SUCCESSION_SECONDS)
        await replica_set.sim.sleep(duration(rng))
        return replica_set.leader() not in (None, deposed)


async def _break(replica_set: ReplicaSet, directions: list[Direction], fault: Fault, seconds: float) -> bool:
    with _broken(replica_set, directions, fault) as well:
        before = _hits(replica_set, well)
        await replica_set.sim.sleep(seconds)
        return _hits(replica_set, well) > before


@contextmanager
def _broken(replica_set: ReplicaSet, directions: list[Direction], fault: Fault) -> Iterator[list[Direction]]:
    """Break those of the links that are healthy, and heal them afterwards."""
    internet = replica_set.sim.internet
    well = [direction for direction in directions if internet.link(*direction).fault is None]
    for direction in well:
        internet.break_link(*direction, fault)
    try:
        yield well
    finally:
        for direction in well:
            internet.heal(*direction)


def _hits(replica_set: ReplicaSet, directions: Iterable[Direction]) -> int:
    return sum(replica_set.sim.internet.link(*direction).hit_count for direction in directions)


# --- packets arrive, but late ---


async def packet_loss(replica_set: ReplicaSet, rng: Random) -> bool:
    """Retransmit some packets; later packets wait for them."""
    probability = rng.choice([0.02, 0.1, 0.4])

    def lose(link: Link) -> None:
        link.loss_probability = probability

    return await _disturb(replica_set, _some_directions(rng, replica_set), lose, duration(rng))


async def delay(replica_set: ReplicaSet, rng: Random) -> bool:
    """Delay packets, more in one direction than in the other."""

    def slow(link: Link) -> None:
        link.latency = rng.choice(SLOW_LATENCIES)

    return await _disturb(replica_set, _some_directions(rng, replica_set), slow, duration(rng))


async def clog(replica_set: ReplicaSet, rng: Random) -> bool:
    """Clog links one by one, and open them in another order; queued packets are delivered then."""
    directions = _some_directions(rng, replica_set)
    waits = [rng.uniform(0, 2) for _ in directions]
    effects = await asyncio.gather(
        *(_clog(replica_set, each, wait, duration(rng)) for each, wait in zip(directions, waits, strict=True))
    )
    return any(effects)


async def _clog(replica_set: ReplicaSet, direction: Direction, wait: float, seconds: float) -> bool:
    await replica_set.sim.sleep(wait)
    opens_at = replica_set.sim.now + seconds

    def hold(link: Link) -> None:
        link.opens_at = opens_at

    return await _disturb(replica_set, [direction], hold, seconds)


async def duplication(replica_set: ReplicaSet, rng: Random) -> bool:
    """Duplicate connections, and reset others so that rows are sent again that may have arrived."""
    pairs = some_pairs(rng, replica_set)

    def double(link: Link) -> None:
        link.duplicate_probability = 0.5

    async def break_connections() -> bool:
        before = _hits(replica_set, pairs)
        for _ in range(rng.randint(1, 5)):
            for pair in pairs:
                replica_set.sim.internet.reset(*pair)
            await replica_set.sim.sleep(rng.uniform(0.1, 2))
        return _hits(replica_set, pairs) > before

    doubling = _disturb(replica_set, both_ways(pairs), double, duration(rng))
    return any(await asyncio.gather(doubling, break_connections()))


def _some_directions(rng: Random, replica_set: ReplicaSet) -> list[Direction]:
    directions = both_ways(combinations(hosts(replica_set), 2))
    return rng.sample(directions, rng.randint(1, len(directions)))


async def _disturb(
    replica_set: ReplicaSet, directions: list[Direction], worsen: Callable[[Link], None], seconds: float
) -> bool:
    internet = replica_set.sim.internet
    links = [link for direction in directions if (link := internet.link(*direction)).is_calm]
    before = sum(link.hit_count for link in links)
    for link in links:
        worsen(link)
    try:
        await replica_set.sim.sleep(seconds)
    finally:
        for link in links:
            link.calm()
    return sum(link.hit_count for link in links) > before
