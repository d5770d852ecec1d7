"""Replication beside the real server: rows applied, joined and relayed per second, and what a replica costs its master.

Members are processes on loopback (`tests/interop`), the peer is a real server in the same place in the same run. A
replica that has been switched off is switched on again by `box.cfg{replication=…}`; the time until it has everything
is what catching up takes, start-up not counted.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

from bench import fan_out
from bench.contender import peer
from bench.measure import Result
from tests.interop.member import Member, NodeMember, RealMember

M = TypeVar("M", bound=Member)

ROUNDS = 3
ROWS = 500_000
JOINED_ROWS: Final = 1_000_000
SECONDS: Final = 90.0

WRITE_LUA: Final = """
local from, count, fibers = ...
local fiber, clock = require('fiber'), require('clock')
local space, done, started = box.space[512], fiber.channel(fibers), clock.time()
local share = count / fibers
for f = 0, fibers - 1 do
    fiber.create(function()
        for i = from + f * share, from + (f + 1) * share - 1 do space:replace{i, 'customer ' .. i, i * 7, true, 0.5} end
        done:put(true)
    end)
end
for f = 1, fibers do done:get() end
return clock.time() - started
"""
FILL_LUA: Final = """
local count = ...
for first = 1, count, 1000 do
    box.begin()
    for i = first, first + 999 do box.space[512]:replace{i, 'customer ' .. i, i * 7, true, 0.5} end
    box.commit()
end
"""
JOIN_LUA: Final = """
local clock = require('clock')
local started = clock.time()
box.cfg{replication = arg[1], memtx_memory = 1024^3, log = 'join.log', replication_sync_timeout = 300}
print(clock.time() - started)
os.exit()
"""
JOINING_NODE: Final = Path(__file__).with_name("joining_node.py")


class Bench:
    """Members in one directory, terminated with the stack."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._count = 0

    def _named(self, name: str) -> tuple[str, Path]:
        self._count += 1
        return name, self._directory / f"{self._count}-{name}"

    def real(self, name: str, **options: Any) -> RealMember:
        memory = {"memtx_memory": 1024**3, "checkpoint_count": 10}
        return self._started(RealMember(*self._named(name), peer().path, **(memory | options)))

    def node(self, name: str, **options: Any) -> NodeMember:
        return self._started(NodeMember(*self._named(name), dialect=peer().dialect, **options))

    def _started(self, member: M) -> M:
        self._stack.callback(member.stop)
        member.start()
        return member

    def place(self, name: str) -> Path:
        path = self._named(name)[1]
        path.mkdir(parents=True)
        return path


def run(directory: Path) -> Iterator[Result]:
    for part in (applied, joined, relayed, relays, archived, write_rate):
        with ExitStack() as stack:
            yield from part(Bench(directory / part.__name__, stack))


def pair() -> tuple[list[float], list[float]]:
    """Seconds, ours and the peer's."""
    return [], []


def make_space(master: RealMember) -> None:
    master.eval("box.schema.space.create('orders', {id = 512}):create_index('pk')")


class Writer:
    """Let a real master write rows, each with a new key and as a transaction of its own."""

    def __init__(self, master: RealMember) -> None:
        self._master = master
        self._next = 1

    def write(self, count: int, fibers: int = 100) -> float:
        """Return the elapsed seconds."""
        first, self._next = self._next, self._next + count
        taken: float = self._master.eval(WRITE_LUA, first, count, fibers)
        return taken


def catch_up(replica: Member, master: Member) -> float:
    """Return the seconds from switching replication on until the replica has all rows of the master."""
    target = master.vclock()
    started = time.perf_counter()
    replica.configure(replication=[master.uri])
    replica.wait_vclock(target, seconds=SECONDS)
    return time.perf_counter() - started


def compared(what: str, count: int, ours: list[float], peers: list[float], promise: float) -> Result:
    """Compute rates from medians of seconds for `count` rows."""
    mine, theirs = statistics.median(ours), statistics.median(peers)
    ratio = theirs / mine
    return Result(what, rate(count, mine), rate(count, theirs), ratio, f"≥ {promise:g}×", ratio >= promise)


def rate(count: int, taken: float) -> str:
    return f"{count / taken / 1000:.0f} k rows/s"


def applied(bench: Bench) -> Iterator[Result]:
    master = bench.real("master")
    make_space(master)
    replicas = [bench.node("replica", replication=[master.uri]), bench.real("peer", replication=[master.uri])]
    writer, taken = Writer(master), pair()
    for _ in range(ROUNDS):
        for replica in replicas:
            replica.configure(replication=[])
        writer.write(ROWS)
        for replica, times in zip(replicas, taken, strict=True):
            times.append(catch_up(replica, master))
    yield compared("rows of a real master applied by a replica", ROWS, *taken, 0.7)


def joined(bench: Bench) -> Iterator[Result]:
    master = bench.real("master")
    make_space(master)
    master.eval(FILL_LUA, JOINED_ROWS)
    yield joined_rows(bench, master, JOINED_ROWS, "initial join of 1 M rows from a real master", 0.5)


def joined_rows(bench: Bench, master: RealMember, rows: int, what: str, promise: float) -> Result:
    """Measure how long a node and a real server take to join `master`, which has `rows` rows."""
    taken = pair()
    for _ in range(ROUNDS):
        for times, command in zip(taken, ([sys.executable, str(JOINING_NODE)], [peer().path, "join.lua"]), strict=True):
            place = bench.place("joining")
            (place / "join.lua").write_text(JOIN_LUA)
            done = subprocess.run(
                [*command, master.uri], cwd=place, capture_output=True, text=True, check=True, timeout=SECONDS
            )
            times.append(float(done.stdout.split()[-1]))
    return compared(what, rows, *taken, promise)


def relayed(bench: Bench) -> Iterator[Result]:
    """A real replica catches up with us and with a real master, both of which have the rows in their logs."""
    source = bench.real("source")
    make_space(source)
    ours = bench.node("ours", replication=[source.uri])
    # Anonymous, because two independent masters would assign one id twice.
    anonymous = {"replication_anon": True, "read_only": True}
    replicas = [bench.real("replica", replication=[master.uri], **anonymous) for master in (ours, source)]
    writer, taken = Writer(source), pair()
    for _ in range(ROUNDS):
        for replica in replicas:
            replica.configure(replication=[])
        writer.write(ROWS)
        ours.catch_up(source, seconds=SECONDS)
        for replica, master, times in zip(replicas, (ours, source), taken, strict=True):
            times.append(catch_up(replica, master))
    yield compared("rows relayed to a real replica", ROWS, *taken, 0.3)


def relays(bench: Bench) -> Iterator[Result]:
    """Measure the processor time of a master that relays live rows: the cost of the second and third replica,
    beside the first.
    """
    first, *others = fan_out.costs(bench.place("fan-out"), 4 * ROUNDS)
    for name, cost in zip(("second", "third"), others, strict=True):
        share = cost / first
        what = f"processor time for a {name} replica, beside the first"
        yield Result(what, f"{cost * 1e6:.2f} µs a row", f"{first * 1e6:.2f} µs a row", share, "≤ 0.3×", share <= 0.3)


def archived(bench: Bench) -> Iterator[Result]:
    """The archive runs as a command: its start, measured without rows, is subtracted."""
    master = bench.real("master")
    make_space(master)
    replica, place = bench.real("peer", replication=[master.uri]), bench.place("archive")
    command = [sys.executable, "-m", "flowstone.cli", "archive", "--once", master.uri, str(place)]

    def archive() -> float:
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
        return time.perf_counter() - started

    writer, taken = Writer(master), pair()
    archive()
    for _ in range(ROUNDS):
        replica.configure(replication=[])
        start_up = archive()
        writer.write(ROWS)
        taken[0].append(archive() - start_up)
        taken[1].append(catch_up(replica, master))
    yield compared("rows archived, beside a real replica's applying", ROWS, *taken, 0.8)


def write_rate(bench: Bench) -> Iterator[Result]:
    """Measure the write rate of a real master with a replica, ours or a real one."""
    taken = pair()
    masters = []
    for make in (bench.node, bench.real):
        master = bench.real("master")
        make_space(master)
        make("replica", replication=[master.uri])
        masters.append(Writer(master))
    for _ in range(2 * ROUNDS):
        for writer, times in zip(masters, taken, strict=True):
            times.append(writer.write(ROWS // 2))
    yield compared("writes to a real master while a replica follows", ROWS // 2, *taken, 0.9)
