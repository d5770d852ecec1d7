"""`flowstone.connect` beside Tarantool's Python clients, against the same real server.

The clients execute the same statements in turns, each on one connection: asynctnt and ours in one event loop (uvloop),
tarantool-python and our blocking form without one. All write the same rows of a table with one index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import asynctnt
import tarantool
import uvloop

import flowstone
from bench.contender import CFG, peer, table_lua
from bench.load import SPACE_ID
from bench.measure import Result, alternate, seconds
from tests import real_tarantool

ROUNDS = 7
REQUESTS = 5_000
BATCH = 1_000
BATCHES = 30

Request = Callable[[tuple[Any, ...]], Awaitable[object]]


def run(work: Path) -> Iterator[Result]:
    with real_tarantool.serve(work, setup=table_lua(), cfg=CFG, binary=peer().path) as server:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            theirs = asynctnt.Connection(host="127.0.0.1", port=server.port)
            runner.run(theirs.connect())
            connecting = flowstone.connect(server.uri)
            client = runner.run(connecting.__aenter__())
            try:
                yield from _async(runner, client, theirs)
            finally:
                runner.run(connecting.__aexit__(None, None, None))
                runner.run(theirs.disconnect())
        yield from _blocking(server)


def _row(number: int) -> tuple[Any, ...]:
    return number, f"name {number}", f"user{number}@example.com", number * 0.5, number % 90


def _async(runner: asyncio.Runner, client: flowstone.Client, theirs: asynctnt.Connection) -> Iterator[Result]:
    people = client.space(SPACE_ID)

    def replace(row: tuple[Any, ...]) -> Awaitable[object]:
        replaced: Awaitable[object] = theirs.replace(SPACE_ID, row)
        return replaced

    def select(row: tuple[Any, ...]) -> Awaitable[object]:
        selected: Awaitable[object] = theirs.select(SPACE_ID, row[:1])
        return selected

    def get(row: tuple[Any, ...]) -> Awaitable[object]:
        return people.get(row[0])

    def timed(work: Callable[[Request], Awaitable[None]], request: Request) -> Callable[[], float]:
        async def once() -> None:
            await work(request)

        return lambda: seconds(lambda: runner.run(once()))

    async def many() -> None:
        await people.replace_many(map(_row, range(BATCH * BATCHES)))

    yield _compared(
        "replace_many",
        "gather of asynctnt",
        BATCH * BATCHES,
        2.0,
        lambda: seconds(lambda: runner.run(many())),
        timed(_together, replace),
    )
    for what, ours, other in (("REPLACE", people.replace, replace), ("SELECT by key", get, select)):
        yield _compared(
            f"{what}, gather of {BATCH}",
            "asynctnt",
            BATCH * BATCHES,
            None,
            timed(_together, ours),
            timed(_together, other),
        )
        yield _compared(
            f"{what}, awaited one by one",
            "asynctnt",
            REQUESTS,
            1.0,
            timed(_one_by_one, ours),
            timed(_one_by_one, other),
        )


async def _one_by_one(request: Request) -> None:
    for number in range(REQUESTS):
        await request(_row(number))


async def _together(request: Request) -> None:
    for first in range(0, BATCH * BATCHES, BATCH):
        await asyncio.gather(*[request(_row(number)) for number in range(first, first + BATCH)])


def _blocking(server: real_tarantool.Server) -> Iterator[Result]:
    theirs = tarantool.Connection("127.0.0.1", server.port)
    with flowstone.connect(server.uri) as client:
        people = client.space(SPACE_ID)

        def one_by_one() -> None:
            for number in range(REQUESTS):
                people.replace(_row(number))

        def their_one_by_one() -> None:
            for number in range(REQUESTS):
                theirs.replace(SPACE_ID, _row(number))

        def many() -> None:
            people.replace_many(map(_row, range(REQUESTS)))

        yield _compared(
            "blocking: replace_many",
            "replace of tarantool-python",
            REQUESTS,
            2.0,
            lambda: seconds(many),
            lambda: seconds(their_one_by_one),
        )
        yield _compared(
            "blocking: REPLACE one by one",
            "tarantool-python",
            REQUESTS,
            None,
            lambda: seconds(one_by_one),
            lambda: seconds(their_one_by_one),
        )
    theirs.close()


def _compared(
    what: str, other: str, count: int, promised: float | None, ours: Callable[[], float], theirs: Callable[[], float]
) -> Result:
    mine, its = alternate(ROUNDS, ours, theirs)
    ratio = its / mine
    return Result(
        f"client: {what}, beside {other}",
        f"{count / mine:,.0f}/s",
        f"{count / its:,.0f}/s",
        ratio,
        "" if promised is None else f"≥ {promised:g}×",
        promised is None or ratio >= promised,
    )
