"""Synchronous commits: a pair of nodes beside a real pair, and three nodes beside three of PySyncObj.

All members are processes on loopback with `wal_mode=write`; one load drives either kind in turns, and counts a commit
when it is acknowledged, which a master can do only once a second member has it. Each part ends with a check of this:
without its replicas, the same master rejects the same request.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.load import FIRST_KEY, SPACE_ID, Connections, Requests, people, person, pings, shuffled, statements
from bench.measure import Result, alternate
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack
from tests.interop.member import Member, NodeMember, RealMember, eventually, wait_ready
from tests.real_tarantool import free_port

ROUNDS: Final = 5
COMMITS: Final = 60_000
SINGLE_COMMITS: Final = 1500
IN_FLIGHT: Final = 500
CONNECTIONS: Final = 50
IN_FLIGHT_OF_THREE, CONNECTIONS_OF_THREE = 2000, 10
BESIDE_COMMITS, ASYNCHRONOUS_IN_FLIGHT = 100, 5000
"""A client writes as many rows synchronously at a time, beside as many asynchronous writes of another client."""
SECONDS: Final = 60.0

RATE_RATIO, BESIDE_RATIO, LATENCY_RATIO, PYSYNCOBJ_RATIO = 0.2, 0.12, 4.0, 3.0

INDEX: Final = 288
NOTES_ID: Final = SPACE_ID + 1
"""An asynchronous space beside the synchronous one."""

OPTIONS: Final[dict[str, Any]] = {"wal_mode": "write", "net_msg_max": 100_000, "checkpoint_count": 10}
PAIR: Final = OPTIONS | {"replication_synchro_quorum": 2, "replication_synchro_timeout": 5}
MESH: Final = OPTIONS | {"bootstrap_strategy": "legacy"}


def run(directory: Path) -> Iterator[Result]:
    for part in (pairs, threes):
        with ExitStack() as stack:
            yield from part(directory / part.__name__, stack)


class Group:
    """A master, its replicas, and connections of the load to the master; keys are used once."""

    def __init__(self, stack: ExitStack, master: Member, *replicas: Member) -> None:
        self.master, self.replicas = master, replicas
        self._stack = stack
        self._next_key = FIRST_KEY

    def connect(self, count: int) -> Connections:
        connections = self._stack.enter_context(Connections(self.master.port, count))
        connections.run(pings(10 * count), 1)  # the driver is already compiled
        return connections

    def inserts(self, count: int) -> Requests:
        first, self._next_key = self._next_key, self._next_key + count
        return statements(RequestType.INSERT, shuffled(count, seed=first, start=first))

    def check(self) -> None:
        """Check that all acknowledged rows are on all members, and that the master alone commits none."""
        count = self._next_key - FIRST_KEY
        for member in (self.master, *self.replicas):
            member.catch_up(self.master, seconds=SECONDS)
            if (found := member.call("box.space.people:len")) != count:
                raise RuntimeError(f"{member} has {found} of {count} rows")
        for replica in self.replicas:
            replica.stop()
        try:
            self.master.client.insert(SPACE_ID, *person(self._next_key))
        except TarantoolError:
            return
        raise RuntimeError(f"{self.master} has committed without a quorum")


# --- two members --------------------------------------------------------------------------------------


def pairs(directory: Path, stack: ExitStack) -> Iterator[Result]:
    ours, real = node_pair(directory, stack), real_pair(directory, stack)
    yield from _waits(ours, real)
    for connections in (1, CONNECTIONS):
        yield _rate(connections, ours, real)
    yield _beside(ours)
    for group in (ours, real):
        group.check()


def node_pair(directory: Path, stack: ExitStack) -> Group:
    def started(name: str, **options: Any) -> NodeMember:
        member = NodeMember(name, directory / f"node-{name}", dialect="2.6", **PAIR, **options)
        stack.callback(member.kill)
        member.start()
        return member

    master = started("master")
    replica = started("replica", replication=[master.uri])
    make_spaces(master)
    return Group(stack, master, replica)


def real_pair(directory: Path, stack: ExitStack) -> Group:
    def started(name: str, **options: Any) -> RealMember:
        options = PAIR | {"memtx_memory": 1024**3} | options
        member = RealMember(name, directory / f"real-{name}", "tarantool", **options)
        stack.callback(member.kill)
        member.start()
        return member

    master = started("master")
    replica = started("replica", replication=[master.uri])
    master.eval(f"box.schema.space.create('people', {{id = {SPACE_ID}, is_sync = true}}):create_index('pk')")
    return Group(stack, master, replica)


def make_spaces(master: Member) -> None:
    master.call("box.schema.space.create", "people", {"id": SPACE_ID, "is_sync": True})
    master.call("box.schema.space.create", "notes", {"id": NOTES_ID})
    for space_id in (SPACE_ID, NOTES_ID):
        master.client.insert(INDEX, space_id, 0, "pk", "tree", {"unique": True}, ((0, "unsigned"),))


def _waits(ours: Group, real: Group) -> Iterator[Result]:
    waits: list[list[float]] = [[], []]
    lines = [(group, group.connect(1), all_of) for group, all_of in zip((ours, real), waits, strict=True)]
    for _ in range(ROUNDS):
        for group, connection, all_of in lines:
            all_of.extend(connection.run(group.inserts(SINGLE_COMMITS), 1, keep_pauses=True).pauses)
    for percent in (50, 99):
        mine, beside = (float(np.percentile(all_of, percent)) for all_of in waits)
        promised = f"≤ {LATENCY_RATIO:g}" if percent == 50 else ""
        holds = mine / beside <= LATENCY_RATIO if promised else True
        what = f"synchronous INSERT with quorum 2, one request in flight, p{percent}"
        yield Result(what, f"{mine * 1e6:.0f} µs", f"{beside * 1e6:.0f} µs", mine / beside, promised, holds)


def _rate(connections: int, ours: Group, real: Group) -> Result:
    def measure(group: Group, load: Connections) -> float:
        return load.run(group.inserts(COMMITS), IN_FLIGHT // connections).rate

    mine, beside = alternate(ROUNDS, *(partial(measure, group, group.connect(connections)) for group in (ours, real)))
    of = "one connection" if connections == 1 else f"{connections} connections"
    what = f"synchronous INSERT with quorum 2, {IN_FLIGHT} in flight, {of}"
    return _compared(what, mine, beside, RATE_RATIO)


def _beside(ours: Group) -> Result:
    """Compare with ourselves: under this load, the real server 2.6 misses ACKs, and its queue times out."""
    body = b"\x82\x10" + pack(NOTES_ID) + b"\x21" + pack(person(FIRST_KEY))
    replaces = people(RequestType.REPLACE, body, shuffled(COMMITS, seed=1), age_at=-1)
    load, other = ours.connect(1), ours.connect(1)

    def alone() -> float:
        return load.run(replaces, ASYNCHRONOUS_IN_FLIGHT).rate

    def beside() -> float:
        is_over = threading.Event()

        def write_synchronously() -> None:
            while not is_over.is_set():
                other.run(ours.inserts(BESIDE_COMMITS), BESIDE_COMMITS)

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write_synchronously)
            try:
                rate = alone()
            finally:
                is_over.set()
            writing.result()
        return rate

    what = f"asynchronous REPLACE, {ASYNCHRONOUS_IN_FLIGHT} in flight, beside synchronous writes, and alone"
    mine, by_itself = alternate(ROUNDS, beside, alone)
    return _compared(what, mine, by_itself, BESIDE_RATIO)


def _compared(what: str, ours: float, peers: float, promised: float) -> Result:
    ratio = ours / peers
    return Result(what, f"{ours / 1e3:.0f} k/s", f"{peers / 1e3:.0f} k/s", ratio, f"≥ {promised:g}", ratio >= promised)


# --- three members ------------------------------------------------------------------------------------


def threes(directory: Path, stack: ExitStack) -> Iterator[Result]:
    group, peers = elected(directory, stack), PySyncObj(directory, stack)
    load = group.connect(CONNECTIONS_OF_THREE)

    def measure() -> float:
        return load.run(group.inserts(2 * COMMITS), IN_FLIGHT_OF_THREE // CONNECTIONS_OF_THREE).rate

    mine, beside = alternate(ROUNDS, measure, partial(peers.rate, COMMITS, IN_FLIGHT_OF_THREE))
    peers.check()
    group.check()
    what = f"commits of three members, journals on, {IN_FLIGHT_OF_THREE} in flight, beside PySyncObj"
    yield _compared(what, mine, beside, PYSYNCOBJ_RATIO)


def elected(directory: Path, stack: ExitStack) -> Group:
    """Three nodes of 2.11, all candidates; the one that receives the rows first leads."""
    members = [NodeMember(name, directory / name, dialect="2.11", **MESH) for name in ("first", "second", "third")]
    first, *others = members
    for member in members:
        stack.callback(member.kill)
    first.start()
    for other in others:
        other.launch(replication=[first.uri])
    wait_ready(*others)
    for member in members:
        member.configure(replication=[one.uri for one in members])
    for member in members:
        member.wait_follow(*(one for one in members if one is not member))
    for other in others:
        other.configure(election_mode="voter")
    first.configure(election_mode="candidate")
    first.wait_writable(seconds=SECONDS)
    for other in others:
        other.configure(election_mode="candidate")
    make_spaces(first)
    return Group(stack, first, *others)


class PySyncObj:
    """Three processes of `bench.pysyncobj_member`."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        self._members = [
            _Member(directory / f"{number}.journal", address, [one for one in addresses if one != address])
            for number, address in enumerate(addresses)
        ]
        for member in self._members:
            stack.callback(member.kill)
        self._leader: _Member = eventually("PySyncObj has a leader", self._find_leader)
        self._count = 0

    def _find_leader(self) -> _Member | None:
        return next((member for member in self._members if member.ask("leads") == 1), None)

    def rate(self, count: int, window: int) -> float:
        first, self._count = FIRST_KEY + self._count, self._count + count
        return count / self._leader.ask("load", first, count, window)

    def check(self) -> None:
        eventually("PySyncObj's members have all", self._have_all)

    def _have_all(self) -> bool:
        return all(member.ask("count") == self._count for member in self._members)


class _Member:
    def __init__(self, journal: Path, address: str, others: list[str]) -> None:
        command = [sys.executable, "-m", "bench.pysyncobj_member", address, str(journal), *others]
        pipe = subprocess.PIPE
        with journal.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)

    def ask(self, *words: object) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()
