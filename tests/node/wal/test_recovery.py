"""Recovery restores written data, from our own directories and from those of real servers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest

from flowstone.box import system
from flowstone.box.bootstrap import FirstUser
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.errors import FlowstoneError
from flowstone.iproto.msgpack import pack, unpack
from flowstone.node.wal.journal import WalMode
from flowstone.node.wal.recovery import (
    NothingToRecover,
    RecoveredBox,
    bootstrap,
    dialect_of,
    find_files,
    lock_directory,
    recover,
)
from flowstone.node.wal.replay import RecoveryError
from flowstone.outside import AlreadyLocked, production
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import DamagedLog, ForeignFile, LogGap
from flowstone.xlog.reader import LogFile
from tests.conftest import FULL
from tests.node.fault_disk import Died, FaultDisk
from tests.node.small_node import SmallNode, start, state
from tests.places import VECTORS

OUTSIDE = production()
RECORDED = sorted(
    path for path in (VECTORS).glob("tarantool-*/*/files/*") if path.is_dir() and any(path.glob("*.snap"))
)


async def recovered(directory: Path, *, force: bool = False) -> tuple[Box, RecoveredBox]:
    found = find_files(OUTSIDE.disk, str(directory), str(directory))
    box = Box(dialect_of(found) or Dialect.V2_11)
    return box, await recover(OUTSIDE, found, box, force=force)


def files(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern))


def tuples(box: Box, space: str) -> list[Any]:
    return [unpack(raw) for raw in box.space(space).tuples()]


class TestRealDirectories:
    @pytest.mark.parametrize("path", RECORDED, ids=lambda path: "-".join(path.parts[-4:]).replace("-files", ""))
    async def test_recorded_directory_is_recovered_from_its_newest_and_oldest_snapshot(
        self, path: Path, tmp_path: Path
    ) -> None:
        newest, from_newest = await recovered(path)
        copy = tmp_path / "oldest"
        shutil.copytree(path, copy)
        for snapshot in sorted(copy.glob("*.snap"))[1:]:
            snapshot.unlink()
        oldest, from_oldest = await recovered(copy)
        assert from_newest.vclock == from_oldest.vclock
        assert from_newest.synchro.pending == from_oldest.synchro.pending == ()
        vinyl = [space.id for space in newest.spaces.values() if space.definition.engine == "vinyl"]
        # A real server keeps vinyl tuples in their own files, so they are missing in snapshots.
        assert state(newest) | dict.fromkeys(vinyl) == state(oldest) | dict.fromkeys(vinyl)
        assert from_newest.replica_id in (1, 2, 3)
        if newest.dialect is not Dialect.V2_6:  # whose snapshots do not include it
            assert from_newest.synchro.promote() == from_oldest.synchro.promote()
            assert from_newest.synchro.raft == from_oldest.synchro.raft

    async def test_election_state_is_recovered(self) -> None:
        path = next(path for path in RECORDED if "tarantool-2.11/05-election/files/a" in str(path))
        _, found = await recovered(path)
        assert (found.synchro.raft.term, found.synchro.raft.vote) == (4, 1)
        assert (found.synchro.owner_id, found.synchro.term) == (1, 4)
        assert found.synchro.confirmed == {1: 13, 2: 2}

    @pytest.mark.real
    async def test_recovery_restores_the_data_of_a_real_server(self, tarantool: Any, tmp_path: Path) -> None:
        shown = tarantool.run(MIXED_WORKLOAD, tmp_path)
        box, found = await recovered(tmp_path)
        assert found.replica_id == 1
        spaces = ("t", "u", "loc", "q", "synced")
        assert {name: sorted(tuples(box, name)) for name in spaces} == _shown(shown)

    @pytest.mark.real
    @pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
    async def test_real_server_recovers_files_of_the_node(self, tarantool: Any, tmp_path: Path, mode: WalMode) -> None:
        node = await start(OUTSIDE, str(tmp_path), mode=mode, wal_max_size=20_000)
        await node.create_space("synced", 520, is_sync=True)
        await workload(node, Random(3), 150)
        await node.checkpointer.snapshot()
        await workload(node, Random(4), 150)
        # Only after the snapshot: 2.6.0 recovers no tuple of a synchronous space from a snapshot, even its own.
        await node.replace("synced", [1], [2])
        await node.replace("synced", [2, "again"])
        await node.close()
        names = ("t", "u", "loc", "q", "synced")
        expected = {name: tuples(node.box, name) for name in names}
        assert len(files(tmp_path, "*.xlog")) > 3
        shown = tarantool.run(f"box.cfg{{log='server.log'}} {SHOW.format(names=' '.join(names))} os.exit(0)", tmp_path)
        assert _shown(shown) == expected
        # The node recovers the files again, with the rows of the server.
        tarantool.run("box.cfg{log='server.log'} box.space.t:replace{77777, 'theirs'} os.exit(0)", tmp_path)
        box, _ = await recovered(tmp_path)
        assert (77777, "theirs") in tuples(box, "t")

    @pytest.mark.real
    async def test_real_server_recovers_an_unused_directory(self, tarantool: Any, tmp_path: Path) -> None:
        node = await start(OUTSIDE, str(tmp_path))
        await node.close()
        shown = tarantool.run("box.cfg{log='server.log'} print(box.info.uuid, box.info.id) os.exit(0)", tmp_path)
        assert shown.split() == [str(node.recovered.instance_uuid), "1"]


SHOW = """
local json = require('json')
for name in ('{names}'):gmatch('%S+') do
    for _, t in box.space[name]:pairs() do print(name, json.encode(t)) end
end
"""

MIXED_WORKLOAD = (
    """
box.cfg{log='server.log', wal_max_size=20000}
local t = box.schema.space.create('t') t:create_index('pk') t:create_index('sk', {parts={2, 'string'}, unique=false})
local u = box.schema.space.create('u') u:create_index('pk', {type='hash', parts={1, 'string'}})
local loc = box.schema.space.create('loc', {is_local=true}) loc:create_index('pk')
local q = box.schema.space.create('q') q:create_index('pk', {sequence=true})
local synced = box.schema.space.create('synced', {is_sync=true}) synced:create_index('pk')
math.randomseed(1)
local function work()
    for i = 1, 300 do
        local k = math.random(100)
        t:replace{k, 'v' .. i}
        if i % 3 == 0 then t:update(k, {{'=', 3, i}}) end
        if i % 7 == 0 then t:delete(k) end
        t:upsert({math.random(100), 'up'}, {{'=', 2, 'down' .. i}})
        u:replace{'k' .. k, i}
        loc:replace{k, i}
        q:insert{box.NULL, i}
        if i % 50 == 0 then synced:replace{i} end
        if i % 10 == 0 then box.begin() t:replace{k, 'a'} loc:replace{k, 'b'} u:replace{'c', i} box.commit() end
        if i % 10 == 5 then box.begin() t:replace{k, 'never'} box.rollback() end
    end
end
work() box.snapshot() u:truncate() work()
box.cfg{replication_synchro_quorum=2, replication_synchro_timeout=0.01}
pcall(synced.replace, synced, {1000}) pcall(synced.replace, synced, {1001})
"""
    + SHOW.format(names="t u loc q synced")
    + "os.exit(0)"
)


def _shown(text: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return the output of SHOW by space, each in key order."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for line in text.splitlines():
        name, values = line.split("\t")
        found.setdefault(name, []).append(unpack(pack(json.loads(values))))
    return {name: sorted(rows, key=lambda row: row[:1]) for name, rows in found.items()}


async def workload(node: SmallNode, rng: Random, count: int) -> None:
    """Run statements of all kinds on spaces of several kinds."""
    box = node.box
    if "t" not in box.names:
        await node.create_space("t")
        await node.create_space("u", 513, key_type="string")
        await node.create_space("loc", 514, group_id=1)
        await node.create_space("q", 515)
        await node.create_space("temp", 516, temporary=True)
    t, u = box.space("t"), box.space("u")
    for number in range(count):
        key = rng.randrange(50)
        await node.replace("t", [key, f"v{number}"])
        await node.replace("u", [f"k{key}", number, None, {"a": [1.5, True]}])
        await node.replace("loc", [key])
        await node.replace("q", [number], [number + 1, "x"])
        await node.replace("temp", [key])
        operations = pack([["=", 1, f"w{number}"]])
        other = pack([rng.randrange(50)])
        await node.write(partial(statements.update, space=t, index_id=0, key=other, operations=operations))
        await node.write(partial(statements.delete, space=t, index_id=0, key=other))
        up = pack([rng.randrange(50), "new"])
        await node.write(partial(statements.upsert, space=t, raw=up, operations=operations))

        def mixed(txn: Any, number: int = number, key: int = key) -> None:
            statements.replace(txn, t, pack([key, "mixed"]))
            statements.replace(txn, u, pack(["mixed", number]))
            statements.replace(txn, box.space("loc"), pack([1000 + number]))

        await node.write(mixed)


async def until_death(disk: FaultDisk, life: Coroutine[Any, Any, None]) -> None:
    """Run `life` until it ends or the disk dies."""
    death, loop = asyncio.Event(), asyncio.get_running_loop()
    disk.on_death = lambda: loop.call_soon_threadsafe(death.set)
    tasks = [asyncio.create_task(life), asyncio.create_task(death.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
        with suppress(Died, asyncio.CancelledError):
            await task


async def life(disk: FaultDisk, acknowledged: list[tuple[int, str]], mode: WalMode = WalMode.WRITE) -> None:
    """Write two tuples per transaction, with small logs and a snapshot; report acknowledged writes until the end."""
    node = await start(disk.outside(), "data", mode=mode, wal_max_size=1500)
    for number in range(25):
        await node.replace("t", [number, "x"], [number + 1, "y"])
        acknowledged += [(number, "x"), (number + 1, "y")]
        if number == 12:
            await node.checkpointer.snapshot()
    await node.close()


async def born() -> FaultDisk:
    """Return a disk with a node's directory and one space."""
    disk = FaultDisk()
    node = await start(disk.outside(), "data", mode=WalMode.FSYNC)
    await node.create_space("t")
    await node.close()
    return disk


def check_found(box: Box, told: list[tuple[int, str]]) -> None:
    """Check that all acknowledged writes are present; one more transaction may be, as a whole."""
    expected, found = dict(told), dict(tuples(box, "t"))
    following = len(expected) - 1 if expected else 0
    assert found in (expected, expected | {following: "x", following + 1: "y"})


class TestOwnDirectories:
    @pytest.mark.parametrize("dialect", list(Dialect))
    async def test_new_instance_is_bootstrapped_and_recovered(self, tmp_path: Path, dialect: Dialect) -> None:
        node = await start(OUTSIDE, str(tmp_path), dialect=dialect)
        await node.close()
        assert [path.name for path in files(tmp_path, "*")] == [f"{0:020}.snap"]
        again = await start(OUTSIDE, str(tmp_path))
        assert again.box.dialect is dialect
        assert again.recovered.instance_uuid == node.recovered.instance_uuid
        assert again.recovered.replicaset_uuid == node.recovered.replicaset_uuid
        assert again.recovered.replica_id == 1
        assert again.recovered.vclock == VClock()
        assert state(again.box) == state(node.box)

    async def test_first_snapshot_has_the_rows_of_a_real_one_in_order(self, tmp_path: Path) -> None:
        def shapes(path: Path) -> list[tuple[int, int, int, object]]:
            with LogFile.open(OUTSIDE.disk, str(path)) as file:
                bodies = [(row, unpack(row.body)) for row in file.rows()]
            return [
                (row.type, row.group_id, row.lsn, row.body if row.type != 2 else body[0x10]) for row, body in bodies
            ]

        node = await start(OUTSIDE, str(tmp_path), dialect=Dialect.V2_11)
        await node.close()
        recorded = next(path for path in RECORDED if "tarantool-2.11/01-join-subscribe/files/master" in str(path))
        assert shapes(tmp_path / f"{0:020}.snap") == shapes(recorded / f"{0:020}.snap")

    async def test_bootstrap_uses_the_given_uuids_and_first_user(self, tmp_path: Path) -> None:
        box = Box(Dialect.V2_11)
        one, two = UUID(int=1 << 100), UUID(int=2 << 100)
        user = FirstUser("jane", b"x" * 20)
        found = await bootstrap(OUTSIDE, str(tmp_path), box, instance_uuid=one, replicaset_uuid=two, first_user=user)
        assert (found.instance_uuid, found.replicaset_uuid) == (one, two)
        again, _ = await recovered(tmp_path)
        assert "jane" in [row[2] for row in tuples(again, "_user")]

    @pytest.mark.parametrize("dialect", list(Dialect))
    @pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
    async def test_recovery_restores_all_written_data(self, dialect: Dialect, mode: WalMode) -> None:
        disk = FaultDisk()
        node = await start(disk.outside(), "data", dialect=dialect, mode=mode, wal_max_size=9000)
        await workload(node, Random(1), 60)
        await node.checkpointer.snapshot()
        await workload(node, Random(2), 60)
        again = await start(disk.after_death().outside(), "data")
        assert state(again.box) == state(node.box)
        assert again.recovered.vclock == node.journal.written_vclock
        await workload(again, Random(3), 10)
        await again.close()
        third = await start(again.outside, "data")
        assert state(third.box) == state(again.box)

    async def test_large_runs_and_single_rows_are_recovered_alike(self, tmp_path: Path) -> None:
        node = await start(OUTSIDE, str(tmp_path))
        await node.create_space("t")
        await node.create_space("s", 513, key_type="string")
        for number in range(300):
            await node.replace("t", [number, "a"])
        for number in range(300):
            await node.replace("s", [f"k{number % 200}", number])
        await node.replace("t", *([number, "b"] for number in range(20)))
        await node.close()
        again = await start(OUTSIDE, str(tmp_path))
        assert state(again.box) == state(node.box)
        assert again.recovered.vclock == node.journal.vclock

    async def test_acknowledged_writes_are_recovered_after_a_kill_at_any_byte(self) -> None:
        first = await born()
        disk = first.after_death()
        await life(disk, [])
        total = sum(len(inode.data) for inode in disk.names.values())
        for number in range(0, total, 29 if FULL else 701):
            disk = first.after_death()
            disk.life = number
            told: list[tuple[int, str]] = []
            await until_death(disk, life(disk, told))
            node = await start(disk.after_death().outside(), "data")
            check_found(node.box, told)

    async def test_writes_acknowledged_with_fsync_are_recovered_after_a_power_loss(self) -> None:
        first = await born()
        for seed in range(500 if FULL else 25):
            rng = Random(seed)
            disk = first.after_death()
            disk.life = rng.randrange(9000)
            told: list[tuple[int, str]] = []
            await until_death(disk, life(disk, told, WalMode.FSYNC))
            node = await start(disk.after_power_loss(rng).outside(), "data")
            check_found(node.box, told)

    async def test_torn_end_is_ignored_and_overwritten(self, caplog: pytest.LogCaptureFixture) -> None:
        disk = FaultDisk()
        node = await start(disk.outside(), "data")
        await node.create_space("t")
        await node.replace("t", [1])
        before = state(node.box)
        await node.replace("t", [2])
        log = next(inode for name, inode in disk.names.items() if name.endswith(".xlog"))
        del log.data[-1]
        again = await start(disk.outside(), "data")
        assert state(again.box) == before
        assert "bytes of an incomplete write at byte" in caplog.text
        await again.replace("t", [3])
        await again.close()
        third = await start(disk.outside(), "data")
        assert tuples(third.box, "t") == [(1,), (3,)]

    async def test_logs_without_a_snapshot_are_rejected(self, tmp_path: Path) -> None:
        node = await start(OUTSIDE, str(tmp_path))
        await node.create_space("t")
        await node.close()
        (tmp_path / f"{0:020}.snap").unlink()
        with pytest.raises(NothingToRecover, match="no snapshot in"):
            await recovered(tmp_path)

    async def test_recovery_removes_incomplete_files_of_a_crash(self, tmp_path: Path) -> None:
        node = await start(OUTSIDE, str(tmp_path))
        await node.close()
        (tmp_path / f"{5:020}.snap.inprogress").write_bytes(b"SNAP")
        await recovered(tmp_path)
        assert not files(tmp_path, "*.inprogress")

    async def test_snapshots_and_logs_in_separate_directories_are_recovered(self, tmp_path: Path) -> None:
        node = await start(OUTSIDE, str(tmp_path / "all"))
        await node.create_space("t")
        await node.close()
        (tmp_path / "logs").mkdir()
        for log in (tmp_path / "all").glob("*.xlog"):
            log.rename(tmp_path / "logs" / log.name)
        apart = find_files(OUTSIDE.disk, str(tmp_path / "all"), str(tmp_path / "logs"))
        box = Box(Dialect.V2_6)
        await recover(OUTSIDE, apart, box)
        assert state(box) == state(node.box)


class TestDamage:
    @pytest.fixture
    async def directory(self, tmp_path: Path) -> Path:
        """Three logs of two blocks each after the first snapshot, 60 tuples in all."""
        node = await start(OUTSIDE, str(tmp_path))
        await node.create_space("t")
        for part in range(3):
            for half in range(2):
                first = part * 20 + half * 10
                await node.replace("t", *([number, "x" * 300] for number in range(first, first + 10)))
            await node.journal.rotate()
        await node.close()
        return tmp_path

    async def test_damaged_block_is_reported_and_skipped_with_force(self, directory: Path) -> None:
        log = files(directory, "*.xlog")[1]
        data = bytearray(log.read_bytes())
        with LogFile.open(OUTSIDE.disk, str(log)) as file:
            data[file.first_block + 30] ^= 1
        log.write_bytes(data)
        with pytest.raises(DamagedLog, match=f"{log.name}.* with force_recovery, or copy the file"):
            await recovered(directory)
        box, found = await recovered(directory, force=True)
        assert [row[0] for row in tuples(box, "t")] == [*range(20), *range(30, 60)]
        assert any(log.name in what for what in found.left_out)

    async def test_missing_log_is_a_gap(self, directory: Path) -> None:
        files(directory, "*.xlog")[1].unlink()
        with pytest.raises(LogGap):
            await recovered(directory)
        box, _ = await recovered(directory, force=True)
        assert [row[0] for row in tuples(box, "t")] == [*range(20), *range(40, 60)]

    async def test_truncated_log_is_a_gap_if_another_follows(self, directory: Path) -> None:
        log = files(directory, "*.xlog")[0]
        log.write_bytes(log.read_bytes()[:-40])
        with pytest.raises(LogGap, match=r"LSN \d+\.\.\d+ of replica 1 missing"):
            await recovered(directory)
        _, found = await recovered(directory, force=True)
        assert any("gap" in what for what in found.left_out)

    async def test_log_of_another_instance_is_rejected(self, directory: Path) -> None:
        log = files(directory, "*.xlog")[2]
        data = log.read_bytes()
        at = data.index(b"Instance: ") + 10
        log.write_bytes(data[:at] + b"00000000" + data[at + 8 :])
        with pytest.raises(ForeignFile):
            await recovered(directory)

    async def test_row_that_cannot_be_applied_is_reported_and_skipped_with_force(self, tmp_path: Path) -> None:
        node = await start(OUTSIDE, str(tmp_path))
        await node.create_space("t")
        await node.replace("t", [1])
        # Bypass the journal: the log will have two inserts of one key.
        t = node.box.space("t")
        assert t.primary is not None
        t.primary.set(1, None)
        await node.write(lambda txn: statements.insert(txn, t, pack([1, "again"])))
        await node.replace("t", [2])
        await node.close()
        with pytest.raises(RecoveryError, match=r"LSN \d+ of replica 1: Duplicate key"):
            await recovered(tmp_path)
        box, found = await recovered(tmp_path, force=True)
        assert tuples(box, "t") == [(1,), (2,)]
        assert found.vclock == node.journal.vclock
        assert len(found.left_out) == 1


def test_second_process_is_rejected_with_one_clear_error(tmp_path: Path) -> None:
    directory = str(tmp_path / "data")
    with lock_directory(OUTSIDE.disk, directory):
        with pytest.raises(AlreadyLocked) as caught:
            lock_directory(OUTSIDE.disk, directory)
        assert directory in str(caught.value)
        assert isinstance(caught.value, FlowstoneError)
    lock_directory(OUTSIDE.disk, directory).release()


async def test_replica_id_is_recovered_from_the_row_of_cluster(tmp_path: Path) -> None:
    node = await start(OUTSIDE, str(tmp_path))
    cluster = node.box.space(system.CLUSTER_ID)
    await node.write(lambda txn: statements.delete(txn, cluster, 0, pack([1])))
    await node.close()
    _, found = await recovered(tmp_path)
    assert found.replica_id == 0
