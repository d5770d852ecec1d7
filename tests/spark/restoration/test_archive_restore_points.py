"""A real Tarantool that starts from data restored at a settled moment, and has its data of that moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from flowstone.archive import events as events
from flowstone.archive.archive import Archive
from flowstone.iproto.row import Row
from flowstone.outside.disk import SystemDisk
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.restoration.archive_restore import restore_archive, restore_in_memory
from flowstone.xlog.meta import Meta
from flowstone.xlog.reader import LogFile
from tests.conftest import FULL
from tests.interop.versions import ANY, parameters
from tests.node.archived_server import RealServer
from tests.spark.restored_server import WORKLOAD, held_by_server_from

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("tarantool")]

POINTS = 20 if FULL else 3
ROUNDS = 4 if FULL else 2
TRANSACTIONS = 6_000 if FULL else 500


@pytest.fixture(params=parameters(ANY))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealServer]:
    with RealServer(tmp_path / "master", binary=request.param.path, setup=WORKLOAD) as running:
        yield running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what it waits for is in another process
            await asyncio.sleep(0.05)


def rows_of(path: str) -> tuple[Meta, list[Row]]:
    """Return the header and the rows; of those, only the encoding of a time of 0 may differ."""
    with LogFile.open(SystemDisk(), path) as log:
        return log.meta, [msgspec.structs.replace(row, raw=b"") for slab in log.slabs() for row in slab.rows()]


async def archived(server: RealServer, directory: Path) -> ArchiveIndex:
    """Archive all changes of the server, with snapshots in between."""
    told: list[events.ArchiveEvent] = []
    async with Archive(server.uri, directory, snapshot_interval=0.5, on_event=told.append) as archive:
        for number in range(ROUNDS + 1):
            if number:
                await asyncio.to_thread(server.eval, "work(...)", number, TRANSACTIONS, TRANSACTIONS // POINTS)
            await until(lambda: archive.settled == VClock(server.vclock()))
            told.clear()
            await until(lambda: any(isinstance(event, events.Snapshotted) for event in told))
    return ArchiveIndex.open(SystemDisk(), str(directory))


async def test_real_server_starts_from_settled_moments(spark: SparkSession, server: RealServer, tmp_path: Path) -> None:
    server.eval("prepare()")
    index = await archived(server, tmp_path / "archive")
    first = index.snapshots[0].vclock.get(1)
    assert len(index.snapshots) > ROUNDS
    assert index._withdrawn.ranges, "no transaction was rolled back"
    (moments,) = server.eval("local r = {} for lsn in pairs(moments) do table.insert(r, tonumber(lsn)) end return r")
    (uuids,) = server.eval("return {box.info.uuid, (box.info.replicaset or box.info.cluster).uuid}")
    there = sorted(lsn for lsn in moments if lsn >= first)
    assert len(there) >= POINTS
    for lsn in sorted(random.Random(7).sample(there, POINTS)):
        (expected,) = server.eval("return moments[...]", lsn)
        out = tmp_path / f"restored-{lsn}"
        restored = restore_archive(spark, index, VClock({1: lsn}), str(out))
        assert [path.name for path in out.iterdir()] == [f"{lsn:020d}.snap"]
        held, *identity = held_by_server_from(out, server.binary)
        assert identity == [lsn, *uuids]
        assert held == sorted(expected.splitlines()), lsn
        alone = restore_in_memory(index, VClock({1: lsn}), str(tmp_path / f"alone-{lsn}"))
        assert rows_of(alone.files["snap"]) == rows_of(restored.files["snap"])
        assert alone.notes == restored.notes
        assert restored.row_count >= sum(not line.startswith("sequence ") for line in held)
