"""A set with one row per element, read as a whole, or by element if only that is guaranteed.

With transactions, some clients only glance at the confirmed rows of any node, or of the one that they write to: the
result may be stale, but not wrong. Elements are removed only with transactions: in 2.6 a pending removal already hides
the element, whatever its outcome.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from flowstone.box.engine.transaction import Isolation
from tests.simulation.checkers.set import GLANCE
from tests.simulation.conversation import Conversation
from tests.simulation.plan import Plan
from tests.simulation.replica_set import SPACES

if TYPE_CHECKING:
    from tests.simulation.clients import Client

SPACE_ID: Final = SPACES["set"].id
GLANCE_SHARE: Final = 0.3
REMOVE_SHARE: Final = 0.35
NOTHING: Final = ("+", 2, 0)
"""An update without effect."""


class Set:
    name = "set"

    def __init__(self, plan: Plan) -> None:
        self._has_streams = plan.dialect != "2.6"
        self._asked: list[int] = []

    async def prepare(self, client: Client, member: str) -> None:
        """The set is empty at first."""

    async def write(self, client: Client, member: str) -> None:
        change = self._remove if self._has_streams and client.random.random() < REMOVE_SHARE else self._add
        if self._has_streams and client.random.random() < GLANCE_SHARE:
            await asyncio.gather(change(client, member), self._glance(client, member))
        else:
            await change(client, member)

    async def _add(self, client: Client, member: str) -> None:
        element = client.new_value()
        self._asked.append(element)
        await client.perform(
            member, self.name, "add", None, element, lambda member: member.insert(SPACE_ID, (element, 0))
        )

    async def _remove(self, client: Client, member: str) -> None:
        if self._asked:
            element = self._asked.pop(client.random.randrange(len(self._asked)))
            await client.perform(
                member, self.name, "remove", None, element, lambda member: member.delete(SPACE_ID, element)
            )

    async def read(self, client: Client, member: str) -> None:
        if self._has_streams and client.random.random() < GLANCE_SHARE:
            await self._glance(client, client.any_node())
        elif self._has_streams:
            await self.read_all(client, member)
        elif self._asked:
            await self._ask_for(client, member, client.random.choice(self._asked))

    async def read_all(self, client: Client, member: str) -> bool:
        """For 2.6 without other writers: once a write of one element is answered, no transaction is pending."""
        if not self._has_streams and self._asked and not await self._ask_for(client, member, self._asked[0]):
            return False

        async def read(member: Conversation) -> tuple[int, ...]:
            rows = await (member.read(SPACE_ID) if self._has_streams else member.select(SPACE_ID))
            return tuple(row[0] for row in rows)

        operation = await client.perform(member, self.name, "read", None, None, read)
        return operation is not None and operation.is_ok

    async def _glance(self, client: Client, member: str) -> None:
        async def read(member: Conversation) -> tuple[int, ...]:
            return tuple(row[0] for row in await member.read(SPACE_ID, isolation=Isolation.READ_CONFIRMED))

        await client.perform(member, self.name, "read", GLANCE, None, read)

    async def _ask_for(self, client: Client, member: str, element: int) -> bool:
        async def ask(member: Conversation) -> tuple[int, ...]:
            return () if await member.update(SPACE_ID, element, NOTHING) is None else (element,)

        operation = await client.perform(member, self.name, "read", None, (element,), ask)
        return operation is not None and operation.is_ok
