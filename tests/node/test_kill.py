"""`kill -9` under load, repeatedly on one directory: acknowledged data remains, and no unit is partial.

Each writer records, unit by unit, what it sent and what was acknowledged. A unit is one statement, or a transaction of
several on a stream. Requests of one connection are executed in order, so after a restart a writer's rows must result
from some prefix of its units that includes all acknowledged ones.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flowstone.client.connection import Connection, ConnectionFailed
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import Response
from tests import real_tarantool, served_node
from tests.conftest import FULL
from tests.served_node import INDEX, SPACE, ServedNode

ROUNDS = 50 if FULL else 2
LEDGER, PLAIN, FIRST_OWN_SPACE = 512, 513, 2000
"""With two indexes; with one, so that many concurrent statements take the bulk path; those of the space writer."""

WRITERS, KEYS_PER_WRITER = 4, 100
IN_FLIGHT = 30
ACKNOWLEDGED_PER_ROUND = 3000
OPTIONS = ("--wal-max-size=300000", "--checkpoint-count=2")
FIELDS = (("id", "unsigned"), ("version", "unsigned"), ("payload", "string"))

Row = tuple[Any, ...]
Place = tuple[int, Row]
"""A space and a primary key in it."""


@dataclass(frozen=True)
class Change:
    """One statement: put `row`, or delete the row at `key` if `row` is None."""

    space_id: int
    key: Row
    row: Row | None
    type: RequestType
    more: dict[Key, Any] = field(default_factory=dict)

    def body(self) -> bytes:
        return pack({Key.SPACE_ID.value: self.space_id} | {key.value: value for key, value in self.more.items()})

    def apply(self, state: dict[Place, Row]) -> None:
        if self.row is not None:
            state[self.space_id, self.key] = self.row
            return
        del state[self.space_id, self.key]
        if self.space_id == INDEX:  # the primary index takes the tuples with it
            for place in [place for place in state if place[0] == self.key[0]]:
                del state[place]


Unit = Sequence[Change]


class Writer:
    """Sends units over its connection and records them. Subclasses choose what to write next."""

    in_flight = 1
    refilled_at = 0
    """Number of units in flight at which it sends more."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.number = number
        self.rng = rng
        self.state: dict[Place, Row] = {}
        """The state after all sent units: `unit` builds on it."""
        self.settled: dict[Place, Row] = {}
        """The state after all acknowledged units."""
        self.unsettled: list[Unit] = []
        self.count = 0

    def owns(self, place: Place) -> bool:
        raise NotImplementedError

    def unit(self) -> Unit:
        raise NotImplementedError

    async def run(self, connection: Connection, on_acknowledged: asyncio.Event) -> None:
        """Run until the connection is lost. An error reply fails the test."""
        waiting: list[asyncio.Future[Response]] = []
        try:
            while True:
                if len(waiting) <= self.refilled_at:
                    waiting += [self._send(connection) for _ in range(self.in_flight - len(waiting))]
                response = await connection.answer(waiting[0])
                waiting.pop(0)
                self._acknowledge(response)
                on_acknowledged.set()
        except ConnectionFailed:
            for answer in waiting:  # replies that had arrived before the end count
                if answer.done() and answer.exception() is None:
                    self._acknowledge(answer.result())
        finally:
            on_acknowledged.set()

    def _send(self, connection: Connection) -> asyncio.Future[Response]:
        unit = self.unit()
        for change in unit:
            change.apply(self.state)
        self.unsettled.append(unit)
        if len(unit) == 1:
            return connection.send(unit[0].type, unit[0].body())
        stream = self.number + 1
        connection.send(RequestType.BEGIN, stream_id=stream)
        for change in unit:
            connection.send(change.type, change.body(), stream_id=stream)
        return connection.send(RequestType.COMMIT, stream_id=stream)

    def _acknowledge(self, response: Response) -> None:
        if response.is_error:
            raise response.error()
        for change in self.unsettled.pop(0):
            change.apply(self.settled)
        self.count += 1

    def check(self, found: dict[Place, Row]) -> None:
        """Check that `found`, the data after a restart, equals the result of some prefix of the units."""
        own = {place: row for place, row in found.items() if self.owns(place)}
        state = dict(self.settled)
        possible = [dict(state)]
        for unit in self.unsettled:
            for change in unit:
                change.apply(state)
            possible.append(dict(state))
        if own not in possible:
            nearest = min(possible, key=lambda state: len(differences(state, own)))
            raise AssertionError(
                f"writer {self.number}, {len(self.unsettled)} units in flight, nearest is after "
                f"{possible.index(nearest)} of them:\n" + "\n".join(differences(nearest, own))
            )
        self.state, self.settled, self.unsettled = dict(own), own, []


def differences(expected: dict[Place, Row], found: dict[Place, Row]) -> list[str]:
    return [
        f"{place}: expected {str(expected.get(place))[:80]}, found {str(found.get(place))[:80]}"
        for place in sorted({*found, *expected})
        if found.get(place) != expected.get(place)
    ]


class RowWriter(Writer):
    """Single statements of every kind on keys of its own, many in flight."""

    in_flight = IN_FLIGHT
    refilled_at = IN_FLIGHT - 1

    def owns(self, place: Place) -> bool:
        return place[0] == LEDGER and place[1][0] // KEYS_PER_WRITER == self.number

    def unit(self) -> Unit:
        return [self.change(self.state, self.number * KEYS_PER_WRITER + self.rng.randrange(KEYS_PER_WRITER))]

    def change(self, state: dict[Place, Row], number: int) -> Change:
        key = (number,)
        version, payload = self.rng.randrange(1000), "x" * self.rng.choice((3, 30, 300, 3000))
        new, old = (number, version, payload), state.get((LEDGER, key))
        kind = self.rng.random()
        if old is None and kind < 0.5:
            return Change(LEDGER, key, new, RequestType.INSERT, {Key.TUPLE: new})
        if old is None or kind < 0.4:
            return Change(LEDGER, key, new, RequestType.REPLACE, {Key.TUPLE: new})
        if kind < 0.6:
            return Change(LEDGER, key, None, RequestType.DELETE, {Key.KEY: key})
        operations = (("+", 1, version), ("=", 2, payload))
        changed = (number, old[1] + version, payload)
        if kind < 0.8:
            return Change(LEDGER, key, changed, RequestType.UPDATE, {Key.KEY: key, Key.TUPLE: operations})
        return Change(LEDGER, key, changed, RequestType.UPSERT, {Key.TUPLE: new, Key.OPS: operations})


class TransactionWriter(RowWriter):
    """Transactions of several statements on a stream of its own."""

    in_flight = 5
    refilled_at = 4

    def unit(self) -> Unit:
        first = self.number * KEYS_PER_WRITER
        numbers = self.rng.sample(range(first, first + KEYS_PER_WRITER), self.rng.randint(2, 8))
        state = dict(self.state)
        changes = []
        for number in numbers:
            changes.append(self.change(state, number))
            changes[-1].apply(state)
        return changes


class BurstWriter(Writer):
    """Many statements of one kind at a time, on a space with one index."""

    in_flight = 200
    refilled_at = 100

    def __init__(self, number: int, rng: random.Random) -> None:
        super().__init__(number, rng)
        self._kind, self._left = RequestType.REPLACE, 0

    def owns(self, place: Place) -> bool:
        return place[0] == PLAIN

    def unit(self) -> Unit:
        if not self._left:
            self._kind = self.rng.choice((RequestType.REPLACE, RequestType.INSERT, RequestType.DELETE))
            self._left = self.rng.randint(13, 100)
        self._left -= 1
        number = self.rng.randrange(10 * KEYS_PER_WRITER)
        new = (number, self.rng.randrange(1000), "x" * self.rng.choice((3, 30, 300)))
        if self._kind is RequestType.DELETE and self.state:
            (_, key) = self.rng.choice(list(self.state))
            return [Change(PLAIN, key, None, RequestType.DELETE, {Key.KEY: key})]
        if self._kind is RequestType.INSERT:
            while (PLAIN, (number,)) in self.state:
                number += 1
            new = (number, *new[1:])
            return [Change(PLAIN, (number,), new, RequestType.INSERT, {Key.TUPLE: new})]
        return [Change(PLAIN, (number,), new, RequestType.REPLACE, {Key.TUPLE: new})]


class SpaceWriter(Writer):
    """Creates spaces, inserts a row, drops the oldest: its writes are rows of system spaces."""

    in_flight = 3
    refilled_at = 2

    def __init__(self, number: int, rng: random.Random) -> None:
        super().__init__(number, rng)
        self._next = FIRST_OWN_SPACE
        self._plan: Iterator[Change] = iter(())

    def owns(self, place: Place) -> bool:
        return (place[1][0] if place[0] in (SPACE, INDEX) else place[0]) >= FIRST_OWN_SPACE

    def check(self, found: dict[Place, Row]) -> None:
        super().check(found)
        self._plan = iter(())

    def unit(self) -> Unit:
        change = next(self._plan, None)
        if change is None:
            self._plan = self._finish() or (self._drop() if self._count() > 5 else self._create())
            change = next(self._plan)
        return [change]

    def _count(self) -> int:
        return sum(space_id == SPACE for space_id, _ in self.state)

    def _put(self, space_id: int, key: Row, row: Row) -> Change:
        return Change(space_id, key, row, RequestType.INSERT, {Key.TUPLE: row})

    def _remove(self, space_id: int, key: Row) -> Change:
        return Change(space_id, key, None, RequestType.DELETE, {Key.KEY: key})

    def _create(self) -> Iterator[Change]:
        number = self._next = self._next + 1
        format = ({"name": "id", "type": "unsigned"},)
        yield self._put(SPACE, (number,), (number, 1, f"own{number}", "memtx", 0, {}, format))
        yield self._put(INDEX, (number, 0), (number, 0, "pk", "tree", {"unique": True}, ((0, "unsigned"),)))
        yield self._put(number, (1,), (1, "text"))

    def _drop(self) -> Iterator[Change]:
        number = min(key[0] for space_id, key in self.state if space_id == SPACE)
        yield self._remove(INDEX, (number, 0))
        yield self._remove(SPACE, (number,))

    def _finish(self) -> Iterator[Change] | None:
        """Drop a space that a crash left without its index, as an operator would."""
        for space_id, (number, *_) in self.state:
            if space_id == SPACE and (INDEX, (number, 0)) not in self.state:
                return iter([self._remove(SPACE, (number,))])
        return None


SNAPSHOT = pack({Key.FUNCTION_NAME.value: "box.snapshot"} | {Key.TUPLE.value: ()})


async def checkpoints(connection: Connection) -> None:
    """Take one snapshot after another, until the connection is lost."""
    with suppress(ConnectionFailed):
        while True:
            await connection.request(RequestType.CALL, SNAPSHOT)


async def rows(connection: Connection, space_id: int, index_id: int = 0) -> list[Row]:
    body = {Key.SPACE_ID.value: space_id, Key.INDEX_ID.value: index_id, Key.LIMIT.value: 2**32 - 1}
    body |= {Key.ITERATOR.value: 2, Key.OFFSET.value: 0}
    answer = await connection.request(RequestType.SELECT, pack(body | {Key.KEY.value: ()}))
    found: list[Row] = answer[Key.DATA]
    return found


async def contents(connection: Connection) -> dict[Place, Row]:
    """Return every row that a writer may have written."""
    found: dict[Place, Row] = {(LEDGER, row[:1]): row for row in await rows(connection, LEDGER)}
    by_version = await rows(connection, LEDGER, 1)
    assert sorted(by_version, key=lambda row: row[0]) == list(found.values()), "the second index differs"
    assert [row[1] for row in by_version] == sorted(row[1] for row in by_version)
    found |= {(PLAIN, row[:1]): row for row in await rows(connection, PLAIN)}
    found |= {(SPACE, row[:1]): row for row in await rows(connection, SPACE) if row[0] >= FIRST_OWN_SPACE}
    found |= {(INDEX, row[:2]): row for row in await rows(connection, INDEX) if row[0] >= FIRST_OWN_SPACE}
    for space_id in [key[0] for space_id, key in found if space_id == INDEX]:
        found |= {(space_id, row[:1]): row for row in await rows(connection, space_id)}
    return found


async def set_up(node: ServedNode) -> None:
    async with await served_node.connect(node) as connection:
        indexes = [("pk", True, [(0, "unsigned")]), ("version", False, [(1, "unsigned")])]
        await served_node.create_space(connection, LEDGER, "ledger", FIELDS, *indexes)
        await served_node.create_space(connection, PLAIN, "plain", FIELDS)


async def round_of(node: ServedNode, writers: list[Writer], rng: random.Random) -> None:
    """Check the data, then write until the node is killed at a random moment."""
    async with await served_node.connect(node) as connection:
        found = await contents(connection)
    for writer in writers:
        writer.check(found)
    connections = [await served_node.connect(node) for _ in range(len(writers) + 1)]
    acknowledged = asyncio.Event()
    tasks = [
        asyncio.create_task(writer.run(connection, acknowledged))
        for writer, connection in zip(writers, connections, strict=False)
    ]
    tasks.append(asyncio.create_task(checkpoints(connections[-1])))
    before, wanted = sum(writer.count for writer in writers), rng.randrange(ACKNOWLEDGED_PER_ROUND)
    try:
        async with asyncio.timeout(60):
            while sum(writer.count for writer in writers) - before < wanted and not any(map(asyncio.Task.done, tasks)):
                acknowledged.clear()
                await acknowledged.wait()
        await asyncio.sleep(rng.random() * 0.01)
    finally:
        node.process.kill()
        await asyncio.gather(*tasks)
        node.process.wait()
        for connection in connections:
            await connection.close()


def kill_while_it_starts(directory: Path, options: Sequence[str], dialect: str, rng: random.Random) -> None:
    node = served_node.launch(directory, *options, dialect=dialect)
    with suppress(subprocess.TimeoutExpired):
        node.process.wait(rng.random() * 1.5)
    node.kill()


LOOK = f"""
box.cfg{{log='server.log', wal_mode='none'}}
local json = require('json')
for _, s in box.space._space:pairs() do
    if s.id >= {LEDGER} then
        local space = box.space[s.id]
        if space.index[0] ~= nil then
            for _, row in space:pairs() do print(json.encode({{s.id, row}})) end
        end
    end
end
print(json.encode(box.space.ledger.index.version:count()))
os.exit(0)
"""


def what_the_real_server_finds(directory: Path) -> tuple[dict[Place, Row], int]:
    *lines, count = real_tarantool.run(LOOK, directory).splitlines()
    found = (json.loads(line) for line in lines)
    return {(space_id, (row[0],)): tuple(row) for space_id, row in found}, int(count)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["write", "fsync"])
@pytest.mark.parametrize("dialect", ["2.6", "2.11"])
def test_acknowledged_transactions_survive_sigkill_whole(
    tmp_path: Path, dialect: str, mode: str, tarantool: object
) -> None:
    rng = random.Random(f"{dialect} {mode}")
    options = (*OPTIONS, f"--wal-mode={mode}")
    kind = TransactionWriter if dialect == "2.11" else RowWriter
    writers: list[Writer] = [
        *(RowWriter(number, rng) for number in range(WRITERS)),
        *(kind(number, rng) for number in range(WRITERS, WRITERS + 2)),
        SpaceWriter(WRITERS + 2, rng),
        BurstWriter(WRITERS + 3, rng),
    ]
    node = served_node.start(tmp_path, *options, dialect=dialect)
    asyncio.run(set_up(node))
    for number in range(ROUNDS):
        asyncio.run(round_of(node, writers, rng))
        if number % 5 == 1:
            kill_while_it_starts(tmp_path, options, dialect, rng)
        node = served_node.start(tmp_path, *options, dialect=dialect)
    try:
        found = asyncio.run(last_look(node))
    finally:
        assert node.stop() == 0, node.log()
    for writer in writers:
        writer.check(found)
        assert writer.count
    if dialect == "2.6":
        expected = {place: row for place, row in found.items() if place[0] >= LEDGER}
        count = sum(place[0] == LEDGER for place in expected)
        assert what_the_real_server_finds(tmp_path) == (expected, count)


async def last_look(node: ServedNode) -> dict[Place, Row]:
    async with await served_node.connect(node) as connection:
        return await contents(connection)
