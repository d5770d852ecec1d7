"""Files: headers and names, gaps, leftovers of a crash, and files of older servers."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flowstone import Node
from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import Row
from flowstone.outside.disk import SystemDisk
from flowstone.xlog.errors import LogGap
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.writer import LogWriter
from tests.interop import ledger
from tests.interop.cluster import Cluster
from tests.interop.compare import assert_same_data, assert_same_vclock
from tests.interop.versions import fits
from tests.places import VECTORS
from tests.scenarios.simulated_members import move_in
from tests.simulation.cluster import contents, converge
from tests.simulation.simulation import Simulation, simulated

INSTANCE = "1a685e63-24cd-4fc5-9532-bf85f649e0ab"
DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])
SPACE = "test"


@asynccontextmanager
async def running(directory: Path, **options: Any) -> AsyncIterator[Node]:
    node = Node(str(directory), **options)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def make(directory: Path, dialect: str = "2.11", keys: Sequence[int] = ()) -> int:
    """Create data with a space in three files; return the id of the space."""
    async with running(directory, dialect=dialect, instance_uuid=INSTANCE, checkpoint_count=10) as node:
        space = await node.create_space(SPACE)
        await space.create_index("pk")
        number = node.box.names[SPACE].id
        for key in keys:
            await space.insert([key, "x"])
            await node.snapshot()
    return number


def found(node: Node) -> list[tuple[Any, ...]]:
    return [unpack(raw) for raw in node.box.names[SPACE].tuples()]


def files(directory: Path, suffix: str) -> list[Path]:
    return sorted(directory.glob(f"*.{suffix}"))


def header_of(path: Path) -> list[str]:
    return path.read_bytes().partition(b"\n\n")[0].decode().splitlines()


def write_log(directory: Path, vclock: dict[int, int], *blocks: Sequence[Row]) -> None:
    """Write a log at that position, with these rows and without an end marker."""
    meta = Meta(FileType.XLOG, INSTANCE, vclock, version="2.1.2")
    writer = LogWriter.create(SystemDisk(), str(directory), meta)
    for rows in blocks:
        writer.append_encoded([b"".join(row.encode() for row in rows)], {})
    writer.close()


def replace(number: int, key: int, value: int, **header: Any) -> Row:
    body = pack({0x10: number, 0x21: [key, value]})
    lsn = header["lsn"]
    return Row(RequestType.REPLACE, timestamp=1.7e9, body=body, **({"tsn": lsn, "flags": Flag.COMMIT} | header))


# --- L1 ---


@DIALECTS
async def test_files_state_their_instance_start_and_predecessor(tmp_path: Path, dialect: str) -> None:
    """L1: at bootstrap, after our own and local rows, and after a restart."""
    async with running(tmp_path, dialect=dialect, instance_uuid=INSTANCE, checkpoint_count=10) as node:
        await node.create_space(SPACE)
        await node.snapshot()
        own = await node.create_space("own", is_local=True)
        await own.create_index("pk")
        await own.insert([1])
        end = dict(sorted(node.info()["vclock"].items()))
        await node.snapshot()
    async with running(tmp_path, checkpoint_count=10) as node:
        await node.create_space("more")
    text = Dialect(dialect).version_text
    common = ["0.13", f"Version: {text}", f"Instance: {INSTANCE}"]
    assert end[0] == 1
    for suffix, kind in (("snap", "SNAP"), ("xlog", "XLOG")):
        for path in files(tmp_path, suffix):
            lines = header_of(path)
            assert lines[:4] == [kind, *common], path
            assert lines[4].startswith("VClock: {")
            position = _vclock(lines[4])
            assert path.name == f"{sum(position.values()):020}.{suffix}"
            assert len(lines) == 5 or (suffix == "xlog" and lines[5].startswith("PrevVClock: {"))
    logs = [header_of(path) for path in files(tmp_path, "xlog")]
    assert len(logs) == 3
    assert (_vclock(logs[0][4]), _vclock(logs[2][4])) == ({}, end)
    for before, log in pairwise(logs):
        assert _vclock(log[5]) == _vclock(before[4]), "PrevVClock is the start of the previous log"


def _vclock(line: str) -> dict[int, int]:
    inside = line.partition("{")[2].rstrip("}")
    pairs = (pair.split(": ") for pair in inside.split(", ") if pair)
    return {int(number): int(lsn) for number, lsn in pairs}


# --- L3 ---


@DIALECTS
async def test_missing_log_is_reported_as_a_gap_at_startup(tmp_path: Path, dialect: str) -> None:
    """L3: recovery fails with the bounds of the gap."""
    await make(tmp_path, dialect, keys=(1, 2, 3))
    snapshots, logs = (files(tmp_path, suffix) for suffix in ("snap", "xlog"))
    for path in snapshots[1:]:
        path.unlink()
    logs[1].unlink()
    with pytest.raises(LogGap, match="LSN"):
        async with running(tmp_path):
            pass
    async with running(tmp_path, force_recovery=True) as node:
        assert found(node) == [(1, "x"), (3, "x")]


@DIALECTS
async def test_missing_lsns_inside_a_log_are_skipped(tmp_path: Path, dialect: str) -> None:
    """L3: the vclock follows the rows, and our next row comes after them."""
    number = await make(tmp_path, dialect)
    async with running(tmp_path) as node:
        lsn = node.info()["lsn"]
        await node.snapshot()
    for path in files(tmp_path, "xlog"):
        path.unlink()
    rows = [replace(number, key, key, replica_id=1, lsn=lsn + 10 * key) for key in (1, 2, 3)]
    write_log(tmp_path, {1: lsn}, rows[:2], rows[2:])
    async with running(tmp_path) as node:
        assert found(node) == [(1, 1), (2, 2), (3, 3)]
        assert node.info()["vclock"] == {1: lsn + 30}
        await node.space(SPACE).insert([4, 4])
        assert node.info()["vclock"] == {1: lsn + 31}
    async with running(tmp_path) as node:
        assert len(found(node)) == 4


# --- L4 ---


@DIALECTS
async def test_empty_logs_unfinished_logs_and_leftover_files_do_not_prevent_a_start(
    tmp_path: Path, dialect: str
) -> None:
    """L4: unfinished files are removed or continued, and LSNs continue."""
    await make(tmp_path, dialect, keys=(1,))
    async with running(tmp_path) as node:
        lsn = node.info()["lsn"]
        await node.space(SPACE).insert([2, "x"])
    newest = files(tmp_path, "xlog")[-1]
    newest.write_bytes(newest.read_bytes()[:-4])  # the end marker
    leftovers = [tmp_path / f"{lsn + 1:020}.xlog.inprogress", tmp_path / f"{lsn + 1:020}.snap.inprogress"]
    for path in leftovers:
        path.write_bytes(b"XLOG\n0.13\n")
    async with running(tmp_path) as node:
        assert found(node) == [(1, "x"), (2, "x")]
        assert not any(path.exists() for path in leftovers)
        await node.space(SPACE).insert([3, "x"])
        assert node.info()["lsn"] == lsn + 2
    async with running(tmp_path) as node:
        assert found(node) == [(1, "x"), (2, "x"), (3, "x")]


@DIALECTS
@pytest.mark.parametrize("what", ["no rows", "no bytes"])
async def test_empty_last_log_is_continued(tmp_path: Path, dialect: str, what: str) -> None:
    """L4: the log has only a header, or not even that, as after a full disk."""
    await make(tmp_path, dialect, keys=(1,))
    async with running(tmp_path) as node:
        lsn = node.info()["lsn"]
    (tmp_path / f"{lsn:020}.xlog").unlink(missing_ok=True)
    if what == "no rows":
        write_log(tmp_path, {1: lsn})
    else:
        (tmp_path / f"{lsn:020}.xlog").write_bytes(b"")
    async with running(tmp_path) as node:
        assert found(node) == [(1, "x")]
        await node.space(SPACE).insert([2, "x"])
        assert node.info()["lsn"] == lsn + 1
    async with running(tmp_path) as node:
        assert found(node) == [(1, "x"), (2, "x")]


# --- L6 ---


@pytest.mark.parametrize("recorded", ["tarantool-2.6/01-join-subscribe/files/master", "tarantool-2.6/04-mesh/files/a"])
@simulated()
async def test_node_on_files_of_an_older_server_is_a_master_with_that_schema(sim: Simulation, recorded: str) -> None:
    """L6: the schema is unchanged; a joining replica gets it unchanged, and both continue after a restart."""
    move_in(sim, "a", VECTORS / recorded)
    node = await sim.start("a")
    assert node.box.dialect is Dialect.V2_6
    before = contents(sim, "a")
    joined = await sim.start("b", replication=["replicator:secret@a:3301"], replication_anon=True, read_only=True)
    assert joined.box.dialect is Dialect.V2_6
    assert contents(sim, "b") == before
    await sim.restart("a")
    await sim.restart("b")
    await converge(sim, "ab")
    assert contents(sim, "b") == before


@fits(">=2.11")
def test_node_follows_a_real_server_through_a_schema_upgrade(cluster: Cluster) -> None:
    """L6: files of an older series; the node joins before `box.schema.upgrade()` and continues after it."""
    older = (
        "tarantool-2.6/04-mesh/files/a" if cluster.binary.version < (3,) else "tarantool-2.11/07-errors/files/master"
    )
    master = cluster.real("master", start=False)
    for path in (VECTORS / older).iterdir():
        if path.suffix in (".snap", ".xlog"):
            shutil.copy(path, master.directory)
    master.start()
    old = master.eval("return box.space._schema:get('version')")
    ours = cluster.ours("ours", replication=[master.uri], replication_anon=True, read_only=True)
    ours.wait_follow(master)
    master.eval("box.schema.upgrade()")
    assert master.eval("return box.space._schema:get('version')") > old
    ledger.define(master)
    master.call("interop.transaction", ledger.transaction(1))
    ours.catch_up(master)
    assert_same_vclock(master, ours)
    assert_same_data(master, ours)
    ours.restart()
    ours.wait_follow(master)
    master.call("interop.transaction", ledger.transaction(2))
    ours.catch_up(master)
    assert_same_data(master, ours)


# --- L7 ---


def mixed(number: int, *, is_whole: bool) -> list[Row]:
    """Return two interleaved transactions; the second one is finished, or not."""
    last = Flag.COMMIT if is_whole else Flag(0)
    rows = []
    for turn in range(3):
        ends = Flag.COMMIT if turn == 2 else Flag(0)
        rows.append(replace(number, turn, 3, replica_id=3, lsn=turn + 1, tsn=1, flags=ends))
        rows.append(replace(number, turn, 2, replica_id=2, lsn=turn + 100, tsn=100, flags=ends & last))
    return rows


@pytest.mark.parametrize(("is_whole", "writer"), [(True, 2), (False, 3)])
async def test_interleaved_transactions_are_rejected_and_recovered_with_force(
    tmp_path: Path, is_whole: bool, writer: int
) -> None:
    """L7: releases 2.1.2 to 2.2.0 wrote such logs; the one that ends last is visible, an unfinished one is not."""
    number = await make(tmp_path)
    async with running(tmp_path) as node:
        vclock = node.info()["vclock"]
        await node.snapshot()
    for path in files(tmp_path, "xlog"):
        path.unlink()
    write_log(tmp_path, vclock, mixed(number, is_whole=is_whole))
    with pytest.raises(FlowstoneError, match=r"belongs to transaction 100, but transaction 1 has not ended"):
        async with running(tmp_path):
            pass
    async with running(tmp_path, force_recovery=True) as node:
        assert found(node) == [(key, writer) for key in range(3)]
        assert node.info()["vclock"] == vclock | {2: 102, 3: 3}
