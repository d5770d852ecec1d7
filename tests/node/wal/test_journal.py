"""The journal keeps its promise: rows reported as written are found again, despite any disk fault."""

from __future__ import annotations

import asyncio
import errno
import time
from contextlib import suppress
from random import Random

import pytest

from flowstone.errors import FlowstoneError
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.node.wal.journal import Journal, JournalClosed, LastLog, WalMode
from flowstone.replication.row_stream import RowStream, StreamError
from flowstone.replication.vclock import VClock
from flowstone.xlog.block import TRANSACTION_SIZE_MAX
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.errors import BlockTooLarge, WriteFailed
from flowstone.xlog.reader import EndingKind, LogFile
from flowstone.xlog.transactions import make_transaction
from tests.conftest import FULL
from tests.node.fault_disk import Died, FaultDisk

UUID = "11111111-0000-4000-8000-000000000001"
DIRECTORY = "data"


def journal(disk: FaultDisk, mode: WalMode = WalMode.WRITE, **how: object) -> Journal:
    options: dict[str, object] = {"instance_uuid": UUID, "vclock": VClock(), "replica_id": 1, "mode": mode}
    return Journal(disk.outside(), DIRECTORY, **(options | how))  # type: ignore[arg-type]


class Writer:
    """Submits transactions of known content and records their results."""

    def __init__(self, log: Journal) -> None:
        self.log = log
        self.told: list[tuple[int, FlowstoneError | None]] = []
        self.acknowledged: list[tuple[int, str]] = []

    def submit(self, note: str, rows: int = 1) -> int:
        first = self.log.next_lsn(1)
        made = [
            Row(3, 1, lsn=lsn, timestamp=1.7e9, body=b"\x82\x10\xcd\x02\x00\x21" + pack([lsn, note]))
            for lsn in range(first, first + rows)
        ]
        data = b"".join(row.encode() for row in make_transaction(made).rows)

        def done(error: FlowstoneError | None) -> None:
            self.told.append((first, error))
            if error is None:
                self.acknowledged += [(lsn, note) for lsn in range(first, first + rows)]

        self.log.submit(data, rows, done)
        return first

    @property
    def failures(self) -> list[int]:
        return [lsn for lsn, error in self.told if error is not None]


def found(disk: FaultDisk) -> list[tuple[int, str]]:
    """Return (LSN, note) of every row in the directory, in order; check transactions and names."""
    rows: list[tuple[int, str]] = []
    outside = disk.outside()
    directory = scan_directory(outside.disk, DIRECTORY)
    for listed in directory.files_from({}):
        assert sum(listed.meta.vclock.values()) == (rows[-1][0] if rows else 0), "a gap between files"
        with LogFile.open(outside.disk, listed.path) as log:
            for transaction in log.transactions():
                for row in transaction.rows:
                    note = row.body.split(b"\x21", 1)[1]
                    rows.append((row.lsn, note.decode("latin-1")[-1]))
    assert [lsn for lsn, _ in rows] == list(range(1, len(rows) + 1))
    return rows


def names(disk: FaultDisk) -> list[str]:
    return disk.list_directory(DIRECTORY)


@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
async def test_journal_writes_submissions_of_one_turn_in_one_append(mode: WalMode) -> None:
    disk = FaultDisk()
    log = journal(disk, mode)
    writer = Writer(log)
    writer.submit("a")
    log.flush()
    await log.drain()
    before = disk.appends
    for _ in range(1000):
        writer.submit("b", 2)
    log.flush()
    await log.drain()
    assert disk.appends == before + 1
    assert log.written_vclock == log.vclock == VClock({1: 2001})
    assert found(disk) == writer.acknowledged
    assert len(writer.acknowledged) == 2001


async def test_write_without_sync_is_complete_when_flush_returns() -> None:
    log = journal(FaultDisk())
    writer = Writer(log)
    writer.submit("a")
    await log.drain()
    writer.submit("b")
    log.flush()
    assert log.is_idle
    assert writer.acknowledged == [(1, "a"), (2, "b")]


async def test_journal_creates_no_file_before_the_first_write() -> None:
    disk = FaultDisk()
    log = journal(disk)
    log.flush()
    await log.drain()
    await log.close()
    assert names(disk) == []


async def test_closed_journal_has_finished_its_file() -> None:
    disk = FaultDisk()
    log = journal(disk)
    Writer(log).submit("a")
    await log.close()
    with LogFile.open(disk.outside().disk, f"{DIRECTORY}/{0:020}.xlog") as file:
        assert len(list(file.rows())) == 1
        assert file.ending is not None
        assert file.ending.kind is EndingKind.COMPLETE


@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
async def test_close_releases_a_new_file_whose_first_write_failed(mode: WalMode) -> None:
    full = FaultDisk()
    log = journal(full, mode)
    full.room = 200  # enough for the header of the file, too little for the row
    Writer(log).submit("a" * 200)
    await log.drain()
    assert full.open_paths
    await log.close()
    assert full.open_paths == []
    assert names(full) == [f"{0:020}.xlog"]
    assert found(full) == []


@pytest.mark.parametrize("mode", list(WalMode))
async def test_closed_journal_rejects_submissions_and_touches_no_file(mode: WalMode) -> None:
    disk = FaultDisk()
    log = journal(disk, mode)
    writer = Writer(log)
    writer.submit("a")
    await log.close()
    before = {name: bytes(inode.data) for name, inode in disk.names.items()}
    with pytest.raises(JournalClosed, match="the log in data is closed"):
        writer.submit("b")
    with pytest.raises(JournalClosed):
        await log.rotate()
    await log.close()
    assert {name: bytes(inode.data) for name, inode in disk.names.items()} == before
    assert (log.vclock, writer.acknowledged) == (VClock({1: 1}), [(1, "a")])


async def test_mode_none_counts_rows_without_writing_them() -> None:
    disk = FaultDisk()
    log = journal(disk, WalMode.NONE)
    writer = Writer(log)
    writer.submit("a", 3)
    log.flush()
    assert log.is_idle
    assert log.written_vclock == VClock({1: 3})
    assert len(writer.acknowledged) == 3
    assert await log.rotate() == VClock({1: 3})
    await log.close()
    assert names(disk) == []


async def test_local_rows_count_in_component_zero() -> None:
    log = journal(FaultDisk())
    told: list[object] = []
    row = Row(2, 0, group_id=1, lsn=log.next_lsn(0), timestamp=1.0, body=b"\x80")
    log.submit(row.encode(), 0, told.append, local_count=1)
    await log.drain()
    assert told == [None]
    assert log.written_vclock == VClock({0: 1})


async def test_relays_receive_the_bytes_and_the_position_of_each_write() -> None:
    disk = FaultDisk()
    log = journal(disk)
    seen: list[tuple[bytes, VClock]] = []
    log.on_written.append(lambda rows, vclock: seen.append((rows, vclock)))
    writer = Writer(log)
    writer.submit("a")
    writer.submit("b")
    await log.drain()
    writer.submit("c")
    log.flush()
    assert [vclock for _, vclock in seen] == [VClock({1: 2}), VClock({1: 3})]
    path = f"{DIRECTORY}/{0:020}.xlog"
    with LogFile.open(disk.outside().disk, path) as file:
        assert b"".join(row.raw for row in file.rows()) == b"".join(rows for rows, _ in seen)


async def test_submissions_during_a_sync_are_written_with_the_next_one() -> None:
    disk = FaultDisk()
    log = journal(disk, WalMode.FSYNC)
    writer = Writer(log)
    writer.submit("a")
    log.flush()
    await asyncio.sleep(0)
    assert not log.is_idle
    for _ in range(100):
        writer.submit("b")
        log.flush()
    await log.drain()
    # The header's append, then one for the first and one for all others.
    assert disk.appends == 3
    assert found(disk) == writer.acknowledged


async def test_journal_starts_a_new_file_when_one_is_full() -> None:
    disk = FaultDisk()
    log = journal(disk, wal_max_size=2000)
    writer = Writer(log)
    for _ in range(200):
        writer.submit("a")
        log.flush()
        await log.drain()
    await log.close()
    assert len(names(disk)) > 3
    assert found(disk) == writer.acknowledged


async def test_rotate_ends_the_file_after_all_submitted_rows() -> None:
    disk = FaultDisk()
    log = journal(disk)
    writer = Writer(log)
    writer.submit("a")
    writer.submit("b")
    rotation = asyncio.create_task(log.rotate())
    await asyncio.sleep(0)
    writer.submit("c")
    log.flush()
    assert await rotation == VClock({1: 2})
    await log.drain()
    assert await log.rotate() == VClock({1: 3})
    assert await log.rotate() == VClock({1: 3})
    assert names(disk) == [f"{0:020}.xlog", f"{2:020}.xlog"]
    writer.submit("d")
    await log.drain()
    assert names(disk) == [f"{0:020}.xlog", f"{2:020}.xlog", f"{3:020}.xlog"]
    assert found(disk) == writer.acknowledged


@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
async def test_full_disk_fails_pending_submissions_newest_first_and_keeps_written_rows(mode: WalMode) -> None:
    disk = FaultDisk()
    log = journal(disk, mode)
    writer = Writer(log)
    writer.submit("a")
    await log.drain()
    disk.room = 10
    for note in "bcd":
        writer.submit(note)
    await log.drain()
    assert writer.failures == [4, 3, 2]
    error = writer.told[-1][1]
    assert isinstance(error, WriteFailed)
    assert error.errno == errno.ENOSPC
    assert "No space left" in str(error)
    assert log.vclock == log.written_vclock == VClock({1: 1})
    disk.room = None
    assert writer.submit("e") == 2
    await log.drain()
    assert found(disk) == writer.acknowledged == [(1, "a"), (2, "e")]


async def test_failed_write_fails_the_submissions_after_it() -> None:
    disk = FaultDisk()
    log = journal(disk, WalMode.FSYNC)
    writer = Writer(log)
    disk.broken.add("sync")
    writer.submit("a")
    log.flush()
    writer.submit("b")
    writer.submit("c")
    await log.drain()
    assert writer.failures == [3, 2, 1]
    disk.broken.clear()
    writer.submit("d")
    await log.drain()
    assert found(disk) == writer.acknowledged == [(1, "d")]


async def test_rows_of_a_failed_sync_are_not_recovered() -> None:
    disk = FaultDisk()
    log = journal(disk, WalMode.FSYNC)
    writer = Writer(log)
    writer.submit("a")
    await log.drain()
    disk.broken |= {"sync", "truncate"}
    writer.submit("b")
    await log.drain()
    writer.submit("c")
    await log.drain()
    assert writer.failures == [2, 2]
    disk.broken.clear()
    writer.submit("d")
    await log.drain()
    assert found(disk.after_death()) == writer.acknowledged == [(1, "a"), (2, "d")]


async def test_failure_to_end_a_file_fails_only_the_rotation() -> None:
    disk = FaultDisk()
    log = journal(disk)
    writer = Writer(log)
    writer.submit("a")
    await log.drain()
    disk.broken.add("sync")
    writer.submit("b")
    with pytest.raises(WriteFailed):
        await log.rotate()
    assert writer.acknowledged == [(1, "a"), (2, "b")]
    disk.broken.clear()
    writer.submit("c")
    await log.drain()
    await log.close()
    assert found(disk) == writer.acknowledged == [(1, "a"), (2, "b"), (3, "c")]


async def test_failure_to_create_a_file_fails_the_write() -> None:
    disk = FaultDisk()
    log = journal(disk)
    writer = Writer(log)
    for broken in ("create", "rename", "sync_directory", "append", "sync"):
        disk.broken.add(broken)
        writer.submit("a")
        await log.drain()
        disk.broken.clear()
        assert names(disk) == []
    assert writer.failures == [1] * 5
    writer.submit("b")
    await log.drain()
    assert found(disk) == [(1, "b")]


async def test_journal_calls_other_callbacks_when_one_raises(caplog: pytest.LogCaptureFixture) -> None:
    log = journal(FaultDisk())

    def mistaken(error: FlowstoneError | None) -> None:
        raise ValueError("oops")

    log.submit(b"\x81\x00\x0c", 1, mistaken)
    told: list[object] = []
    log.submit(b"\x81\x00\x0c", 1, told.append)
    await log.drain()
    assert told == [None]
    assert "oops" in caplog.text


@pytest.mark.parametrize("mode", list(WalMode))
async def test_journal_callbacks_may_submit_and_are_called_in_order(mode: WalMode) -> None:
    log = journal(FaultDisk(), mode)
    told: list[str] = []

    def first(error: FlowstoneError | None) -> None:
        told.append("first")
        log.submit(b"\x81\x00\x0c", 1, lambda error: told.append("third"))
        log.flush()

    log.submit(b"\x81\x00\x0c", 1, first)
    log.submit(b"\x81\x00\x0c", 1, lambda error: told.append("second"))
    while not log.is_idle:
        await log.drain()
    assert told == ["first", "second", "third"]
    log.submit(b"\x81\x00\x0c", 1, first)
    log.submit(b"\x81\x00\x0c", 1, lambda error: told.append("second"))
    log.flush()
    while not log.is_idle:
        await log.drain()
    assert told == ["first", "second", "third"] * 2
    await log.close()


async def test_journal_rejects_an_oversized_transaction_without_affecting_others() -> None:
    disk = FaultDisk()
    log = journal(disk)
    writer = Writer(log)
    writer.submit("a")
    with pytest.raises(BlockTooLarge):
        log.submit(bytes(TRANSACTION_SIZE_MAX + 1), 1, lambda error: None)
    writer.submit("b")
    await log.close()
    assert found(disk) == writer.acknowledged == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
async def test_drain_waits_for_submitted_rows_but_not_for_later_ones(mode: WalMode) -> None:
    disk = FaultDisk()
    log = journal(disk, mode)
    loop, told, is_over = asyncio.get_running_loop(), 0, False

    def submit() -> None:
        lsn = log.next_lsn(1)
        row = Row(3, 1, lsn=lsn, timestamp=1.7e9, tsn=lsn, flags=1, body=b"\x82\x10\xcd\x02\x00\x21\x91\x01")
        log.submit(row.encode(), 1, again)
        log.flush()

    def again(error: FlowstoneError | None) -> None:
        nonlocal told
        told += 1
        if not is_over:
            loop.call_soon(submit)

    for _ in range(4):
        submit()
    position = log.vclock
    async with asyncio.timeout(60):
        await log.drain()
    assert log.written_vclock >= position
    is_over = True
    await log.close()
    assert told == log.written_vclock.get(1)


async def test_drain_ends_on_a_failure_and_survives_a_cancelled_waiter() -> None:
    disk = FaultDisk()
    log = journal(disk, WalMode.FSYNC)
    writer = Writer(log)
    writer.submit("a")
    gone = asyncio.get_running_loop().create_task(log.drain())
    await asyncio.sleep(0)
    gone.cancel()
    await log.drain()
    assert writer.acknowledged == [(1, "a")]
    disk.room = 0
    writer.submit("b")
    await log.drain()
    assert writer.failures == [2]


def test_transaction_of_a_peer_is_accepted_up_to_the_limit_of_the_log() -> None:
    stream = RowStream("peer")
    stream.feed(b"\xce" + TRANSACTION_SIZE_MAX.to_bytes(4, "big"))
    with pytest.raises(StreamError, match=f"a transaction of more than {TRANSACTION_SIZE_MAX} bytes"):
        stream.take()


async def test_empty_log_is_continued_and_a_torn_one_ended() -> None:
    disk = FaultDisk()
    log = journal(disk)
    writer = Writer(log)
    writer.submit("a")
    await log.drain()
    path = f"{DIRECTORY}/{0:020}.xlog"
    size = disk.size(path)
    disk.names[path].data += b"\xd5\xba\x0b\xab torn"
    with LogFile.open(disk.outside().disk, path) as file:
        meta = file.meta
    last = LastLog(path, meta, size, is_complete=False)
    again = journal(disk, vclock=VClock({1: 1}), last=last)
    writer = Writer(again)
    writer.submit("b")
    await again.close()
    assert names(disk) == [f"{0:020}.xlog", f"{1:020}.xlog"]
    assert found(disk) == [(1, "a"), (2, "b")]
    # A log with only its header.
    path = f"{DIRECTORY}/{1:020}.xlog"
    with LogFile.open(disk.outside().disk, path) as file:
        meta, start = file.meta, file.first_block
    del disk.names[path].data[start:]
    third = journal(disk, vclock=VClock({1: 1}), last=LastLog(path, meta, start, is_complete=False))
    Writer(third).submit("c")
    await third.close()
    assert found(disk) == [(1, "a"), (2, "c")]


async def rotated(log: Journal) -> None:
    """Call `log.rotate()` without waiting for a dead process."""
    rotation = asyncio.create_task(log.rotate())
    try:
        await asyncio.sleep(0)
        await log.drain()
        await rotation
    finally:
        rotation.cancel()


async def workload(disk: FaultDisk, mode: WalMode, rng: Random, turns: int = 12) -> Writer:
    """Load a journal on a disk that may die at any byte; return its answers until then."""
    log = journal(disk, mode, wal_max_size=1500)
    writer = Writer(log)
    try:
        for turn in range(turns):
            for _ in range(rng.randint(1, 4)):
                writer.submit(chr(97 + turn), rng.choice((1, 1, 3)))
            if rng.random() < 0.2:
                await rotated(log)
            log.flush()
            if rng.random() < 0.7:
                await log.drain()
        await log.close()
    except Died:
        pass
    return writer


@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
async def test_acknowledged_rows_survive_a_kill_at_any_byte(mode: WalMode) -> None:
    disk = FaultDisk()
    await workload(disk, mode, Random(1))
    total = sum(len(inode.data) for inode in disk.names.values())
    for life in range(0, total, 1 if FULL else 7):
        disk = FaultDisk()
        disk.life = life
        writer = await workload(disk, mode, Random(1))
        rows = found(disk.after_death())
        assert rows[: len(writer.acknowledged)] == writer.acknowledged


async def test_rows_acknowledged_with_fsync_survive_a_power_loss() -> None:
    for seed in range(2000 if FULL else 150):
        rng = Random(seed)
        disk = FaultDisk()
        disk.life = rng.randint(0, 6000)
        writer = await workload(disk, WalMode.FSYNC, rng)
        rows = found(disk.after_power_loss(rng))
        assert rows[: len(writer.acknowledged)] == writer.acknowledged


@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
async def test_log_equals_the_acknowledged_rows_on_a_randomly_failing_disk(mode: WalMode) -> None:
    for seed in range(500 if FULL else 60):
        rng = Random(seed)
        disk = FaultDisk()
        log = journal(disk, mode, wal_max_size=1500)
        writer = Writer(log)
        for turn in range(30):
            disk.broken = {
                call
                for call in ("sync", "truncate", "append", "rename", "create", "sync_directory")
                if rng.random() < 0.1
            }
            disk.room = rng.randint(0, 200) if rng.random() < 0.2 else None
            for _ in range(rng.randint(1, 4)):
                writer.submit(chr(97 + turn % 26), rng.choice((1, 1, 3)))
            log.flush()
            if rng.random() < 0.2:
                with suppress(FlowstoneError):
                    await log.rotate()
            await log.drain()
        disk.broken, disk.room = set(), None
        writer.submit("z")
        await log.drain()
        await log.close()
        assert found(disk) == writer.acknowledged


async def test_submission_takes_about_a_microsecond() -> None:
    log = journal(FaultDisk(), WalMode.NONE)
    row = Row(3, 1, lsn=1, timestamp=1.0, body=b"\x82\x10\xcd\x02\x00\x21\x92\x01\x02").encode()

    def done(error: FlowstoneError | None) -> None:
        pass

    best = 1.0
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(20_000):
            log.submit(row, 1, done)
        best = min(best, (time.perf_counter() - begin) / 20_000)
        log.flush()
    assert best < 3e-6


# --- counters ---


async def test_journal_counts_writes_syncs_and_rotations() -> None:
    disk = FaultDisk()
    log = journal(disk, wal_max_size=200)
    writer = Writer(log)
    for note in "abcdefgh":
        writer.submit(note, rows=2)
        log.flush()
        await log.drain()
    counters = log.counters
    assert (counters.write_seconds.count, counters.synced_seconds.count) == (8, 0)
    assert log.row_count == 16
    assert counters.rotations > 0
    assert log.written_bytes > 0
    await log.close()
    synced = journal(FaultDisk(), WalMode.FSYNC)
    Writer(synced).submit("a")
    synced.flush()
    await synced.drain()
    assert (synced.counters.write_seconds.count, synced.counters.synced_seconds.count) == (0, 1)
    await synced.close()


async def test_a_failed_write_is_remembered_until_one_succeeds() -> None:
    disk = FaultDisk()
    log = journal(disk)
    writer = Writer(log)
    disk.broken.add("append")
    writer.submit("a")
    log.flush()
    await log.drain()
    assert log.counters.failures == 1
    assert log.counters.failure is not None
    disk.broken.clear()
    writer.submit("b")
    log.flush()
    await log.drain()
    seen: list[object] = [log.counters.failures, log.counters.failure, log.row_count]
    assert seen == [1, None, 1]
    await log.close()


async def test_slow_write_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = journal(FaultDisk())
    log.too_long_threshold = -1.0
    Writer(log).submit("a")
    log.flush()
    await log.drain()
    assert "too long WAL write at LSN 1: 0.000 sec" in caplog.text
    await log.close()


async def test_row_counter_starts_at_the_position_of_the_continued_log() -> None:
    log = journal(FaultDisk(), vclock=VClock({1: 100}))
    log.continue_at(VClock({1: 500, 2: 7}))
    assert log.row_count == 0
    Writer(log).submit("a")
    log.flush()
    await log.drain()
    log.continue_at(VClock({1: 3}))
    assert log.row_count == 1
    await log.close()
