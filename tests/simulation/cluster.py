"""Replica sets in a simulation: start, inspect and compare them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from flowstone import Node
from flowstone.box.box import Box
from flowstone.box.engine.index import WHOLE
from flowstone.box.system import CLUSTER_ID
from flowstone.iproto.msgpack import unpack
from tests.simulation.simulation import Simulation

NAMES = ("a", "b", "c")


async def start_set(sim: Simulation, names: Sequence[str] = NAMES, **options: Any) -> list[Node]:
    """Start nodes that know each other at the same time, as when a replica set is bootstrapped."""
    replication = [sim.uri(name) for name in names]
    return list(await asyncio.gather(*(sim.start(name, replication=replication, **options) for name in names)))


def vclock(sim: Simulation, name: str) -> dict[int, int]:
    """Return the vclock of a node without local rows."""
    return sim.node(name)._instance.vclock.without_zero().to_mapping()  # `info()` collects much more, and is slow


def contents(sim: Simulation, name: str) -> dict[int, list[bytes]]:
    return contents_of(sim.node(name).box)


def contents_of(box: Box) -> dict[int, list[bytes]]:
    """Return the replicated contents: the tuples of all spaces except local and temporary ones."""
    return {
        number: sorted(space.tuples())
        for number, space in sorted(box.spaces.items())
        if space.definition.engine == "memtx" and not space.definition.is_temporary and not space.definition.is_local
    }


def decided_members(box: Box) -> dict[int, str]:
    """Return the UUIDs of members by id, by committed rows: a member counts until its expulsion is committed."""
    with box.open_view(confirmed=True) as view:
        primary = box.spaces[CLUSTER_ID].primary
        rows = () if primary is None else (unpack(raw) for _, raw in view.source(primary).scan(WHOLE))
        return {row[0]: row[1] for row in rows}


def is_converged(sim: Simulation, names: Sequence[str] = NAMES) -> bool:
    """Return True if all nodes have the same vclock."""
    first, *others = (vclock(sim, name) for name in names)
    return all(other == first for other in others)


async def converge(sim: Simulation, names: Sequence[str] = NAMES, *, seconds: float = 60.0) -> None:
    """Wait until all nodes have the same vclock, and check that they have the same data."""
    await sim.until(
        lambda: is_converged(sim, names),
        seconds=seconds,
        what="equal vclocks",
    )
    expected = contents(sim, names[0])
    for name in names[1:]:
        assert contents(sim, name) == expected, f"{name} differs from {names[0]}"


def upstream(sim: Simulation, name: str, peer: str) -> dict[str, Any]:
    """Return the upstream status of `peer` at a node; empty if there is none."""
    return _side(sim, name, peer, "upstream")


def downstream(sim: Simulation, name: str, peer: str) -> dict[str, Any]:
    """Return the downstream status of `peer` at a node; empty if there is none."""
    return _side(sim, name, peer, "downstream")


def _side(sim: Simulation, name: str, peer: str, side: str) -> dict[str, Any]:
    uuid = sim.machine(peer).uuid
    for member in sim.node(name).info()["replication"].values():
        if member["uuid"] == uuid:
            found: dict[str, Any] = member.get(side, {})
            return found
    return {}


def follows(sim: Simulation, name: str, peer: str) -> bool:
    return upstream(sim, name, peer).get("status") == "follow"


def all_follow_all(sim: Simulation, names: Sequence[str] = NAMES) -> bool:
    return all(_follows_all(sim, name, [peer for peer in names if peer != name]) for name in names)


def _follows_all(sim: Simulation, name: str, peers: Sequence[str]) -> bool:
    members = sim.node(name).info()["replication"].values()
    followed = [member["uuid"] for member in members if member.get("upstream", {}).get("status") == "follow"]
    return all(sim.machine(peer).uuid in followed for peer in peers)
