"""A server that says it leads, and whose answers to writes the tests choose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from tests.node.fake_server import OK, Reply, answering, peer

SPACES: list[Any] = [(512, 1, "fruit", "memtx", 0, {}, [{"name": "id", "type": "unsigned"}])]
INDEXES: list[Any] = [(512, 0, "pk", "tree", {"unique": True}, [(0, "unsigned")])]
STORED: Reply = (0, pack({Key.DATA.value: [(1,)]}))


class Script:
    """Answers to writes, in order; afterwards they succeed. `asked` has the types of the writes that came."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.asked: list[RequestType] = []
        self.silence: asyncio.Event | None = None
        """If set, answers wait for it."""

    def __call__(self, row: Row) -> Reply:
        if row.type == RequestType.VOTE:
            return OK
        if row.type == RequestType.SELECT:
            return 0, pack({Key.DATA.value: SPACES if b"\xcd\x01\x19" in row.body else INDEXES})
        self.asked.append(RequestType(row.type))
        return self.replies.pop(0) if self.replies else STORED

    async def before(self, row: Row) -> None:
        if self.silence is not None and row.type not in (RequestType.VOTE, RequestType.SELECT):
            await self.silence.wait()


@asynccontextmanager
async def scripted(
    *replies: Reply, prepare: Callable[[Script], None] | None = None
) -> AsyncIterator[tuple[str, Script]]:
    """Run a scripted server; yield its URI and its script."""
    script = Script(*replies)
    if prepare is not None:
        prepare(script)
    async with peer(answering(script, (2, 6, 0), script.before)) as uri:
        yield uri, script
