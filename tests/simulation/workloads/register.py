"""Registers: a few keys whose values are replaced, read, and, with transactions, compared and swapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.simulation.conversation import Conversation
from tests.simulation.history import Operation
from tests.simulation.plan import Plan
from tests.simulation.replica_set import SPACES
from tests.simulation.workloads.workload import Keyed

if TYPE_CHECKING:
    from tests.simulation.clients import Client

KEYS: Final = range(4)
CAS_SHARE: Final = 0.3
"""Share of CAS among writes, if the dialect has transactions."""

SPACE_ID: Final = SPACES["register"].id
NOTHING: Final = ("+", 2, 0)
"""An update without effect."""


class Register(Keyed):
    keys = KEYS
    name = "register"

    def __init__(self, plan: Plan) -> None:
        self._has_streams = plan.dialect != "2.6"

    async def prepare(self, client: Client, member: str) -> None:
        """A register without a write has no row."""

    async def write(self, client: Client, member: str) -> None:
        key, value = client.random.choice(KEYS), client.new_value()
        if self._has_streams and client.random.random() < CAS_SHARE:
            await self._cas(client, member, key, value)
            return
        await client.perform(
            member, self.name, "write", key, value, lambda member: member.replace(SPACE_ID, (key, value))
        )

    async def _cas(self, client: Client, member: str, key: int, new: int) -> None:
        """Change the value that it reads; the expected value is known only after the operation has begun."""
        value: list[int | None] = [None, new]

        async def swap(member: Conversation) -> None:
            async with member.transaction() as transaction:
                row = await transaction.get(SPACE_ID, key)
                value[0] = None if row is None else row[1]
                await client.think()
                await transaction.replace(SPACE_ID, (key, new))

        await client.perform(member, self.name, "cas", key, value, swap)

    async def read_key(self, client: Client, member: str, key: int) -> Operation | None:
        async def read(member: Conversation) -> int | None:
            if self._has_streams:
                rows = await member.read(SPACE_ID, key=key)
            else:
                row = await member.update(SPACE_ID, key, NOTHING)
                rows = [] if row is None else [row]
            value: int | None = rows[0][1] if rows else None
            return value

        return await client.perform(member, self.name, "read", key, None, read)
