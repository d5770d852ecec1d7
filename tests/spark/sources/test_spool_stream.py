"""The batches of a stream: chunks of the snapshot, then changes, and the same batch for the same positions."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.columns.change_contract import ChangeContract
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import ArchiveIndex, DataLoss
from flowstone.spark.sources import spool_stream
from flowstone.spark.sources.change_batches import FormatChanged, read_slice
from flowstone.spark.sources.offsets import Position
from flowstone.spark.sources.spool_stream import BatchLimits, SnapshotLost, next_position, slices_between, snapshot_of
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.writer import SnapWriter
from tests.node.archived_rows import INSTANCE, SYNC, rollback
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import ORDERS, UUID, define, define_key, insert, whole

ALL = ChangeContract(UUID, None, wanted=("_lsn",))
TYPED = ChangeContract(UUID, ORDERS, wanted=("_lsn", "id"))
NO_LIMIT = BatchLimits()


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    archive = WrittenArchive(production().disk, str(tmp_path / "archive"))
    archive.define_orders()
    return archive


def saved(archive: WrittenArchive) -> ArchiveIndex:
    archive.save()
    return ArchiveIndex.open(production().disk, archive.directory)


def at(lsn: int, chunk: int | None = None) -> Position:
    return Position(VClock({1: lsn}), chunk=chunk)


def lsns(index: ArchiveIndex, start: Position, end: Position, contract: ChangeContract = ALL) -> list[int]:
    found: list[int] = []
    for piece in slices_between(index, start, end, contract):
        for batch in read_slice(production().disk, piece.part, piece.start, piece.end, piece.contract):
            found += batch["_lsn"].to_pylist()
    return found


def test_batch_ends_at_the_limit_or_the_target(archive: WrittenArchive) -> None:
    for lsn in range(3, 9):
        archive.write(whole(insert(lsn, lsn, "x")))
    index = saved(archive)
    end = next_position(index, at(2), NO_LIMIT, ALL)
    assert end.vclock == VClock({1: 8})
    assert lsns(index, at(2), end) == [3, 4, 5, 6, 7, 8]
    assert next_position(index, at(2), BatchLimits(rows=2), ALL).vclock == VClock({1: 4})
    target = VClock({1: 5})
    assert next_position(index, at(2), BatchLimits(rows=3), ALL, target=target).vclock == target
    assert next_position(index, at(5), NO_LIMIT, ALL, target=target) == at(5)
    assert next_position(index, end, NO_LIMIT, ALL) == end
    assert BatchLimits(10, 1).share(3) == BatchLimits(3, 1)


def test_target_between_positions_of_this_log_splits_no_transaction(archive: WrittenArchive) -> None:
    # The member that returned the target had the row of replica 2 before the second row of replica 1.
    archive.write(whole(insert(3, 3, "x")), whole(insert(4, 4, "x")), whole(insert(1, 5, "x", origin=2)))
    archive.write(whole(insert(5, 6, "x")))
    index = saved(archive)
    end = next_position(index, at(2), NO_LIMIT, ALL, target=VClock({1: 3, 2: 1}))
    assert lsns(index, at(2), end) == [3, 4, 1, 5]


def test_rolled_back_rows_are_not_delivered(archive: WrittenArchive) -> None:
    archive.write(whole(insert(3, 3, "x")))
    archive.write(whole(insert(4, 4, "gone"), flags=SYNC))
    assert next_position(saved(archive), at(2), NO_LIMIT, ALL).vclock == VClock({1: 3})
    archive.write(rollback(5, 4))
    archive.write(whole(insert(6, 6, "x")))
    index = saved(archive)
    assert lsns(index, at(2), next_position(index, at(2), NO_LIMIT, ALL)) == [3, 6]


def test_times_never_decrease_below_delivered_ones(archive: WrittenArchive) -> None:
    archive.write(whole(insert(3, 3, "x")))
    index = saved(archive)
    late = Position(VClock({1: 2}), stamp=10**15)
    end = next_position(index, late, NO_LIMIT, ALL)
    assert end.stamp == 10**15
    (piece,) = slices_between(index, late, end, ALL)
    assert piece.part.before.time == 10**15
    assert next_position(index, at(2), NO_LIMIT, ALL).stamp == 103_000_000


def test_batch_ends_before_a_change_of_format_and_the_next_one_raises(archive: WrittenArchive) -> None:
    archive.write(whole(insert(3, 3, "x")))
    archive.write(whole(define(4, 512, "orders", ("id", "unsigned"), ("name", "string"), ("note", "string"))))
    archive.write(whole(insert(5, 5, "x", "y")))
    index = saved(archive)
    end = next_position(index, at(2), NO_LIMIT, TYPED)
    assert end.vclock == VClock({1: 3})
    with pytest.raises(FormatChanged, match=r"changes after \{1: 3\}"):
        next_position(index, end, NO_LIMIT, TYPED)
    space = index.definition_at(index.settled, "orders")
    renewed = ChangeContract(UUID, space, wanted=("_lsn", "note"))
    assert lsns(index, end, next_position(index, end, NO_LIMIT, renewed), renewed) == [5]
    assert next_position(index, at(2), NO_LIMIT, ALL).vclock == VClock({1: 5})


def snapshot(archive: WrittenArchive, lsn: int, rows: int) -> None:
    meta = Meta(FileType.SNAP, INSTANCE, {1: lsn}, version="2.11.9")
    with SnapWriter(archive.disk, archive.directory, meta, 1.0) as writer:
        space = define(1, 512, "orders", ("id", "unsigned"), ("name", "string"))
        for row in (space, define_key(2, 512)):
            writer.add_row(RequestType(row.type), row.body)
        writer.add_tuples(512, (pack((number, str(number) * 100)) for number in range(rows)))


def test_snapshot_is_delivered_in_chunks_with_absolute_numbers(
    archive: WrittenArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_stream, "CHUNK_SIZE", 20_000)
    archive.write(whole(insert(3, 3, "x")))
    snapshot(archive, 2, 10_000)
    contract = ChangeContract(UUID, ORDERS, wanted=("id",))
    index = saved(archive)
    here, numbers, ids = at(2, 0), [], []
    while here.chunk is not None:
        end = next_position(index, here, BatchLimits(size=25_000), contract)
        assert next_position(index, here, BatchLimits(rows=1), contract).chunk in (here.chunk + 1, None)
        for piece in slices_between(index, here, end, contract):
            for batch in read_slice(production().disk, piece.part, piece.start, piece.end, piece.contract):
                ids += batch["id"].to_pylist()
        numbers.append(end.chunk)
        here = end
    assert ids == list(range(10_000))
    assert len(numbers) > 2
    assert numbers[:2] == [1, 2]
    assert here == at(2)
    assert lsns(index, here, next_position(index, here, NO_LIMIT, ALL)) == [3]


def test_snapshot_lost_halfway_is_an_error(archive: WrittenArchive) -> None:
    index = saved(archive)
    with pytest.raises(SnapshotLost, match=r"snapshot at \{1: 2\} was deleted after 3 of its chunks were delivered"):
        next_position(index, at(2, 3), NO_LIMIT, ALL)
    with pytest.raises(SnapshotLost):
        snapshot_of(index, at(2, 3))


def test_snapshot_after_a_gap_replaces_the_missing_rows_if_allowed(archive: WrittenArchive) -> None:
    archive.write(whole(insert(3, 3, "x")))
    archive.lose(VClock({1: 10}))
    archive.write(whole(insert(11, 11, "x")))
    index = saved(archive)
    end = next_position(index, at(2), NO_LIMIT, ALL)
    assert end.vclock == VClock({1: 3})
    with pytest.raises(DataLoss, match="LSN 4 to 10 of replica 1 are missing"):
        next_position(index, end, NO_LIMIT, ALL)
    behind = next_position(index, end, NO_LIMIT, ALL, over_gaps=True)
    assert (behind.vclock, behind.chunk) == (VClock({1: 10}), 0)
    assert slices_between(index, end, behind, ALL) == []
    whole_snapshot = next_position(index, behind, NO_LIMIT, ALL, over_gaps=True)
    assert (whole_snapshot.vclock, whole_snapshot.chunk) == (VClock({1: 10}), None)
    last = next_position(index, whole_snapshot, NO_LIMIT, ALL, over_gaps=True)
    assert lsns(index, whole_snapshot, last) == [11]
