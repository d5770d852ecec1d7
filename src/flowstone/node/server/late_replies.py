"""Replies that wait for a verdict on their transactions; replies that are due at the same time are sent together.

A turn sends its other replies at once: a verdict of other members may take seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from flowstone.box.box import Box
from flowstone.errors import FlowstoneError
from flowstone.iproto.replies import encode_error
from flowstone.node.counters import Counters
from flowstone.node.wal.commits import client_error


class ReplyPeer(Protocol):
    """A connection."""

    def send_late(self, packets: Sequence[bytes], count: int) -> None:
        """Send `count` postponed replies."""
        ...


class LateReply:
    """One reply, called with the verdict. `packet` is sent if the transaction is committed."""

    __slots__ = ("_all", "_peer", "_sync", "packet")

    def __init__(self, all: LateReplies, peer: ReplyPeer, sync: int, packet: bytes) -> None:
        self._all = all
        self._peer = peer
        self._sync = sync
        self.packet = packet

    def __call__(self, error: FlowstoneError | None) -> None:
        self._all.send(self._peer, self.packet if error is None else self._all.refusal(self._sync, error))


class LateRun:
    """The replies to requests `first` to `end` (exclusive) of a run; a verdict on a part of the run divides it.

    `spans` are the connections, each with the range of its requests; reply i ends at `edges[i + 1]` of `packets`.
    """

    __slots__ = ("_all", "_edges", "_end", "_first", "_packets", "_spans", "_syncs")

    def __init__(
        self,
        all: LateReplies,
        spans: Sequence[tuple[ReplyPeer, int, int]],
        syncs: Sequence[int],
        packets: bytes,
        edges: Sequence[int],
        first: int,
        end: int,
    ) -> None:
        self._all = all
        self._spans = spans
        self._syncs = syncs
        self._packets = packets
        self._edges = edges
        self._first = first
        self._end = end

    def __call__(self, error: FlowstoneError | None) -> None:
        for peer, first, end in self._spans:
            first, end = max(first, self._first), min(end, self._end)
            if first < end:
                packets = self._packets[self._edges[first] : self._edges[end]]
                if error is not None:
                    packets = b"".join(self._all.refusal(sync, error) for sync in self._syncs[first:end])
                self._all.send(peer, packets, end - first)

    def take_first(self, count: int) -> LateRun:
        first, self._first = self._first, self._first + count
        return self._between(first, self._first)

    def take_last(self, count: int) -> LateRun:
        end, self._end = self._end, self._end - count
        return self._between(self._end, end)

    def _between(self, first: int, end: int) -> LateRun:
        return LateRun(self._all, self._spans, self._syncs, self._packets, self._edges, first, end)


class LateReplies:
    """All late replies of a server. `wide` selects the encoding of errors, see `iproto/replies.py`."""

    def __init__(self, box: Box, counters: Counters, *, wide: bool) -> None:
        self._box = box
        self._counters = counters
        self._wide = wide
        self._due: dict[ReplyPeer, list[bytes]] = {}
        self._counts: dict[ReplyPeer, int] = {}

    def reply(self, peer: ReplyPeer, sync: int, packet: bytes = b"") -> LateReply:
        """Return the callback for the verdict on a transaction that is about to be submitted.

        The caller may set `packet` later, before the rows are written.
        """
        return LateReply(self, peer, sync, packet)

    def run(
        self, spans: Sequence[tuple[ReplyPeer, int, int]], syncs: Sequence[int], packets: bytes, edges: Sequence[int]
    ) -> LateRun:
        """Like `reply`, for a run of transactions."""
        return LateRun(self, spans, syncs, packets, edges, 0, len(syncs))

    def refusal(self, sync: int, error: FlowstoneError) -> bytes:
        self._counters.errors += 1
        return encode_error(sync, self._box.schema_version, client_error(error), self._wide)

    def send(self, peer: ReplyPeer, packet: bytes, count: int = 1) -> None:
        """Send a packet together with all others that become due in this iteration of the event loop."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._send)
        self._due.setdefault(peer, []).append(packet)
        self._counts[peer] = self._counts.get(peer, 0) + count

    def _send(self) -> None:
        due, self._due = self._due, {}
        counts, self._counts = self._counts, {}
        for peer, packets in due.items():
            peer.send_late(packets, counts[peer])
