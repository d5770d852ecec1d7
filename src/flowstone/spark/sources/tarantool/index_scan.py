"""All tuples of a space at a live server, read through its primary key by SELECT, page by page.

Each page shows the server's state at its own moment: a row that changes between two pages appears as it was before or
after the change. Tuples stay MessagePack.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from flowstone.box.definitions import IndexDefinition, SpaceDefinition
from flowstone.box.engine import keys
from flowstone.client.connection import REQUEST_SECONDS, Connection
from flowstone.columns.tuple_slabs import slab_of_spans
from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import Response
from flowstone.iproto.scan import Bytes, Cells
from flowstone.iproto.scan_kernels import skip_value
from flowstone.iproto.slab import Slab
from flowstone.iproto.uri import Uri
from flowstone.outside.loop_thread import LoopThread
from flowstone.spark.sources.tarantool.live_node import connect, explained, select_body
from flowstone.spark.sources.tarantool.select_kernels import tuple_spans

PAGE_SIZE: Final = 4 * 1024 * 1024
"""Size of a page to aim for, in bytes. The first page is small because the size of tuples is not known yet."""

FIRST_PAGE_ROWS: Final = 256
PAGE_ROWS_MAX: Final = 20_000
ROWS_MIN: Final = 2048
"""Smallest number of rows to decode together, if there are that many."""


def tuples_of(body: bytes) -> list[bytes]:
    """Return the tuples in the body of an answer to a SELECT with a small result."""
    edges: Cells = np.empty(FIRST_PAGE_ROWS, np.int64)
    count = tuple_spans(np.frombuffer(body, np.uint8), edges)
    if count < 0:
        raise RemoteProtocolError("invalid response to SELECT")
    return [body[edges[number] : edges[number + 1]] for number in range(count)]


def can_walk(key: IndexDefinition | None) -> bool:
    """Return True if SELECT can page through the whole index: a tree on plain fields."""
    return key is not None and key.type == "tree" and not any(part.path for part in key.parts)


def scan_space(members: Sequence[Uri], space: SpaceDefinition) -> Iterator[Slab]:
    """Yield all tuples of `space` as slabs of INSERT rows, read from the first of `members` that can be reached."""
    thread = LoopThread("flowstone-select")
    try:
        connection, uri = thread.run(connect(members))
        try:
            scan = _Scan(connection, space)
            while len(slab := thread.run(_words(scan.next_rows(), uri))):
                yield slab
        finally:
            thread.run(connection.close())
    finally:
        thread.close()


async def _words(work: Any, uri: Uri) -> Any:
    try:
        return await work
    except FlowstoneError as error:
        raise explained(error, uri, "read from") from error


class _Scan:
    """Pages through the primary index in key order; requests the next page before the last one is decoded."""

    def __init__(self, connection: Connection, space: SpaceDefinition) -> None:
        assert space.primary_key is not None
        self._connection = connection
        self._space = space
        self._key: IndexDefinition = space.primary_key
        self._edges: Cells = np.empty(PAGE_ROWS_MAX + 1, np.int64)
        self._limit = FIRST_PAGE_ROWS
        self._is_begun = False
        self._sent: asyncio.Future[Response] | None = None

    async def next_rows(self) -> Slab:
        """Return the rows of one page, or of several small ones; an empty slab at the end."""
        bodies, spans = [], []
        size = count = 0
        while count < ROWS_MIN and (page := await self._page()) is not None:
            body, edges = page
            spans.append(edges + size)
            bodies.append(body)
            size, count = size + len(body), count + len(edges) - 1
        starts = np.concatenate([edges[:-1] for edges in spans] or [np.zeros(0, np.int64)])
        ends = np.concatenate([edges[1:] for edges in spans] or [np.zeros(0, np.int64)])
        buf: Bytes = np.frombuffer(bodies[0] if len(bodies) == 1 else b"".join(bodies), np.uint8)
        return slab_of_spans(buf, starts, ends, self._space.id, self._connection.address)

    async def _page(self) -> tuple[bytes, Cells] | None:
        """Return the next page as an answer and the offsets of its tuples, or None at the end."""
        if not self._is_begun:
            self._is_begun = True
            self._sent = self._ask(keys.ALL, pack(()))
        if self._sent is None:
            return None
        response = await self._connection.answer(self._sent, timeout=REQUEST_SECONDS)
        if response.is_error:
            raise response.error()
        count = tuple_spans(np.frombuffer(response.body, np.uint8), self._edges)
        if count < 0:
            raise RemoteProtocolError(f"{self._connection.address} sent an invalid response to SELECT")
        edges = self._edges[: count + 1].copy()
        self._sent = None
        if count == self._limit:
            size = int(edges[-1] - edges[0])
            self._limit = max(1, min(PAGE_ROWS_MAX, PAGE_SIZE * count // max(size, 1)))
            self._sent = self._ask(keys.GT, array_of(key_of(response.body[edges[-2] : edges[-1]], self._key)))
        return response.body, edges

    def _ask(self, iterator: int, key: bytes) -> asyncio.Future[Response]:
        body = select_body(self._space.id, iterator=iterator, limit=self._limit, raw_key=key)
        return self._connection.send(RequestType.SELECT, body)


def key_of(raw: bytes, index: IndexDefinition) -> list[bytes]:
    """Return the key parts of a tuple as MessagePack; no part may lie inside a document.

    Raise RemoteProtocolError if the tuple lacks a part.
    """
    buf: Bytes = np.frombuffer(raw, np.uint8)
    at = {0xDC: 3, 0xDD: 5}.get(raw[0], 1)
    spans = []
    for _ in range(max(part.field for part in index.parts) + 1):
        end = skip_value(buf, at, len(raw))
        if end < 0:
            raise RemoteProtocolError("invalid response to SELECT: a tuple without its primary key")
        spans.append((at, end))
        at = end
    return [raw[slice(*spans[part.field])] for part in index.parts]


def array_of(parts: Sequence[bytes]) -> bytes:
    """Return MessagePack values as one array."""
    head = bytes([0x90 + len(parts)]) if len(parts) < 16 else b"\xdc" + len(parts).to_bytes(2, "big")
    return head + b"".join(parts)
