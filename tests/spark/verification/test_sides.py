"""Sides that are logs: their ends, the positions that they can show, and the spaces that can be compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import Schema
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.verification.sides import LogSide, comparable
from tests.node.archived_rows import SYNC
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, insert, whole


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    written.write(whole(insert(3, 1, "a")), whole(insert(4, 2, "b"), insert(5, 3, "c")))
    written.save()
    return written


def test_reach_of_an_archive_is_its_settled_position(archive: WrittenArchive) -> None:
    side = LogSide(archive.directory)
    assert (side.kind, side.replicaset_uuid, side.reach) == ("archive", UUID, VClock({1: 5}))
    archive.write(whole(insert(6, 4, "waits"), flags=SYNC))
    archive.save()
    side.refresh()
    assert side.reach == VClock({1: 5})
    assert not side.can_show(VClock({1: 6}))


def test_archive_shows_positions_from_its_snapshot_to_its_end(archive: WrittenArchive) -> None:
    side = LogSide(archive.directory)
    assert side.can_show(VClock({1: 3}))
    assert side.can_show(VClock({1: 5}))
    assert not side.can_show(VClock({1: 9}))


def test_archive_shows_no_position_inside_a_gap(archive: WrittenArchive) -> None:
    archive.lose(VClock({1: 20}))
    archive.write(whole(insert(21, 9, "z")))
    archive.save()
    side = LogSide(archive.directory)
    assert [side.can_show(VClock({1: lsn})) for lsn in (5, 10, 20, 21)] == [True, False, True, True]


def test_spaces_without_comparable_tuples_are_skipped_with_the_reason() -> None:
    spaces = [
        SpaceDefinition(280, "_space"),
        SpaceDefinition(512, "plain"),
        SpaceDefinition(513, "local", is_local=True),
        SpaceDefinition(514, "temporary", is_temporary=True),
        SpaceDefinition(515, "view", is_view=True),
        SpaceDefinition(516, "vinyl", engine="vinyl"),
    ]
    schema = Schema({space.id: space for space in spaces})
    found, left_out = comparable(schema, has_vinyl=False)
    assert list(found) == [512]
    assert left_out == {
        513: "it is local to each instance",
        514: "it is temporary and not in the log",
        515: "it has no tuples",
        516: "its engine is vinyl, whose tuples are in separate files",
    }
    assert list(comparable(schema, has_vinyl=True)[0]) == [512, 516]
