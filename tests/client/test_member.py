"""One member as the pool sees it: real servers, nodes, and members that stop answering."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowstone.client.member import PoolMember
from flowstone.iproto.constants import RequestType
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from tests.client.scripted_server import Script
from tests.node.fake_server import answering, peer
from tests.node.upstream_server import Upstream
from tests.real_tarantool import Server

SECONDS = 20.0


class Seen:
    """A member, and the wait for what it reports."""

    def __init__(self, uri: str, timeout: float = 5.0) -> None:
        self._changed = asyncio.Event()
        self.member = PoolMember(production(), parse_uri(uri), timeout=timeout, on_change=self._note)

    def _note(self, member: PoolMember) -> None:
        self._changed.set()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition(self.member):
                self._changed.clear()
                await self._changed.wait()

    async def __aenter__(self) -> PoolMember:
        self.member.start()
        await self.until(lambda member: member.is_tried)
        return self.member

    async def __aexit__(self, *error: object) -> None:
        await self.member.close()


async def test_node_reports_its_role_at_once(node: Upstream) -> None:
    seen = Seen(node.uri)
    async with seen as member:
        assert not member.is_read_only
        asked = member.asked
        await node.node.reconfigure(read_only=True)
        await seen.until(lambda member: member.is_read_only)
        await seen.until(lambda member: member.asked > asked)
        assert member.vclock == VClock(node.vclock).without_zero()


@pytest.mark.real
async def test_real_server_reports_its_position(fruit_server: Server) -> None:
    async with Seen(fruit_server.uri) as member:
        assert not member.is_read_only
        assert member.vclock
        connection = member.connection
        assert connection is not None
        await asyncio.gather(*[member.read_schema(connection) for _ in range(3)])
        assert member.schema is not None
        schema = member.schema
        member.forget_schema(schema)
        assert member.schema is None
        await member.read_schema(connection)
        member.forget_schema(schema)  # an older one
        assert member.schema is not None


async def test_member_that_stops_answering_is_lost() -> None:
    votes = 0

    class Tired(Script):
        async def before(self, row: Any) -> None:
            nonlocal votes
            votes += row.type == RequestType.VOTE
            if votes > 1:
                await asyncio.Event().wait()

    script = Tired()
    async with peer(answering(script, (2, 6, 0), script.before)) as uri:
        seen = Seen(uri, timeout=0.1)
        async with seen as member:
            assert member.connection is not None
            await seen.until(lambda member: member.connection is None)
            assert "did not answer within 0.1 s" in str(member.error)
