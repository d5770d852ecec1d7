"""Reading our own logs during writes: from any position, across files, never beyond the reported end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row
from flowstone.node.wal import log_reader
from flowstone.node.wal.log_reader import LogReader, LogsGone
from flowstone.outside import Disk
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import ListedFile, LogDirectory, scan_directory
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.writer import LogWriter
from tests.node.fault_disk import FaultDisk

UUID = "11111111-0000-4000-8000-000000000001"


def row(lsn: int) -> bytes:
    return Row(RequestType.NOP.value, 1, 0, lsn, 1.0, lsn).encode()


class Log:
    """The growing logs of instance 1."""

    def __init__(self, start: int = 0) -> None:
        self.disk = FaultDisk()
        self.door = self.disk.outside().disk
        self._writer = LogWriter.create(self.door, "data", Meta(FileType.XLOG, UUID, {1: start} if start else {}))

    def write(self, *lsns: int) -> None:
        """Write one block per LSN."""
        for lsn in lsns:
            self._writer.append_encoded([row(lsn)], {1: lsn})

    def write_block(self, *lsns: int) -> None:
        self._writer.append_encoded([b"".join(map(row, lsns))], {1: lsns[-1]})

    def rotate(self) -> None:
        self._writer = self._writer.rotate()

    def end(self) -> None:
        self._writer.close()

    def reader(self, lsn: int) -> LogReader:
        return LogReader(self.door, "data", VClock({1: lsn}))


def read_all(reader: LogReader, limit: int) -> list[int]:
    """Return LSNs up to the end; they may start before the requested position."""
    found: list[int] = []
    while (piece := reader.read(VClock({1: limit}))) is not None:
        found += [row.lsn for row in piece.slab.rows()]
        assert piece.after == VClock({1: found[-1]})
    return found


def test_rows_are_read_from_all_logs_in_order() -> None:
    log = Log()
    log.write(1, 2)
    log.rotate()
    log.write(3)
    log.rotate()
    log.write(4, 5)
    assert read_all(log.reader(0), 5) == [1, 2, 3, 4, 5]
    assert read_all(log.reader(2), 5) == [3, 4, 5]
    assert read_all(log.reader(4), 5) == [4, 5], "from the log with the position; a replica that has row 4 skips it"


def test_reader_continues_at_its_position_after_further_writes() -> None:
    log = Log()
    log.write(1)
    reader = log.reader(0)
    assert read_all(reader, 1) == [1]
    log.write(2, 3)
    assert read_all(reader, 3) == [2, 3]
    log.rotate()
    log.write(4)
    log.end()
    assert read_all(reader, 4) == [4]
    reader.close()


def test_log_that_ended_meanwhile_is_read_to_its_end_first() -> None:
    log = Log()
    log.write(1)
    reader = log.reader(0)
    assert read_all(reader, 1) == [1]
    log.write(2)
    log.rotate()
    log.write(3)
    assert read_all(reader, 3) == [2, 3]


def test_many_rows_are_returned_in_pieces_of_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "ROWS_MAX", 2)
    log = Log()
    log.write_block(1, 2, 3)
    log.write_block(4)
    log.write_block(5)
    log.write_block(6)
    reader = log.reader(0)
    pieces = []
    while (piece := reader.read(VClock({1: 6}))) is not None:
        pieces.append([row.lsn for row in piece.slab.rows()])
    assert pieces == [[1, 2, 3], [4, 5], [6]]


def test_log_reader_returns_only_reported_rows() -> None:
    log = Log()
    log.write(1, 2, 3)
    reader = log.reader(0)
    assert read_all(reader, 2) == [1, 2]
    assert read_all(reader, 2) == []
    log.rotate()
    log.write(4)
    assert read_all(reader, 2) == [], "the limit holds although another log follows"
    assert read_all(reader, 4) == [3, 4]


def test_missing_rows_are_reported_with_their_position() -> None:
    log = Log(10)
    log.write(11)
    with pytest.raises(LogsGone) as caught:
        log.reader(5).read(VClock({1: 11}))
    assert (caught.value.have, caught.value.need) == (VClock({1: 5}), VClock({1: 10}))


def test_all_rows_are_missing_without_any_log() -> None:
    disk = FaultDisk().outside().disk
    disk.make_directory("data")
    with pytest.raises(LogsGone) as caught:
        LogReader(disk, "data", VClock({1: 5})).read(VClock({1: 11}))
    assert caught.value.need == VClock({1: 11})


def test_log_deleted_in_the_middle_is_reported() -> None:
    log = Log()
    for lsn in (1, 2, 3):
        log.write(lsn)
        log.rotate()
    reader = log.reader(0)
    reader.read(VClock({1: 1}))
    log.disk.unlink("data/00000000000000000001.xlog")
    with pytest.raises(LogsGone) as caught:
        read_all(reader, 3)
    assert caught.value.need == VClock({1: 2})


class Collector:
    """Deletes logs right after a directory was listed: `count` of the oldest, after each of the next listings."""

    def __init__(self, log: Log, monkeypatch: pytest.MonkeyPatch, *counts: int) -> None:
        self._counts = list(counts)
        self._log = log
        monkeypatch.setattr(log_reader, "scan_directory", self._scan)

    def _scan(self, disk: Disk, directory: str) -> LogDirectory:
        found = scan_directory(disk, directory)
        for each in found.logs[: self._counts.pop(0) if self._counts else 0]:
            self._log.disk.unlink(each.path)
        return found


def twenty_logs() -> Log:
    """Log number n begins at LSN n, and holds row n + 1."""
    log = Log()
    for lsn in range(1, 21):
        log.write(lsn)
        log.rotate()
    return log


@pytest.mark.parametrize("counts", [(12,), (17,), (11, 6)])
def test_reader_finds_its_first_log_while_older_ones_are_deleted(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = twenty_logs()
    Collector(log, monkeypatch, *counts)
    assert read_all(log.reader(17), 20) == [18, 19, 20]


def test_first_log_deleted_after_the_listing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    log = twenty_logs()
    Collector(log, monkeypatch, 18)
    with pytest.raises(LogsGone) as caught:
        log.reader(17).read(VClock({1: 20}))
    assert (caught.value.have, caught.value.need) == (VClock({1: 17}), VClock({1: 18}))


@pytest.mark.parametrize("position", [7, 0])
def test_listed_log_that_does_not_exist_ends_the_search(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a dangling symbolic link: it must neither hang the relay nor count as a gap."""
    log = twenty_logs()
    listed = scan_directory(log.door, "data")
    log.disk.unlink("data/00000000000000000007.xlog")
    monkeypatch.setattr(log_reader, "scan_directory", lambda *_: replace(listed, logs=fresh(listed.logs)))
    with pytest.raises(FileNotFoundError):
        read_all(log.reader(position), 20)


def fresh(logs: tuple[ListedFile, ...]) -> tuple[ListedFile, ...]:
    """Return the same files, without cached headers."""
    return tuple(replace(each) for each in logs)


def test_log_reader_raises_logs_gone_for_rows_received_by_a_rejoin() -> None:
    """The log before the JOIN still exists, and the next one names no predecessor (seed 2212)."""
    log = Log()
    log.write(1, 2)
    log.end()
    joined = LogWriter.create(log.door, "data", Meta(FileType.XLOG, UUID, {1: 10}))
    joined.append_encoded([row(11)], {1: 11})
    reader = log.reader(1)
    piece = reader.read(VClock({1: 11}))
    assert piece is not None
    assert [each.lsn for each in piece.slab.rows()] == [1, 2]
    with pytest.raises(LogsGone) as caught:
        reader.read(VClock({1: 11}))
    assert (caught.value.have, caught.value.need) == (VClock({1: 2}), VClock({1: 10}))


def test_partially_written_block_is_not_returned() -> None:
    log = Log()
    log.write(1, 2)
    inode = log.disk.names["data/00000000000000000000.xlog"]
    whole = bytes(inode.data)
    del inode.data[-3:]
    reader = log.reader(0)
    assert read_all(reader, 2) == [1]
    inode.data[:] = whole
    assert read_all(reader, 2) == [2]


def test_catching_up_over_many_logs_lists_the_directory_once_and_reads_each_header_twice() -> None:
    """A listing per log makes catching up quadratic: 94 s for 2,400 logs."""
    log, count = Log(), 100
    for lsn in range(1, count + 1):
        log.write(lsn)
        log.rotate()
    listings, opened = log.disk.count("list_directory"), log.disk.count("open")
    reader = log.reader(0)
    assert read_all(reader, count) == list(range(1, count + 1))
    assert log.disk.count("list_directory") - listings <= 2
    # The header for the check and the rows; a bisection for the first log.
    assert log.disk.count("open") - opened <= 2 * count + 10
