"""Operators at the wrong moment: changes of members, quorums and leaders, and checkpoints.

They obey the rules under which a set keeps its promises. A quorum is never below the majority of the registered
members. One member joins or leaves at a time (the nemesis ensures that), and the next change waits until all nodes have
the last one, and a majority has the leader's rows: otherwise two majorities need not overlap. The permanent owner of
the queue stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any, Final
from unittest.mock import patch
from uuid import UUID

from flowstone import Node
from flowstone.box.system import CLUSTER_ID, INDEX_ID, SPACE_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.node.downstream import join_server as relay_join
from flowstone.replication.membership.membership import unused_id
from tests.simulation.process_faults import duration, some
from tests.simulation.replica_set import ANONYMOUS_NAMES, SPACES, ReplicaSet, Space
from tests.simulation.simulation import Crashed

CHANGE_SECONDS: Final = 600.0
"""Time within which a member must have joined or left despite other faults."""

ASK_SECONDS: Final = 10.0
RETRY_SECONDS: Final = 0.5
LOOK_SECONDS: Final = 0.07
LOOKS_MAX: Final = 20
"""How often, and how many times, the operator looks at a node that lacks logs: for longer than its retries take."""

AFTERLIFE_SECONDS: Final = (1.0, 10.0)
"""How long an expelled member runs before the next action on it."""

DEAD_SHARE, CUT_SHARE, RESTART_SHARE, CONFIGURED_SHARE = 0.25, 0.4, 0.4, 0.7
"""How often an expelled member is dead; is isolated, so that it does not learn of it; is restarted; stays configured.
"""

ANONYMOUS_SHARE: Final = 0.3
"""How often a new replica is anonymous."""

MEMBERS_MIN: Final = 3
GROWTH_MAX: Final = 1

SCRATCH_ID, SCRATCH_INDEX = 600, 5
"""The temporary space and, in other spaces, the temporary index."""

QUORUMS: Final = ("N", "N / 2 + 1", "N * 2 / 3 + 1")
"""From the majority to all members, for any number of members."""


# --- quorums, leaders, checkpoints ---


async def quorum(replica_set: ReplicaSet, rng: Random) -> bool:
    """Raise the quorum of some members for a while."""
    usual = _usual_quorum(replica_set)
    names = some(rng, replica_set.members)
    effects = [await _set_quorum(replica_set, name, _some_quorum(replica_set, rng)) for name in names]
    await replica_set.sim.sleep(duration(rng))
    for name in names:
        await _set_quorum(replica_set, name, usual)
    return any(effects)


def _usual_quorum(replica_set: ReplicaSet) -> int | str:
    return replica_set.majority if replica_set.plan.dialect == "2.6" else "N / 2 + 1"


def _some_quorum(replica_set: ReplicaSet, rng: Random) -> int | str:
    if replica_set.plan.dialect == "2.6":
        return rng.randint(replica_set.majority, len(replica_set.members))
    return rng.choice(QUORUMS)


async def _set_quorum(replica_set: ReplicaSet, name: str, quorum: int | str) -> bool:
    """Set the quorum of a member; return True if it changed."""
    before = _quorum_of(replica_set, name)
    return await _configure(replica_set, name, replication_synchro_quorum=quorum) and before not in (
        None,
        _quorum_of(replica_set, name),
    )


def _quorum_of(replica_set: ReplicaSet, name: str) -> int | None:
    return replica_set.sim.node(name)._instance.queue.limbo.quorum if replica_set.sim.is_ready(name) else None


async def promote(replica_set: ReplicaSet, rng: Random) -> bool:
    """Promote and demote members concurrently. For sets with elections."""
    asked, before = [], _newest_term(replica_set)
    for _ in range(rng.randint(1, 6)):
        for name in some(rng, replica_set.ready()):
            node = replica_set.sim.node(name)
            work = node.promote() if rng.random() < 0.75 else node.demote()
            asked.append(asyncio.ensure_future(_ask(replica_set, name, work)))
        await replica_set.sim.sleep(rng.uniform(0, 1.5))
    return any(await asyncio.gather(*asked)) and _newest_term(replica_set) > before


def _newest_term(replica_set: ReplicaSet) -> int:
    """Return the newest term: every change of leader starts one."""
    terms = [replica_set.sim.node(name)._instance.elections.raft.term for name in replica_set.ready()]
    return max(terms, default=0)


async def checkpoint(replica_set: ReplicaSet, rng: Random) -> bool:
    """Take snapshots at any moment; unneeded logs are collected."""
    done = False
    for _ in range(rng.randint(1, 3)):
        names = [name for name in some(rng, replica_set.names) if replica_set.sim.is_ready(name)]
        work = [_ask(replica_set, name, replica_set.sim.node(name).snapshot()) for name in names]
        done |= any(await asyncio.gather(*work))
        await replica_set.sim.sleep(rng.uniform(0, 2))
    return done


async def schema(replica_set: ReplicaSet, rng: Random) -> bool:
    """Create a space and an index of a client space, and drop both again, including earlier leftovers."""
    # the second field of which is an array
    workloads = [name for name in replica_set.plan.workloads if name != "append"]
    indexed = SPACES[rng.choice(workloads)] if workloads else None
    effects = []
    for change in (_define, _drop):
        leader = replica_set.leader()
        if leader is not None:
            effects.append(await _ask(replica_set, leader, change(replica_set.sim.node(leader), indexed)))
        await replica_set.sim.sleep(duration(rng))
    return any(effects)


async def _define(node: Node, indexed: Space | None) -> None:
    format = [{"name": "key", "type": "unsigned"}]
    rows: list[tuple[int, tuple[Any, ...]]] = [
        (SPACE_ID, (SCRATCH_ID, 1, "scratch", "memtx", 0, {}, format)),
        (INDEX_ID, (SCRATCH_ID, 0, "pk", "tree", {"unique": True}, [(0, "unsigned")])),
    ]
    if indexed is not None:
        parts = [(1, indexed.fields[1][1])]
        rows.append((INDEX_ID, (indexed.id, SCRATCH_INDEX, "scratch", "tree", {"unique": False}, parts)))
    if node.configuration.dialect == "2.6":
        for space_id, row in rows:
            await node.space(space_id).replace(row)
        return
    async with node.transaction(is_sync=True) as transaction:
        for space_id, row in rows:
            transaction.space(space_id).replace(row)


async def _drop(node: Node, _: Space | None) -> None:
    """Drop what exists of the scratch space and index."""
    indexes = [(row[0], row[1]) for row in node.space(INDEX_ID).select()]
    ours = [key for key in indexes if key[0] == SCRATCH_ID or key[1] == SCRATCH_INDEX]
    keys: list[tuple[int, Any]] = [(INDEX_ID, key) for key in ours]
    if node.space(SPACE_ID).get(SCRATCH_ID) is not None:
        keys.append((SPACE_ID, SCRATCH_ID))
    if node.configuration.dialect == "2.6":
        for space_id, key in keys:
            await node.space(space_id).delete(key)
        return
    async with node.transaction(is_sync=True) as transaction:
        for space_id, key in keys:
            transaction.space(space_id).delete(key)


async def _ask(replica_set: ReplicaSet, name: str, work: Coroutine[Any, Any, object]) -> bool:
    """Return True if a node performed an action that it may reject or not survive."""
    with suppress(FlowstoneError, OSError, Crashed):
        async with asyncio.timeout(ASK_SECONDS):
            await replica_set.sim.on(name, work)
        return True
    return False


# --- members ---


async def join(replica_set: ReplicaSet, rng: Random) -> bool:
    """Add a member, which stays, or an anonymous replica."""
    free = [name for name in ANONYMOUS_NAMES if name not in replica_set.anonymous]
    if free and rng.random() < ANONYMOUS_SHARE:
        await add_anonymous(replica_set, free[0])
        return True
    if len(replica_set.members) >= replica_set.plan.size + GROWTH_MAX:
        return await expel(replica_set, rng)
    await add_member(replica_set, rng)
    return True


async def expel(replica_set: ReplicaSet, rng: Random) -> bool:
    """Expel a member for good; if too few would remain, add one first. The expelled member may keep running."""
    spare = [name for name in replica_set.members if is_spare(replica_set, name)]
    if not spare:
        return False
    name = rng.choice(spare)
    if len(replica_set.members) <= MEMBERS_MIN:
        await add_member(replica_set, rng)
    if rng.random() < DEAD_SHARE:
        await remove_member(replica_set, name)
    else:
        await _expel_running(replica_set, rng, name)
    return True


async def _expel_running(replica_set: ReplicaSet, rng: Random, name: str) -> None:
    """Expel a member that keeps running with unchanged options, whether it learns of it or not; its id may be reused.

    Our own masters do not reissue the id, so the master acts as a real one.
    """
    sim = replica_set.sim
    is_cut = rng.random() < CUT_SHARE
    if rng.random() < CONFIGURED_SHARE:
        replica_set.configured.append(name)
    cut = await remove_member(replica_set, name, is_alive=True, is_cut=is_cut)
    if len(replica_set.members) < replica_set.plan.size:
        with ids_of_real_masters():
            await add_member(replica_set, rng)
    await sim.sleep(rng.uniform(*AFTERLIFE_SECONDS))
    for other in cut:
        sim.heal(name, other)
    await sim.sleep(rng.uniform(*AFTERLIFE_SECONDS))
    if sim.is_ready(name) and rng.random() < RESTART_SHARE:
        await _restart_expelled(replica_set, name)


@contextmanager
def ids_of_real_masters() -> Iterator[None]:
    """Make masters choose ids as real servers do: the smallest free one, whoever had it before."""

    def smallest_free(taken: Collection[int], used: Collection[int]) -> int:
        return unused_id(taken, ())

    with patch.object(relay_join, "unused_id", smallest_free):
        yield


async def _restart_expelled(replica_set: ReplicaSet, name: str) -> None:
    """Restart an expelled member. It refuses to start if it knows of its expulsion; otherwise no peer accepts it."""
    sim = replica_set.sim
    knows = sim.node(name)._instance.is_expelled
    sim.kill(name)
    try:
        await sim.restart(name)
    except errors.UnknownReplica as error:
        sim.trace.note(name, f"does not start: {error}")
        return
    except (FlowstoneError, OSError, Crashed) as error:
        sim.trace.note(name, f"does not start: {error!r}")
        return
    if knows:
        replica_set.violations.append(f"{name} was expelled, knew it, and has started again")


async def replace_member(replica_set: ReplicaSet, rng: Random, name: str) -> None:
    """Replace a member whose data is lost, as an operator would: expel it first, then add a new one.

    In the opposite order, a set of three with a dead member needs all others for its quorum, including the new one: if
    that one fails after its registration and before it has the data, the set has lost its quorum (seed 1114).
    """
    await remove_member(replica_set, name)
    await _drop_who_is_ahead(replica_set)
    await add_member(replica_set, rng)


async def _drop_who_is_ahead(replica_set: ReplicaSet) -> None:
    """Drop anonymous replicas that have rows which only the lost member had: they can follow nobody any more, because
    the next member with that id reuses the LSNs (seed 1489)."""
    sim = replica_set.sim
    for name in list(replica_set.anonymous):
        async with asyncio.timeout(CHANGE_SECONDS):
            while not (sim.is_ready(name) and replica_set.ready()):
                await sim.sleep(RETRY_SECONDS)
        nodes = [sim.node(member) for member in replica_set.ready()]
        ids = _registered(nodes[0]).values()
        left = {number: lsn for number, lsn in sim.node(name)._instance.vclock if number not in (0, *ids)}
        if any(lsn > max(node._instance.vclock.get(number) for node in nodes) for number, lsn in left.items()):
            sim.kill(name)
            replica_set.anonymous.remove(name)
            replica_set.departed.append(name)


def is_spare(replica_set: ReplicaSet, name: str) -> bool:
    """Return True if the set can do without a member: it does not lead, and is not the permanent owner."""
    leader = replica_set.leader()
    return leader not in (None, name) and (replica_set.plan.has_elections or name != replica_set.members[0])


async def add_member(replica_set: ReplicaSet, rng: Random) -> None:
    """Add a member; return when all nodes follow it and it has the leader's rows."""
    name = replica_set.new_name()
    members = [*replica_set.members, name]
    options = replica_set.options(name)
    options["replication"] = _uris(replica_set, [*members, *replica_set.configured])
    # With the same UUID each time: a failed attempt may have registered it.
    options["instance_uuid"] = str(UUID(int=rng.getrandbits(128), version=4))
    async with asyncio.timeout(CHANGE_SECONDS):
        await _start_at_last(replica_set, name, options)
        replica_set.members.append(name)
        await _adjust_quorum(replica_set)
        await _tell_all(replica_set)
        await _settle(replica_set)


async def add_anonymous(replica_set: ReplicaSet, name: str) -> None:
    """Add an anonymous replica; it runs on return."""
    async with asyncio.timeout(CHANGE_SECONDS):
        await _start_at_last(replica_set, name, replica_set.options(name))
        replica_set.anonymous.append(name)


async def _start_at_last(replica_set: ReplicaSet, name: str, options: dict[str, Any]) -> None:
    sim = replica_set.sim
    work = sim.start(name, **options)
    while True:
        try:
            await work
            return
        except (FlowstoneError, OSError, Crashed) as error:
            sim.trace.note(name, f"does not join: {error}")
        await sim.sleep(RETRY_SECONDS)
        work = sim.restart(name)


async def remove_member(
    replica_set: ReplicaSet, name: str, *, is_alive: bool = False, is_cut: bool = False
) -> list[str]:
    """Stop a member, unless it is to stay alive, and expel it. Return when no member lists it any more.

    `is_cut`: it is isolated from all members first, so that it does not learn of it; those links are returned.
    """
    sim = replica_set.sim
    uuid = sim.machine(name).uuid
    cut: list[str] = []
    async with asyncio.timeout(CHANGE_SECONDS):
        if sim.is_running(name):
            await _spare(replica_set, name)
            if not is_alive:
                sim.kill(name)
            elif is_cut:
                cut = [other for other in replica_set.members if other != name]
                for other in cut:
                    sim.cut(name, other)
        replica_set.members.remove(name)
        replica_set.departed.append(name)
        await _settle(replica_set, leaving=name)
        await _strike_off(replica_set, name, uuid)
        await _tell_all(replica_set)
        await _settle(replica_set)
        await _adjust_quorum(replica_set)
    return cut


async def _spare(replica_set: ReplicaSet, name: str) -> None:
    """Wait until a running member does not lead and has no row of which it has the only copy."""
    sim = replica_set.sim
    while True:
        if is_spare(replica_set, name) and sim.is_ready(name):
            others = [other for other in replica_set.ready() if other != name]
            position = sim.node(name)._instance.vclock.without_zero()
            if sum(position <= sim.node(other)._instance.vclock for other in others) >= replica_set.majority - 1:
                return
        elif replica_set.leader() == name and replica_set.plan.has_elections:
            await _ask(replica_set, name, sim.node(name).demote())
        await sim.sleep(RETRY_SECONDS)


async def _strike_off(replica_set: ReplicaSet, leaving: str, uuid: str) -> None:
    """Delete the member repeatedly until no node lists it: a leader that was replaced may not have deleted it."""
    sim = replica_set.sim
    while not all(sim.is_ready(name) and uuid not in _registered(sim.node(name)) for name in replica_set.members):
        leader = replica_set.leader()
        if leader is not None and uuid in _registered(sim.node(leader)):
            await _ask(replica_set, leader, _delete_member(sim.node(leader), uuid))
        await _help_leader(replica_set, leaving)
        await sim.sleep(RETRY_SECONDS)


async def _help_leader(replica_set: ReplicaSet, leaving: str | None) -> None:
    """If no member leads, remove what may prevent it.

    The leaving member may have been elected in the meantime: nobody else could expel it then (seed 1595). An elected
    member may be an orphan: it waits for an expelled one that is still in its `replication` (seed 1001421).
    """
    if replica_set.leader() is not None:
        return
    if leaving is not None and replica_set.leads(leaving):
        await _ask(replica_set, leaving, replica_set.sim.node(leaving).demote())
    replication = _uris(replica_set, replica_set.members)
    for name in replica_set.ready():
        is_orphan = replica_set.sim.node(name)._instance.is_orphan
        if is_orphan and not set(replication).issuperset(replica_set.sim.machine(name).options["replication"]):
            await _configure(replica_set, name, replication=replication)


async def _delete_member(node: Node, uuid: str) -> None:
    """Delete the row with a quorum: a leader that acts alone, unaware of its successor, causes a split brain."""
    replica_id = _registered(node)[uuid]
    if node.configuration.dialect == "2.6":
        await node.space(CLUSTER_ID).delete(replica_id)
        return
    async with node.transaction(is_sync=True) as transaction:
        transaction.space(CLUSTER_ID).delete(replica_id)


def _registered(node: Node) -> dict[str, int]:
    return {row[1]: row[0] for row in node.space(CLUSTER_ID).select()}


async def _settle(replica_set: ReplicaSet, *, leaving: str | None = None) -> None:
    """Wait until a majority has the leader's current rows."""
    sim = replica_set.sim
    while (leader := replica_set.leader()) is None:
        await _help_leader(replica_set, leaving)
        await sim.sleep(RETRY_SECONDS)
    goal = sim.node(leader)._instance.vclock.without_zero()
    while sum(goal <= sim.node(name)._instance.vclock for name in replica_set.ready()) < replica_set.majority:
        await sim.sleep(RETRY_SECONDS)


async def resume_replication(replica_set: ReplicaSet, name: str) -> None:
    """Restart appliers that stopped because rows could not be written; real servers need an operator for that, too.

    `watchers.py` judges why they stopped. An expelled member is told only once: it may refuse, so nobody waits for it
    (seed 219), but without its appliers it would never learn of its expulsion (seed 573897856).
    """
    sim = replica_set.sim
    while await _is_stuck(replica_set, name):
        replication = sim.machine(name).options["replication"]
        if name in replica_set.departed:
            with suppress(FlowstoneError, OSError, Crashed):
                await sim.on(name, sim.node(name).reconfigure(replication=replication))
            return
        await _configure(replica_set, name, replication=replication)
        await sim.sleep(RETRY_SECONDS)
        if sim.is_ready(name) and _is_too_old(sim.node(name)):
            sim.kill(name)
            await replica_set.restart(name)


async def _is_stuck(replica_set: ReplicaSet, name: str) -> bool:
    """Return True if a node needs an operator. A node that is too old is shown to follow an upstream from the moment it
    subscribes until it gets the error, so several looks are needed (seed 1000396)."""
    sim = replica_set.sim
    for _ in range(LOOKS_MAX):
        if not sim.is_ready(name):
            return False
        if _has_stopped(sim.node(name)) or _is_too_old(sim.node(name)):
            return True
        if not _lacks_logs(sim.node(name)):
            return False
        await sim.sleep(LOOK_SECONDS)
    return False


def _has_stopped(node: Node) -> bool:
    return "stopped" in [side["status"] for side in _upstreams(node)]


def _is_too_old(node: Node) -> bool:
    """Return True if no upstream has the logs that the node needs: it joins anew when it is started (seed 1000105)."""
    sides = _upstreams(node)
    is_following = any(side["status"] in ("follow", "sync") for side in sides)
    return not is_following and _lacks_logs(node)


def _lacks_logs(node: Node) -> bool:
    """Return True if one of the upstreams, at least, has deleted the logs that the node needs."""
    return any("Missing .xlog file" in side.get("message", "") for side in _upstreams(node))


def _upstreams(node: Node) -> list[dict[str, Any]]:
    return [peer["upstream"] for peer in node.info()["replication"].values() if "upstream" in peer]


async def _tell_all(replica_set: ReplicaSet) -> None:
    """Set `replication` on all nodes."""
    replication = _uris(replica_set, [*replica_set.members, *replica_set.configured])
    await asyncio.gather(*(_configure(replica_set, name, replication=replication) for name in replica_set.names))


async def _adjust_quorum(replica_set: ReplicaSet) -> None:
    """Adjust a numeric quorum after the change, which may need the old one."""
    if replica_set.plan.dialect == "2.6":
        usual = _usual_quorum(replica_set)
        await asyncio.gather(*(_set_quorum(replica_set, name, usual) for name in replica_set.members))


def _uris(replica_set: ReplicaSet, names: list[str]) -> list[str]:
    return [replica_set.sim.uri(name) for name in names]


async def _configure(replica_set: ReplicaSet, name: str, **options: Any) -> bool:
    """Set options of a node, also for later restarts; return True if the node had to be reconfigured.

    An expelled member rejects all replication options; that is accepted.
    """
    sim = replica_set.sim
    sim.machine(name).options |= options
    while sim.is_running(name) and name not in replica_set.departed:
        with suppress(FlowstoneError, OSError, Crashed):
            if sim.is_ready(name):
                await sim.on(name, sim.node(name).reconfigure(**options))
                return True
        await sim.sleep(RETRY_SECONDS)
    return False
