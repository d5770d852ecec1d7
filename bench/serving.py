"""A node under load, beside the real server: rates, latency, pauses, memory, recovery, and reads inside the process.

Both servers run at the same time and are measured in turns, under the same requests, encoded beforehand; both write
their log with `wal_mode=write`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.contender import IN_FLIGHT, MANY, PLAIN, Contender, Index, peer, real, served, table_lua
from bench.load import EVERYTHING, FIRST_KEY, SPACE_ID, selects, sequential, shuffled, statements
from bench.measure import Result, alternate, child, million_rows_per_second
from flowstone.iproto.constants import RequestType
from tests import real_tarantool, served_node

ROUNDS = 5
TUPLES = 1_000_000
REQUESTS = 300_000

WRITE_RATIO, SELECT_RATIO, LATENCY_RATIO, MEMORY_RATIO, RECOVERY_RATIO = 0.4, 0.25, 1.5, 2.5, 0.3
READS_PER_SECOND = 1e6


def run(work: Path) -> Iterator[Result]:
    """Run every benchmark of this module, with its files below `work`."""
    with ExitStack() as stack:
        contenders = stack.enter_context(served(work / "node")), stack.enter_context(real(work / "real"))
        yield _memory(*contenders)
        yield from _rates(*contenders)
        yield from _waits(*contenders)
    yield _recovery(work)
    yield from _reads_in_process(work / "recovery")


# --- measurements ------------------------------------------------------------------------------


def memory_growth(ours: Contender, theirs: Contender, tuples: int) -> tuple[float, float]:
    """Return the memory growth of each process by `tuples`, after a few that trigger one-time loading."""
    few = statements(RequestType.REPLACE, sequential(min(tuples, 20_000)))
    load = statements(RequestType.REPLACE, shuffled(tuples, seed=0))

    def growth(contender: Contender) -> float:
        contender.one.run(few, EVERYTHING)
        contender.many.run(few, IN_FLIGHT)
        before = served_node.resident_bytes(contender.pid)
        contender.many.run(load, IN_FLIGHT)
        return served_node.resident_bytes(contender.pid) - before

    return growth(ours), growth(theirs)


def _memory(ours: Contender, theirs: Contender) -> Result:
    grown, beside = memory_growth(ours, theirs, TUPLES)
    return Result(
        f"resident memory of {TUPLES / 1e6:.0f} M tuples of 5 fields",
        f"{grown / 1e6:.0f} MB",
        f"{beside / 1e6:.0f} MB",
        grown / beside,
        f"≤ {MEMORY_RATIO}",
        grown / beside <= MEMORY_RATIO,
    )


def _rates(ours: Contender, theirs: Contender) -> Iterator[Result]:
    replaces = statements(RequestType.REPLACE, sequential(REQUESTS))
    random_replaces = statements(RequestType.REPLACE, shuffled(TUPLES, seed=1)[:REQUESTS])
    random_selects = selects(shuffled(TUPLES, seed=2)[:REQUESTS])
    many = f"{MANY} connections × {IN_FLIGHT} in flight"

    def compared(what: str, promised: float, measure: Callable[[Contender], float]) -> Result:
        mine, beside = alternate(ROUNDS, partial(measure, ours), partial(measure, theirs))
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
    """Insert keys new to the server in every round."""
    rounds: dict[int, int] = {}

    def measure(server: Contender) -> float:
        number = rounds[server.port] = rounds.get(server.port, 0) + 1
        first = FIRST_KEY + TUPLES + number * REQUESTS
        return server.rate_of_many(statements(RequestType.INSERT, shuffled(REQUESTS, number, first)))

    return measure


def _rate(what: str, ours: float, real: float, promised: float) -> Result:
    ratio = ours / real
    return Result(what, f"{ours / 1e3:.0f} k/s", f"{real / 1e3:.0f} k/s", ratio, f"≥ {promised}", ratio >= promised)


def _waits(ours: Contender, theirs: Contender) -> Iterator[Result]:
    replaces, reads = statements(RequestType.REPLACE, sequential(5000)), selects(sequential(5000))
    for what, requests in (("REPLACE", replaces), ("SELECT", reads)):
        mine, beside = alternate(ROUNDS, partial(ours.median_wait, requests), partial(theirs.median_wait, requests))
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
        mine, beside = (server.longest_wait_during(action, few) for server in (ours, theirs))
        yield Result(
            f"longest wait of one SELECT in flight {what}",
            f"{mine * 1e3:.1f} ms",
            f"{beside * 1e3:.1f} ms",
            mine / beside,
        )


# --- recovery and in-process reads ---------------------------------------------------------------

FILL = """
box.cfg{{log='server.log', memtx_memory=4*1024^3, wal_mode='none'}}
{table}
for n = 1, {rows} do
    box.space.people:replace{{n, 'name'..n, 'user'..n..'@example.com', n + 0.25, n % 90}}
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


def recovery(work: Path, indexes: Sequence[Index] = PLAIN) -> tuple[float, float]:
    """Return the seconds for a snapshot that the real server made; those for an almost empty one are subtracted."""
    full, empty = work / "recovery", work / "empty"
    for directory, rows in ((full, TUPLES), (empty, 100)):
        real_tarantool.run(FILL.format(table=table_lua(indexes), rows=rows), directory, binary=peer().path)

    def recovered(measure: Callable[[Path], str], directory: Path, rows: int) -> float:
        taken, found = measure(directory).split()
        if int(found) != rows:
            raise RuntimeError(f"recovered {found} of {rows} rows")
        return float(taken)

    measures: tuple[Callable[[Path], str], ...] = (
        lambda directory: child(RECOVER_OURS, str(directory)),
        lambda directory: real_tarantool.run(RECOVER_REAL, directory, binary=peer().path),
    )
    base = [min(recovered(measure, empty, 100) for _ in range(2)) for measure in measures]
    taken = alternate(3, *(partial(recovered, measure, full, TUPLES) for measure in measures))
    mine, beside = (value - without for value, without in zip(taken, base, strict=True))
    return mine, beside


def _recovery(work: Path) -> Result:
    mine, beside = recovery(work)
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
