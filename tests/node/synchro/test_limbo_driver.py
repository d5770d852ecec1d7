"""The queue of a node: pending transactions commit or roll back, in memory, in the log and for their waiters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flowstone
from flowstone.box.dialect import Dialect
from flowstone.box.engine.index import WHOLE
from flowstone.errors import OutcomeUnknown
from flowstone.iproto import errors
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import Row
from flowstone.node.downstream.join_server import JoinServer
from flowstone.outside import production
from flowstone.replication.limbo.control_rows import Promote
from tests.node.fault_disk import FaultDisk
from tests.node.small_node import start
from tests.real_tarantool import free_port

SYNC = (Flag.COMMIT | Flag.WAIT_SYNC | Flag.WAIT_ACK).value
QUEUED = (Flag.COMMIT | Flag.WAIT_SYNC).value

UNDECIDED = """
box.cfg{log='real.log', replication_synchro_quorum=2, replication_synchro_timeout=1000}
local s = box.schema.space.create('synced', {is_sync=true}) s:create_index('pk')
local t = box.schema.space.create('plain') t:create_index('pk')
local fiber = require('fiber')
fiber.create(s.replace, s, {1, 'undecided'})
fiber.create(t.replace, t, {2, 'behind it'})
fiber.sleep(0.2)
os.exit()
"""
SHOW = """
box.cfg{log='real.log'}
print(#box.space.synced:select(), #box.space.plain:select(), box.space.plain:replace{3} ~= nil)
os.exit()
"""


def tuples(node: flowstone.Node) -> list[Any]:
    return [row.values for name in ("synced", "plain") for row in node.space(name).select()]


def snapshots(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.snap"))


class TestQueueOfARealServer:
    @pytest.fixture
    def directory(self, tarantool: Any, tmp_path: Path) -> Path:
        tarantool.run(UNDECIDED, tmp_path)
        return tmp_path

    async def test_pending_transaction_is_readable_and_stays_pending(
        self, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING, "flowstone.node")
        before = snapshots(directory)
        async with flowstone.Node(directory, replication_synchro_quorum=2, replication_synchro_timeout=0.1) as node:
            assert "2 transactions are pending in the synchronous queue of replica 1" in caplog.text
            assert tuples(node) == [(1, "undecided"), (2, "behind it")]
            with pytest.raises(errors.SyncQuorumTimeout):
                await node.snapshot()
            with node.box.open_view(confirmed=True) as view:
                synced = node.box.space("synced").primary
                assert synced is not None
                assert not list(view.source(synced).scan(WHOLE))
        assert snapshots(directory) == before

    async def test_owner_that_is_its_own_quorum_confirms_recovered_transactions(
        self, directory: Path, tarantool: Any
    ) -> None:
        async with flowstone.Node(directory) as node:
            await node.space("synced").replace((3, "confirmed at once"))
            assert tuples(node) == [(1, "undecided"), (3, "confirmed at once"), (2, "behind it")]
        assert tarantool.run(SHOW, directory) == "2\t1\ttrue\n"
        async with flowstone.Node(directory) as node:
            await node.snapshot()  # 2.6.0, unlike us, does not start from this snapshot: it has synchronous tuples

    async def test_orphan_leaves_recovered_transactions_to_its_peers(self, directory: Path) -> None:
        nowhere = [f"127.0.0.1:{free_port()}"]
        async with flowstone.Node(directory, replication=nowhere, replication_connect_timeout=0.1) as node:
            assert node.info()["status"] == "orphan"
            assert len(node.box.in_flight) == 2
            await node.reconfigure(replication=[])
            await node.space("synced").replace((3, "behind a verdict"))
            assert not node.box.in_flight
            assert tuples(node) == [(1, "undecided"), (3, "behind a verdict"), (2, "behind it")]


async def test_recovered_queue_of_a_newer_server_has_owner_and_terms_and_waits_for_a_promotion(tmp_path: Path) -> None:
    small = await start(production(), str(tmp_path), dialect=Dialect.V2_11)
    await small.create_space("synced", 512, is_sync=True)
    first = small.journal.next_lsn(1)
    promote = Promote(0, 0, 7).encode()
    for row in (
        Row(RequestType.RAFT, lsn=1, group_id=1, body=pack({0: 7, 1: 1})),
        Row(RequestType.RAFT_PROMOTE, 1, lsn=first, body=promote),
        Row(RequestType.REPLACE, 1, lsn=first + 1, flags=SYNC, body=b"\x82\x10\xcd\x02\x00\x21\x91\x01"),
        Row(RequestType.REPLACE, 1, lsn=first + 2, flags=QUEUED, body=b"\x82\x10\xcd\x02\x00\x21\x91\x02"),
        Row(RequestType.NOP, 1, lsn=first + 3),
    ):
        local = int(row.group_id == 1)
        small.journal.submit(row.encode(), 1 - local, lambda error: None, local_count=local)
    await small.close()
    async with flowstone.Node(tmp_path, replication_synchro_timeout=0.1) as node:
        info = node.info()
        assert (info["election"]["vote"], info["election"]["term"]) == (1, 7)
        queue = info["synchro"]["queue"]
        assert (queue["len"], queue["owner"], queue["term"], queue["busy"]) == (2, 1, 7, False)
        assert (info["ro"], info["ro_reason"]) == (True, "synchro")
        with pytest.raises(errors.SyncQuorumTimeout):
            await node.snapshot()
        with pytest.raises(errors.Readonly, match=r"belongs to 1 .* and is frozen until promotion"):
            await node.space("synced").replace((9,))
        await node._instance.elections.promote()
        assert node.info()["synchro"]["queue"]["len"] == 0
        assert [row[0] for row in node.space("synced").select()] == [1, 2]
        await node.snapshot()


async def test_verdict_that_cannot_be_written_is_retried() -> None:
    disk = FaultDisk()
    small = await start(disk.outside(), "data")
    await small.create_space("synced", 512, is_sync=True)
    queue, confirmed = small.commits.queue, small.box.space("synced")
    queue.configure(quorum=2)
    writing = asyncio.ensure_future(small.replace("synced", [1]))
    await until(lambda: len(queue.limbo) == 1 and queue.limbo.pending[0].is_written)
    disk.room = 0
    queue.ack(2, small.journal.written_vclock)
    await asyncio.sleep(0.05)
    assert (len(queue.limbo), list(confirmed.tuples()), writing.done()) == (1, [b"\x91\x01"], False)
    disk.room = None
    await writing
    assert len(queue.limbo) == 0
    lsn = small.journal.next_lsn(1) - 1
    await small.close()
    again = (await start(disk.outside(), "data")).recovered.synchro
    assert (again.pending, again.confirmed) == ((), {1: lsn - 1})


async def test_limbo_removes_unwritten_transactions_newest_first() -> None:
    disk = FaultDisk()
    small = await start(disk.outside(), "data")
    await small.create_space("synced", 512, is_sync=True)
    await small.create_space("plain", 513)
    small.commits.queue.configure(quorum=2)
    first = asyncio.ensure_future(small.replace("synced", [1, "written"]))
    await until(lambda: len(small.commits.queue.limbo) == 1)
    disk.room = 0
    others = [
        asyncio.ensure_future(small.replace("synced", [1, "refused"])),
        asyncio.ensure_future(small.replace("plain", [2, "refused"])),
    ]
    for error in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(error, errors.WalIo)
    disk.room = None
    assert [unpack(raw) for raw in small.box.space("synced").tuples()] == [(1, "written")]
    assert not list(small.box.space("plain").tuples())
    small.commits.queue.ack(2, small.journal.written_vclock)
    await first
    assert small.commits.queue.limbo.rollback_count == 2
    assert not small.box.in_flight
    await small.close()


async def test_limbo_releases_waiters_when_the_node_stops() -> None:
    small = await start(FaultDisk().outside(), "data")
    await small.create_space("synced", 512, is_sync=True)
    small.commits.queue.configure(quorum=2)
    writing = asyncio.ensure_future(small.replace("synced", [1]))
    await until(lambda: len(small.commits.queue.limbo) == 1)
    settled = asyncio.ensure_future(small.commits.queue.settled())
    await asyncio.sleep(0)
    await small.close()
    with pytest.raises(OutcomeUnknown, match="was stopped"):
        await settled
    with pytest.raises(OutcomeUnknown):
        await writing


class TestSnapshotWhileARowIsBeingWritten:
    """The effect of such a row is in the snapshot, whose position is after it."""

    async def test_snapshot_has_the_term_and_vote_being_written(self, tmp_path: Path) -> None:
        async with flowstone.Node(tmp_path, election_mode="candidate", election_timeout=1000) as node:
            elections = node._instance.elections
            elections.stand()
            await node.snapshot()
            before = elections.persisted
            assert before.vote == 1
        async with flowstone.Node(tmp_path) as node:
            assert node._instance.elections.persisted == before

    async def test_snapshot_has_the_owner_being_written(self, tmp_path: Path) -> None:
        async with flowstone.Node(tmp_path, wal_mode="fsync") as node:
            elections, queue = node._instance.elections, node._instance.queue
            term = elections.begin_term()
            await elections.until(lambda: elections.raft.term >= term)
            promoting = asyncio.ensure_future(queue.promote(term))
            await asyncio.sleep(0)
            await node.snapshot()
            await promoting
        async with flowstone.Node(tmp_path) as node:
            limbo = node._instance.queue.limbo
            assert (limbo.owner_id, limbo.term) == (1, term)

    async def test_joining_replica_receives_the_owner(self, tmp_path: Path) -> None:
        async with flowstone.Node(tmp_path, wal_mode="fsync") as node:
            instance = node._instance
            term = instance.elections.begin_term()
            await instance.elections.until(lambda: instance.elections.raft.term >= term)
            promoting = asyncio.ensure_future(instance.queue.promote(term))
            await asyncio.sleep(0)
            link = Link()
            vclock = await JoinServer(instance, str(tmp_path), link, 1, version=2 << 16 | 11 << 8 | 9).send_snapshot()
            await promoting
            assert vclock.get(1) == instance.vclock.get(1)
            assert instance.queue.checkpoint().encode() in link.sent

    async def test_snapshot_has_the_confirmed_position_being_written(self, tmp_path: Path) -> None:
        async with flowstone.Node(tmp_path, wal_mode="fsync") as node:
            synced = await node.create_space("synced", is_sync=True)
            await synced.create_index("pk")
            await node.promote()
            queue = node._instance.queue
            queue.configure(quorum=2)
            writing = asyncio.ensure_future(synced.replace((1,)))
            await until(lambda: len(queue.limbo) == 1 and queue.limbo.pending[0].is_written)
            queue.ack(2, node._instance.vclock)
            await node.snapshot()
            await writing
            lsn = queue.limbo.confirmed_lsn
        async with flowstone.Node(tmp_path) as node:
            assert node._instance.queue.limbo.confirmed_lsn == lsn


class Link:
    """A replica that accepts all packets."""

    peer, user = "somewhere", 1

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    async def flushed(self) -> None:
        return


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
