"""The requests of a turn: the connections they came by, and stretches of them in the table that a scan has made."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto import request_scan as scan
from flowstone.iproto.scan import Bytes, Cells


class Reply(NamedTuple):
    """What a session answers. `transaction` has taken effect and must be in the log before the packet leaves."""

    packet: bytes
    sync: int = 0
    transaction: BoxTransaction | None = None


class BatchPeer(Protocol):
    """A connection, as a turn sees it. `unread` holds the bytes that no turn has taken yet."""

    unread: bytearray
    packet_size_max: int

    @property
    def user(self) -> int:
        """Whose rights its statements have."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether requests of it have to wait: `handle` then keeps them for a later turn, and no batch may overtake."""
        ...

    def handle(self, packet: bytes) -> Reply | Coroutine[Any, Any, Reply]:
        """Executes one request. Every error that it may cause is in the reply."""
        ...

    def start(self, reply: Coroutine[Any, Any, Reply]) -> None:
        """Runs what takes time, and sends its reply when there is one."""
        ...

    def replying(self, size: int) -> None:
        """Told of each reply in the making; who asks for more than is good has to wait."""
        ...

    def send(self, packets: Sequence[bytes]) -> None:
        """Sends replies. A connection that is gone sends nothing."""
        ...

    def postponed(self, count: int) -> None:
        """Told of replies that have to wait for others than us; who has many of them has to wait with its next."""
        ...

    def send_late(self, packets: Sequence[bytes], count: int) -> None:
        """Sends `count` replies that were postponed."""
        ...

    def refuse(self, reason: str) -> None:
        """Ends the connection, because what it sent is no packet."""
        ...


class BatchPart:
    """Requests of a batch: columns `start` to `end` of `cells`, or the chosen ones of them."""

    __slots__ = ("_peers", "_spans", "buf", "cells", "data", "end", "start", "syncs")

    def __init__(self, data: bytes, buf: Bytes, cells: Cells, start: int, end: int, peers: Sequence[BatchPeer]) -> None:
        self.data = data
        self.buf = buf
        self.cells = cells
        self.start = start
        self.end = end
        self._peers = peers
        self._spans = [(peers[span], first, behind) for span, first, behind in scan.runs(self.line(scan.SPAN))]
        # The table belongs to the next turn by the time that a write may fail.
        self.syncs: Cells = self.line(scan.SYNC).copy()

    def line(self, number: int) -> Cells:
        return self.cells[number, self.start : self.end]

    def choose(self, which: Cells) -> BatchPart:
        """Some of the requests, by their numbers from the start."""
        cells = np.ascontiguousarray(self.cells[:, self.start + which])
        return BatchPart(self.data, self.buf, cells, 0, len(which), self._peers)

    def by_peer(self) -> list[tuple[BatchPeer, int, int]]:
        """The connections, and which of the requests are theirs, counted from the start."""
        return self._spans

    def peers_of(self) -> list[BatchPeer]:
        return [peer for peer, _, _ in self._spans]

    @property
    def is_waiting(self) -> bool:
        """Whether one of the connections has requests that must not be overtaken."""
        return any(peer.is_waiting for peer, _, _ in self._spans)


class ScannedBatch(NamedTuple):
    """What a turn has scanned."""

    data: bytes
    buf: Bytes
    cells: Cells
    peers: Sequence[BatchPeer]

    def size(self, start: int, end: int) -> int:
        """Bytes of the requests from `start` to `end`."""
        return int(self.cells[scan.PACKET_END, end - 1] - self.cells[scan.PACKET_AT, start])

    def part(self, start: int, end: int) -> BatchPart:
        return BatchPart(self.data, self.buf, self.cells, start, end, self.peers)
