"""What recovery finds without a verdict stays so, until it gets one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import flowstone
from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.node.limbo import clear_synchro_queue
from flowstone.outside import production
from flowstone.replication.synchro import Promote
from tests.node.fault_disk import FaultDisk
from tests.node.instances import make_instance
from tests.node.small_node import start

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

    async def test_while_it_waits_it_can_be_read_and_nothing_makes_it_a_fact(
        self, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING, "flowstone.node")
        before = snapshots(directory)
        async with flowstone.Node(directory) as node:
            assert "2 transactions in the synchronous queue of replica 1 wait for a verdict" in caplog.text
            assert tuples(node) == [(1, "undecided"), (2, "behind it")]
            with pytest.raises(errors.SyncQuorumTimeout, match="Can't make a snapshot: 2 transactions in the sync"):
                await node.snapshot()
            for name in ("synced", "plain"):
                with pytest.raises(errors.Readonly):
                    await node.space(name).replace((9,))
            await node.reconfigure(read_only=True)
            await node.reconfigure(read_only=False)
            assert node.info()["ro"]
        assert snapshots(directory) == before

    async def test_clearing_it_confirms_what_waits_for_the_real_server_too(
        self, directory: Path, tarantool: Any
    ) -> None:
        async with flowstone.Node(directory) as node:
            await clear_synchro_queue(node._instance)
            assert not node.info()["ro"]
            await clear_synchro_queue(node._instance)
        async with flowstone.Node(directory) as node:
            assert (tuples(node), node.info()["ro"]) == ([(1, "undecided"), (2, "behind it")], False)
            await node.space("synced").replace((3, "confirmed at once"))
        assert tarantool.run(SHOW, directory) == "2\t1\ttrue\n"
        async with flowstone.Node(directory) as node:
            await node.snapshot()


async def test_a_queue_of_a_newer_server_is_shown_with_owner_and_terms_and_waits_for_promotion(tmp_path: Path) -> None:
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
    async with flowstone.Node(tmp_path) as node:
        info = node.info()
        assert info["election"] == {"state": "follower", "vote": 1, "leader": 0, "term": 7}
        assert info["synchro"] == {"queue": {"len": 2, "owner": 1, "term": 7, "busy": False}, "quorum": 1}
        assert (info["ro"], info["ro_reason"]) == (True, "synchro")
        with pytest.raises(errors.SyncQuorumTimeout):
            await node.snapshot()
        with pytest.raises(errors.Unsupported, match=r"does not support box\.ctl\.clear_synchro_queue"):
            await clear_synchro_queue(node._instance)
        assert node.info()["synchro"]["queue"]["len"] == 2


async def test_a_verdict_that_cannot_be_written_is_none() -> None:
    disk = FaultDisk()
    small = await start(disk.outside(), "data")
    await small.create_space("synced", 512, is_sync=True)
    lsn = small.journal.next_lsn(1)
    row = Row(RequestType.REPLACE, 1, lsn=lsn, body=b"\x82\x10\xcd\x02\x00\x21\x91\x01")
    small.journal.submit(row.encode(), 1, lambda error: None)
    await small.close()
    again = await start(disk.outside(), "data")
    instance = make_instance(dialect=Dialect.V2_6)
    instance.journal, instance.synchro = again.journal, again.recovered.synchro
    instance.settle_read_only()
    disk.room = 0
    with pytest.raises(errors.WalIo):
        await clear_synchro_queue(instance)
    assert (len(instance.synchro.pending), instance.is_read_only) == (1, True)
    disk.room = None
    await clear_synchro_queue(instance)
    assert (instance.synchro.pending, instance.is_read_only) == ((), False)
    await again.close()
    synchro = (await start(disk.outside(), "data")).recovered.synchro
    assert (synchro.pending, synchro.confirmed) == ((), {1: lsn})
