"""Watching a ballot on its own connection: how the watch ends, and peers that read no answers."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from flowstone.iproto.greeting import Greeting, encode_greeting
from flowstone.iproto.msgpack import pack
from flowstone.iproto.replies import encode_event
from flowstone.node.upstream.ballot_watcher import BallotWatching
from flowstone.outside import Stream
from flowstone.replication.applier.states import ConnectionLost
from flowstone.replication.messages import Ballot, encode_ballot_body
from flowstone.replication.vclock import VClock

GREETING = encode_greeting(Greeting((2, 11, 9), UUID(int=7), b"s" * 32))


class Peer:
    """A stream that delivers ballots as fast as they are read, and accepts only some answers."""

    def __init__(self, ballots: int, *, reads_answers: int) -> None:
        self._left = ballots
        self._room = reads_answers
        self._lsn = 0
        self.is_greeted = False
        self.reads = 0
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.closing = asyncio.Event()

    async def connect(self) -> Stream:
        return self

    async def read(self, n: int) -> bytes:
        self.reads += 1
        if not self.is_greeted:
            self.is_greeted = True
            return GREETING
        if not self._left:
            return b""
        self._left -= 1
        self._lsn += 1
        ballot = Ballot(VClock({1: self._lsn}))
        return encode_event(0, pack("internal.ballot"), encode_ballot_body(ballot, is_2_6=False))

    def write(self, data: object) -> None:
        self._room -= 1

    async def drain(self) -> None:
        if self._room < 0:
            await asyncio.Event().wait()

    def deliver(self, receive: object, ended: object) -> bool:
        return False

    async def close(self) -> None:
        self.closing.set()
        await self.may_close.wait()


def watching(peer: Peer, told: list[Ballot]) -> BallotWatching:
    return BallotWatching("upstream", peer.connect, told.append)


async def test_first_ballot_is_returned_and_later_ones_are_delivered() -> None:
    told: list[Ballot] = []
    peer = Peer(3, reads_answers=10)
    watch = watching(peer, told)
    assert (await watch.first(10.0)).vclock == VClock({1: 1})
    await peer.closing.wait()
    assert [ballot.vclock.get(1) for ballot in told] == [2, 3]
    await watch.end()


async def test_ballot_watcher_stops_reading_from_a_peer_that_does_not_read() -> None:
    told: list[Ballot] = []
    peer = Peer(10**9, reads_answers=5)
    watch = watching(peer, told)
    await watch.first(10.0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert peer.reads == 6
    await watch.end()


async def test_peer_that_disconnects_before_a_ballot_is_an_error() -> None:
    with pytest.raises(ConnectionLost, match="closed the connection"):
        await watching(Peer(0, reads_answers=10), []).first(10.0)


async def test_peer_without_a_ballot_times_out() -> None:
    watch = watching(Peer(0, reads_answers=0), [])
    with pytest.raises(ConnectionLost, match=r"no ballot from .* within"):
        await watch.first(0.05)
    await watch.end()


async def test_stop_of_a_ballot_watcher_propagates_cancellation() -> None:
    peer = Peer(10**9, reads_answers=0)
    peer.may_close.clear()
    watch = watching(peer, [])
    with pytest.raises(ConnectionLost):
        await watch.first(0.01)
    ending = asyncio.create_task(watch.end())
    await peer.closing.wait()
    ending.cancel()
    peer.may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
