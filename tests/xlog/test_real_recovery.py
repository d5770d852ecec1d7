"""The real Tarantool recovers directories that we wrote, with exactly the data of our model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowstone.iproto.constants import GROUP_LOCAL
from flowstone.iproto.msgpack import pack, unpack_body
from flowstone.outside import production
from flowstone.xlog.block import ROW_MAGIC, ZROW_MAGIC
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.reader import LogFile
from flowstone.xlog.writer import LogWriter, SnapWriter
from tests.conftest import FULL
from tests.xlog.model import INSTANCE, LATE, LOCAL, STRICT, TYPED, World, system_tuples

DISK = production().disk
TRANSACTIONS = 3000 if FULL else 300
DUMP = """
box.cfg{log='server.log', memtx_memory=64*1024*1024}
local function main()
    local msgpack, found = require('msgpack'), {}
    for _, space in box.space._space:pairs({512}, {iterator='GE'}) do
        local tuples = setmetatable({}, {__serialize='array'})
        for _, tuple in box.space[space.id]:pairs() do
            table.insert(tuples, (msgpack.encode(tuple):hex()))
        end
        for number, index in pairs(box.space[space.id].index) do
            if type(number) == 'number' then assert(index:count() == #tuples) end
        end
        found[tostring(space.id)] = tuples
    end
    local vclock = {}
    for id, lsn in pairs(box.info.vclock) do vclock[tostring(id)] = tonumber(lsn) end
    AFTERWARDS
    io.stdout:write(require('json').encode({data=found, vclock=vclock, uuid=box.info.uuid}))
end
local ok, problem = pcall(main)
if not ok then io.stderr:write(tostring(problem)) end
os.exit(ok and 0 or 1)
"""


def write_snapshot(world: World, directory: Path) -> None:
    spaces = [TYPED, STRICT, LOCAL]
    for space in spaces:
        world.define(space)
        for _ in range(200):
            world.put(space, world.random_tuple(space))
    world.vclock = {1: 7, 0: 2}
    meta = Meta(FileType.SNAP, INSTANCE, world.vclock)
    with SnapWriter(DISK, str(directory), meta, 1.7e9) as snap:
        for space_id, tuples in system_tuples(spaces).items():
            snap.add_tuples(space_id, map(pack, tuples))
        for space in spaces:
            # Servers accept rows in any order, so these are in insertion order instead of key order.
            tuples = list(world.data[space.id].values())
            snap.add_tuples(space.id, map(pack, tuples), GROUP_LOCAL if space.is_local else 0)


def write_directory(world: World, directory: Path, batch: int) -> LogWriter:
    """Write a snapshot and several logs; leave the last log open."""
    directory.mkdir(parents=True, exist_ok=True)
    write_snapshot(world, directory)
    log = LogWriter.create(DISK, str(directory), Meta(FileType.XLOG, INSTANCE, world.vclock))
    log.append([world.create(LATE)])
    for number in range(0, TRANSACTIONS, batch):
        log.append([world.transaction() for _ in range(batch)])
        if number and number % (TRANSACTIONS // 4) < batch:
            log.sync()
            log = log.rotate()
    return log


Recovered = tuple[dict[int, list[str]], dict[int, int]]


def recover(tarantool: Any, directory: Path, afterwards: str = "") -> Recovered:
    """Return the tuples per space and the vclock of a real server that recovered the directory."""
    found = json.loads(tarantool.run(DUMP.replace("AFTERWARDS", afterwards), directory))
    assert found["uuid"] == INSTANCE
    data = {int(space_id): sorted(tuples) for space_id, tuples in found["data"].items()}
    return data, {int(replica_id): lsn for replica_id, lsn in found["vclock"].items()}


def log_bytes(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.xlog")))


@pytest.mark.parametrize("batch", [1, 30], ids=["plain", "compressed"])
def test_real_server_recovers_our_files(tarantool: Any, tmp_path: Path, batch: int) -> None:
    world = World(seed=batch)
    log = write_directory(world, tmp_path, batch)
    log.close()
    assert len(list(tmp_path.glob("*.xlog"))) >= 4
    assert (ZROW_MAGIC if batch > 1 else ROW_MAGIC) in log_bytes(tmp_path)
    data, vclock = recover(tarantool, tmp_path)
    assert data == world.dump()
    assert vclock == world.vclock == log.vclock


def test_real_server_continues_and_we_read_its_snapshot(tarantool: Any, tmp_path: Path) -> None:
    world = World(seed=3)
    write_directory(world, tmp_path, 7).close()
    recover(tarantool, tmp_path, "box.space.late:replace{1000000, 5, 'theirs'} box.snapshot()")
    world.put(LATE, (1000000, 5, "theirs"))
    newest = scan_directory(DISK, str(tmp_path)).newest_snapshot()
    assert newest is not None
    assert newest.meta.vclock == world.vclock | {1: world.vclock[1] + 1}
    found: dict[int, list[str]] = {space_id: [] for space_id in world.data}
    with LogFile.open(DISK, newest.path) as snap:
        for row in snap.rows():
            body = unpack_body(row.body)
            if body[0x10] >= 512:
                found[body[0x10]].append(row.body[8:].hex())
    assert {space_id: sorted(tuples) for space_id, tuples in found.items()} == world.dump()


@pytest.mark.parametrize("lost", [1, 20, 60])
def test_real_server_recovers_our_log_with_a_torn_tail(tarantool: Any, tmp_path: Path, lost: int) -> None:
    world = World(seed=lost)
    log = write_directory(world, tmp_path, 5)
    expected, vclock = world.dump(), dict(world.vclock)
    size = log.size
    log.append([world.transaction() for _ in range(8)])
    whole = log.size
    log.abandon()
    with DISK.append_to(log.path) as file:
        file.truncate(max(size + 1, whole - lost))
    data, found = recover(tarantool, tmp_path)
    assert data == expected
    assert found == vclock


def test_real_server_recovers_a_log_that_was_torn_and_continued(tarantool: Any, tmp_path: Path) -> None:
    world = World(seed=11)
    log = write_directory(world, tmp_path, 5)
    log.abandon()
    with DISK.append_to(log.path) as file:
        file.append(ROW_MAGIC + b"\x20\x00")
    log = LogWriter.reopen(DISK, log.path)
    assert log.vclock == world.vclock
    log.append([world.transaction() for _ in range(20)])
    log.close()
    data, vclock = recover(tarantool, tmp_path)
    assert data == world.dump()
    assert vclock == world.vclock
