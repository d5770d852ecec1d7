"""Definitions in a file next to a log: written atomically, and read when there is no snapshot."""

from __future__ import annotations

import pytest

from flowstone.archive.definitions_file import (
    DamagedDefinitions,
    DefinitionsFile,
    check_rows,
    definition_files,
    read_definitions,
    rows_of,
    write_definitions,
)
from flowstone.box.schema import SchemaTracker
from flowstone.errors import FlowstoneError
from flowstone.iproto.msgpack import pack
from flowstone.replication.limbo.control_rows import Promote
from tests.node.archived_rows import INSTANCE, new_disk

SPACE = pack((512, 1, "orders", "memtx", 0, {}, [{"name": "id", "type": "unsigned"}]))
INDEX = pack((512, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]]))


def definitions(lsn: int = 500) -> DefinitionsFile:
    return DefinitionsFile({1: lsn}, INSTANCE, "2.6.0", ((280, SPACE), (288, INDEX)), (1, 400, 2))


def test_definitions_round_trip() -> None:
    disk = new_disk()
    disk.make_directory("dir")
    path = write_definitions(disk, "dir", definitions())
    assert path == "dir/00000000000000000500.definitions"
    found = read_definitions(disk, path)
    assert found == definitions()
    assert found.promote == Promote(1, 400, 2)
    tracker = SchemaTracker()
    found.apply_to(tracker)
    orders = tracker.schema.space("orders")
    assert [field.name for field in orders.fields] == ["id"]
    assert orders.primary_key is not None


def test_rows_of_a_tracker_rebuild_an_equal_tracker() -> None:
    tracker, other = SchemaTracker(), SchemaTracker()
    definitions().apply_to(tracker)
    DefinitionsFile({}, INSTANCE, "2.6.0", rows_of(tracker)).apply_to(other)
    assert other.schema == tracker.schema


def test_files_are_found_in_the_order_of_their_positions() -> None:
    disk = new_disk()
    disk.make_directory("dir")
    for lsn in (900, 5):
        write_definitions(disk, "dir", definitions(lsn))
    disk.create("dir/5.definitions")
    assert [file.signature for file in definition_files(disk, "dir")] == [5, 900]


def test_truncated_file_is_an_error() -> None:
    disk = new_disk()
    disk.make_directory("dir")
    path = write_definitions(disk, "dir", definitions())
    with disk.append_to(path) as file:
        file.truncate(file.size() - 3)
    with pytest.raises(DamagedDefinitions, match="not a definitions file"):
        read_definitions(disk, path)


def test_only_definition_rows_are_accepted() -> None:
    assert check_rows([(280, SPACE)]) == ((280, SPACE),)
    with pytest.raises(FlowstoneError, match="space 512 is not a schema space; pass rows of _space or _index"):
        check_rows([(512, SPACE)])
