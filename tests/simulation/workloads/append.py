"""Lists under append: blind, by an update, or by a transaction that reads the list and writes a longer one.

Rows have the newest value first, because an update can insert there without knowing the length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.simulation.conversation import Conversation, Row
from tests.simulation.history import Operation
from tests.simulation.plan import Plan
from tests.simulation.replica_set import SPACES
from tests.simulation.workloads.workload import Keyed

if TYPE_CHECKING:
    from tests.simulation.clients import Client

KEYS: Final = range(3)
TRANSACTION_SHARE: Final = 0.4
"""Share of appends by transaction, if the dialect has them."""

SPACE_ID: Final = SPACES["append"].id
FIRST: Final = "[2][1]"
NOTHING: Final = ("+", 3, 0)
"""An update without effect."""


class Append(Keyed):
    keys = KEYS
    name = "append"

    def __init__(self, plan: Plan) -> None:
        self._has_streams = plan.dialect != "2.6"

    async def prepare(self, client: Client, member: str) -> None:
        async def open_lists(member: Conversation) -> None:
            for key in KEYS:
                await member.replace(SPACE_ID, (key, (), 0))

        opened = await client.perform(member, self.name, "open", None, None, open_lists)
        assert opened is not None, member
        assert opened.is_ok, str(opened)

    async def write(self, client: Client, member: str) -> None:
        key, value = client.random.choice(KEYS), client.new_value()
        is_blind = not self._has_streams or client.random.random() >= TRANSACTION_SHARE

        async def insert(member: Conversation) -> tuple[int, ...]:
            return _values(await member.update(SPACE_ID, key, ("!", FIRST, value)))

        async def rewrite(member: Conversation) -> tuple[int, ...]:
            async with member.transaction() as transaction:
                values = _values(await transaction.get(SPACE_ID, key))
                await client.think()
                await transaction.replace(SPACE_ID, (key, (value, *reversed(values)), 0))
            return (*values, value)

        await client.perform(member, self.name, "append", key, value, insert if is_blind else rewrite)

    async def read_key(self, client: Client, member: str, key: int) -> Operation | None:
        async def read(member: Conversation) -> tuple[int, ...]:
            if self._has_streams:
                (row,) = await member.read(SPACE_ID, key=key)
                return _values(row)
            return _values(await member.update(SPACE_ID, key, NOTHING))

        return await client.perform(member, self.name, "read", key, None, read)


def _values(row: Row | None) -> tuple[Any, ...]:
    """Return the values, oldest first."""
    assert row is not None, "the row was created before the first client started"
    return tuple(reversed(row[1]))
