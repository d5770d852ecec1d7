"""Writers in a simulation, and the check of their rows afterwards.

A writer knows which writes were acknowledged and which were only sent; `check` compares both with the rows found.
"""

from __future__ import annotations

from typing import Any, Final

from flowstone.client.connection import Connection
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import TarantoolError, WalIo
from flowstone.iproto.msgpack import pack
from tests import served_node
from tests.simulation.simulation import Simulation

SPACE_ID: Final = 512
SPACE: Final = "ledger"
FIELDS: Final = (("id", "unsigned"), ("version", "unsigned"), ("text", "string"))

Row = tuple[Any, ...]


async def make_space(sim: Simulation, name: str) -> None:
    """Create the writers' space as a client of the node."""
    client = await sim.client(name)
    await served_node.create_space(client, SPACE_ID, SPACE, FIELDS)


async def replace(client: Connection, row: Row, *, timeout: float = 60.0) -> None:
    body = {Key.SPACE_ID.value: SPACE_ID, Key.TUPLE.value: row}
    await client.request(RequestType.REPLACE, pack(body), timeout=timeout)


async def rows(client: Connection) -> list[Row]:
    """Return all rows of the space, as a client sees them."""
    body = {Key.SPACE_ID.value: SPACE_ID, Key.INDEX_ID.value: 0, Key.LIMIT.value: 2**32 - 1}
    body |= {Key.ITERATOR.value: 2, Key.OFFSET.value: 0}
    answer = await client.request(RequestType.SELECT, pack(body | {Key.KEY.value: ()}))
    found: list[Row] = answer[Key.DATA]
    return found


def held(sim: Simulation, name: str) -> list[bytes]:
    """Return the rows of the space in a running node, as bytes; none if it does not know the space yet."""
    spaces = sim.node(name).box.spaces
    return sorted(spaces[SPACE_ID].tuples()) if SPACE_ID in spaces else []


class Writer:
    """Replaces the rows of its own keys, one at a time, with growing versions."""

    def __init__(self, sim: Simulation, number: int, *, key_count: int = 10) -> None:
        self._sim = sim
        self._keys = range(1 + number * key_count, 1 + (number + 1) * key_count)
        self._version = 0
        self.acknowledged: dict[int, Row] = {}
        self.unanswered: dict[int, list[Row]] = {}
        self.count = 0
        """Number of acknowledged writes."""

    async def run(self, name: str, count: int, *, timeout: float = 60.0) -> None:
        """Write `count` rows to a node, or as many as it lives to accept."""
        try:
            client = await self._sim.client(name)
        except FlowstoneError:
            return
        for _ in range(count):
            if not await self.write(client, timeout):
                return

    async def write(self, client: Connection, timeout: float = 60.0) -> bool:
        """Write one row; return True if the connection is still usable."""
        self._version += 1
        key = self._sim.random.choice(self._keys)
        row = (key, self._version, "x" * self._sim.random.randrange(200))
        self.unanswered.setdefault(key, []).append(row)
        try:
            await replace(client, row, timeout=timeout)
        except WalIo:
            return True  # a power loss can bring back what could not be cut off durably
        except TarantoolError:
            self.unanswered[key].remove(row)
            return True
        except FlowstoneError:
            return False
        self.acknowledged[key] = row
        self.unanswered.pop(key)
        self.count += 1
        return True

    def check(self, found: list[Row]) -> None:
        """Check that each key has its last acknowledged version, or a newer one that was sent."""
        by_key = {row[0]: row for row in found}
        for key in self._keys:
            acknowledged, row = self.acknowledged.get(key), by_key.get(key)
            allowed = [acknowledged, *self.unanswered.get(key, ())]
            assert row in allowed, (
                f"key {key}: found {row and row[:2]}, acknowledged {acknowledged and acknowledged[:2]}"
            )
            if row is not None and row != acknowledged:
                # It is present now, and so it must stay.
                self.acknowledged[key] = row
            self.unanswered.pop(key, None)
