"""A single statement has the same reply, state and row as in its session."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.access import GUEST
from flowstone.box.engine.transaction import ADMIN
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame
from flowstone.node.server.single_statement import SingleStatements
from flowstone.node.wal.journal import WalMode
from tests.node.server.test_executor import (
    DELETE,
    INSERT,
    NUMBERS,
    ODD,
    READER,
    REPLACE,
    SELECT,
    Served,
    statement,
    stretches,
)


def by_sessions() -> Any:
    """Send every statement to its session."""
    return patch.object(SingleStatements, "execute", lambda *_: None)


async def serve(packets: list[bytes], user: int, filled: int, *, fails: bool = False) -> Served:
    served = Served([user])
    served.fill(filled)
    await served.run([statement(REPLACE, NUMBERS, (1000, 0))])  # the first write creates the file
    if fails:
        served.disk.broken.add("append")
    for packet in packets:
        await served.run([packet])
    return served


PACKETS = st.lists(stretches() | st.sampled_from(ODD), max_size=8)


@pytest.mark.parametrize("fails", [False, True], ids=["written", "failing disk"])
@given(packets=PACKETS, user=st.sampled_from((ADMIN, READER, GUEST)), filled=st.integers(0, 6))
def test_single_statement_returns_the_reply_of_the_session(
    fails: bool, packets: list[bytes], user: int, filled: int
) -> None:
    quick = asyncio.run(serve(packets, user, filled, fails=fails))
    with by_sessions():
        slow = asyncio.run(serve(packets, user, filled, fails=fails))
    assert b"".join(quick.peers[0].sent) == b"".join(slow.peers[0].sent)
    assert quick.contents() == slow.contents()
    assert b"".join(quick.rows) == b"".join(slow.rows)
    assert quick.journal.vclock == slow.journal.vclock == quick.journal.written_vclock


@given(packets=PACKETS, cut=st.integers(0, 60), byte=st.integers(0, 255))
def test_any_bytes_have_the_reply_of_the_session(packets: list[bytes], cut: int, byte: int) -> None:
    mutated = []
    for packet in packets:
        body = bytearray(packet[5:])
        if len(body):
            body[cut % len(body)] = byte
        mutated.append(frame(bytes(body)))
    quick = asyncio.run(serve(mutated, ADMIN, 3))
    with by_sessions():
        slow = asyncio.run(serve(mutated, ADMIN, 3))
    assert b"".join(quick.peers[0].sent) == b"".join(slow.peers[0].sent)
    assert quick.contents() == slow.contents()
    assert b"".join(quick.rows) == b"".join(slow.rows)


@pytest.mark.parametrize(
    "packet",
    [
        statement(SELECT, NUMBERS, (1,)),
        statement(INSERT, NUMBERS, (77, 1)),
        statement(REPLACE, NUMBERS, (1, 1)),
        statement(DELETE, NUMBERS, (1,)),
        frame(b"\x82\x01\xcd\x01\x00\x00\x03" + pack({0x10: NUMBERS, 0x21: (1, 2)})),  # net.box: sync first
    ],
    ids=["select", "insert", "replace", "delete", "sync before type"],
)
async def test_plain_statements_never_reach_the_session(packet: bytes) -> None:
    served = await serve([], ADMIN, 3)
    before = served.peers[0].handled
    await served.run([packet])
    assert served.peers[0].handled == before
    assert served.peers[0].codes()[-1] == 0


@pytest.mark.parametrize("mode", [WalMode.FSYNC, WalMode.NONE])
async def test_slow_writes_are_left_to_the_session(mode: WalMode) -> None:
    served = Served(mode=mode)
    await served.run([statement(REPLACE, NUMBERS, (1, 1))])
    await served.run([statement(REPLACE, NUMBERS, (2, 1))])
    assert served.peers[0].codes() == [0, 0]
    assert served.journal.written_vclock.get(1) == 7


async def test_packet_without_content_is_rejected() -> None:
    served = Served()
    await served.run([b"\xce\0\0\0\0"])
    assert len(served.peers[0].refused) == 1
