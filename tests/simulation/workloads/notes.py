"""Rows of an asynchronous space, each an element of a set that all members have in the end. Only for sets in which the
owner never changes: asynchronous rows may be lost otherwise.

In 2.6 any member may write them, but only without synchronous writes: a member with pending ones rejects asynchronous
rows of others (error 214).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.simulation.conversation import Conversation
from tests.simulation.plan import Plan
from tests.simulation.replica_set import SPACES

if TYPE_CHECKING:
    from tests.simulation.clients import Client

SPACE_ID: Final = SPACES["notes"].id
SIZE_MAX: Final = 200


class Notes:
    name = "notes"

    def __init__(self, plan: Plan) -> None:
        self._has_masters = plan.has_masters

    async def prepare(self, client: Client, member: str) -> None:
        """Do nothing: there are no elements at first."""

    async def write(self, client: Client, member: str) -> None:
        number = client.new_value()
        row = (number, "x" * client.random.randrange(SIZE_MAX))
        target = client.any_member() if self._has_masters else member
        await client.perform(target, self.name, "add", None, number, lambda member: member.replace(SPACE_ID, row))

    async def read(self, client: Client, member: str) -> None:
        """Write instead: reads guarantee nothing before all faults are over."""
        target = client.writer()
        if target is not None:
            await self.write(client, target)

    async def read_all(self, client: Client, member: str) -> bool:
        async def read(member: Conversation) -> tuple[int, ...]:
            return tuple(row[0] for row in await member.select(SPACE_ID))

        operation = await client.perform(member, self.name, "read", None, None, read)
        return operation is not None and operation.is_ok
