"""Checkpoints: a snapshot is the state of one moment, despite concurrent writes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.box import Box
from flowstone.box.definitions import read_index, read_space, with_indexes
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.space import EngineSpace
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.node.wal.journal import WalMode
from flowstone.outside import Outside
from flowstone.replication.limbo.control_rows import Promote, RaftState
from flowstone.replication.limbo.tenures import Tenures
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed
from flowstone.xlog.reader import LogFile
from tests.node.fault_disk import FaultDisk
from tests.node.small_node import SmallNode, start, state


def snapshots(disk: FaultDisk) -> list[int]:
    return [int(name[:20]) for name in disk.list_directory("data") if name.endswith(".snap")]


async def tick(count: int = 1) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Any, seconds: float = 20) -> None:
    """Waits for `condition`, with a deadline."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition is of another task's making
            await asyncio.sleep(0)


class Clock:
    """A manual clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleepers: list[tuple[float, asyncio.Future[None]]] = []
        self.timers: list[tuple[float, asyncio.Future[None]]] = []
        """Timers of checkpoints, which sleep long."""

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.now + seconds, future))
        if seconds > 1:
            self.timers.append(self.sleepers[-1])
        await future

    async def advance(self, seconds: float) -> None:
        self.now += seconds
        for due, future in list(self.sleepers):
            if due <= self.now and not future.done():
                future.set_result(None)
        await tick(3)


def with_clock(disk: FaultDisk, clock: Clock) -> Outside:
    return replace(disk.outside(), clock=clock)


def is_in_progress(node: SmallNode) -> bool:
    return bool(node.checkpointer.gc_info()["checkpoint_is_in_progress"])


async def small_node(disk: FaultDisk, **options: Any) -> SmallNode:
    node = await start(disk.outside(), "data", **options)
    await node.create_space("t")
    return node


@pytest.mark.parametrize("mode", list(WalMode))
async def test_requested_snapshot_is_complete_and_recoverable(mode: WalMode) -> None:
    disk = FaultDisk()
    node = await small_node(disk, mode=mode)
    await node.replace("t", [1], [2])
    await node.checkpointer.snapshot()
    lsn = node.journal.written_vclock.signature
    assert snapshots(disk) == [0, lsn]
    again = await start(disk.outside(), "data")
    assert state(again.box) == state(node.box)
    assert again.recovered.vclock == node.journal.written_vclock
    assert node.checkpointer.gc_info()["checkpoints"][-1]["signature"] == lsn


async def test_second_snapshot_at_the_same_position_is_skipped() -> None:
    disk = FaultDisk()
    node = await small_node(disk)
    await node.checkpointer.snapshot()
    before = dict(disk.names)
    await node.checkpointer.snapshot()
    assert disk.names == before


@pytest.mark.parametrize("allowed", [0, 1])
async def test_checkpoint_rejected_after_its_start_is_not_kept(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    disk = FaultDisk()
    node = await small_node(disk)
    answers = iter([None] * allowed + [errors.Unsupported("expelled")] * 2)
    monkeypatch.setattr(node.checkpointer, "_refusal", lambda: next(answers))
    with pytest.raises(errors.Unsupported, match="expelled"):
        await node.checkpointer.snapshot()
    assert snapshots(disk) == [0]
    assert not is_in_progress(node)
    await node.checkpointer._make_unasked()
    assert snapshots(disk) == [0]


async def test_log_ends_at_the_snapshot_and_older_files_are_deleted() -> None:
    disk = FaultDisk()
    node = await small_node(disk)
    for number in range(4):
        await node.replace("t", [number])
        await node.checkpointer.snapshot()
    await node.replace("t", [9])
    await node.close()
    assert disk.list_directory("data") == [
        f"{5:020}.snap",
        f"{5:020}.xlog",
        f"{6:020}.snap",
        f"{6:020}.xlog",
    ]
    assert node.checkpointer.gc_vclock == VClock({1: 5})


async def test_writes_during_a_checkpoint_are_in_the_log_and_not_in_the_snapshot() -> None:
    disk = FaultDisk()
    node = await small_node(disk)
    await node.replace("t", *([number, "before"] for number in range(0, 5000, 2)))
    expected = state(node.box)
    lsn = node.journal.vclock.signature
    making = asyncio.create_task(node.checkpointer.snapshot())
    rng = Random(1)
    await tick()
    t = node.box.space("t")
    while not making.done():
        await node.replace("t", [rng.randrange(5000), "after"])
        await node.write(lambda txn: statements.delete(txn, t, 0, pack([rng.randrange(5000)])))
        await tick()
    await making
    assert node.journal.vclock.signature > lsn
    only = FaultDisk()
    only.names = {name: inode for name, inode in disk.names.items() if name == f"data/{lsn:020}.snap"}
    alone = await start(only.outside(), "data")
    assert state(alone.box) == expected
    again = await start(disk.after_death().outside(), "data")
    assert state(again.box) == state(node.box)


async def test_concurrent_checkpoint_request_is_rejected() -> None:
    node = await small_node(FaultDisk())
    making = asyncio.create_task(node.checkpointer.snapshot())
    await tick()
    assert is_in_progress(node)
    with pytest.raises(errors.TarantoolError, match="Snapshot is already in progress") as caught:
        await node.checkpointer.snapshot()
    assert caught.value.code == 120
    await making
    assert not is_in_progress(node)


async def test_old_files_are_deleted_when_a_backup_ends() -> None:
    disk = FaultDisk()
    node = await small_node(disk, checkpoint_count=1)
    await node.checkpointer.snapshot()
    (path,) = node.checkpointer.start_backup(0)
    await node.replace("t", [1])
    await node.checkpointer.snapshot()
    assert path in disk.names
    node.checkpointer.stop_backup()
    await until(lambda: path not in disk.names)
    assert len(snapshots(disk)) == 1
    await node.close()


async def test_checkpoint_on_a_full_disk_keeps_the_old_one_and_leaves_no_partial_file() -> None:
    disk = FaultDisk()
    node = await small_node(disk)
    await node.replace("t", *([number, "x" * 100] for number in range(3000)))
    disk.room = 3000
    with pytest.raises(WriteFailed, match="No space left"):
        await node.checkpointer.snapshot()
    assert snapshots(disk) == [0]
    assert not [name for name in disk.names if name.endswith(".inprogress")]
    assert not node.box.views
    disk.room = None
    await node.replace("t", [1, "later"])
    await node.checkpointer.snapshot()
    assert len(snapshots(disk)) == 2
    again = await start(disk.outside(), "data")
    assert state(again.box) == state(node.box)


async def test_checkpoint_fails_when_its_rows_cannot_be_written() -> None:
    disk = FaultDisk()
    node = await small_node(disk, mode=WalMode.FSYNC)
    before = state(node.box)
    disk.broken.add("append")
    writing = asyncio.create_task(node.replace("t", [1]))
    await tick()
    with pytest.raises(WriteFailed):
        await node.checkpointer.snapshot()
    with pytest.raises(errors.TarantoolError):
        await writing
    assert state(node.box) == before
    assert snapshots(disk) == [0]


async def test_snapshot_omits_temporary_spaces_and_marks_local_ones() -> None:
    disk = FaultDisk()
    node = await small_node(disk)
    await node.create_space("loc", 600, group_id=1)
    await node.create_space("temp", 601, temporary=True)
    await node.create_space("v", 602, engine="vinyl")
    for name in ("loc", "temp", "t", "v"):
        await node.replace(name, [1])
    await node.checkpointer.snapshot()
    with LogFile.open(disk.outside().disk, f"data/{snapshots(disk)[-1]:020}.snap") as file:
        rows = [(row.group_id, unpack(row.body)) for row in file.rows()]
    assert [(group, body[0x10]) for group, body in rows if body[0x10] >= 512] == [(0, 512), (1, 600), (0, 602)]
    spaces = [body[0x10] for _, body in rows]
    assert spaces == sorted(spaces)


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_snapshot_has_the_election_state_between_system_and_user_spaces(dialect: Dialect) -> None:
    disk = FaultDisk()
    node = await small_node(disk, dialect=dialect)
    await node.replace("t", [1])
    node.recovered.synchro.raft = RaftState(term=4, vote=1)
    promote = Promote(1, 13, 4, VClock({1: 13, 2: 2}))
    node.commits.queue.start(1, promote, Tenures({1: 4}, (), {}), ())
    await node.checkpointer.snapshot()
    with LogFile.open(disk.outside().disk, f"data/{snapshots(disk)[-1]:020}.snap") as file:
        rows = list(file.rows())
    assert [row.lsn for row in rows] == list(range(len(rows)))
    kinds = [row.type for row in rows[-3:]]
    if dialect is Dialect.V2_6:
        assert kinds == [RequestType.INSERT] * 3
        return
    assert kinds == [RequestType.RAFT, RequestType.RAFT_PROMOTE, RequestType.INSERT]
    # As 2.11.9 wrote it in the recorded election.
    assert rows[-3].body == bytes.fromhex("8200040101")
    assert unpack(rows[-2].body) == {2: 1, 3: 13, 0x53: 4, 0x26: {1: 13, 2: 2}}
    assert (rows[-3].group_id, rows[-2].group_id) == (1, 0)
    again = await start(disk.outside(), "data")
    assert again.recovered.synchro.raft == RaftState(term=4, vote=1)
    assert again.recovered.synchro.promote() == promote


async def test_checkpoint_interval_has_jitter_at_first() -> None:
    disk, clock = FaultDisk(), Clock()
    node = await start(with_clock(disk, clock), "data", checkpoint_interval=100.0)
    await node.create_space("t")
    node.checkpointer.start()
    await tick(2)
    assert len(clock.timers) == 1
    assert 1100 <= clock.timers[0][0] <= 1200
    await clock.advance(200)
    await until(lambda: len(snapshots(disk)) == 2)
    await node.replace("t", [1])
    await until(lambda: len(clock.timers) == 2)
    assert clock.timers[1][0] == 1300
    await clock.advance(100)
    await until(lambda: snapshots(disk)[-1] == 3)
    node.checkpointer.reconfigure(checkpoint_interval=0)
    await tick(3)
    assert all(future.done() for _, future in clock.timers)
    await node.close()


async def test_checkpoint_is_made_when_the_log_reaches_its_size() -> None:
    disk = FaultDisk()
    node = await small_node(disk, checkpoint_wal_threshold=5000, checkpoint_interval=0)
    node.checkpointer.start()
    for number in range(200):
        await node.replace("t", [number, "x" * 50])
        if is_in_progress(node):
            break
    node.checkpointer.reconfigure(checkpoint_wal_threshold=10**18)
    await until(lambda: len(snapshots(disk)) == 2 and not is_in_progress(node))
    node.checkpointer.reconfigure(checkpoint_count=1)
    last = snapshots(disk)
    for number in range(200):
        await node.replace("t", [number, "x" * 50])
    assert snapshots(disk) == last
    await node.checkpointer.snapshot()
    assert len(snapshots(disk)) == 1
    await node.close()


async def test_failed_scheduled_checkpoint_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    disk, clock = FaultDisk(), Clock()
    node = await start(with_clock(disk, clock), "data", checkpoint_interval=100.0)
    await node.create_space("t")
    node.checkpointer.start()
    disk.broken.add("create")
    await tick(2)
    await clock.advance(200)
    await until(lambda: "checkpoint failed" in caplog.text)
    await node.close()


async def test_stop_abandons_a_checkpoint_in_progress() -> None:
    disk, clock = FaultDisk(), Clock()
    node = await start(with_clock(disk, clock), "data", checkpoint_interval=100.0)
    await node.create_space("t")
    await node.replace("t", *([number] for number in range(5000)))
    node.checkpointer.start()
    await tick(2)
    await clock.advance(200)
    await until(lambda: is_in_progress(node))
    await node.close()
    assert not node.box.views
    again = await start(disk.after_death().outside(), "data")
    assert state(again.box) == state(node.box)


async def test_checkpoint_does_not_block_the_event_loop() -> None:
    disk = FaultDisk()
    node = await small_node(disk)
    t = node.box.space("t")
    assert t.primary is not None
    for number in range(100_000):
        t.primary.set(number, pack([number, "some text", number * 7]))
    making = asyncio.create_task(node.checkpointer.snapshot())
    pauses = []
    while not making.done():
        begin = time.perf_counter()
        await asyncio.sleep(0)
        pauses.append(time.perf_counter() - begin)
    await making
    pauses.sort()
    # Other processes share the machine, so an occasional longer pause is not ours.
    assert pauses[int(len(pauses) * 0.99)] < 0.02


def index_of(box: Box, kind: str) -> EngineIndex:
    space = with_indexes(
        read_space((512, 1, "t", "memtx", 0, {}, ())),
        [read_index((512, 0, "pk", kind, {"unique": True}, ((0, "unsigned"),)))],
    )
    index = EngineSpace(space, {}, box.views).primary
    assert index is not None
    return index


OPERATIONS = st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=12)


@given(
    st.sampled_from(["tree", "hash"]),
    st.sets(st.integers(0, 30)),
    OPERATIONS,
    st.lists(OPERATIONS, max_size=12),
    st.integers(1, 7),
)
def test_slices_equal_the_view_despite_writes_between_them(
    kind: str, keys: set[int], first: list[tuple[int, bool]], later: list[list[tuple[int, bool]]], count: int
) -> None:
    box = Box(Dialect.V2_6)
    index = index_of(box, kind)
    for key in sorted(keys):
        index.set(key, pack([key]))

    def change(operations: list[tuple[int, bool]]) -> None:
        for key, is_there in operations:
            index.set(key, pack([key, "new"]) if is_there else None)

    with box.open_view() as view:
        change(first)
        found: list[bytes] = []
        steps = iter(later)
        for piece in view.slices(index, count):
            found += piece
            change(next(steps, []))
    expected = [pack([key]) for key in sorted(keys)]
    assert (found if kind == "tree" else sorted(found, key=unpack)) == expected


@pytest.mark.parametrize("step", [1, 7919], ids=["rising", "scattered"])
def test_slices_end_even_if_keys_are_added_faster_than_tuples_are_read(step: int) -> None:
    box = Box(Dialect.V2_6)
    index = index_of(box, "tree")
    keys = [number * step % 1_000_003 for number in range(400_000)]
    old, new = keys[:20_000], iter(keys[20_000:])
    for key in old:
        index.set(key, pack([key]))
    found: list[bytes] = []
    with box.open_view() as view:
        for piece in view.slices(index, 500):
            found += piece
            for key in islice(new, 1500):
                index.set(key, pack([key, "new"]))
    assert found == [pack([key]) for key in sorted(old)]
    assert next(new, None) is not None, "the snapshot outlasted the load"
