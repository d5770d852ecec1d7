"""The plan of batches over an archive: settled ends, slices with their definitions, gaps, changes of format."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from flowstone.archive.manifest import NotAnArchive
from flowstone.columns.change_contract import ChangeContract
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import ArchiveIndex, DataLoss, EndsEarlier, NoImages, NotSettled
from flowstone.spark.sources.change_batches import read_slice
from flowstone.spark.sources.options import AsOf
from flowstone.spark.sources.stream_order import StreamPlace
from tests.node.archived_rows import SYNC, confirm, new_disk, rollback, slab
from tests.spark.archives import DIRECTORY, WrittenArchive
from tests.spark.change_rows import UUID, define, define_key, delete, insert, truncate, whole


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


def test_directory_without_a_manifest_or_logs_is_refused() -> None:
    disk = new_disk()
    disk.make_directory(DIRECTORY)
    with pytest.raises(NotAnArchive, match="neither an archive nor logs of a server; specify a directory"):
        ArchiveIndex.open(disk, DIRECTORY)


def test_batches_end_at_settled_positions_near_the_limit(archive: WrittenArchive) -> None:
    index = opened(archive)
    assert index.cut(VClock()) == index.settled == VClock({1: 6})
    assert index.cut(VClock({1: 2}), max_rows=2) == VClock({1: 4})
    assert index.cut(VClock({1: 2}), max_rows=1) == VClock({1: 3})
    assert index.cut(VClock(), max_rows=1) == VClock({1: 2})  # one transaction of two rows
    assert index.cut(VClock({1: 2}), max_bytes=1) == VClock({1: 3})
    assert index.cut(VClock({1: 6})) == VClock({1: 6})


def test_unsettled_rows_are_in_no_batch(archive: WrittenArchive) -> None:
    archive.write(whole(insert(7, 7, "x"), flags=SYNC))
    archive.write(whole(insert(8, 8, "x"), flags=SYNC))
    archive.save()
    assert opened(archive).cut(VClock({1: 6})) == VClock({1: 6})
    with pytest.raises(NotSettled, match=r"\{1: 7\} is not settled; rows are settled up to \{1: 6\}"):
        opened(archive).slices(VClock(), VClock({1: 7}))
    archive.write(confirm(9, 7), rollback(10, 8))
    index = opened(archive)  # the index may be ahead of the manifest
    assert index.cut(VClock({1: 6}), max_rows=1) == index.settled == VClock({1: 10})
    (part,) = index.slices(VClock({1: 6}), index.settled)
    assert part.rolled_back == ((1, 8, 8),)


def test_slices_are_ranges_of_blocks_with_their_prior_state(archive: WrittenArchive) -> None:
    index = opened(archive)
    parts = index.slices(VClock({1: 3}), VClock({1: 5}), size=1)
    assert [(part.before, part.row_count) for part in parts] == [
        (StreamPlace(VClock({1: 3}), 103_000_000), 1),
        (StreamPlace(VClock({1: 4}), 104_000_000), 1),
    ]
    (whole_part,) = index.slices(VClock(), index.settled)
    assert whole_part.row_count == 6
    assert whole_part.definitions.schema.get("orders") is None
    space = pickle.loads(pickle.dumps(parts[0])).definitions.schema.get("orders")
    assert space is not None
    assert space.field_names == ("id", "name")


def test_runs_without_rows_of_the_chosen_spaces_are_skipped(archive: WrittenArchive) -> None:
    archive.write(whole(insert(7, 7, space=513)))
    archive.save()
    index = opened(archive)
    assert [part.row_count for part in index.slices(VClock({1: 4}), index.settled, spaces=[513])] == [1]
    assert not index.slices(VClock({1: 4}), index.settled, spaces=[514])


def test_format_changes_are_known_before_a_batch_is_read(archive: WrittenArchive) -> None:
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


def test_rolled_back_definition_is_ignored(archive: WrittenArchive) -> None:
    archive.write(whole(define(7, 512, "orders", ("id", "unsigned")), flags=SYNC))
    archive.write(rollback(8, 7))
    archive.save()
    index = opened(archive)
    assert not index.format_changes(512, VClock({1: 2}), index.settled)
    assert _names(index, 8) == ("id", "name")


def test_missing_rows_are_named(archive: WrittenArchive) -> None:
    archive.lose(VClock({1: 20}))
    archive.write(whole(insert(21, 21, space=513)))
    archive.save()
    index = opened(archive)
    with pytest.raises(DataLoss, match=r"LSN 7 to 20 of replica 1 are missing after \{1: 3\}: they were collected"):
        index.slices(VClock({1: 3}), index.settled)
    assert len(index.slices(VClock({1: 3}), VClock({1: 6}))) == 1
    (behind,) = index.slices(VClock({1: 20}), index.settled)
    assert behind.before.vclock == VClock({1: 20})
    assert behind.definitions.schema.get("orders") is None  # the snapshot after the gap has no definition
    name = "00000000000000000000"
    for extension in (".snap", ".xlog", ".blocks.jsonl"):
        archive.disk.unlink(f"{DIRECTORY}/{name}{extension}")
    with pytest.raises(
        DataLoss, match=r"LSN 4 to 20 of replica 1 are missing after \{1: 3\}: the oldest log starts later"
    ):
        opened(archive).slices(VClock({1: 3}), index.settled)


def test_missing_images_are_an_error(archive: WrittenArchive) -> None:
    index = opened(archive)
    with pytest.raises(NoImages, match="the archive has none; set images=ops"):
        index.check_images(VClock())
    index.facts = replace(index.facts, images_since=VClock({1: 4}))
    with pytest.raises(NoImages, match=r"no images of the rows after \{1: 3\}: the archive has images after \{1: 4\}"):
        index.check_images(VClock({1: 3}))
    index.check_images(VClock({1: 4}))


# --- a growing archive ---


def test_refresh_reads_what_was_appended(archive: WrittenArchive) -> None:
    index = opened(archive)
    index.refresh()
    assert index.settled == VClock({1: 6})
    archive.write(whole(insert(7, 7, "x"), flags=SYNC))
    archive.save()
    index.refresh()
    assert index.settled == VClock({1: 6})
    archive.write(rollback(8, 7))
    archive.write(whole(define(9, 512, "orders", ("id", "unsigned"))))
    archive.save()
    index.refresh()
    assert index.settled == VClock({1: 9})
    fresh = opened(archive)
    for size in (1, 1 << 20):
        known, new = (
            index.slices(VClock(), VClock({1: 9}), size=size),
            fresh.slices(VClock(), VClock({1: 9}), size=size),
        )
        assert [(each.offset, each.end, each.before, each.rolled_back) for each in known] == [
            (each.offset, each.end, each.before, each.rolled_back) for each in new
        ]
        assert [each.definitions.schema for each in known] == [each.definitions.schema for each in new]


def test_collected_logs_are_forgotten_and_definitions_are_kept(archive: WrittenArchive) -> None:
    archive.log.cut(VClock({1: 6}))
    archive.snapshot(VClock({1: 6}), [])
    archive.write(whole(insert(7, 7, "x")))
    archive.save()
    index = opened(archive)
    assert index.earliest == VClock()
    for extension in (".snap", ".xlog", ".blocks.jsonl"):
        archive.disk.unlink(f"{DIRECTORY}/{0:020d}{extension}")
    index.refresh()
    assert index.earliest == VClock({1: 6})
    assert _names(index, 7) == ("id", "name")
    with pytest.raises(DataLoss, match=r"LSN 3 to 6 of replica 1 are missing after \{1: 2\}"):
        index.slices(VClock({1: 2}), index.settled)


def test_definitions_and_truncations_are_separate_batches(archive: WrittenArchive) -> None:
    archive.write(whole(insert(7, 7, "x")), whole(define(8, 512, "orders", ("id", "unsigned"))), whole(insert(9, 9)))
    archive.write(whole(insert(10, 10)), whole(truncate(11)), whole(insert(12, 1)))
    archive.write(whole(delete(13, 512, space=330)))  # a row of a dropped space: it truncates nothing
    archive.save()
    index = opened(archive)
    position, found = VClock(), []
    while position != index.settled:
        position = index.cut(position, at_definitions=True)
        found.append(position.get(1))
    assert found == [2, 7, 8, 10, 11, 13]
    assert index.cut(VClock({1: 2}), max_rows=2, at_definitions=True) == VClock({1: 4})


def test_unsettled_definition_does_not_end_a_batch(archive: WrittenArchive) -> None:
    archive.write(whole(define(7, 512, "orders", ("id", "unsigned")), flags=SYNC))
    archive.save()
    index = opened(archive)
    assert index.cut(VClock({1: 4}), at_definitions=True) == VClock({1: 6})
    archive.write(whole(insert(8, 1)), confirm(9, 7))
    archive.save()
    index.refresh()
    assert index.cut(VClock({1: 6}), at_definitions=True) == VClock({1: 7})
    assert index.schema_at(VClock({1: 6})).schema.space(512).field_names == ("id", "name")
    assert index.schema_at(VClock({1: 7})).schema.space(512).field_names == ("id",)


def test_changing_a_returned_schema_does_not_affect_the_index(archive: WrittenArchive) -> None:
    index = opened(archive)
    mine = index.schema_at(index.settled)
    (row,) = slab(whole(define(1, 513, "mine"))).rows()
    mine.apply(row.type, row.body)
    assert index.definition_at(index.settled, "mine") is None


# --- snapshots ---


def test_snapshots_are_read_in_slices_of_whole_blocks(archive: WrittenArchive) -> None:
    rows = [(512, (number, "x" * 200)) for number in range(5000)]
    archive.snapshot(VClock({1: 6}), rows, at=104.5)
    index = opened(archive)
    first, second = index.snapshots
    assert (first.vclock, second.vclock) == (VClock(), VClock({1: 6}))
    assert index.snapshot_at(VClock({1: 5})) == first
    assert index.snapshot_at(VClock({1: 6})) == second
    parts = index.snapshot_slices(second, size=1)
    assert len(parts) > 1
    assert all(part.is_snapshot and part.before == StreamPlace(VClock({1: 6}), 106_000_000) for part in parts)
    assert [part.end for part in parts[:-1]] == [part.offset for part in parts[1:]]
    assert len(index.snapshot_slices(second)) == 1
    read = [
        row
        for part in parts
        for batch in read_slice(archive.disk, part, VClock(), VClock(), ChangeContract(UUID, wanted=("_tuple",)))
        for row in batch.column(0).to_pylist()
    ]
    assert read == [f'[{number},"{"x" * 200}"]' for number in range(5000)]


def test_snapshot_is_never_later_than_the_rows_after_it() -> None:
    """The time stamp of the snapshot comes from another clock, or is the time of its writing."""
    archive = WrittenArchive(snapshot_at=200.0)
    archive.define_orders()
    archive.save()
    index = opened(archive)
    (first,) = index.snapshots
    assert index.snapshot_slices(first)[0].before == StreamPlace(VClock(), 101_000_000)


# --- past moments ---


@pytest.mark.parametrize(
    ("as_of", "lsn"),
    [
        (AsOf(time=105.5), 5),
        (AsOf(time=105.0), 5),
        (AsOf(time=101.5), 0),  # the transaction of LSN 1 and 2 was committed at 102
        (AsOf(time=106.0), 6),
        (AsOf(vclock=VClock({1: 4})), 4),
        (AsOf(vclock=VClock({1: 2})), 2),
        (AsOf(vclock=VClock()), 0),
        (AsOf(lsn=3), 3),
        (AsOf(lsn=6), 6),
    ],
)
def test_moment_resolves_to_a_position_between_transactions(archive: WrittenArchive, as_of: AsOf, lsn: int) -> None:
    assert opened(archive).resolve(as_of) == VClock({1: lsn})


@pytest.mark.parametrize(
    ("as_of", "message"),
    [
        (AsOf(lsn=1), r"the position after LSN 1 is not settled; the nearest: \{\} and \{1: 2\}"),
        (AsOf(vclock=VClock({1: 1})), r"\{1: 1\} is not a position .*; the nearest: \{\} and \{1: 2\}"),
        (AsOf(vclock=VClock({1: 3, 2: 4})), r"\{1: 3, 2: 4\} is not a position .* the nearest: \{1: 3\} and \{1: 4\}"),
        (AsOf(vclock=VClock({1: 8})), r"\{1: 8\} is not a position between .*; the nearest: \{1: 6\}"),
        (AsOf(lsn=7), r"the position after LSN 7 is not settled; the nearest: \{1: 6\}"),
        (AsOf(lsn=9), r"the position after LSN 9 is not settled; the nearest: \{1: 6\}"),
        (AsOf(time=107.0), r"rows written up to 1970-01-01T00:01:47\+00:00 are not settled; the nearest: \{1: 6\}"),
        (AsOf(time=0.5), r"the state at 1970-01-01T00:00:00.500000\+00:00 is unknown; the nearest: \{\}"),
    ],
)
def test_unsettled_moment_is_rejected_with_the_nearest_one(archive: WrittenArchive, as_of: AsOf, message: str) -> None:
    archive.write(whole(insert(7, 7, "x"), flags=SYNC), whole(insert(8, 8, "x")))
    archive.save()
    with pytest.raises(NotSettled, match=message):
        opened(archive).resolve(as_of)


def test_lsn_is_ambiguous_with_several_writers(archive: WrittenArchive) -> None:
    archive.write(whole(insert(1, 9, "x", origin=2)))
    archive.save()
    with pytest.raises(NotSettled, match="LSN 3 is ambiguous: 2 instances have written rows; use a vclock"):
        opened(archive).resolve(AsOf(lsn=3))


def test_moment_in_a_gap_is_unknown(archive: WrittenArchive) -> None:
    archive.lose(VClock({1: 20}), at=119.0)
    archive.write(whole(insert(21, 21, space=513)))
    archive.save()
    index = opened(archive)
    with pytest.raises(NotSettled, match=r"is unknown; the nearest: \{1: 6\} and \{1: 20\}"):
        index.resolve(AsOf(time=110.0))
    assert index.resolve(AsOf(time=120.0)) == VClock({1: 20})
    assert index.resolve(AsOf(time=105.0)) == VClock({1: 5})
    with pytest.raises(NotSettled, match=r"the nearest: \{1: 6\}"):
        index.resolve(AsOf(vclock=VClock({1: 12})))


def test_time_after_the_end_of_an_archive_is_refused_with_that_end(archive: WrittenArchive) -> None:
    index = opened(archive)
    with pytest.raises(EndsEarlier, match=r"ends at 1970-01-01T00:01:46\+00:00, before .*01:46.500000.*use that time"):
        index.resolve(AsOf(time=106.5))
    archive.save(known_until=200.25)  # no row was written between the last row and this time
    index.refresh()
    assert index.resolve(AsOf(time=106.5)) == index.resolve(AsOf(time=200.25)) == VClock({1: 6})
    with pytest.raises(EndsEarlier, match=r"ends at 1970-01-01T00:03:20.250000\+00:00, before"):
        index.resolve(AsOf(time=200.250001))


def test_archive_without_rows_ends_at_its_snapshot() -> None:
    archive = WrittenArchive(snapshot_at=100.0)
    archive.save()
    assert opened(archive).resolve(AsOf(time=100.0)) == VClock()
    with pytest.raises(EndsEarlier, match=r"ends at 1970-01-01T00:01:40\+00:00, before"):
        opened(archive).resolve(AsOf(time=101.0))
    archive.save(known_until=101.0)
    assert opened(archive).resolve(AsOf(time=101.0)) == VClock()


def test_time_after_the_last_row_of_a_plain_directory_is_doubtful(archive: WrittenArchive) -> None:
    assert opened(archive).doubt(AsOf(time=1e9)) is None  # archives reject such a time instead
    archive.disk.unlink(f"{archive.directory}/manifest.json")
    index = opened(archive)
    assert index.resolve(AsOf(time=1e9)) == VClock({1: 6})
    doubt = index.doubt(AsOf(time=107.0))
    assert doubt is not None
    assert "was written at 1970-01-01T00:01:46+00:00; rows written between then and 1970-01-01T00:01:47" in doubt
    assert index.doubt(AsOf(time=106.0)) is index.doubt(AsOf(lsn=6)) is None


def test_definitions_after_a_gap_are_those_of_its_snapshot(archive: WrittenArchive) -> None:
    index = opened(archive)
    archive.lose(VClock({1: 20}))  # the snapshot after the gap defines nothing
    archive.save()
    for each in (index, opened(archive)):
        each.refresh()
        assert _names(each, 20) is None
        assert _names(each, 6) == ("id", "name")
    archive.write(whole(define(21, 512, "orders", ("id", "unsigned"))))
    archive.save()
    index.refresh()
    assert _names(index, 21) == ("id",)


def test_batch_ends_before_a_gap(archive: WrittenArchive) -> None:
    archive.lose(VClock({1: 20}))
    archive.write(whole(insert(21, 21, space=513)))
    archive.save()
    index = opened(archive)
    assert index.cut(VClock({1: 2})) == VClock({1: 6})
    with pytest.raises(DataLoss, match=r"LSN 7 to 20 of replica 1 are missing after \{1: 6\}"):
        index.cut(VClock({1: 6}))
    assert index.cut(VClock({1: 20})) == VClock({1: 21})
    gap = index.first_gap(VClock({1: 6}), index.settled)
    assert gap is not None
    assert VClock(gap.until) == VClock({1: 20})
    assert index.cut_before_gap(VClock({1: 3})) == VClock({1: 6})
    assert index.stretches(VClock({1: 3}), VClock({1: 21})) == [
        (VClock({1: 3}), VClock({1: 6})),
        (VClock({1: 20}), VClock({1: 21})),
    ]
    assert index.stretches(VClock({1: 20}), VClock({1: 21})) == [(VClock({1: 20}), VClock({1: 21}))]


def test_space_recreated_under_its_name_is_a_format_change(archive: WrittenArchive) -> None:
    archive.write(whole(delete(7, 512, 0, space=288)), whole(delete(8, 512, space=280)), whole(insert(9, 1, space=513)))
    archive.write(whole(define(10, 600, "orders", ("id", "unsigned"))), whole(define_key(11, 600)))
    archive.write(whole(insert(12, 1, space=600)))
    archive.save()
    index = opened(archive)
    (change,) = index.format_changes(512, VClock({1: 4}), index.settled)
    assert change.before == VClock({1: 10})  # until the space has a key, no row can be written
    assert change.space is not None
    assert change.space.id == 600
    ids = {lsn: index.definition_after(VClock({1: lsn}), "orders") for lsn in (0, 6, 9, 10, 12)}
    assert {lsn: space.id if space is not None else None for lsn, space in ids.items()} == {
        0: 512,
        6: 512,
        9: 600,
        10: 600,
        12: 600,
    }
    last = index.last_definition(VClock({1: 9}), "orders")
    assert last is not None
    assert last.id == 512
    assert index.last_definition(index.settled, "nope") is None
