"""Storages as spaces and entries as tuples: ids, definitions, ordered keys."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from flowstone.limestone.format.entries import put, remove
from flowstone.outside import production
from flowstone.spark.index.limestone_index import LimestoneIndex
from flowstone.spark.index.limestone_spaces import (
    STORAGE_MAX,
    StorageTooLarge,
    any_space,
    epoch_of,
    position_of,
    sort_key_column,
    space_id_of,
    storage_id_of,
    tracker_of,
    tuple_column,
)
from flowstone.spark.sources.limestone.entry_reader import chunks_of, counted
from tests.spark.limestone_directories import WrittenDirectory, version


def test_storages_have_tables_of_one_shape() -> None:
    schema = tracker_of((0, 7, 1 << 40)).schema
    for storage_id in (0, 7, 1 << 40):
        space = schema.get(f"storage_{storage_id}")
        assert space is not None
        assert storage_id_of(space.id) == storage_id
        assert space.field_names == any_space().field_names
        assert space.primary_key is not None
        assert [(part.field, part.type) for part in space.primary_key.parts] == [(0, "varbinary")]


def test_storage_id_too_large_for_a_table_is_refused() -> None:
    assert storage_id_of(space_id_of(STORAGE_MAX)) == STORAGE_MAX
    with pytest.raises(StorageTooLarge, match="cannot have a table"):
        space_id_of(STORAGE_MAX + 1)


def test_epoch_round_trips_through_a_position() -> None:
    assert epoch_of(position_of(77)) == position_of(77).signature == 77


def test_chunk_has_tuples_and_ordered_keys(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    keys = [b"", b"\0", b"\0\0", b"a", b"a\0", b"ab", b"\xff"]
    directory.session(
        0, 1, *(put(1, key, key * 2, version(1, 1 << 63 | 5), (9,)) for key in keys), remove(1, b"gone", version(2))
    )
    directory.durable(1)
    index = LimestoneIndex.open(production().disk, directory.path)
    (chunk,) = chunks_of(index.disk, index.slices(0, 1)[0])
    tuples = tuple_column(chunk, counted(chunk, 0, 1))
    assert [msgpack.unpackb(each) for each in tuples.to_pylist()] == [
        *([key, key * 2, 1, 5, True, [9]] for key in keys),
        [b"gone", b"", 2, 0, False, []],
    ]
    ordered = sort_key_column(tuples).to_pylist()[: len(keys)]
    assert ordered == sorted(ordered)
    assert len(set(ordered)) == len(keys)
