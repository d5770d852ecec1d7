"""The directories of a query: by replica set, the choice for a batch, and the columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowstone.box.schema import UnknownSpace
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import ArchiveIndex, DataLoss, EndsEarlier, NotSettled
from flowstone.spark.sources.offsets import Offset, Position
from flowstone.spark.sources.options import AsOf, WrongOption, xlog_options
from flowstone.spark.sources.xlog.log_directories import (
    LogDirectories,
    ReplicaSetLogs,
    contracts_of_batch,
    contracts_of_stream,
)
from tests.node.archived_rows import new_disk
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, define, insert, whole

OTHER_UUID = "bbbbbbbb-0000-4000-8000-000000000001"


def archive(disk: Any, name: str, first: int, last: int, uuid: str = UUID) -> WrittenArchive:
    """Return an archive of LSNs `first` to `last`, with a snapshot before them."""
    found = WrittenArchive(disk, name, uuid=uuid)
    if first > 1:
        found.begin_at(VClock({1: first - 1}))
    else:
        found.define_orders()
        first = 3
    for lsn in range(first, last + 1):
        found.write(whole(insert(lsn, lsn, "x")))
    found.save()
    return found


def one_set(*archives: WrittenArchive) -> ReplicaSetLogs:
    directories = LogDirectories.open(archives[0].disk, [each.directory for each in archives])
    (logs,) = directories
    return logs


def without_manifest(made: WrittenArchive) -> ArchiveIndex:
    """Return the same files as a plain directory."""
    made.disk.unlink(f"{made.directory}/manifest.json")
    return ArchiveIndex.open(made.disk, made.directory)


def test_archives_of_one_replica_set_complete_each_other() -> None:
    disk = new_disk()
    logs = one_set(archive(disk, "a", 1, 10), archive(disk, "b", 8, 20))
    first, second = logs.indexes
    assert (logs.earliest, logs.settled, logs.furthest) == (VClock(), VClock({1: 20}), second)
    assert logs.furthest_from(Position(VClock({1: 3}))) is first
    assert logs.furthest_from(Position(VClock({1: 8}))) is second
    assert logs.between(VClock({1: 3}), VClock({1: 9})) is first
    assert logs.between(VClock({1: 8}), VClock({1: 15})) is second
    assert logs.furthest_from(Position(VClock({1: 7}), chunk=1)) is second
    assert logs.newest_snapshot() == VClock({1: 7})


def test_moment_is_resolved_in_the_archive_that_contains_it() -> None:
    disk = new_disk()
    logs = one_set(archive(disk, "a", 1, 10), archive(disk, "b", 8, 20))
    assert logs.resolve(AsOf(lsn=4)) == (logs.indexes[0], VClock({1: 4}))
    assert logs.resolve(AsOf(lsn=15)) == (logs.indexes[1], VClock({1: 15}))
    assert logs.resolve(None) == (logs.indexes[1], VClock({1: 20}))
    with pytest.raises(NotSettled, match="LSN 30"):
        logs.resolve(AsOf(lsn=30))


def test_time_is_resolved_in_the_archive_that_reaches_it() -> None:
    disk = new_disk()
    archives = archive(disk, "a", 1, 10), archive(disk, "b", 8, 20)
    logs = one_set(*archives)
    assert logs.resolve(AsOf(time=115.0)) == (logs.indexes[1], VClock({1: 15}))
    with pytest.raises(EndsEarlier):
        logs.resolve(AsOf(time=121.0))
    logs = ReplicaSetLogs(UUID, tuple(map(without_manifest, archives)))
    assert logs.resolve(AsOf(time=115.0)) == (logs.indexes[1], VClock({1: 15}))
    assert logs.resolve(AsOf(time=121.0)) == (logs.indexes[1], VClock({1: 20}))


def test_archive_with_a_known_end_is_preferred_to_one_that_ends_earlier() -> None:
    disk = new_disk()
    plain, known = archive(disk, "a", 1, 10), archive(disk, "b", 8, 20)
    logs = ReplicaSetLogs(UUID, (without_manifest(plain), *one_set(known).indexes))
    with pytest.raises(EndsEarlier):
        logs.resolve(AsOf(time=121.0))


def test_offsets_are_names_or_positions() -> None:
    logs = one_set(archive(new_disk(), "a", 1, 10))
    assert logs.offset_of("latest", "startingOffsets") == VClock({1: 10})
    assert logs.offset_of("earliest", "startingOffsets") == VClock()
    assert logs.offset_of({None: VClock({1: 3})}, "startingOffsets") == VClock({1: 3})
    assert logs.offset_of({UUID: VClock({1: 3})}, "startingOffsets") == VClock({1: 3})
    with pytest.raises(WrongOption, match=f"endingOffsets has no position for replica set {UUID}"):
        logs.offset_of({OTHER_UUID: VClock({1: 3})}, "endingOffsets")


def test_starting_snapshot_must_exist() -> None:
    disk = new_disk()
    made = archive(disk, "a", 1, 4)
    disk.unlink(f"a/{0:020d}.snap")
    with pytest.raises(DataLoss, match="a: no snapshot to start from; use startingOffsets=earliest"):
        one_set(made).newest_snapshot()


def test_replica_sets_are_separate_and_need_the_same_columns() -> None:
    disk = new_disk()
    archive(disk, "a", 1, 4)
    other = archive(disk, "b", 1, 4, OTHER_UUID)
    directories = LogDirectories.open(disk, ["a", "b"])
    assert sorted(directories.sets) == [UUID, OTHER_UUID]
    options = xlog_options({"path": "a,b", "space": "orders"})
    assert set(contracts_of_batch(directories, options)) == {UUID, OTHER_UUID}
    other.write(whole(define(5, 512, "orders", ("id", "unsigned"))))
    other.save()
    directories.refresh()
    with pytest.raises(WrongOption, match=f"columns of the space differ between replica sets {OTHER_UUID} and {UUID}"):
        contracts_of_batch(directories, options)


def test_several_logs_of_unknown_replica_sets_are_refused() -> None:
    disk = new_disk()
    for name in ("a", "b"):
        archive(disk, name, 1, 4)
        for gone in (f"{name}/manifest.json", f"{name}/{0:020d}.snap"):
            disk.unlink(gone)
    with pytest.raises(WrongOption, match="cannot tell which replica sets a and b belong to"):
        LogDirectories.open(disk, ["a", "b"])


def test_stream_has_the_columns_of_its_resume_position(tmp_path: Path) -> None:
    made = archive(production().disk, str(tmp_path / "a"), 1, 4)
    made.write(whole(define(5, 512, "orders", ("id", "unsigned"), ("name", "string"), ("more", "string"))))
    made.write(whole(insert(6, 6, "x", "y")), whole(define(7, 512, "orders", ("id", "unsigned"))))
    made.save()
    directories = LogDirectories.open(made.disk, [made.directory])

    def columns(**given: str) -> tuple[str, ...]:
        options = xlog_options({"path": made.directory, "space": "orders", **given}, streaming=True)
        space = contracts_of_stream(directories, options)[UUID].space
        assert space is not None
        return space.field_names

    assert columns() == ("id",)
    assert columns(schemaAt='{"1": 3}') == ("id", "name")
    assert columns(schemaAt='{"1": 4}') == ("id", "name", "more")  # the next transaction changes the format
    assert columns(schemaAt=f'{{"{UUID}": {{"1": 5}}}}') == ("id", "name", "more")
    assert columns(schemaAt='{"1": 6}') == ("id",)
    checkpoint = tmp_path / "checkpoint"
    assert columns(schemaAt=str(checkpoint)) == ("id",)
    for name in ("offsets", "commits"):
        (checkpoint / name).mkdir(parents=True)
        (checkpoint / name / "0").write_text(
            f"v1\n{{}}\n{json.dumps(Offset({UUID: Position(VClock({1: 3}))}).to_json())}"
        )
    assert columns(schemaAt=str(checkpoint)) == ("id", "name")


def test_batch_has_the_columns_at_its_end() -> None:
    disk = new_disk()
    made = archive(disk, "a", 1, 4)
    made.write(whole(define(5, 512, "orders", ("id", "unsigned"))))
    made.save()
    directories = LogDirectories.open(disk, ["a"])
    for ending, wanted in (("latest", ("id",)), ('{"1": 4}', ("id", "name"))):
        options = xlog_options({"path": "a", "space": "orders", "endingOffsets": ending})
        space = contracts_of_batch(directories, options)[UUID].space
        assert space is not None
        assert space.field_names == wanted
    with pytest.raises(UnknownSpace, match="no space 'nope' in a"):
        contracts_of_batch(directories, xlog_options({"path": "a", "space": "nope"}))
