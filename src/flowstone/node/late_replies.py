"""Replies that wait for a verdict on their transactions: they leave when that is there, many together.

A turn answers all else at once; what waits for other members may take seconds, and nothing of the turn waits with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from flowstone.box.box import Box
from flowstone.errors import FlowstoneError
from flowstone.iproto.replies import encode_error
from flowstone.node.commits import client_error


class Peer(Protocol):
    """A connection."""

    def send_late(self, packets: Sequence[bytes]) -> None:
        """Sends replies that were postponed."""
        ...


class LateReply:
    """One of them: it is told of the verdict, and `packet` is what is sent if that is good."""

    __slots__ = ("_all", "_peer", "_sync", "packet")

    def __init__(self, all: LateReplies, peer: Peer, sync: int, packet: bytes) -> None:
        self._all = all
        self._peer = peer
        self._sync = sync
        self.packet = packet

    def __call__(self, error: FlowstoneError | None) -> None:
        self._all.send(self._peer, self.packet if error is None else self._all.refusal(self._sync, error))


class LateReplies:
    """All of a server. `wide` is for errors, see `iproto/replies.py`."""

    def __init__(self, box: Box, *, wide: bool) -> None:
        self._box = box
        self._wide = wide
        self._due: dict[Peer, list[bytes]] = {}

    def reply(self, peer: Peer, sync: int, packet: bytes = b"") -> LateReply:
        """For a transaction that is being submitted: what is to be told of its verdict."""
        return LateReply(self, peer, sync, packet)

    def refusal(self, sync: int, error: FlowstoneError) -> bytes:
        return encode_error(sync, self._box.schema_version, client_error(error), self._wide)

    def send(self, peer: Peer, packet: bytes) -> None:
        """One verdict is about many: what is due before the loop comes round leaves together."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._send)
        self._due.setdefault(peer, []).append(packet)

    def _send(self) -> None:
        due, self._due = self._due, {}
        for peer, packets in due.items():
            peer.send_late(packets)
