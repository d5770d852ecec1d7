"""Plain directories of logs: the first scan gives the same result as an archive's index, even during writes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flowstone.archive.manifest import NotAnArchive
from flowstone.box.schema import UnknownSpace
from flowstone.columns.change_contract import ChangeContract
from flowstone.replication.vclock import VClock
from flowstone.spark.index.directory_index import UNKNOWN_REPLICASET, DirectoryRuns, OverlappingLogs
from flowstone.spark.index.log_index import ArchiveIndex, DataLoss
from flowstone.spark.sources.change_batches import read_slice
from flowstone.xlog.errors import ForeignFile
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.writer import LogWriter
from tests.node.archived_rows import SYNC, confirm, new_disk, rollback
from tests.spark.archives import DIRECTORY, WrittenArchive
from tests.spark.change_rows import UUID, insert, whole
from tests.spark.sources.test_change_batches import scribble


def plain(archive: WrittenArchive) -> ArchiveIndex:
    """Return the directory in the form of a server's own."""
    index = ArchiveIndex(archive.disk, DIRECTORY, DirectoryRuns(archive.disk, DIRECTORY))
    index.refresh()
    return index


def changes(index: ArchiveIndex, start: VClock, end: VClock) -> pa.Table:
    contract = ChangeContract(UUID)
    batches = [
        batch
        for part in index.slices(start, end, size=3000)
        for batch in read_slice(index.disk, part, start, end, contract)
    ]
    return pa.Table.from_batches(batches, contract.schema).combine_chunks()


@pytest.mark.parametrize("seed", range(3))
def test_first_pass_finds_the_same_as_the_index_of_an_archive(seed: int) -> None:
    archive = WrittenArchive(wal_max_size=4000)
    archive.define_orders()
    scribble(archive, seed)
    known, found = ArchiveIndex.open(archive.disk, DIRECTORY), plain(archive)
    assert (found.settled, found.earliest) == (known.settled, known.earliest)
    assert found.schema_at(found.settled).schema == known.schema_at(known.settled).schema
    assert changes(found, VClock(), found.settled) == changes(known, VClock(), known.settled)
    position = VClock()
    while position != found.settled:
        end = found.cut(position, max_rows=20)
        assert changes(found, position, end) == changes(known, position, end)
        position = end


def test_growing_log_is_followed_by_refresh() -> None:
    archive = WrittenArchive(wal_max_size=700)
    archive.define_orders()
    index = plain(archive)
    assert index.settled == VClock({1: 2})
    archive.log.write(whole(insert(3, 3, "x"), flags=SYNC))
    index.refresh()
    assert index.settled == VClock({1: 2})
    archive.log.write(whole(insert(4, 4, "x")) + confirm(5, 3))
    index.refresh()
    assert index.settled == VClock({1: 5})
    for lsn in range(6, 40):
        archive.log.write(whole(insert(lsn, lsn, "x" * lsn)))
        if lsn % 3 == 0:
            index.refresh()
            assert index.settled == VClock({1: lsn})
    assert changes(index, VClock(), VClock({1: 39})).column("_lsn").to_pylist() == [3, 4, *range(6, 40)]
    assert len({part.path for part in index.slices(VClock(), index.settled)}) > 1


def test_transaction_rolled_back_after_a_pass_is_omitted() -> None:
    archive = WrittenArchive()
    archive.define_orders()
    archive.log.write(whole(insert(3, 3, "x"), flags=SYNC))
    index = plain(archive)
    archive.log.write(rollback(4, 3) + whole(insert(5, 5, "x")))
    index.refresh()
    assert changes(index, VClock(), index.settled).column("_lsn").to_pylist() == [5]


def test_torn_tail_is_ignored_until_it_is_complete() -> None:
    archive = WrittenArchive()
    archive.define_orders()
    path = f"{DIRECTORY}/{0:020d}.xlog"
    size = archive.disk.size(path)
    archive.log.write(whole(insert(3, 3, "x")))
    with archive.disk.open(path) as file:
        block = file.read_at(size, archive.disk.size(path) - size)
    with archive.disk.append_to(path) as file:
        file.truncate(size + len(block) // 2)
    index = plain(archive)
    assert index.settled == VClock({1: 2})
    with archive.disk.append_to(path) as file:
        file.append(block[len(block) // 2 :])
    index.refresh()
    assert index.settled == VClock({1: 3})
    assert changes(index, VClock({1: 2}), index.settled).column("_lsn").to_pylist() == [3]


def test_snapshot_without_logs_is_a_state_without_changes() -> None:
    archive = WrittenArchive()
    archive.snapshot(VClock({1: 5}), [(280, (512, 1, "orders", "memtx", 0, {}, []))])
    archive.disk.unlink(f"{DIRECTORY}/{0:020d}.snap")
    index = plain(archive)
    assert index.settled == index.earliest == VClock({1: 5})
    assert index.definition_at(index.settled, "orders") is not None
    assert not index.slices(index.settled, index.settled)


def test_missing_log_is_a_gap() -> None:
    archive = WrittenArchive(wal_max_size=1)
    archive.define_orders()
    for lsn in range(3, 7):
        archive.log.write(whole(insert(lsn, lsn, "x")))
    archive.disk.unlink(f"{DIRECTORY}/{4:020d}.xlog")
    index = plain(archive)
    with pytest.raises(DataLoss, match=r"LSN 5 of replica 1 is missing after .*: no log in the directory has them"):
        index.check(VClock(), index.settled)
    assert index.cut(VClock({1: 2})) == VClock({1: 4})


def test_logs_before_the_first_snapshot_are_ignored() -> None:
    archive = WrittenArchive(wal_max_size=1)
    archive.define_orders()
    archive.log.write(whole(insert(3, 3, "x")))
    archive.snapshot(VClock({1: 2}), [])
    archive.disk.unlink(f"{DIRECTORY}/{0:020d}.snap")
    assert plain(archive).earliest == VClock({1: 2})


def test_replica_set_uuid_is_that_of_the_snapshot() -> None:
    archive = WrittenArchive()
    archive.snapshot(VClock({1: 5}), [(272, ("cluster", UUID))])
    assert plain(archive).replicaset_uuid == UUID
    archive.disk.unlink(f"{DIRECTORY}/{5:020d}.snap")
    assert plain(archive).replicaset_uuid == UNKNOWN_REPLICASET


def test_missing_directory_is_refused() -> None:
    disk = new_disk()
    with pytest.raises(NotAnArchive, match="no such directory"):
        DirectoryRuns(disk, "nowhere").poll()


def test_logs_of_another_server_are_refused() -> None:
    archive = WrittenArchive()
    archive.define_orders()
    meta = Meta(FileType.XLOG, "99999999-2222-3333-4444-555555555555", {1: 2}, version="2.11.9")
    LogWriter.create(archive.disk, DIRECTORY, meta).close()
    with pytest.raises(ForeignFile):
        plain(archive)


def test_logs_of_two_histories_are_refused() -> None:
    archive = WrittenArchive()
    archive.define_orders()
    archive.log.write(whole(insert(3, 3, "x"), insert(4, 4, "x")))
    meta = Meta(FileType.XLOG, "11111111-2222-3333-4444-555555555555", {1: 3}, version="2.11.9")
    LogWriter.create(archive.disk, DIRECTORY, meta).close()
    with pytest.raises(OverlappingLogs, match=r"starts at \{1: 3\}, but the log before it ends at \{1: 4\}"):
        plain(archive)


def test_old_log_without_definitions_is_refused() -> None:
    archive = WrittenArchive(version="2.6.0")
    archive.log.version = "2.6.0"
    archive.log.write(whole(insert(3, 3, "x")))
    archive.disk.unlink(f"{DIRECTORY}/{0:020d}.snap")
    with pytest.raises(UnknownSpace, match="cannot tell whether rows of space 512 are settled"):
        plain(archive)
