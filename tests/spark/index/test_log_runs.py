"""The runs of an archive: each poll returns everything appended since the last one."""

from __future__ import annotations

import pytest

from flowstone.archive.definitions_file import DefinitionsFile, write_definitions
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_runs import ArchiveRuns, BrokenIndex, newest_at
from tests.node.archived_rows import INSTANCE
from tests.spark.archives import DIRECTORY, WrittenArchive
from tests.spark.change_rows import insert, whole


@pytest.fixture
def archive() -> WrittenArchive:
    archive = WrittenArchive(wal_max_size=300)
    archive.define_orders()
    for lsn in range(3, 12):
        archive.write(whole(insert(lsn, lsn, "x" * 50)))
    archive.save()
    return archive


def positions(feed: ArchiveRuns) -> list[int]:
    return [VClock(run.vclock).get(1) for added in feed.poll().added for run in added.runs]


def second_index(archive: WrittenArchive) -> str:
    names = [name for name in archive.disk.list_directory(DIRECTORY) if name.endswith(".blocks.jsonl")]
    return f"{DIRECTORY}/{names[1]}"


def test_every_run_is_returned_once(archive: WrittenArchive) -> None:
    feed = ArchiveRuns(archive.disk, DIRECTORY)
    assert positions(feed) == list(range(2, 12))
    assert not positions(feed)
    archive.write(whole(insert(12, 12, "x")))
    archive.save()
    assert positions(feed) == [12]
    for lsn in range(13, 20):
        archive.write(whole(insert(lsn, lsn, "x" * 100)))
    archive.save()
    assert positions(feed) == list(range(13, 20))


def test_runs_state_their_start(archive: WrittenArchive) -> None:
    before = VClock()
    for added in ArchiveRuns(archive.disk, DIRECTORY).poll().added:
        assert added.before == before
        before = VClock(added.runs[-1].vclock)
    assert before == VClock({1: 11})


def test_recreated_index_is_read_again() -> None:
    archive = WrittenArchive()
    archive.define_orders()
    archive.write(whole(insert(3, 3, "x")))
    archive.save()
    feed = ArchiveRuns(archive.disk, DIRECTORY)
    assert positions(feed) == [2, 3]
    path = f"{DIRECTORY}/{0:020d}.blocks.jsonl"
    with archive.disk.open(path) as file:
        lines = file.read_at(0, file.size()).splitlines(keepends=True)
    archive.disk.unlink(path)
    with archive.disk.create(path) as file:
        file.append(*lines[:2])
    news = feed.poll()
    assert news.gone == {f"{DIRECTORY}/{0:020d}.xlog"}
    assert [len(added.runs) for added in news.added] == [1]


def test_log_without_an_index_is_refused(archive: WrittenArchive) -> None:
    archive.disk.unlink(second_index(archive))
    with pytest.raises(BrokenIndex, match="run `flowstone archive`"):
        ArchiveRuns(archive.disk, DIRECTORY).poll()


def test_indexes_that_end_before_the_next_log_are_rejected(archive: WrittenArchive) -> None:
    path = second_index(archive)
    with archive.disk.open(path) as file:
        lines = file.read_at(0, file.size()).splitlines(keepends=True)
    with archive.disk.append_to(path) as file:
        file.truncate(sum(map(len, lines[:-1])))
    with pytest.raises(BrokenIndex, match="its indexes end at"):
        ArchiveRuns(archive.disk, DIRECTORY).poll()


def test_definitions_are_read_from_the_newest_file_before_a_position(archive: WrittenArchive) -> None:
    feed = ArchiveRuns(archive.disk, DIRECTORY)
    assert feed.poll().facts.defined_at(VClock({1: 5})) == f"{DIRECTORY}/{0:020d}.snap"
    alone = write_definitions(archive.disk, DIRECTORY, DefinitionsFile({1: 4}, INSTANCE, "2.11.9", ()))
    facts = feed.poll().facts
    assert facts.defined_at(VClock({1: 5})) == alone
    assert facts.defined_at(VClock({1: 3})) == f"{DIRECTORY}/{0:020d}.snap"
    assert [snapshot.vclock for snapshot in facts.snapshots] == [VClock()]


def test_newest_snapshot_at_a_position_is_found(archive: WrittenArchive) -> None:
    archive.snapshot(VClock({1: 5}), [])
    snapshots = ArchiveRuns(archive.disk, DIRECTORY).poll().facts.snapshots
    assert newest_at(snapshots, VClock({1: 4})) == snapshots[0]
    assert newest_at(snapshots, VClock({1: 5, 2: 7})) == snapshots[1]
    assert newest_at(snapshots[1:], VClock({1: 4})) is None
