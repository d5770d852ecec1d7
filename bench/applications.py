"""Tables of applications beside the real server: strings, secondary indexes, updates, ranges, transactions, waits.

The table has five fields and three indexes: an integer primary key, a unique string, and a non-unique composite key.
The servers execute the same requests in turns. Each round writes other keys or other values than the round before it,
so every statement has an effect. A spread is the smallest and the largest ratio of a round.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from typing import Any, Final

import numpy as np

from bench import replication, serving
from bench.contender import IN_FLIGHT, MANY, Contender, Index, peer, real, served, table_lua
from bench.load import (
    FIRST_KEY,
    SPACE_ID,
    Keys,
    Requests,
    interleaved,
    people,
    person,
    selects,
    shuffled,
    statements,
)
from bench.measure import Result
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from tests import served_node
from tests.interop.member import Member
from tests.real_tarantool import free_port

ROUNDS = 5
TUPLES = 1_000_000
REQUESTS = 100_000
TRANSACTIONS = 10_000
ROWS = 200_000
STREAMS: Final = 200
STREAMS_SINCE: Final = (2, 10)
"""The first release of Tarantool that has streams."""

INDEXES: Final[tuple[Index, ...]] = (
    ("pk", True, [(0, "unsigned")]),
    ("email", True, [(2, "string")]),
    ("age_name", False, [(4, "unsigned"), (1, "string")]),
)
BY_EMAIL, BY_AGE = 1, 2
AGE, AMOUNT = 4, 3
RANGE: Final = 20
GE: Final = 5

MIX: Final = ("SELECT by key", 50), ("UPDATE", 30), ("INSERT", 15), ("SELECT of a range", 5)
"""Shares of a typical load, in percent."""


def run(work: Path) -> Iterator[Result]:
    with ExitStack() as stack:
        ours = stack.enter_context(served(work / "node", INDEXES))
        theirs = stack.enter_context(real(work / "real", INDEXES))
        yield from _memory(ours, theirs)
        yield from _statements(ours, theirs)
        yield from _waits(ours, theirs)
    if peer().version >= STREAMS_SINCE:
        yield from _transactions(work / "streams")
    yield from _replica(work / "replica")
    yield from _recovery(work / "recovery")
    yield from _start(work / "start")


# --- requests ---------------------------------------------------------------------------------------

_SPACE: Final = b"\x10" + pack(SPACE_ID)
_ID: Final = pack((FIRST_KEY,))
_PERSON: Final = person(FIRST_KEY)


def _update(keys: Keys, field: int, years: int = 0) -> Requests:
    """UPDATE by primary key: set the age to that of the key plus `years`, or increase the amount."""
    if field == AGE:
        return people(RequestType.UPDATE, _update_body(("=", AGE, 0)), keys, age_at=-1, years=years)
    return people(RequestType.UPDATE, _update_body(("+", field, 0.5)), keys)


def _update_body(operation: tuple[Any, ...]) -> bytes:
    return b"\x83" + _SPACE + b"\x20" + _ID + b"\x21" + pack((operation,))


def _replaces(keys: Keys, years: int) -> Requests:
    body = b"\x82" + _SPACE + b"\x21" + pack(_PERSON)
    return people(RequestType.REPLACE, body, keys, age_at=-1, years=years)


def _upserts(keys: Keys) -> Requests:
    operations = pack((("+", AMOUNT, 0.5),))
    body = b"\x83" + _SPACE + b"\x28" + operations + b"\x21" + pack(_PERSON)
    return people(RequestType.UPSERT, body, keys, age_at=-1, tuples=0)


def _by_email(keys: Keys) -> Requests:
    return people(RequestType.SELECT, _select_body(BY_EMAIL, 0, 1) + b"\x20" + pack((_PERSON[2],)), keys)


def _ranges(keys: Keys) -> Requests:
    """SELECT of RANGE tuples from a position in the composite index, far enough from its end."""
    key = pack((_PERSON[AGE], _PERSON[1]))
    body = _select_body(BY_AGE, GE, RANGE) + b"\x20" + key
    return people(RequestType.SELECT, body, keys[keys % 90 < 80], age_at=-len(pack(_PERSON[1])) - 1, tuples=RANGE)


def _select_body(index: int, iterator: int, limit: int) -> bytes:
    return b"\x86" + _SPACE + b"\x11%c\x12%b\x13\x00\x14%c" % (index, pack(limit), iterator)


def _deletes(keys: Keys) -> Requests:
    return people(RequestType.DELETE, b"\x83" + _SPACE + b"\x11\x00\x20" + _ID, keys)


def _mix(number: int) -> Requests:
    """Return round `number` of the mix. INSERTs use keys that no other round uses."""
    count, (_, reads), (_, updates), (_, inserts), (_, ranges) = REQUESTS, *MIX
    known = shuffled(TUPLES, seed=100 + number)
    fresh = FIRST_KEY + 1_000 * TUPLES + number * REQUESTS
    some = _ranges(known)
    part = count * ranges // 100
    kinds = (
        selects(known[: count * reads // 100]),
        _update(known[: count * updates // 200], AMOUNT),
        _update(known[-(count * updates // 200) :], AGE, years=number),
        statements(RequestType.INSERT, shuffled(count * inserts // 100, number, fresh)),
        Requests(some.blob[: some.edges[part]], some.edges[: part + 1], some.answer_size),
    )
    order = np.repeat(np.arange(len(kinds)), [kind.count for kind in kinds])
    return interleaved(np.random.default_rng(number).permutation(order), *kinds)


# --- statements -------------------------------------------------------------------------------------


class Rounds:
    """Measures both servers in turns; each round makes its requests once, for both."""

    def __init__(self, ours: Contender, theirs: Contender) -> None:
        self._contenders = ours, theirs

    def compare(self, what: str, requests: Callable[[int], Requests], *, is_many: bool = False, per: int = 1) -> Result:
        """Return a line with the medians of all rounds; `per` is the number of requests that count as one."""
        rates: list[list[float]] = [[], []]
        for number in range(1, ROUNDS + 1):
            made = requests(number)
            for contender, seen in zip(self._contenders, rates, strict=True):
                seen.append((contender.rate_of_many(made) if is_many else contender.rate_of_one(made)) / per)
        return line(what, rates[0], rates[1])


def line(what: str, ours: Sequence[float], theirs: Sequence[float], unit: str = "/s") -> Result:
    """Return a line of rates with the spread of its ratios."""
    mine, beside = statistics.median(ours), statistics.median(theirs)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return Result(what, f"{mine / 1e3:.1f} k{unit}", f"{beside / 1e3:.1f} k{unit} ({spread})", mine / beside)


def _memory(ours: Contender, theirs: Contender) -> Iterator[Result]:
    grown, beside = serving.memory_growth(ours, theirs, TUPLES)
    what = f"table with 3 indexes: resident memory of {TUPLES / 1e6:g} M tuples"
    yield Result(what, f"{grown / 1e6:.0f} MB", f"{beside / 1e6:.0f} MB", grown / beside)


def _statements(ours: Contender, theirs: Contender) -> Iterator[Result]:
    rounds = Rounds(ours, theirs)

    def known(number: int) -> Keys:
        return shuffled(TUPLES, seed=number)[:REQUESTS]

    def fresh(number: int) -> Keys:
        return shuffled(REQUESTS, number, FIRST_KEY + 10 * TUPLES + number * REQUESTS)

    lines: tuple[tuple[str, Callable[[int], Requests]], ...] = (
        ("REPLACE of new keys", lambda number: statements(RequestType.REPLACE, fresh(number))),
        ("REPLACE of existing keys", lambda number: _replaces(known(number), years=number)),
        ("UPDATE of an indexed field", lambda number: _update(known(number), AGE, years=10 * number)),
        ("UPDATE of another field", lambda number: _update(known(number), AMOUNT)),
        ("UPSERT", lambda number: _upserts(known(number))),
        ("SELECT by integer key", lambda number: selects(known(number))),
        ("SELECT by unique string", lambda number: _by_email(known(number))),
        (f"SELECT of {RANGE} from a position in the composite index", lambda number: _ranges(known(number))),
        ("DELETE", lambda number: _deletes(fresh(number))),
    )
    for what, requests in lines:
        yield rounds.compare(f"table with 3 indexes: {what}", requests)
    shares = ", ".join(f"{share} % {name}" for name, share in MIX)
    what = f"table with 3 indexes: {shares}; {MANY} connections × {IN_FLIGHT} in flight"
    yield rounds.compare(what, _mix, is_many=True)


def _waits(ours: Contender, theirs: Contender) -> Iterator[Result]:
    few, loads = selects(shuffled(TUPLES, seed=9)[:100]), [_mix(ROUNDS + 1 + number) for number in range(3)]

    def load(server: Contender) -> None:
        for requests in loads:
            server.rate_of_many(requests)

    waits = [server.waits_during(load, few) for server in (ours, theirs)]
    for name, share in (("p50", 50.0), ("p99.9", 99.9), ("longest", 100.0)):
        mine, beside = (float(np.percentile(each, share)) for each in waits)
        what = f"table with 3 indexes: wait of one SELECT in flight during that mix, {name}"
        yield Result(what, f"{mine * 1e3:.2f} ms", f"{beside * 1e3:.2f} ms", mine / beside)


# --- transactions -----------------------------------------------------------------------------------


def _transactions(work: Path) -> Iterator[Result]:
    """Transactions of five statements in streams; a real server needs `memtx_use_mvcc_engine` for them."""
    with (
        served(work / "node", INDEXES) as ours,
        real(work / "real", INDEXES, cfg=", memtx_use_mvcc_engine=true") as theirs,
    ):
        for server in (ours, theirs):
            server.rate_of_many(statements(RequestType.REPLACE, shuffled(5 * TRANSACTIONS, seed=0)))
        what = f"transactions of 5 statements in {STREAMS} streams, one connection"
        yield Rounds(ours, theirs).compare(what, _transaction_requests, per=len(_transaction()))


def _transaction() -> list[tuple[RequestType, bytes, int | None]]:
    """Return the requests of one transaction: type, body, and offset of the age."""
    replace = RequestType.REPLACE, b"\x82" + _SPACE + b"\x21" + pack(_PERSON), -1
    amount = RequestType.UPDATE, _update_body(("+", AMOUNT, 0.5)), None
    age = RequestType.UPDATE, _update_body(("=", AGE, 0)), -1
    begin, commit = ((type, b"\x80", None) for type in (RequestType.BEGIN, RequestType.COMMIT))
    return [begin, replace, amount, age, amount, amount, commit]


def _transaction_requests(number: int) -> Requests:
    """Return all transactions of a round, in order, each in the next stream, each with five keys of its own."""
    steps = _transaction()
    keys = shuffled(5 * TRANSACTIONS, seed=number).reshape(5, TRANSACTIONS)
    streams = np.arange(TRANSACTIONS, dtype=np.int64) % STREAMS
    kinds = []
    for position, (type, body, age_at) in enumerate(steps):
        own = keys[min(max(position - 1, 0), 4)]
        tuples = int(0 < position < len(steps) - 1)
        kinds.append(people(type, body, own, age_at=age_at, years=number, tuples=tuples, streams=streams))
    return interleaved(np.tile(np.arange(len(steps)), TRANSACTIONS), *kinds)


# --- replication and recovery -----------------------------------------------------------------------

UPDATES_LUA: Final = """
local count, fibers, round = ...
local fiber, clock = require('fiber'), require('clock')
local space, done, started = box.space.people, fiber.channel(fibers), clock.time()
for f = 1, fibers do
    fiber.create(function()
        for id = f, count, fibers do
            if id % 4 == 0 then
                space:replace{id, 'name'..id, 'user'..id..'@example.com', id + round + 0.25, (id + round) % 90}
            elseif id % 4 == 1 then
                space:update(id, {{'=', 5, (id + round) % 90}})
            else
                space:update(id, {{'+', 4, 0.5}})
            end
        end
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
    for n = first, math.min(first + 999, count) do
        box.space.people:replace{n, 'name'..n, 'user'..n..'@example.com', n + 0.25, n % 90}
    end
    box.commit()
end
"""


def _replica(work: Path) -> Iterator[Result]:
    """Join a real master, and apply its rows: three UPDATEs for each REPLACE."""
    with ExitStack() as stack:
        bench = replication.Bench(work, stack)
        master = bench.real("master")
        master.eval(table_lua(INDEXES))
        master.eval(FILL_LUA, ROWS)
        what = f"initial join of {ROWS / 1e6:g} M rows with 3 indexes"
        yield replication.joined_rows(bench, master, ROWS, what, promise=0)
        replicas: list[Member] = [
            bench.node("replica", replication=[master.uri]),
            bench.real("peer", replication=[master.uri]),
        ]
        taken: tuple[list[float], list[float]] = [], []
        for number in range(1, ROUNDS + 1):
            for replica in replicas:
                replica.configure(replication=[])
            master.eval(UPDATES_LUA, ROWS, 100, number)
            for replica, times in zip(replicas, taken, strict=True):
                times.append(replication.catch_up(replica, master))
        mine, beside = ([ROWS / seconds for seconds in times] for times in taken)
        what = "UPDATE-heavy rows of a table with 3 indexes applied by a replica"
        yield line(what, mine, beside, unit=" rows/s")


def _recovery(work: Path) -> Iterator[Result]:
    mine, beside = serving.recovery(work, INDEXES)
    rows = serving.TUPLES
    yield line("recovery of a `.snap` with 3 indexes", [rows / mine], [rows / beside], unit=" rows/s")


def _start(work: Path) -> Iterator[Result]:
    """`flowstone serve` on a new directory until it is ready, with an empty home, beside the real server."""
    taken: tuple[list[float], list[float]] = [], []
    for number in range(ROUNDS):
        taken[0].append(_seconds_to_ready(work / f"node-{number}", _with_empty_home(work / f"home-{number}")))
        started = time.perf_counter()
        with real(work / f"real-{number}"):
            taken[1].append(time.perf_counter() - started)
    mine, beside = (statistics.median(times) for times in taken)
    yield Result("`serve` on an empty directory, with an empty home", f"{mine:.2f} s", f"{beside:.2f} s", mine / beside)


def _with_empty_home(home: Path) -> dict[str, str]:
    """Return an environment without any cache of earlier runs."""
    home.mkdir(parents=True)
    return os.environ | {"HOME": str(home)}


def _seconds_to_ready(directory: Path, environment: dict[str, str]) -> float:
    directory.mkdir()
    port = free_port()
    command = [sys.executable, "-m", "flowstone.cli", "serve", f"--listen=127.0.0.1:{port}", f"--work-dir={directory}"]
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    alarm = Timer(served_node.START_SECONDS, process.kill)
    alarm.start()
    try:
        for said in process.stdout:
            if said.strip() == "ready":
                return time.perf_counter() - started
        raise RuntimeError(f"flowstone serve was not ready within {served_node.START_SECONDS} s")
    finally:
        alarm.cancel()
        process.terminate()
        process.stdout.close()
        process.wait()
