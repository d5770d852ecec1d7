"""Loads the kernels of turns, relays and appliers, or compiles them, before clients connect.

Otherwise the first batch of a new installation would block all clients for seconds. A turn on a temporary box calls
each kernel with the same types as real turns.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np

from flowstone.box.access import ADMIN
from flowstone.box.box import Box
from flowstone.box.definitions import IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine.space import EngineSpace
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import encode_request
from flowstone.iproto.row import Row
from flowstone.node.server.executor import BATCH_COUNT_MIN, Executor
from flowstone.node.server.request_batch import Reply
from flowstone.node.wal.commits import Commits
from flowstone.node.wal.journal import Journal, WalMode
from flowstone.node.wal.log_tail import packets_of
from flowstone.outside import production
from flowstone.replication.relay.relay_logic import RowFilter
from flowstone.replication.row_stream import RowStream, journal_rows, slab_of_rows
from flowstone.replication.vclock import VClock
from flowstone.xlog.walk import BLOCK_COLUMNS, walk

SPACE_ID: Final = 512
ROWS: Final = 32
REQUESTS: Final = (RequestType.REPLACE, RequestType.INSERT, RequestType.SELECT, RequestType.DELETE)


@cache
def warm_up() -> int:
    """Run a turn with every kind of bulk statement, once per process, and return the number of replies.

    It uses neither disk nor network, so it does not need the `Outside` of a node.
    """
    outside = production()
    index = IndexDefinition(SPACE_ID, 0, "primary", "tree", True, (IndexPart(0, "unsigned"),))
    box = Box(Dialect.V2_11)
    box.put_space(
        EngineSpace(SpaceDefinition(SPACE_ID, "warm_up", indexes=(index,)), box.collations, box.views, box.dialect)
    )
    journal = Journal(outside, "", instance_uuid="", vclock=VClock(), replica_id=1, mode=WalMode.NONE)
    executor = Executor(box, journal, Commits(box, journal, outside.clock), outside.clock, wide=True)
    client = _Client()
    executor.execute([client])
    _replicate()
    return client.reply_count


def _replicate() -> None:
    """Encode rows for replicas, from memory and from files, with and without a filter, and decode them again.

    Few and many rows use different kernels.
    """
    for count in (1, ROWS):
        slab = slab_of_rows(b"".join(_row(lsn).encode() for lsn in range(1, count + 1)), "warm_up")
        packets = packets_of(slab)
        packets_of(slab, RowFilter(VClock({1: 1})))
        stream = RowStream("warm_up")
        stream.feed(packets)
        received = stream.take()
        assert received is not None
        # Kernels are compiled for each array layout; a slice of a table has another layout than a whole table.
        for each in (received, replace(received, cells=np.ascontiguousarray(received.cells))):
            packets_of(each)
            journal_rows(each, 0, len(each), 1.0)
    walk(np.empty(0, np.uint8), 0, np.empty((1, BLOCK_COLUMNS), np.int64), 0, True)


def _row(lsn: int) -> Row:
    body = pack(_body(RequestType.REPLACE, lsn))
    return Row(RequestType.REPLACE.value, 1, lsn=lsn, timestamp=1.0, tsn=lsn, body=body)


def _requests() -> bytes:
    count = 2 * BATCH_COUNT_MIN
    return b"".join(
        encode_request(
            request, 1, pack(_body(request, number if request is not RequestType.INSERT else number + count))
        )
        for request in REQUESTS
        for number in range(count)
    )


def _body(request: RequestType, number: int) -> dict[int, Any]:
    if request in (RequestType.REPLACE, RequestType.INSERT):
        return {Key.SPACE_ID.value: SPACE_ID, Key.TUPLE.value: (number, "text")}
    body: dict[int, Any] = {Key.SPACE_ID.value: SPACE_ID, Key.INDEX_ID.value: 0}
    if request is RequestType.SELECT:
        body |= {Key.LIMIT.value: 1, Key.OFFSET.value: 0, Key.ITERATOR.value: 0}
    return body | {Key.KEY.value: (number,)}


class _Client:
    """A connection without a client, for the turn."""

    user = ADMIN
    is_waiting = False
    packet_size_max = 1024 * 1024

    def __init__(self) -> None:
        self.unread = bytearray(_requests())
        self.reply_count = 0

    def handle(self, packet: bytes) -> Reply | Coroutine[Any, Any, Reply]:
        return Reply(b"")

    def start(self, reply: Coroutine[Any, Any, Reply]) -> None:
        reply.close()

    def replying(self, size: int) -> None: ...

    def send(self, packets: Sequence[bytes]) -> None:
        self.reply_count += len(packets)

    def postponed(self, count: int) -> None: ...

    def send_late(self, packets: Sequence[bytes], count: int) -> None:
        self.send(packets)

    def refuse(self, reason: str) -> None:
        raise AssertionError(reason)
