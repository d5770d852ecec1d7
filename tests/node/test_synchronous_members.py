"""Membership and the queue: pending rows change neither the members nor the data of a new member."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest

import flowstone
from flowstone.iproto import errors
from flowstone.node.downstream.join_server import JoinServer
from flowstone.node.synchro.limbo_driver import LimboDriver
from flowstone.replication.limbo.control_rows import RaftState, SynchroError, decode_control
from flowstone.replication.messages import Ack, decode_ack, encode_ack
from flowstone.replication.vclock import VClock
from tests.real_tarantool import free_port


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def owner(path: Path, **options: Any) -> flowstone.Node:
    node = flowstone.Node(path, replication_synchro_timeout=1000, **options)
    await node.start()
    await (await node.create_space("synced", is_sync=True)).create_index("pk")
    await node.promote()
    return node


async def test_join_snapshot_omits_pending_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real masters of 2.11 send such rows in the final stage."""
    port = free_port()
    master = await owner(tmp_path / "master", listen=f"127.0.0.1:{port}", user=("demo", "secret"))
    await master.reconfigure(replication_synchro_quorum=3)
    writing: list[asyncio.Future[Any]] = []
    register = JoinServer.register

    async def and_write(join: JoinServer, *who: Any) -> None:
        await register(join, *who)
        writing.append(asyncio.ensure_future(master.space("synced").replace((1, "undecided"))))
        await until(lambda: len(master._instance.queue.limbo) == 1)

    async def at_once(queue: LimboDriver, timeout: float | None = None) -> None:
        return

    monkeypatch.setattr(JoinServer, "register", and_write)
    monkeypatch.setattr(LimboDriver, "settled", at_once)
    async with flowstone.Node(tmp_path / "replica", replication=[f"demo:secret@127.0.0.1:{port}"]) as replica:
        queue = replica._instance.queue
        await until(lambda: len(queue.limbo) == 1)
        await master.reconfigure(replication_synchro_timeout=0.05)
        with pytest.raises(errors.SyncQuorumTimeout):
            await writing[0]
        await until(lambda: len(queue.limbo) == 0)
        assert replica.space("synced").get(1) is None
    await master.stop()
    async with flowstone.Node(tmp_path / "replica") as replica:
        assert replica.space("synced").get(1) is None


async def test_member_counts_for_the_quorum_until_its_expulsion_is_confirmed(tmp_path: Path) -> None:
    node = await owner(tmp_path)
    await node.space("_cluster").insert((2, str(uuid.uuid4())))
    limbo = node._instance.queue.limbo
    writing: list[asyncio.Future[Any]] = [asyncio.ensure_future(node.space("synced").replace((1,)))]
    await until(lambda: len(limbo) == 1)
    writing.append(asyncio.ensure_future(node.space("_cluster").delete(2)))
    await until(lambda: len(limbo) == 2)
    await node.reconfigure(election_timeout=7)
    await asyncio.sleep(0.05)
    assert (len(limbo), limbo.quorum) == (2, 2)
    await node.stop()
    assert all(
        isinstance(error, flowstone.OutcomeUnknown) for error in await asyncio.gather(*writing, return_exceptions=True)
    )


async def test_stop_does_not_roll_back_pending_transactions(tmp_path: Path) -> None:
    node = flowstone.Node(tmp_path, replication_synchro_timeout=1000)
    taken_back: list[Any] = []
    node.on_rollback(taken_back.append)
    await node.start()
    await (await node.create_space("synced", is_sync=True)).create_index("pk")
    await node.promote()
    await node.reconfigure(replication_synchro_quorum=2)
    writing = asyncio.ensure_future(node.space("synced").replace((1,)))
    await until(lambda: len(node._instance.queue.limbo) == 1)
    await node.stop()
    with pytest.raises(flowstone.OutcomeUnknown, match="was stopped before a quorum acknowledged the transaction"):
        await writing
    assert not taken_back


async def test_vote_of_a_peer_does_not_replace_our_own(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path) as node:
        elections = node._instance.elections
        assert elections.kept_beside(RaftState(term=4, vote=3)) == RaftState(term=4)
        elections.start(RaftState(term=5, vote=2), 1)
        assert elections.kept_beside(RaftState(term=5, vote=3)) == RaftState(term=5, vote=2)
        assert elections.kept_beside(RaftState(term=4, vote=3)) == RaftState(term=5, vote=2)
        assert elections.kept_beside(RaftState(term=6, vote=3)) == RaftState(term=6)


def test_last_possible_term_is_rejected() -> None:
    from flowstone.iproto.packet import split
    from flowstone.iproto.row import decode_row

    (packet,), _ = split(encode_ack(Ack(VClock({1: 1}), 2**63)))
    with pytest.raises(errors.InvalidMsgpack, match="invalid term"):
        decode_ack(decode_row(packet))
    with pytest.raises(SynchroError, match="TERM is 18446744073709551615"):
        decode_control(30, b"\x81\x00\xcf" + b"\xff" * 8)
