"""Clients of an instance that run Lua, for the tests of this package."""

from __future__ import annotations

from typing import Any

from flowstone.box.ddl import functions as ddl
from flowstone.iproto.constants import RequestType
from flowstone.node.instance import Instance
from tests.node.conversations import Conversation


class LuaClient(Conversation):
    """A client with `evaluate`."""

    async def evaluate(self, text: str, *arguments: Any, stream: int = 0) -> tuple[Any, ...]:
        return await self.data(RequestType.EVAL, {0x27: text, 0x21: arguments}, stream=stream)


async def client_of(instance: Instance) -> LuaClient:
    """Return a client of the instance, which gets the space `s` (id, name) with the tuple (1, "one")."""
    transaction = instance.box.begin()
    ddl.create_space(transaction, "s", format=[("id", "unsigned"), ("name", "string")])
    ddl.create_index(transaction, "s", "pk")
    await instance.commits.commit(transaction)
    client = LuaClient(instance)
    await client.replace(1, "one")
    return client


async def user_of(instance: Instance, name: str, *grants: tuple[str, str, str | None]) -> LuaClient:
    """Create a user with these privileges, and return a client of that user."""
    transaction = instance.box.begin()
    ddl.create_user(transaction, name, password="secret", if_not_exists=False, time=0)
    for privileges, kind, which in grants:
        ddl.grant(transaction, name, privileges, kind, which)
    await instance.commits.commit(transaction)
    found = instance.box.access.find(name)
    assert found is not None
    return LuaClient(instance, user=found.id)
