"""The requests of a turn and their replies: connections, ranges of the table that a scan fills, and the outbox."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto import request_scan as scan
from flowstone.iproto.scan import Bytes, Cells


class Reply(NamedTuple):
    """A reply of a session. `transaction` has taken effect, and must be in the log before the packet is sent."""

    packet: bytes
    sync: int = 0
    transaction: BoxTransaction | None = None


class BatchPeer(Protocol):
    """A connection, as a turn uses it. `unread` has the bytes that no turn has processed yet."""

    unread: bytearray
    packet_size_max: int

    @property
    def user(self) -> int:
        """The user whose access rights apply."""
        ...

    @property
    def is_waiting(self) -> bool:
        """True if its requests must wait: `handle` keeps them for a later turn, and no batch may overtake them."""
        ...

    def handle(self, packet: bytes) -> Reply | Coroutine[Any, Any, Reply]:
        """Execute one request. Errors are returned as replies."""
        ...

    def start(self, reply: Coroutine[Any, Any, Reply]) -> None:
        """Run a request that takes time, and send its reply when it is complete."""
        ...

    def replying(self, size: int) -> None:
        """Count the bytes of a reply to be sent; a client with too many unsent bytes has to wait."""
        ...

    def send(self, packets: Sequence[bytes]) -> None:
        """Send replies. Does nothing if the connection is closed."""
        ...

    def postponed(self, count: int) -> None:
        """Count replies that wait for other members; a client with too many of them has to wait."""
        ...

    def send_late(self, packets: Sequence[bytes], count: int) -> None:
        """Send `count` postponed replies."""
        ...

    def refuse(self, reason: str) -> None:
        """Close the connection, which sent an invalid packet."""
        ...


class Outbox:
    """The replies of a turn, in order by connection; sent when the log has all rows of the turn."""

    def __init__(self) -> None:
        self._replies: dict[BatchPeer, list[bytes]] = {}
        self._waiting = 1  # the turn itself

    def add(self, peer: BatchPeer, packet: bytes) -> Callable[[bytes], None]:
        """Queue `packet`; return a function that replaces it with another packet."""
        peer.replying(len(packet))
        packets = self._replies.setdefault(peer, [])
        place = len(packets)
        packets.append(packet)

        def replace(other: bytes) -> None:
            packets[place] = other

        return replace

    def hold(self) -> None:
        self._waiting += 1

    def release(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            for peer, packets in self._replies.items():
                peer.send(packets)


class BatchPart:
    """Requests of a batch: columns `start` to `end` of `cells`, or a selection of them."""

    __slots__ = ("_peers", "_spans", "buf", "cells", "data", "end", "start", "syncs")

    def __init__(self, data: bytes, buf: Bytes, cells: Cells, start: int, end: int, peers: Sequence[BatchPeer]) -> None:
        self.data = data
        self.buf = buf
        self.cells = cells
        self.start = start
        self.end = end
        self._peers = peers
        self._spans = [(peers[span], first, end) for span, first, end in scan.runs(self.line(scan.SPAN))]
        # The table belongs to the next turn by the time that a write may fail.
        self.syncs: Cells = self.line(scan.SYNC).copy()

    def line(self, number: int) -> Cells:
        return self.cells[number, self.start : self.end]

    def choose(self, which: Cells) -> BatchPart:
        """Return some of the requests, by their numbers from the start."""
        cells = np.ascontiguousarray(self.cells[:, self.start + which])
        return BatchPart(self.data, self.buf, cells, 0, len(which), self._peers)

    def first(self, count: int) -> BatchPart:
        """Return the first `count` requests."""
        if self.start + count == self.end:
            return self
        return BatchPart(self.data, self.buf, self.cells, self.start, self.start + count, self._peers)

    def rest(self, count: int) -> BatchPart:
        """Return the requests after the first `count`."""
        return BatchPart(self.data, self.buf, self.cells, self.start + count, self.end, self._peers)

    def by_peer(self) -> list[tuple[BatchPeer, int, int]]:
        """Return the connections, each with the range of its requests, counted from the start."""
        return self._spans

    def peers_of(self) -> list[BatchPeer]:
        return [peer for peer, _, _ in self._spans]

    @property
    def is_waiting(self) -> bool:
        """True if one of the connections has requests that must not be overtaken."""
        return any(peer.is_waiting for peer, _, _ in self._spans)


class ScannedBatch(NamedTuple):
    """The result of the scan of a turn."""

    data: bytes
    buf: Bytes
    cells: Cells
    peers: Sequence[BatchPeer]

    def size(self, start: int, end: int) -> int:
        """Return the number of bytes of the requests from `start` to `end`."""
        return int(self.cells[scan.PACKET_END, end - 1] - self.cells[scan.PACKET_AT, start])

    def part(self, start: int, end: int) -> BatchPart:
        return BatchPart(self.data, self.buf, self.cells, start, end, self.peers)
