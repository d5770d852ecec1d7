"""The plan of batches over an archive: settled ends, slices with what holds before them, gaps, changes of format."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from flowstone.node.archive_manifest import NotAnArchive
from flowstone.replication.vclock import VClock
from flowstone.spark.archive_index import ArchiveIndex, DataLoss, NoImages, NotSettled
from flowstone.spark.stream_order import Place
from tests.node.archived_rows import SYNC, confirm, new_disk, rollback
from tests.spark.archives import DIRECTORY, WrittenArchive
from tests.spark.change_rows import define, insert, whole


@pytest.fixture
def archive() -> WrittenArchive:
    archive = WrittenArchive()
    archive.define_orders()
    for lsn in range(3, 7):
        archive.write(whole(insert(lsn, lsn, "x")))
    archive.save()
    return archive


def opened(archive: WrittenArchive) -> ArchiveIndex:
    return ArchiveIndex.open(archive.disk, DIRECTORY)


def test_a_directory_without_a_manifest_is_no_archive() -> None:
    disk = new_disk()
    disk.make_directory(DIRECTORY)
    with pytest.raises(NotAnArchive, match="there is no archive, and no log of a server; name a directory"):
        ArchiveIndex.open(disk, DIRECTORY)


def test_batches_end_at_settled_positions_of_about_the_allowed_size(archive: WrittenArchive) -> None:
    index = opened(archive)
    assert index.cut(VClock()) == index.settled == VClock({1: 6})
    assert index.cut(VClock({1: 2}), max_rows=2) == VClock({1: 4})
    assert index.cut(VClock({1: 2}), max_rows=1) == VClock({1: 3})
    assert index.cut(VClock(), max_rows=1) == VClock({1: 2})  # a transaction of two
    assert index.cut(VClock({1: 2}), max_bytes=1) == VClock({1: 3})
    assert index.cut(VClock({1: 6})) == VClock({1: 6})


def test_what_waits_for_a_verdict_is_in_no_batch(archive: WrittenArchive) -> None:
    archive.write(whole(insert(7, 7, "x"), flags=SYNC))
    archive.write(whole(insert(8, 8, "x"), flags=SYNC))
    archive.save()
    assert opened(archive).cut(VClock({1: 6})) == VClock({1: 6})
    with pytest.raises(NotSettled, match=r"\{1: 7\} is not settled; settled is what lies up to \{1: 6\}"):
        opened(archive).slices(VClock(), VClock({1: 7}))
    archive.write(confirm(9, 7), rollback(10, 8))
    index = opened(archive)  # the index may be ahead of the manifest
    assert index.cut(VClock({1: 6}), max_rows=1) == index.settled == VClock({1: 10})
    (part,) = index.slices(VClock({1: 6}), index.settled)
    assert part.rolled_back == ((1, 8, 8),)


def test_slices_are_ranges_of_blocks_with_what_holds_before_them(archive: WrittenArchive) -> None:
    index = opened(archive)
    parts = index.slices(VClock({1: 3}), VClock({1: 5}), size=1)
    assert [(part.before, part.row_count) for part in parts] == [
        (Place(VClock({1: 3}), 103_000_000), 1),
        (Place(VClock({1: 4}), 104_000_000), 1),
    ]
    (whole_part,) = index.slices(VClock(), index.settled)
    assert whole_part.row_count == 6
    assert whole_part.definitions.schema.get("orders") is None
    space = pickle.loads(pickle.dumps(parts[0])).definitions.schema.get("orders")
    assert space is not None
    assert space.field_names == ("id", "name")


def test_runs_without_rows_of_the_wanted_spaces_are_left_out(archive: WrittenArchive) -> None:
    archive.write(whole(insert(7, 7, space=513)))
    archive.save()
    index = opened(archive)
    assert [part.row_count for part in index.slices(VClock({1: 4}), index.settled, spaces=[513])] == [1]
    assert not index.slices(VClock({1: 4}), index.settled, spaces=[514])


def test_where_columns_of_a_space_change_is_known_before_a_batch_is_read(archive: WrittenArchive) -> None:
    archive.write(whole(insert(7, 7, "x")), whole(define(8, 512, "renamed", ("id", "unsigned"), ("name", "string"))))
    archive.write(whole(insert(9, 9, "x"), define(10, 512, "renamed", ("id", "unsigned"))), whole(insert(11, 1)))
    archive.save()
    index = opened(archive)
    (change,) = index.format_changes(512, VClock({1: 2}), index.settled)
    assert change.before == VClock({1: 8})
    assert change.space is not None
    assert change.space.field_names == ("id",)
    assert not index.format_changes(512, VClock({1: 10}), index.settled)
    assert not index.format_changes(513, VClock(), index.settled)
    assert [_names(index, lsn) for lsn in (0, 2, 8, 11)] == [None, ("id", "name"), ("id", "name"), ("id",)]


def _names(index: ArchiveIndex, lsn: int) -> tuple[str, ...] | None:
    space = index.definition_at(VClock({1: lsn}), 512)
    return space.field_names if space is not None else None


def test_a_definition_that_was_withdrawn_is_none(archive: WrittenArchive) -> None:
    archive.write(whole(define(7, 512, "orders", ("id", "unsigned")), flags=SYNC))
    archive.write(rollback(8, 7))
    archive.save()
    index = opened(archive)
    assert not index.format_changes(512, VClock({1: 2}), index.settled)
    assert _names(index, 8) == ("id", "name")


def test_rows_that_are_not_there_are_named(archive: WrittenArchive) -> None:
    archive.lose(VClock({1: 20}))
    archive.write(whole(insert(21, 21, space=513)))
    archive.save()
    index = opened(archive)
    with pytest.raises(DataLoss, match=r"LSN 7 to 20 of replica 1 are missing behind \{1: 3\}: they were collected"):
        index.slices(VClock({1: 3}), index.settled)
    assert len(index.slices(VClock({1: 3}), VClock({1: 6}))) == 1
    (behind,) = index.slices(VClock({1: 20}), index.settled)
    assert behind.before.vclock == VClock({1: 20})
    assert behind.definitions.schema.get("orders") is None  # the snapshot behind the gap has none
    name = "00000000000000000000"
    for extension in (".snap", ".xlog", ".blocks.jsonl"):
        archive.disk.unlink(f"{DIRECTORY}/{name}{extension}")
    with pytest.raises(DataLoss, match=r"LSN 4 to 20 of replica 1 behind \{1: 3\} came before its oldest log"):
        opened(archive).slices(VClock({1: 3}), index.settled)


def test_images_are_asked_for_only_where_they_are(archive: WrittenArchive) -> None:
    index = opened(archive)
    with pytest.raises(NoImages, match="it has none; set images=ops"):
        index.check_images(VClock())
    index.facts = replace(index.facts, images_since=VClock({1: 4}))
    with pytest.raises(NoImages, match=r"no images of the rows behind \{1: 3\}: it has them behind \{1: 4\}"):
        index.check_images(VClock({1: 3}))
    index.check_images(VClock({1: 4}))
