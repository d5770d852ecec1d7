"""Writers: names, blocks, row numbers, failures and crashes."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError
from flowstone.iproto import scan
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.msgpack import pack, unpack_body
from flowstone.iproto.row import Row
from flowstone.outside import Disk, File, production
from flowstone.xlog.block import EOF_MAGIC, ROW_MAGIC, ZROW_MAGIC
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.errors import DamagedLog, LsnUsedTwice, WriteFailed, XlogError
from flowstone.xlog.meta import FileType, Meta, encode
from flowstone.xlog.reader import Ending, EndingKind, LogFile
from flowstone.xlog.transactions import LogTransaction, make_transaction
from flowstone.xlog.writer import LogWriter, SnapWriter
from tests.places import VECTORS

DISK = production().disk
UUID = "11111111-0000-4000-8000-000000000001"
XLOG = Meta(FileType.XLOG, UUID, {1: 10})
SNAP = Meta(FileType.SNAP, UUID, {1: 10})


def transaction(*lsns: int, replica_id: int = 1, size: int = 4) -> LogTransaction:
    body = b"\x82\x10\xcd\x02\x00\x21" + pack(("x" * size,))
    return make_transaction([Row(RequestType.INSERT, replica_id, lsn=lsn, timestamp=1.5, body=body) for lsn in lsns])


def lsns(path: str) -> list[int]:
    with LogFile.open(DISK, path) as log:
        return [row.lsn for row in log.rows()]


def blocks(path: str) -> int:
    data = Path(path).read_bytes()
    return data.count(ROW_MAGIC) + data.count(ZROW_MAGIC)


class FailingFile:
    """A file on a disk that is full after `room` bytes of appends; calls named in `broken` always fail."""

    def __init__(self, file: File, room: int, broken: frozenset[str]) -> None:
        self.file, self.room, self.broken = file, room, broken

    def append(self, *parts: bytes) -> None:
        data = b"".join(parts)
        self.file.append(data[: self.room])
        if len(data) > self.room:
            self.room = 0
            raise OSError(errno.ENOSPC, "No space left on device", self.file.path)
        self.room -= len(data)

    def truncate(self, size: int) -> None:
        self._refuse("truncate")
        self.file.truncate(size)

    def sync(self) -> None:
        self._refuse("sync")
        self.file.sync()

    def _refuse(self, call: str) -> None:
        if call in self.broken:
            raise OSError(errno.EIO, "Input/output error", self.file.path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class FailingDisk:
    """The real disk, with files for writing that fail like FailingFile; calls named in `broken` always fail."""

    def __init__(self, room: int = 2**60, broken: frozenset[str] = frozenset()) -> None:
        self.room, self.broken = room, broken

    def create(self, path: str) -> Any:
        return FailingFile(DISK.create(path), self.room, self.broken)

    def append_to(self, path: str) -> Any:
        return FailingFile(DISK.append_to(path), self.room, self.broken)

    def sync_directory(self, path: str) -> None:
        if "sync_directory" in self.broken:
            raise OSError(errno.EIO, "Input/output error", path)
        DISK.sync_directory(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(DISK, name)


def failing(room: int = 2**60, *broken: str) -> Disk:
    disk: Any = FailingDisk(room, frozenset(broken))
    return disk


class TestLogWriter:
    def test_new_log_has_its_name_and_header_immediately(self, tmp_path: Path) -> None:
        log = LogWriter.create(DISK, str(tmp_path), XLOG)
        assert [path.name for path in tmp_path.iterdir()] == ["00000000000000000010.xlog"]
        assert Path(log.path).read_bytes() == encode(XLOG)
        log.close()
        assert Path(log.path).read_bytes() == encode(XLOG) + EOF_MAGIC

    def test_create_replaces_a_leftover_but_never_a_log(self, tmp_path: Path) -> None:
        (tmp_path / "00000000000000000010.xlog.inprogress").write_bytes(b"XLO")
        LogWriter.create(DISK, str(tmp_path), XLOG).close()
        with pytest.raises(XlogError, match="already exists"):
            LogWriter.create(DISK, str(tmp_path), XLOG)

    def test_append_writes_one_block_and_small_blocks_are_uncompressed(self, tmp_path: Path) -> None:
        with LogWriter.create(DISK, str(tmp_path), XLOG) as log:
            log.append([transaction(11), transaction(12, 13)])
            log.append([transaction(14)])
            assert blocks(log.path) == 2
            assert ZROW_MAGIC not in Path(log.path).read_bytes()
            log.append([transaction(15, size=4000)])
            assert ZROW_MAGIC in Path(log.path).read_bytes()
        assert lsns(log.path) == [11, 12, 13, 14, 15]

    def test_large_batch_is_divided_between_transactions_at_128_kib(self, tmp_path: Path) -> None:
        with LogWriter.create(DISK, str(tmp_path), XLOG) as log:
            log.append([transaction(11 + 2 * i, 12 + 2 * i, size=20_000) for i in range(8)])
            log.append([transaction(100, 101, 102, size=100_000)])
        with LogFile.open(DISK, log.path) as read:
            found = [span for slab in read.slabs() for span in slab.cells[scan.SPAN].tolist()]
        assert found == [0] * 8 + [1] * 8 + [2] * 3

    def test_rows_that_were_read_are_written_unchanged(self, tmp_path: Path) -> None:
        # An unusual but valid encoding: LSN 11 as a uint 64.
        raw = bytes.fromhex("8300020201 03cf000000000000000b 811005".replace(" ", ""))
        row = Row(RequestType.INSERT, 1, lsn=11, tsn=11, body=raw[-3:], raw=raw)
        with LogWriter.create(DISK, str(tmp_path), XLOG) as log:
            log.append([make_transaction([row])])
        assert raw in Path(log.path).read_bytes()

    def test_vclock_advances_with_global_and_local_rows(self, tmp_path: Path) -> None:
        local = Row(RequestType.INSERT, group_id=GROUP_LOCAL, lsn=1, timestamp=1.5, body=b"\x81\x10\x05")
        with LogWriter.create(DISK, str(tmp_path), XLOG) as log:
            log.append([transaction(11), make_transaction([local]), transaction(5, replica_id=2)])
            assert log.vclock == {0: 1, 1: 11, 2: 5}

    @pytest.mark.parametrize("lsn", [10, 3])
    def test_duplicate_lsn_is_rejected_and_nothing_is_written(self, tmp_path: Path, lsn: int) -> None:
        with LogWriter.create(DISK, str(tmp_path), XLOG) as log:
            before = log.size
            with pytest.raises(LsnUsedTwice, match=f"LSN {lsn} of replica 1 is used twice: the log is at 11"):
                log.append([transaction(11), transaction(lsn)])
            assert (log.size, log.vclock) == (before, {1: 10})
            log.append([transaction(11)])
        assert lsns(log.path) == [11]

    def test_rotation_names_and_ends_the_previous_log(self, tmp_path: Path) -> None:
        first = LogWriter.create(DISK, str(tmp_path), XLOG)
        assert first.rotate() is first
        first.append([transaction(11), transaction(12)])
        second = first.rotate()
        assert second.meta == Meta(FileType.XLOG, UUID, {1: 12}, prev_vclock={1: 10})
        assert Path(first.path).read_bytes().endswith(EOF_MAGIC)
        second.append([transaction(13)])
        second.close()
        with pytest.raises(XlogError, match="closed"):
            first.append([transaction(13)])

    @pytest.mark.parametrize("room", [0, 1, 30, 60])
    def test_log_after_a_full_disk_ends_with_a_complete_block_and_continues(self, tmp_path: Path, room: int) -> None:
        log = LogWriter.create(failing(), str(tmp_path), XLOG)
        log.append([transaction(11)])
        file: Any = log._file
        size, file.room = log.size, room
        with pytest.raises(WriteFailed, match="No space left on device; the file was cut back") as caught:
            log.append([transaction(12), transaction(13, size=100)])
        assert caught.value.is_usable
        assert caught.value.errno == errno.ENOSPC
        assert (log.size, log.vclock, DISK.size(log.path)) == (size, {1: 11}, size)
        file.room = 2**60
        log.append([transaction(12)])
        log.close()
        assert lsns(log.path) == [11, 12]

    def test_log_that_cannot_be_truncated_rejects_writes_until_reopened(self, tmp_path: Path) -> None:
        log = LogWriter.create(failing(2**60, "truncate"), str(tmp_path), XLOG)
        log.append([transaction(11)])
        file: Any = log._file
        file.room = 25
        with pytest.raises(WriteFailed, match="the end of the file is unknown") as caught:
            log.append([transaction(12)])
        assert not caught.value.is_usable
        with pytest.raises(XlogError, match="failed before"):
            log.append([transaction(12)])
        log.close()
        assert EOF_MAGIC not in Path(log.path).read_bytes()
        with LogWriter.reopen(DISK, log.path) as reopened:
            reopened.append([transaction(12)])
        assert lsns(log.path) == [11, 12]

    def test_reopened_log_and_its_name_survive_a_loss_of_power(self, tmp_path: Path) -> None:
        """The previous writer may have crashed between the rename and the sync of the directory."""
        LogWriter.create(DISK, str(tmp_path), XLOG).abandon()
        path = str(tmp_path / "00000000000000000010.xlog")
        for broken in ("sync", "sync_directory"):
            with pytest.raises(OSError, match="Input/output error"):
                LogWriter.reopen(failing(2**60, broken), path)
        LogWriter.reopen(failing(), path).close()

    def test_failed_sync_is_final(self, tmp_path: Path) -> None:
        log = LogWriter.create(failing(), str(tmp_path), XLOG)
        file: Any = log._file
        file.broken = frozenset({"sync"})
        with pytest.raises(WriteFailed):
            log.sync()
        with pytest.raises(XlogError, match="failed before"):
            log.append([transaction(11)])
        log.close()

    @pytest.mark.parametrize("disk", [failing(10), failing(2**60, "sync"), failing(2**60, "sync_directory")])
    def test_log_that_cannot_be_created_leaves_no_file(self, tmp_path: Path, disk: Disk) -> None:
        with pytest.raises(WriteFailed):
            LogWriter.create(disk, str(tmp_path), XLOG)
        assert list(tmp_path.iterdir()) == []

    def test_failed_rotation_leaves_the_old_log_in_use(self, tmp_path: Path) -> None:
        disk: Any = failing()
        log = LogWriter.create(disk, str(tmp_path), XLOG)
        log.append([transaction(11)])
        disk.broken = frozenset({"sync_directory"})
        with pytest.raises(WriteFailed):
            log.rotate()
        log.append([transaction(12)])
        disk.broken = frozenset()
        log.rotate().close()
        assert lsns(log.path) == [11, 12]
        assert len(list(tmp_path.iterdir())) == 2

    def test_only_logs_can_be_reopened(self, tmp_path: Path) -> None:
        with SnapWriter(DISK, str(tmp_path), SNAP, 1.5) as snap:
            pass
        with pytest.raises(XlogError, match="cannot append to a SNAP file"):
            LogWriter.reopen(DISK, snap.path)
        with pytest.raises(LocalProtocolError):
            LogWriter.create(DISK, str(tmp_path), SNAP)


row_bodies = st.binary(max_size=300).map(lambda data: b"\x82\x10\xcd\x02\x00\x21\x91" + pack(data))
batches = st.lists(st.lists(st.lists(row_bodies, min_size=1, max_size=4), min_size=1, max_size=6), max_size=6)


@given(batches, st.sampled_from([1, 1000, 2**60]))
def test_written_rows_are_read_across_rotations(contents: list[list[list[bytes]]], wal_max_size: int) -> None:
    lsn, written = 10, []
    with TemporaryDirectory() as directory:
        log = LogWriter.create(DISK, directory, XLOG)
        for content in contents:
            batch = []
            for bodies in content:
                rows = [Row(3, 1, lsn=lsn + i, timestamp=2.5, body=body) for i, body in enumerate(bodies, 1)]
                lsn += len(rows)
                batch.append(make_transaction(rows))
            if log.size >= wal_max_size:
                log = log.rotate()
            log.append(batch)
            written += batch
        log.close()
        found = []
        for file in scan_directory(DISK, directory).files_from(XLOG.vclock):
            with LogFile.open(DISK, file.path) as read:
                found += list(read.transactions())
                assert read.ending == Ending(EndingKind.COMPLETE, DISK.size(file.path) - len(EOF_MAGIC))
    assert [[row.raw for row in each.rows] for each in found] == [
        [row.encode() for row in each.rows] for each in written
    ]
    assert [(each.lsn, each.tsn) for each in found] == [(each.lsn, each.tsn) for each in written]


class TestEncoded:
    """Rows that are already encoded, as in a journal."""

    def data(self, *lsns: int, size: int = 4) -> bytes:
        return b"".join(row.encode() for row in transaction(*lsns, size=size).rows)

    def test_complete_transactions_share_blocks_up_to_the_threshold(self, tmp_path: Path) -> None:
        with LogWriter.create(DISK, str(tmp_path), XLOG) as log:
            log.append_encoded([self.data(11), self.data(12, 13)], {1: 13})
            assert blocks(log.path) == 1
            log.append_encoded([self.data(lsn, size=50_000) for lsn in range(14, 24)], {1: 23})
            log.append_encoded([], {1: 23})
            assert log.vclock == {1: 23}
        assert lsns(log.path) == list(range(11, 24))
        with LogFile.open(DISK, log.path) as file:
            # Three of 50 KB reach 128 KiB.
            assert [len(np.unique(slab.cells[scan.SPAN])) for slab in file.slabs()] == [5]

    def test_failed_sync_removes_the_rows(self, tmp_path: Path) -> None:
        disk: Any = failing()
        log = LogWriter.create(disk, str(tmp_path), XLOG)
        log.append_encoded([self.data(11)], {1: 11}, sync=True)
        size = log.size
        file: Any = log._file
        file.broken = frozenset(["sync"])
        with pytest.raises(WriteFailed) as caught:
            log.append_encoded([self.data(12)], {1: 12}, sync=True)
        assert not caught.value.is_usable
        assert not log.is_usable
        with pytest.raises(WriteFailed):
            log.mend()
        file.broken = frozenset()
        log.mend()
        assert (log.size, log.vclock, log.is_usable) == (size, {1: 11}, True)
        log.append_encoded([self.data(12)], {1: 12}, sync=True)
        log.close()
        assert lsns(log.path) == [11, 12]

    def test_log_is_resumed_at_the_end_of_its_rows(self, tmp_path: Path) -> None:
        log = LogWriter.create(DISK, str(tmp_path), XLOG)
        log.append_encoded([self.data(11)], {1: 11})
        size = log.size
        log.append_encoded([self.data(12)], {1: 12})
        log.abandon()
        with LogWriter.resume(DISK, log.path, XLOG, {1: 11}, size) as again:
            again.append_encoded([self.data(12, 13)], {1: 13})
        assert lsns(log.path) == [11, 12, 13]

    def test_end_marker_that_cannot_be_synced_is_removed(self, tmp_path: Path) -> None:
        disk: Any = failing()
        log = LogWriter.create(disk, str(tmp_path), XLOG)
        log.append_encoded([self.data(11)], {1: 11})
        file: Any = log._file
        file.broken = frozenset(["sync"])
        with pytest.raises(WriteFailed):
            log.rotate()
        file.broken = frozenset()
        log.mend()
        log.append_encoded([self.data(12)], {1: 12})
        log.close()
        assert lsns(log.path) == [11, 12]


class TestCrash:
    """A log truncated at any byte is a prefix of complete transactions, and can be continued."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> tuple[Path, list[tuple[int, int]]]:
        """Write a log of plain and compressed blocks; return it with the end of each block: (size, last LSN)."""
        rng = random.Random(5)
        writer = LogWriter.create(DISK, str(tmp_path), XLOG)
        ends, lsn = [(writer.size, 10)], 10
        for count in (1, 3, 1, 5, 2):
            batch = []
            for _ in range(count):
                rows = rng.choice((1, 1, 3))
                batch.append(transaction(*range(lsn + 1, lsn + 1 + rows), size=700 if count == 5 else 4))
                lsn += rows
            writer.append(batch)
            ends.append((writer.size, lsn))
        writer.close()
        assert ZROW_MAGIC in Path(writer.path).read_bytes()
        return Path(writer.path), ends

    def test_log_cut_at_any_byte_reads_as_a_prefix(self, log: tuple[Path, list[tuple[int, int]]]) -> None:
        path, ends = log
        data = path.read_bytes()
        for size in range(ends[0][0], len(data)):
            path.write_bytes(data[:size])
            whole, last = max(end for end in ends if end[0] <= size)
            with LogFile.open(DISK, str(path)) as read:
                found = [row.lsn for group in read.transactions() for row in group.rows]
                assert found == list(range(11, last + 1))
                assert read.ending is not None
                assert read.ending.offset == whole
                assert read.ending.kind is (EndingKind.NO_MARKER if whole == size else EndingKind.TORN)

    def test_log_cut_at_any_byte_is_continued(self, log: tuple[Path, list[tuple[int, int]]]) -> None:
        path, ends = log
        data = path.read_bytes()
        for size in range(ends[0][0], len(data) + 1):
            path.write_bytes(data[:size])
            _, last = max(end for end in ends if end[0] <= size)
            with LogWriter.reopen(DISK, str(path)) as writer:
                assert writer.vclock == {1: last}
                writer.append([transaction(last + 1)])
            assert lsns(str(path)) == list(range(11, last + 2))

    def test_damage_in_the_middle_is_never_truncated(self, log: tuple[Path, list[tuple[int, int]]]) -> None:
        path, ends = log
        data = bytearray(path.read_bytes())
        data[ends[1][0] + 25] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamagedLog) as caught:
            LogWriter.reopen(DISK, str(path))
        assert caught.value.offset == ends[1][0]
        assert path.read_bytes() == data


class TestSnapWriter:
    def test_snapshot_appears_when_complete(self, tmp_path: Path) -> None:
        snap = SnapWriter(DISK, str(tmp_path), SNAP, 1.5)
        snap.add_tuples(512, [pack((1,))])
        assert [path.name for path in tmp_path.iterdir()] == ["00000000000000000010.snap.inprogress"]
        assert snap.finish() == str(tmp_path / "00000000000000000010.snap")
        assert [path.name for path in tmp_path.iterdir()] == ["00000000000000000010.snap"]

    def test_snapshot_rows_are_numbered_from_0_with_one_timestamp_and_a_wide_space_id(self, tmp_path: Path) -> None:
        with SnapWriter(DISK, str(tmp_path), SNAP, 1.5) as snap:
            snap.add_tuples(272, [pack(("a",)), pack(("b",))])
            snap.add_row(RequestType.RAFT, pack({0: 3}), GROUP_LOCAL)
            snap.add_tuples(512, [pack((7,))], GROUP_LOCAL)
        with LogFile.open(DISK, snap.path) as read:
            rows = list(read.rows())
        time = "04cb3ff8000000000000"
        assert [row.raw.hex() for row in rows] == [
            f"820002{time}8210ce000001102191a161",
            f"8300020301{time}8210ce000001102191a162",
            f"84001e07010302{time}810003",
            f"84000207010303{time}8210ce0000020021" + "9107",
        ]

    def test_snapshot_of_a_real_servers_rows_equals_its_snapshot(self, tmp_path: Path) -> None:
        recorded = VECTORS / "xlog" / "2.6-master.snap"
        with LogFile.open(DISK, str(recorded)) as read:
            rows, meta = list(read.rows()), read.meta
        with SnapWriter(DISK, str(tmp_path), meta, rows[0].timestamp) as snap:
            for row in rows:
                snap.add_tuples(unpack_body(row.body)[0x10], [row.body[8:]], row.group_id)
        with LogFile.open(DISK, snap.path) as read:
            assert [row.raw for row in read.rows()] == [row.raw for row in rows]
            assert encode(read.meta) == recorded.read_bytes()[: read.first_block]

    def test_blocks_end_at_128_kib(self, tmp_path: Path) -> None:
        rng = random.Random(1)
        with SnapWriter(DISK, str(tmp_path), SNAP, 1.5) as snap:
            snap.add_tuples(512, [pack((i, rng.randbytes(1000))) for i in range(1000)])
        assert snap.row_count == 1000
        assert 7 <= blocks(snap.path) <= 8

    def test_failed_snapshot_leaves_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(WriteFailed), SnapWriter(failing(200), str(tmp_path), SNAP, 1.5) as snap:
            snap.add_tuples(512, (pack((i, random.Random(i).randbytes(1000))) for i in range(1000)))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("disk", [failing(130), failing(2**60, "sync"), failing(2**60, "sync_directory")])
    def test_snapshot_that_cannot_be_finished_is_removed(self, tmp_path: Path, disk: Disk) -> None:
        with pytest.raises(WriteFailed), SnapWriter(disk, str(tmp_path), SNAP, 1.5) as snap:
            snap.add_tuples(512, [pack((1,))])
        assert list(tmp_path.iterdir()) == []

    def test_exception_discards_the_snapshot(self, tmp_path: Path) -> None:
        with pytest.raises(KeyError), SnapWriter(DISK, str(tmp_path), SNAP, 1.5):
            raise KeyError
        assert list(tmp_path.iterdir()) == []

    def test_only_a_snapshot_header_is_accepted(self, tmp_path: Path) -> None:
        with pytest.raises(LocalProtocolError, match="type SNAP"):
            SnapWriter(DISK, str(tmp_path), XLOG, 1.5)
