"""A served node with endless input from its master: its memory is bounded, and its clients are answered."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest

from flowstone.box.dialect import Dialect
from flowstone.client.connection import Connection
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.replication.vclock import VClock
from flowstone.xlog.block import TRANSACTION_SIZE_MAX
from tests import served_node
from tests.hostile.liar import LIAR, LIAR_ID, MARK, SPACE_ID, Liar, Role, Talk, row, tuple_body
from tests.served_node import ServedNode

CLUSTER: Final = 320
SECONDS: Final = 60
GROWTH_MAX: Final = 3 * TRANSACTION_SIZE_MAX
"""A growing buffer exists twice for a moment."""


async def transaction_without_end(talk: Talk) -> None:
    await talk.subscribed()
    body = tuple_body(1, MARK * 200_000)
    for lsn in range(5, 2**31):
        await talk.say(row(lsn, tsn=5, is_last=False, body=body))


async def packet_without_end(talk: Talk) -> None:
    """Send a packet of the largest accepted size without its last byte."""
    await talk.subscribed()
    size = TRANSACTION_SIZE_MAX - 100
    await talk.say(b"\xce" + size.to_bytes(4, "big"))
    for _ in range(size // (1 << 20)):
        await talk.say(bytes(1 << 20))
    await asyncio.sleep(SECONDS)


LIES: Final = {
    "transaction": (transaction_without_end, r"sent a transaction of more than \d+ bytes"),
    "packet": (packet_without_end, r"sent nothing for \d+"),
}


class Client:
    """Query a served node, and measure its size."""

    def __init__(self, node: ServedNode, connection: Connection) -> None:
        self._node = node
        self._connection = connection
        self.peak_bytes = self.first_bytes = node.resident_bytes()

    async def call(self, name: str, *arguments: Any) -> Any:
        body = pack({Key.FUNCTION_NAME.value: name, Key.TUPLE.value: arguments})
        self.peak_bytes = max(self.peak_bytes, self._node.resident_bytes())
        results = (await self._connection.request(RequestType.CALL, body))[Key.DATA]
        return results[0] if results else None

    async def write(self, number: int) -> None:
        body = {Key.SPACE_ID.value: SPACE_ID, Key.TUPLE.value: (number, "true")}
        await self._connection.request(RequestType.REPLACE, pack(body))

    async def what_is_said_of_the_liar(self) -> str:
        upstream: dict[str, Any] = (await self.call("box.info"))["replication"][LIAR_ID].get("upstream", {})
        return str(upstream.get("message", ""))


needs_time = pytest.mark.full_scale(reason="takes the time of a quarter of a gigabyte")


@pytest.mark.parametrize("kind", ["transaction", pytest.param("packet", marks=needs_time)])
async def test_endless_input_uses_bounded_memory(kind: str, tmp_path: Path) -> None:
    tell, reason = LIES[kind]
    with served_node.serve(tmp_path, "--replication-timeout=0.5") as node:
        connection = await served_node.connect(node)
        await served_node.create_space(connection, SPACE_ID, "plain", [("id", "unsigned"), ("text", "string")])
        await served_node.insert(connection, CLUSTER, (LIAR_ID, str(LIAR)))
        client = Client(node, connection)
        info = await client.call("box.info")
        role = Role(Dialect.V2_6, UUID(info["cluster"]["uuid"]), VClock(info["vclock"]))
        async with Liar(role, tell) as liar, asyncio.timeout(SECONDS):
            await client.call("box.cfg", {"replication": [liar.address], "replication_connect_quorum": 0})
            number = 0
            while not re.search(reason, await client.what_is_said_of_the_liar()):
                await client.write(number := number + 1)
        assert client.peak_bytes - client.first_bytes < GROWTH_MAX
        await connection.close()
        assert "Traceback" not in node.log()
        assert number
