"""The log of an archive: written rows are kept, a torn tail is removed, and the index matches the log."""

from __future__ import annotations

import errno
from random import Random
from typing import Any

import pytest

from flowstone.archive import block_index as archive_blocks
from flowstone.archive.archive_log import ArchiveLog, BrokenOrder, logs_behind, start_verdicts, version_of
from flowstone.archive.block_index import path_of, read_blocks
from flowstone.archive.settled_tracker import Verdicts
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.errors import LogGap, WriteFailed
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.reader import LogFile
from flowstone.xlog.writer import SnapWriter
from tests.limestone.crashes import fresh
from tests.node.archived_rows import (
    INSTANCE,
    QUEUED,
    SYNC,
    SYNC_SPACE,
    alone,
    confirm,
    define_space,
    new_disk,
    rollback,
    row,
)
from tests.node.archived_rows import transaction as whole
from tests.node.fault_disk import Died

START = VClock({1: 5})


def begun(disk: Any, **options: Any) -> ArchiveLog:
    """Return a log after an empty snapshot at START."""
    disk.make_directory("dir")
    meta = Meta(FileType.SNAP, INSTANCE, START.to_mapping(), version="2.11.9")
    SnapWriter(disk, "dir", meta, 1.0).finish()
    verdicts = Verdicts()
    verdicts.start(START)
    return ArchiveLog(disk, "dir", instance_uuid=INSTANCE, vclock=START, verdicts=verdicts, version="2.11.9", **options)


def resumed(disk: Any, **options: Any) -> ArchiveLog:
    directory = scan_directory(disk, "dir")
    for leftover in directory.leftovers:
        disk.unlink(leftover)
    snapshot = directory.newest_snapshot()
    assert snapshot is not None
    vclock = VClock(snapshot.meta.vclock)
    log = ArchiveLog(
        disk,
        "dir",
        instance_uuid=INSTANCE,
        vclock=vclock,
        verdicts=start_verdicts(disk, snapshot),
        version="2.11.9",
        **options,
    )
    log.resume(logs_behind(directory, vclock))
    return log


def rows_of(disk: Any) -> list[tuple[int, int]]:
    found = []
    for listed in scan_directory(disk, "dir").logs:
        with LogFile.open(disk, listed.path) as log:
            found += [(each.replica_id, each.lsn) for each in log.rows()]
    return found


def names(disk: Any) -> list[str]:
    return [name.lstrip("0") for name in disk.list_directory("dir")]


def test_rows_are_written_unchanged_and_durable() -> None:
    disk = new_disk()
    log = begun(disk)
    log.write(alone(6) + alone(7))
    log.write(whole([row(8), row(9)]))
    after = disk.after_power_loss(Random(1))
    assert rows_of(after) == [(1, 6), (1, 7), (1, 8), (1, 9)]
    assert log.vclock == log.verdicts.settled == VClock({1: 9})
    assert log.row_count == 4


def test_rows_keep_the_timestamp_of_the_upstream() -> None:
    disk = new_disk()
    begun(disk).write(alone(6, at=12.5))
    with LogFile.open(disk, "dir/00000000000000000005.xlog") as log:
        assert [each.timestamp for each in log.rows()] == [12.5]


def test_large_batches_become_many_blocks_of_whole_transactions() -> None:
    disk = new_disk()
    log = begun(disk)
    rng = Random(3)
    noise = "".join(rng.choice("abcdefghijklmnop") for _ in range(9000))
    lsn, parts = 5, []
    for _ in range(40):
        together = [row(lsn + number, size=0) for number in (1, 2, 3)]
        for each in together:
            each.body = each.body[:-1] + b"\xda" + (9000).to_bytes(2, "big") + noise.encode()
        parts.append(whole(together))
        lsn += 3
    log.write(b"".join(parts))
    with LogFile.open(disk, "dir/00000000000000000005.xlog") as file:
        offsets = {slab.path: slab.offsets for slab in file.slabs()}
    assert sum(len(each) for each in offsets.values()) > 5
    with LogFile.open(disk, "dir/00000000000000000005.xlog") as file:
        assert len(list(file.transactions())) == 40


def test_full_file_is_followed_by_the_next() -> None:
    disk = new_disk()
    log = begun(disk, wal_max_size=300)
    for lsn in range(6, 30):
        log.write(alone(lsn))
    log.close()
    directory = scan_directory(disk, "dir")
    assert len(directory.logs) > 3
    assert [listed.path for listed in directory.files_from(START.to_mapping())] == [log.path for log in directory.logs]
    assert rows_of(disk) == [(1, lsn) for lsn in range(6, 30)]


def test_log_continues_in_the_same_file_after_a_clean_shutdown() -> None:
    disk = new_disk()
    log = begun(disk)
    log.write(alone(6))
    log.close()
    again = resumed(disk)
    assert again.vclock == VClock({1: 6})
    again.write(alone(7))
    again.close()
    assert names(disk) == ["5.blocks.jsonl", "5.snap", "5.xlog"]
    assert rows_of(disk) == [(1, 6), (1, 7)]


def test_torn_tail_is_cut_off() -> None:
    disk = new_disk()
    log = begun(disk)
    log.write(alone(6))
    disk.names["dir/00000000000000000005.xlog"].data += b"\xd5\xba\x0b\xab\x20\x00"
    again = resumed(disk)
    assert again.vclock == VClock({1: 6})
    again.write(alone(7))
    assert rows_of(disk) == [(1, 6), (1, 7)]


def test_missing_index_is_rebuilt() -> None:
    disk = new_disk()
    log = begun(disk)
    log.write(alone(6) + define_space(7, 600) + alone(8, flags=SYNC))
    log.write(rollback(9, 8) + alone(10))
    log.close()
    path = "dir/00000000000000000005.xlog"
    before = read_blocks(disk, path)
    disk.unlink(path_of(path))
    again = resumed(disk)
    again.close()
    after = read_blocks(disk, path)
    assert before is not None
    assert after is not None
    assert after.runs[-1].settled == before.runs[-1].settled == {1: 10}
    assert [span for run in after.runs for span in run.rolled_back] == [(1, 8, 8)]
    assert again.vclock == VClock({1: 10})


def test_pending_transaction_is_still_pending_after_a_restart() -> None:
    disk = new_disk()
    log = begun(disk)
    log.write(alone(6) + alone(7, SYNC_SPACE, flags=SYNC))
    log.flush()
    log.write(alone(8, flags=QUEUED))
    again = resumed(disk)
    assert again.vclock == VClock({1: 8})
    assert again.verdicts.settled == VClock({1: 6})
    again.write(confirm(9, 7))
    assert again.verdicts.settled == VClock({1: 9})


def test_plain_runs_are_not_read_again_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = new_disk()
    log = begun(disk)
    log.write(alone(6))
    log.flush()

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Verdicts, "push", refuse)
    assert resumed(disk).vclock == VClock({1: 6})


def test_file_starts_exactly_at_the_position_of_a_snapshot() -> None:
    disk = new_disk()
    log = begun(disk)
    log.write(alone(6))
    log.cut(VClock({1: 8}))
    log.write(alone(7) + alone(8) + alone(9) + alone(10))
    assert log.was_cut
    assert log.cut_at is None
    log.close()
    starts = [listed.signature for listed in scan_directory(disk, "dir").logs]
    assert starts == [5, 8]
    assert rows_of(disk) == [(1, lsn) for lsn in range(6, 11)]


def test_snapshot_at_the_current_position_ends_the_file_at_once() -> None:
    disk = new_disk()
    log = begun(disk)
    log.cut(START)
    assert log.was_cut
    log.write(alone(6))
    log.cut(VClock({1: 6}))
    assert log.was_cut
    assert [listed.signature for listed in scan_directory(disk, "dir").logs] == [5, 6]


def test_log_cannot_rotate_at_a_snapshot_before_its_end() -> None:
    log = begun(new_disk())
    log.write(alone(6) + alone(7))
    log.cut(VClock({1: 6}))
    assert not log.was_cut
    log.cut(VClock({1: 8}))
    log.write(whole([row(8), row(9)]))
    assert not log.was_cut
    assert log.cut_at is None


def test_rows_of_an_upgraded_server_start_a_new_file() -> None:
    disk = new_disk()
    log = begun(disk)
    log.write(alone(6))
    log.version = "3.8.0"
    log.write(alone(7))
    log.close()
    versions = [listed.meta.version for listed in scan_directory(disk, "dir").logs]
    assert versions == ["2.11.9", "3.8.0"]


def test_full_disk_raises_and_keeps_acknowledged_rows() -> None:
    disk = new_disk()
    log = begun(disk)
    log.write(alone(6))
    disk.room = 20
    with pytest.raises(WriteFailed, match="No space left"):
        log.write(alone(7))
    assert log.vclock == VClock({1: 6})
    again = resumed(disk.after_death())
    assert again.vclock == VClock({1: 6})


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("operation", ["create", "unlink"])
def test_log_file_without_an_index_is_continued(
    monkeypatch: pytest.MonkeyPatch, operation: str, is_closed: bool
) -> None:
    disk = new_disk()
    log = begun(disk)
    log.write(alone(6))
    original = getattr(disk, operation)

    def refuse(path: str) -> Any:
        if path.endswith(".jsonl"):
            raise OSError(errno.EIO, "Input/output error", path)
        return original(path)

    with monkeypatch.context() as patching:
        patching.setattr(disk, operation, refuse)
        with pytest.raises(OSError, match="Input/output error"):
            log.cut(VClock({1: 6}))
    if is_closed:
        log.close()
        log = resumed(disk)
    log.write(alone(7))
    log.close()
    assert [each.meta.vclock for each in scan_directory(disk, "dir").logs] == [{1: 5}, {1: 6}]
    assert resumed(disk).vclock == VClock({1: 7})


def test_rows_out_of_order_are_rejected() -> None:
    log = begun(new_disk())
    log.write(alone(6))
    for rows in (alone(6), alone(8) + alone(7), alone(3)):
        with pytest.raises(BrokenOrder, match="replica 1"):
            log.write(rows)
    assert log.vclock == VClock({1: 6})


def test_missing_file_is_a_gap() -> None:
    disk = new_disk()
    log = begun(disk, wal_max_size=100)
    for lsn in range(6, 12):
        log.write(alone(lsn))
    log.close()
    disk.unlink(scan_directory(disk, "dir").logs[1].path)
    with pytest.raises(LogGap):
        resumed(disk)


def test_written_rows_survive_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_blocks, "RUN_SIZE", 150)
    for seed in range(60):
        rng = Random(seed)
        disk = new_disk()
        log = begun(disk, wal_max_size=rng.choice((200, 1000, 10**6)))
        acknowledged, sent, waiting = 5, 5, 0
        for _ in range(3):
            disk.life = rng.randrange(1500)
            try:
                while True:
                    batch = b""
                    for _ in range(rng.randrange(1, 5)):
                        sent += 1
                        if waiting and rng.random() < 0.4:
                            batch += (confirm if rng.random() < 0.5 else rollback)(sent, waiting)
                            waiting = 0
                        elif waiting or rng.random() < 0.7:
                            batch += alone(sent, flags=QUEUED if waiting else 0)
                        else:
                            waiting = sent
                            batch += alone(sent, flags=SYNC)
                    log.write(batch)
                    acknowledged = sent
                    if rng.random() < 0.3:
                        log.flush()
            except Died:
                pass
            disk = disk.after_death() if rng.random() < 0.5 else disk.after_power_loss(rng)
            log = resumed(disk, wal_max_size=300)
            lsns = [lsn for _, lsn in rows_of(disk)]
            assert lsns == list(range(6, log.vclock.get(1) + 1))
            assert log.vclock.get(1) >= acknowledged
            fresh = {path: inode for path, inode in disk.names.items() if not path.endswith(".jsonl")}
            bare = disk._successor(fresh).after_death()
            other = resumed(bare)
            assert other.verdicts.settled == log.verdicts.settled
            assert other.verdicts.pending_transactions == log.verdicts.pending_transactions
            sent = log.vclock.get(1)
            pending = log.verdicts.pending_transactions
            waiting = 0 if not pending else log.verdicts.settled.get(1) + 1


@pytest.mark.parametrize(
    ("text", "version"), [("2.6.0-0-g47aa4e01e", (2, 6, 0)), ("3.8.0", (3, 8, 0)), ("Flowstone", (2, 11, 9))]
)
def test_server_version_is_parsed_from_a_header(text: str, version: tuple[int, ...]) -> None:
    assert version_of(text) == version


def test_abandoned_log_keeps_no_file_open() -> None:
    machine, disk = fresh()
    log = begun(disk)
    log.write(alone(6))
    assert machine.opened
    log.abandon()
    assert not machine.opened
    assert rows_of(disk) == [(1, 6)]


def test_file_that_cannot_be_finished_is_closed() -> None:
    machine, disk = fresh()
    log = begun(disk, wal_max_size=1)
    log.write(alone(6))
    machine.broken.add("sync")
    with pytest.raises((WriteFailed, OSError)):
        log.write(alone(7))
    assert not machine.opened


def test_rows_with_a_failed_sync_are_not_recovered() -> None:
    """The kernel keeps pages in its cache after a failed write and never retries them: a power loss drops them."""
    machine, disk = fresh()
    log = begun(disk)
    log.write(alone(6))
    machine.broken.add("sync")
    with pytest.raises(WriteFailed):
        log.write(alone(7))
    log.abandon()
    machine.broken.clear()
    assert rows_of(disk) == [(1, 6)]
    assert resumed(disk).vclock == VClock({1: 6})
