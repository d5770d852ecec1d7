"""The built-in system spaces equal those in the first snapshot of real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.box import system
from flowstone.box.schema import Schema, SchemaTracker
from flowstone.iproto.constants import RequestType
from flowstone.outside.disk import SystemDisk
from flowstone.xlog.reader import LogFile
from tests.places import VECTORS

FIRST_SNAPSHOTS = sorted(VECTORS.glob("tarantool-*/01-*/files/master/00000000000000000000.snap"))
LATEST = next(path for path in FIRST_SNAPSHOTS if "3.8" in str(path))


def schema_of(path: Path) -> Schema:
    tracker = SchemaTracker()
    with LogFile.open(SystemDisk(), str(path)) as log:
        for row in log.rows():
            tracker.apply(row.type, row.body)
    return tracker.schema


def test_each_release_has_a_first_snapshot() -> None:
    assert len(FIRST_SNAPSHOTS) == 3


@pytest.mark.parametrize("path", FIRST_SNAPSHOTS, ids=lambda path: path.parts[-5])
def test_first_snapshot_defines_all_system_spaces_with_names_and_primary_keys(path: Path) -> None:
    schema = schema_of(path)
    assert not any(schema.problem(space.id) for space in schema)
    built_in = SchemaTracker().schema
    for space in schema:
        known = built_in.space(space.id)
        assert (known.name, known.engine, known.field_count) == (space.name, space.engine, space.field_count)
        assert (known.is_local, known.is_temporary) == (space.is_local, space.is_temporary)
        # Later releases append fields, but never rename, retype or remove a field.
        assert known.fields[: len(space.fields)] == space.fields
        assert known.primary_key == space.primary_key
        assert (space.primary_key is None) == (space.id == system.VINYL_DEFERRED_DELETE_ID)


def test_built_in_schema_equals_that_of_the_newest_release() -> None:
    latest, built_in = schema_of(LATEST), SchemaTracker().schema
    assert [space.id for space in built_in] == [space.id for space in latest]
    assert [space.fields for space in built_in] == [space.fields for space in latest]


def test_log_without_a_snapshot_has_named_system_spaces() -> None:
    tracker = SchemaTracker()
    assert tracker.schema.space(system.SPACE_ID).name == "_space"
    assert tracker.schema.space("_vindex").id == system.INDEX_ID + 1
    assert tracker.schema.space("_cluster").field_names == ("id", "uuid", "name")
    assert all(system.FIRST_SYSTEM_SPACE_ID < space.id < system.FIRST_USER_SPACE_ID for space in tracker.schema)
    assert tracker.apply(RequestType.NOP, b"") is None
