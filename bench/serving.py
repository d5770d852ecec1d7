"""A node under load, beside the real server: rates, latency, pauses, memory, recovery, and reads inside the process.

Both servers run at the same time and are measured in turns, under the same requests, encoded beforehand; both write
their log with `wal_mode=write`.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.load import (
    EVERYTHING,
    FIRST_KEY,
    SPACE_ID,
    Connections,
    Requests,
    pings,
    selects,
    sequential,
    shuffled,
    statements,
)
from bench.measure import Result, alternate, child, million_rows_per_second
from flowstone.client.connection import Connection
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from tests import real_tarantool, served_node

ROUNDS = 5
TUPLES = 1_000_000
REQUESTS = 300_000
MANY, IN_FLIGHT = 50, 20

WRITE_RATIO, SELECT_RATIO, LATENCY_RATIO, MEMORY_RATIO, RECOVERY_RATIO = 0.4, 0.25, 1.5, 2.5, 0.3
READS_PER_SECOND = 1e6

FIELDS = (("id", "unsigned"), ("name", "string"), ("email", "string"), ("amount", "double"), ("age", "unsigned"))
CFG = "wal_mode='write', memtx_memory=4*1024^3, wal_max_size=8*1024^3, net_msg_max=100000"
SETUP = f"""
local format = {{{", ".join(f"{{'{name}', '{type}'}}" for name, type in FIELDS)}}}
box.schema.space.create('people', {{id={SPACE_ID}, format=format}}):create_index('pk')
"""


@dataclass(frozen=True)
class Contender:
    """A server under load: its process, one connection to it, and many."""

    port: int
    pid: int
    one: Connections
    many: Connections

    def rate_of_one(self, requests: Requests) -> float:
        return self.one.run(requests, EVERYTHING).rate

    def rate_of_many(self, requests: Requests) -> float:
        return self.many.run(requests, IN_FLIGHT).rate

    def median_wait(self, requests: Requests) -> float:
        return float(np.median(self.one.run(requests, 1, keep_pauses=True).pauses))

    def longest_wait_during(self, action: Callable[[Contender], object], requests: Requests) -> float:
        """Of a client with one request in flight, until the action is over."""
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(action, self)
            waits = [0.0]
            while not busy.done():
                waits.append(float(self.one.run(requests, 1, keep_pauses=True).pauses.max()))
            busy.result()
        return max(waits)

    def make_snapshot(self) -> None:
        async def call() -> None:
            async with await Connection.open(production(), parse_uri(f"127.0.0.1:{self.port}")) as connection:
                body = {Key.FUNCTION_NAME.value: "box.snapshot"} | {Key.TUPLE.value: ()}
                await connection.request(RequestType.CALL, pack(body))

        asyncio.run(call())


def run(work: Path) -> Iterator[Result]:
    """Every benchmark of this module, with its files below `work`."""
    with ExitStack() as stack:
        node = stack.enter_context(served(work / "node"))
        real = stack.enter_context(_real(work / "real"))
        yield _memory(node, real)
        yield from _rates(node, real)
        yield from _waits(node, real)
    yield _recovery(work)
    yield from _reads_in_process(work / "recovery")


@contextmanager
def served(directory: Path, *, command: Sequence[str] = served_node.COMMAND) -> Iterator[Contender]:
    async def set_up(node: served_node.ServedNode) -> None:
        async with await served_node.connect(node) as connection:
            await served_node.create_space(connection, SPACE_ID, "people", FIELDS)
            await served_node.grant_guest(connection)

    options = ("--wal-mode=write", f"--wal-max-size={8 << 30}", "--net-msg-max=100000")
    with served_node.serve(directory, *options, command=command) as node:
        asyncio.run(set_up(node))
        with _contender(node.port, node.process.pid) as contender:
            yield contender


@contextmanager
def _real(directory: Path) -> Iterator[Contender]:
    with (
        real_tarantool.serve(directory, setup=SETUP, cfg=CFG) as server,
        _contender(server.port, server.process.pid) as contender,
    ):
        yield contender


@contextmanager
def _contender(port: int, pid: int) -> Iterator[Contender]:
    with Connections(port, 1) as one, Connections(port, MANY) as many:
        one.run(pings(10), 1)  # the driver is compiled by now
        yield Contender(port, pid, one, many)


# --- what is measured -----------------------------------------------------------------------------


def _memory(ours: Contender, real: Contender) -> Result:
    """What the processes grow by. A few tuples go first, so that what a server loads once is not counted."""
    few = statements(RequestType.REPLACE, sequential(20_000))
    load = statements(RequestType.REPLACE, shuffled(TUPLES, seed=0))

    def growth(contender: Contender) -> float:
        contender.one.run(few, EVERYTHING)
        contender.many.run(few, IN_FLIGHT)
        before = served_node.resident_bytes(contender.pid)
        contender.many.run(load, IN_FLIGHT)
        return served_node.resident_bytes(contender.pid) - before

    grown, beside = growth(ours), growth(real)
    return Result(
        f"resident memory of {TUPLES / 1e6:.0f} M tuples of 5 fields",
        f"{grown / 1e6:.0f} MB",
        f"{beside / 1e6:.0f} MB",
        grown / beside,
        f"≤ {MEMORY_RATIO}",
        grown / beside <= MEMORY_RATIO,
    )


def _rates(ours: Contender, real: Contender) -> Iterator[Result]:
    replaces = statements(RequestType.REPLACE, sequential(REQUESTS))
    random_replaces = statements(RequestType.REPLACE, shuffled(TUPLES, seed=1)[:REQUESTS])
    random_selects = selects(shuffled(TUPLES, seed=2)[:REQUESTS])
    many = f"{MANY} connections × {IN_FLIGHT} in flight"

    def compared(what: str, promised: float, measure: Callable[[Contender], float]) -> Result:
        mine, beside = alternate(ROUNDS, partial(measure, ours), partial(measure, real))
        return _rate(what, mine, beside, promised)

    yield compared("REPLACE, one connection, pipelined", WRITE_RATIO, lambda server: server.rate_of_one(replaces))
    yield compared(f"REPLACE, random keys, {many}", WRITE_RATIO, lambda server: server.rate_of_many(random_replaces))
    yield compared(f"INSERT, random keys, {many}", WRITE_RATIO, _fresh_inserts())
    yield compared(
        "SELECT by key, one connection, pipelined",
        SELECT_RATIO,
        lambda server: server.rate_of_one(selects(sequential(REQUESTS))),
    )
    yield compared(f"SELECT by random key, {many}", SELECT_RATIO, lambda server: server.rate_of_many(random_selects))


def _fresh_inserts() -> Callable[[Contender], float]:
    """Inserts keys that the server has not seen, in every round."""
    rounds: dict[int, int] = {}

    def measure(server: Contender) -> float:
        number = rounds[server.port] = rounds.get(server.port, 0) + 1
        first = FIRST_KEY + TUPLES + number * REQUESTS
        return server.rate_of_many(statements(RequestType.INSERT, shuffled(REQUESTS, number, first)))

    return measure


def _rate(what: str, ours: float, real: float, promised: float) -> Result:
    ratio = ours / real
    return Result(what, f"{ours / 1e3:.0f} k/s", f"{real / 1e3:.0f} k/s", ratio, f"≥ {promised}", ratio >= promised)


def _waits(ours: Contender, real: Contender) -> Iterator[Result]:
    replaces, reads = statements(RequestType.REPLACE, sequential(5000)), selects(sequential(5000))
    for what, requests in (("REPLACE", replaces), ("SELECT", reads)):
        mine, beside = alternate(ROUNDS, partial(ours.median_wait, requests), partial(real.median_wait, requests))
        yield Result(
            f"{what}, one request in flight, p50",
            f"{mine * 1e6:.0f} µs",
            f"{beside * 1e6:.0f} µs",
            mine / beside,
            f"≤ {LATENCY_RATIO}",
            mine / beside <= LATENCY_RATIO,
        )
    load = statements(RequestType.INSERT, shuffled(TUPLES, 3, FIRST_KEY + 100 * TUPLES))
    few = selects(sequential(100))
    for what, action in (
        (f"while {MANY} connections insert {TUPLES / 1e6:.0f} M tuples", lambda server: server.rate_of_many(load)),
        ("during a snapshot", Contender.make_snapshot),
    ):
        mine, beside = (server.longest_wait_during(action, few) for server in (ours, real))
        yield Result(
            f"longest wait of one SELECT in flight {what}",
            f"{mine * 1e3:.1f} ms",
            f"{beside * 1e3:.1f} ms",
            mine / beside,
        )


# --- recovery and reads inside the process ----------------------------------------------------------

FILL = f"""
box.cfg{{{{log='server.log', memtx_memory=4*1024^3, wal_mode='none'}}}}
{SETUP.replace("{", "{{").replace("}", "}}")}
for n = 1, {{rows}} do
    box.space.people:replace{{{{n, 'name'..n, 'user'..n..'@example.com', n + 0.25, n % 90}}}}
end
box.snapshot()
os.exit(0)
"""

RECOVER_REAL = f"""
local clock = require('clock')
local start = clock.monotonic()
box.cfg{{log='server.log', memtx_memory=4*1024^3, wal_mode='none'}}
local taken = clock.monotonic() - start
print(taken, box.space[{SPACE_ID}] and box.space[{SPACE_ID}]:len() or 0)
os.exit(0)
"""

RECOVER_OURS = """
import asyncio, sys, time
import flowstone
async def main():
    start = time.perf_counter()
    async with flowstone.Node(sys.argv[1], wal_mode="none") as node:
        print(time.perf_counter() - start, len(node.space("people")))
asyncio.run(main())
"""

READ_IN_PROCESS = """
import asyncio, random, sys, time
import flowstone
async def main():
    async with flowstone.Node(sys.argv[1], wal_mode="none") as node:
        people = node.space("people")
        keys = [row[0] for row in people.select(limit=200_000)]
        for order in (sorted, lambda keys: random.Random(1).sample(keys, len(keys))):
            keys = order(keys)
            start = time.perf_counter()
            for key in keys:
                people.get(key)[4]
            print(len(keys) / (time.perf_counter() - start))
asyncio.run(main())
"""


def _recovery(work: Path) -> Result:
    """Of the snapshot that the real server made; what an almost empty one takes is subtracted."""
    full, empty = work / "recovery", work / "empty"
    for directory, rows in ((full, TUPLES), (empty, 100)):
        real_tarantool.run(FILL.format(rows=rows), directory)

    def recovered(measure: Callable[[Path], str], directory: Path, rows: int) -> float:
        taken, found = measure(directory).split()
        if int(found) != rows:
            raise RuntimeError(f"recovered {found} of {rows} rows")
        return float(taken)

    measures: tuple[Callable[[Path], str], ...] = (
        lambda directory: child(RECOVER_OURS, str(directory)),
        lambda directory: real_tarantool.run(RECOVER_REAL, directory),
    )
    base = [min(recovered(measure, empty, 100) for _ in range(2)) for measure in measures]
    taken = alternate(3, *(partial(recovered, measure, full, TUPLES) for measure in measures))
    mine, beside = (value - without for value, without in zip(taken, base, strict=True))
    return Result(
        "recovery of the real server's `.snap`",
        million_rows_per_second(TUPLES, mine),
        million_rows_per_second(TUPLES, beside),
        beside / mine,
        f"≥ {RECOVERY_RATIO}",
        beside / mine >= RECOVERY_RATIO,
    )


def _reads_in_process(directory: Path) -> Iterator[Result]:
    runs = [[float(rate) for rate in child(READ_IN_PROCESS, str(directory)).split()] for _ in range(3)]
    in_order, at_random = (statistics.median(rates) for rates in zip(*runs, strict=True))
    yield Result("reads in the process: look-up and one field, keys in order", f"{in_order / 1e6:.2f} M/s", "")
    yield Result(
        "reads in the process: look-up and one field, random keys",
        f"{at_random / 1e6:.2f} M/s",
        "",
        target=f"≥ {READS_PER_SECOND / 1e6:.0f} M/s",
        holds=at_random >= READS_PER_SECOND,
    )
