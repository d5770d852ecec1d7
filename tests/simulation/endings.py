"""Checks after all faults: the set accepts writes, its nodes are equal, and their directories agree with them.

Each check returns its violations as text. `check_liveness`, `check_idle` and `check_equal` inspect running nodes;
`stop_and_compare` stops all nodes and reads their directories with code of its own (`logs.py`, `replay.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

from flowstone.box.box import Box
from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RaftKey, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.observation.explanation import explain
from flowstone.observation.findings.finding import Kind
from flowstone.observation.own_report import report_now
from flowstone.observation.replica_set import replica_sets
from flowstone.replication.applier.states import ApplierState
from flowstone.replication.vclock import VClock
from tests.simulation.cluster import contents_of
from tests.simulation.expelled import running, unbound
from tests.simulation.judged import JUDGED_EVERY, judged
from tests.simulation.logs import (
    CONTROL,
    DEMOTE,
    NOP,
    PROMOTE,
    RAFT,
    NodeLog,
    Position,
    Record,
    read_all,
    read_log,
    unpacked,
    without_lost_verdicts,
)
from tests.simulation.replay import replayed
from tests.simulation.watchers import Watched

LIVE_SECONDS: Final = 120.0
"""Virtual seconds after which a set without faults must be in sync again."""

WRITE_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.1

_OF_MACHINES: Final = (Kind.DISK_FULL, Kind.CLOCK_SKEW)
"""Findings that can be true of simulated machines, whose disks are small and whose clocks differ."""

SHOWN_MAX: Final = 3
"""Maximum number of reported differences of one kind."""


class Led(Watched, Protocol):
    def leader(self) -> str | None: ...


def names(replica_set: Watched) -> list[str]:
    return [*replica_set.members, *replica_set.anonymous]


# --- running nodes ---


async def check_liveness(
    replica_set: Led, *, seconds: float = LIVE_SECONDS, operator: Callable[[], Awaitable[None]] | None = None
) -> list[str]:
    """Check that, within `seconds` each, a leader exists, all nodes follow it and have its rows, and all spaces accept
    a write.

    `operator` is called once if a condition does not hold after half of that time.
    """
    conditions: list[tuple[str, Callable[[], object]]] = [
        ("all nodes run", lambda: all(map(replica_set.sim.is_ready, names(replica_set)))),
        ("a leader exists", replica_set.leader),
        ("all nodes follow each other", lambda: not not_following(replica_set)),
        ("all nodes have the same position", lambda: _is_converged(replica_set)),
        # A member that was isolated may return with a newer term, which makes the leader resign.
        ("a leader exists when all nodes are connected", replica_set.leader),
        ("no expelled member accepts writes", lambda: not unbound(replica_set)),
    ]
    for what, condition in conditions:
        if operator is not None and not await _comes_true(replica_set, condition, seconds / 2):
            await operator()
        if not await _comes_true(replica_set, condition, seconds):
            return [f"not within {seconds:g} s after all faults: {what}; {_state(replica_set)}"]
    violations = await _check_writes(replica_set)
    if not await _comes_true(replica_set, lambda: _is_converged(replica_set), seconds):
        violations.append(f"a write did not reach all nodes within {seconds:g} s; {_state(replica_set)}")
    return violations


async def _comes_true(replica_set: Watched, condition: Callable[[], object], seconds: float) -> bool:
    """Wait for a condition, polling rarely because the conditions are slow."""
    sim = replica_set.sim
    deadline = sim.now + seconds
    while not condition():
        if sim.now > deadline:
            return False
        await sim.sleep(LOOK_SECONDS)
    return True


def not_following(replica_set: Watched) -> list[str]:
    """Return the nodes that do not follow all members, or that a member does not serve.

    A node that restarts after a power loss serves no replica at first, while the others consider their old connections
    alive until they time out: no quorum is possible until then.
    """
    parts = {name: replica_set.sim.node(name)._parts for name in names(replica_set)}
    uuids = {name: each.instance.uuid for name, each in parts.items()}
    served = {name: {relay.replica.uuid for relay in each.relays._followers} for name, each in parts.items()}
    found = []
    for name, each in parts.items():
        appliers = each.replication._appliers.values()
        followed = {applier.uuid for applier in appliers if applier.state is ApplierState.FOLLOW}
        peers = [peer for peer in replica_set.members if peer != name]
        if not all(uuids[peer] in followed and uuids[name] in served[peer] for peer in peers):
            found.append(name)
    return found


def _vclock(replica_set: Watched, name: str) -> VClock:
    return replica_set.sim.node(name)._instance.vclock.without_zero()


def _is_converged(replica_set: Watched) -> bool:
    first, *others = (_vclock(replica_set, name) for name in names(replica_set))
    return all(other == first for other in others)


def _state(replica_set: Watched) -> str:
    """Return the positions of all nodes, for diagnosis."""
    shown = []
    for name in names(replica_set):
        if not replica_set.sim.is_ready(name):
            refusal = replica_set.sim.machine(name).refusal
            shown.append(f"{name} is not up" + (f", it did not start: {refusal}" if refusal else ""))
            continue
        instance = replica_set.sim.node(name)._instance
        info, limbo = instance.elections.info(), instance.queue.limbo
        shown.append(
            f"{name} is {info.state} in term {info.term} at {instance.vclock}, {len(limbo)} wait for {limbo.owner_id}"
        )
    late = not_following(replica_set) if all(map(replica_set.sim.is_ready, names(replica_set))) else []
    return "; ".join(shown) + (f"; not all is followed by {', '.join(late)}" if late else "")


async def _check_writes(replica_set: Led) -> list[str]:
    """Replace a tuple of each space by itself: that changes nothing, but needs a quorum like any other write."""
    sim, leader = replica_set.sim, replica_set.leader()
    if leader is None:
        return ["no leader any more, without a fault"]
    spaces = sim.node(leader).box.spaces
    wanted = [
        (number, raw)
        for number, space in sorted(spaces.items())
        if number >= FIRST_USER_SPACE_ID and (raw := next(iter(space.tuples()), None)) is not None
    ]
    client = await sim.client(leader)
    violations = []
    for number, raw in wanted:
        body = b"\x82" + pack(Key.SPACE_ID.value) + pack(number) + pack(Key.TUPLE.value) + raw
        try:
            await client.request(RequestType.REPLACE, body, timeout=WRITE_SECONDS)
        except FlowstoneError as error:
            violations.append(f"{leader} does not take a write to space {number}: {error}")
    await client.close()
    return violations


async def check_idle(replica_set: Watched, *, seconds: float = LIVE_SECONDS) -> list[str]:
    """Check that nothing has grown: each node holds only the resources of an idle set, and all are at one position."""

    def is_idle() -> bool:
        return not overgrown(replica_set) and _is_converged(replica_set)

    if await _comes_true(replica_set, is_idle, seconds):
        return []
    return overgrown(replica_set) or [f"nodes are at different positions with nothing to do; {_state(replica_set)}"]


def overgrown(replica_set: Watched) -> list[str]:
    """Return the resources of nodes beyond those that the nodes of this set need."""
    found = []
    for name in names(replica_set):
        parts = replica_set.sim.node(name)._parts
        instance, relays, queue = parts.instance, parts.relays, parts.instance.queue
        peers = [relay.replica.uuid for relay in relays._followers]
        others = len(replica_set.members) - (name in replica_set.members)
        figures = {
            "relays of one and the same follower": len(peers) - len(set(peers)),
            "joins": len(relays._joining),
            "consumers of logs beyond members": max(len(relays._collector.consumers) - others, 0),
            "transactions in the queue": len(queue.limbo) + len(queue._unproven),
            "who wait for the queue": len(queue._watched) + len(queue._clearing) + len(queue._received),
            "transactions in flight": len(instance.box.in_flight),
            "views": len(instance.box.views),
            "open transactions of clients": sum(parts.server.open_transactions._count.values()),
        }
        found += [f"{name} has {count} {what} with nothing to do" for what, count in figures.items() if count]
    return found


async def check_reports(replica_set: Watched, *, seconds: float = LIVE_SECONDS) -> list[str]:
    """Check that there are no findings once all nodes are in sync: any finding is a false alarm."""
    sim, found = replica_set.sim, [""]
    deadline = sim.now + seconds
    while found and sim.now <= deadline:
        sets = replica_sets([report_now(sim.node(name)) for name in names(replica_set)])
        waiting = _orphans_of_the_departed(replica_set)
        found = [
            f"{one.kind.value}: {one.what}; {one.why}"
            for one in explain(sets)
            if one.kind not in _OF_MACHINES and not (one.kind is Kind.ORPHAN and one.member in waiting)
        ]
        if found:
            await sim.sleep(LOOK_SECONDS)
    return [f"a false alarm of {text}" for text in found]


def _orphans_of_the_departed(replica_set: Watched) -> list[str]:
    """UUIDs of nodes that are orphans because their `replication` lists an expelled member.

    As in Tarantool 2.11 (`replicaset_check_quorum`), a node stays an orphan until it has synchronized with as many
    upstreams as it was connected to when it was configured, and an expelled member refuses to feed it. The finding is
    true until someone corrects `replication` (seeds 1003070, 1003551 and 1003869).
    """
    sim = replica_set.sim
    departed = {sim.uri(name) for name in replica_set.departed}
    return [
        str(sim.node(name)._instance.uuid)
        for name in names(replica_set)
        if sim.node(name)._instance.is_orphan and departed.intersection(sim.machine(name).options["replication"])
    ]


def check_equal(replica_set: Watched) -> list[str]:
    """Check that all nodes are at the same position, with identical tuples."""
    sim, (first, *others) = replica_set.sim, names(replica_set)
    position, expected = _vclock(replica_set, first), contents_of(sim.node(first).box)
    found = []
    for name in others:
        if (vclock := _vclock(replica_set, name)) != position:
            found.append(f"{name} is at {vclock}, {first} at {position}")
        found += _differences(name, contents_of(sim.node(name).box), first, expected)
    return found


def _differences(name: str, found: dict[int, list[bytes]], other: str, expected: dict[int, list[bytes]]) -> list[str]:
    words = []
    for number in sorted({*found, *expected}):
        here, there = found.get(number, []), expected.get(number, [])
        if here != there:
            ours, theirs = [raw for raw in here if raw not in there], [raw for raw in there if raw not in here]
            words.append(
                f"space {number}: {name} has {len(here)} tuples, {other} has {len(there)};"
                f" only {name}: {_shown(ours)}; only {other}: {_shown(theirs)}"
            )
    return words


def _shown(tuples: Sequence[bytes]) -> str:
    return f"{[unpacked(raw) for raw in tuples[:SHOWN_MAX]]}"


# --- the directories ---


class Left(NamedTuple):
    """The directories of a stopped set."""

    violations: list[str]
    logs: list[NodeLog]
    """All logs, including deleted ones, of the nodes that ran to the end."""
    departed: list[NodeLog]
    """Logs of former members, without the verdicts that were lost with them."""
    departed_whole: list[NodeLog]
    """The same with these verdicts."""


async def stop_and_compare(replica_set: Led) -> Left:
    """Stop all nodes in order; check that each directory matches the memory of its node, and that all logs, including
    those of former members, agree."""
    sim = replica_set.sim
    boxes = {name: sim.node(name).box for name in names(replica_set)}
    for name in (*running(replica_set), *boxes):
        await sim.stop(name)
    found = check_replay([read_log(name, sim.storage(name)) for name in boxes], boxes)
    if isinstance(sim.seed, int) and sim.seed % JUDGED_EVERY == 0:
        found += [each for name, box in boxes.items() for each in judged(name, sim.storage(name), box)]
    logs = [read_all(name, sim.storage(name)) for name in boxes]
    departed = [read_all(name, sim.storage(name), has_departed=True) for name in replica_set.departed]
    found += check_terms([*logs, *departed])
    without_lost = without_lost_verdicts(departed, [*logs, *departed])
    return Left([*found, *check_logs(logs, without_lost)], logs, without_lost, departed)


def check_replay(logs: Sequence[NodeLog], boxes: dict[str, Box]) -> list[str]:
    """Check that the rows of a directory, applied one by one, produce the contents of the stopped node."""
    found = []
    for log in logs:
        rows, contents = replayed(log), contents_of(boxes[log.name])
        for number in sorted({*rows, *contents}):
            live = sorted(repr(unpacked(raw)) for raw in contents.get(number, []))
            again = sorted(repr(fields) for fields in rows.get(number, {}).values())
            if live != again:
                ours, theirs = (
                    [each for each in live if each not in again],
                    [each for each in again if each not in live],
                )
                found.append(
                    f"space {number} of {log.name} had {len(live)} tuples, its directory gives {len(again)};"
                    f" only live: {ours[:SHOWN_MAX]}; only from the directory: {theirs[:SHOWN_MAX]}"
                )
    return found


def check_terms(logs: Sequence[NodeLog]) -> list[str]:
    """Check that all logs have one owner of the queue per term, and that no node decreased its term or voted twice in
    one."""
    found: list[str] = []
    owners: dict[int, tuple[int, int]] = {}
    for log in logs:
        term = vote = 0
        for record in log.records:
            row = record.rows[0]
            if row.type in (PROMOTE, DEMOTE):
                number = unpacked(row.body).get(Key.TERM, 0)
                if owners.setdefault(number, (row.replica_id, row.type)) != (row.replica_id, row.type):
                    found.append(f"by the log of {log.name} {row.replica_id} took term {number} of {owners[number][0]}")
            elif row.type == RAFT:
                state = unpacked(row.body)
                if state[RaftKey.TERM] < term:
                    found.append(f"by its log {log.name} went back from term {term} to {state[RaftKey.TERM]}")
                if state[RaftKey.TERM] == term and vote not in (0, state.get(RaftKey.VOTE, 0)):
                    found.append(f"by its log {log.name} voted for {vote} and {state.get(RaftKey.VOTE)} in term {term}")
                term, vote = state[RaftKey.TERM], state.get(RaftKey.VOTE, 0)
    return found


def check_logs(logs: Sequence[NodeLog], departed: Sequence[NodeLog] = ()) -> list[str]:
    """Check that a position has the same row and the same verdict in all logs; among nodes that have not `departed`."""
    found: list[str] = []
    seen: dict[Position, tuple[str, tuple[object, ...], Record]] = {}
    voids: dict[Position, str] = {}
    for number, log in enumerate((*logs, *departed)):
        for position, row, record in log.positions():
            if record.is_kept is None:
                if number >= len(logs):
                    continue  # no other node need have had it, and its successor has its id
                if record.is_before_gap:
                    continue  # the node joined again: the verdict is among the rows that its new snapshot covers
                found.append(f"no verdict on {position} in the log of {log.name}")
            if row.type == NOP:
                voids.setdefault(position, log.name)
                continue
            told = row.type, row.body, row.tsn, row.flags
            where, first, other = seen.setdefault(position, (log.name, told, record))
            if first != told:
                found.append(f"row {position} of {where} is {first}, that of {log.name} {told}")
            elif None not in (other.is_kept, record.is_kept) and other.is_kept != record.is_kept:
                found.append(
                    f"{position} is {_verdict(other)} by the log of {where}, {_verdict(record)} by {log.name}'s"
                )
    for position, name in voids.items():
        # A late verdict has no effect if its transactions were undone already.
        if position in seen and seen[position][2].is_kept and seen[position][1][0] not in CONTROL:
            found.append(f"{position} is a fact in the log of {seen[position][0]}, and nothing in that of {name}")
    return found[: 4 * SHOWN_MAX]


def _verdict(record: Record) -> str:
    return {True: "kept", False: "rolled back", None: "undecided"}[record.is_kept]
