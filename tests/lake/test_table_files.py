"""Files of tables: names that contain their keys, statistics, and look-ups."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.iproto.msgpack import pack
from flowstone.lake import table_files as lake_files
from flowstone.lake.table_files import (
    RANGE_BYTES,
    FileEntry,
    KeyRange,
    PinnedTable,
    SortedKeys,
    TableFiles,
    in_order,
)
from flowstone.lake.table_schema import LakeError, LakeSchema
from tests.spark.lake_rows_given import ORDERS, packed, space

SCHEMA = LakeSchema(ORDERS)


def rows(*keys: bytes) -> pa.Table:
    return SCHEMA.rows(
        pa.array(keys, pa.binary()), pa.array([packed(len(key), key.hex()) for key in keys], pa.binary())
    )


def found_in(pinned: PinnedTable, *keys: bytes) -> dict[bytes, bytes]:
    looked_up = pinned.lookup(pa.array(keys, pa.binary()))
    return dict(zip(*(column.to_pylist() for column in looked_up.columns), strict=True))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=50), min_size=1, unique=True), st.lists(st.binary(max_size=50)))
def test_every_key_is_within_the_range_of_its_file(inside: list[bytes], asked: list[bytes]) -> None:
    ordered = sorted(inside)
    between = KeyRange(ordered[0][:RANGE_BYTES], ordered[-1][:RANGE_BYTES])
    keys = SortedKeys(pa.array(sorted({*inside, *asked}), pa.binary()))
    chosen = between.places(keys)
    assert {keys.keys[place].as_py() for place in chosen} >= set(inside)
    assert all(keys.keys[place].as_py() >= between.first for place in chosen)
    assert KeyRange(b"", None).places(keys) == range(len(keys))


def test_file_states_its_keys_in_its_name_and_footer(tmp_path: Path) -> None:
    files = TableFiles(str(tmp_path))
    written = files.write(rows(b"", b"b" * 60, b"c" * 60))
    assert files.range_of(written.entry.path) == KeyRange(b"", b"c" * RANGE_BYTES)
    (tmp_path / written.entry.path).rename(tmp_path / "other.parquet")
    assert files.range_of("other.parquet") == KeyRange(b"", b"c" * RANGE_BYTES)
    assert files.read("other.parquet", SCHEMA.file_schema) == rows(b"", b"b" * 60, b"c" * 60)


def test_file_of_another_writer_is_sorted_on_read(tmp_path: Path) -> None:
    pq.write_table(rows(b"z", b"a"), tmp_path / "x.parquet", write_statistics=False)
    files = TableFiles(str(tmp_path))
    assert files.read("x.parquet", SCHEMA.file_schema)["_key"].to_pylist() == [b"a", b"z"]
    assert files.range_of("x.parquet") == KeyRange(b"", None)
    assert found_in(PinnedTable(files, ("x.parquet",)), b"z", b"q") == {b"z": packed(1, "7a")}


def test_statistics_bound_the_contents_of_a_file(tmp_path: Path) -> None:
    definition = space(("id", "unsigned"), ("text", "string"), ("at", "datetime"), ("number", "double"))
    schema = LakeSchema(definition, history=True)
    times = pa.array([datetime(2026, 1, 1, 0, 0, 0, 1500, UTC), None], schema.schema.field("_valid_from").type)
    states = {name: pa.nulls(2, schema.file_schema.field(name).type) for name in schema.file_schema.names[5:12]}
    filled = schema.rows(
        pa.array([b"a", b"b"]), pa.array([packed(3, "t" * 50), packed(9)]), {**states, "_valid_from": times}
    )
    said = json.loads(TableFiles(str(tmp_path)).write(filled, True).statistics)
    assert said["numRecords"] == 2
    assert (said["minValues"]["id"], said["maxValues"]["id"], said["nullCount"]["text"]) == (3, 9, 1)
    assert said["minValues"]["text"] == "t" * 32
    assert "text" not in said["maxValues"]
    assert said["minValues"]["_valid_from"] == "2026-01-01T00:00:00.001Z"
    assert said["maxValues"]["_valid_from"] == "2026-01-01T00:00:00.002Z"
    assert not {"number", "_key", "_tuple"} & {*said["minValues"]}


def test_statistics_leave_out_bounds_that_no_reader_can_represent(tmp_path: Path) -> None:
    definition = space(("id", "unsigned"), ("at", "datetime"))
    last = datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)
    filled = LakeSchema(definition).rows(
        pa.array([b"a", b"b"]), pa.array([pack([1, last]), pack([2, datetime(2026, 1, 1, tzinfo=UTC)])])
    )
    said = json.loads(TableFiles(str(tmp_path)).write(filled).statistics)
    assert said["minValues"]["at"] == "2026-01-01T00:00:00.000Z"
    assert "at" not in said["maxValues"]


def test_look_ups_open_only_files_whose_range_contains_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = TableFiles(str(tmp_path))
    paths = tuple(files.write(rows(*keys)).entry.path for keys in ([b"a", b"c"], [b"d", b"f"], [b"g"]))
    pinned: PinnedTable = deepcopy(PinnedTable(files, paths))
    opened: list[str] = []
    plain = TableFiles.open

    def watched(files: TableFiles, path: str) -> pq.ParquetFile:
        opened.append(path)
        return plain(files, path)

    monkeypatch.setattr(TableFiles, "open", watched)
    assert found_in(pinned, b"f", b"e", b"f", b"zz") == {b"f": packed(1, "66")}
    assert opened == [paths[1]]
    assert found_in(pinned) == {}
    assert [len(batch) for batch in pinned.scan()] == [2, 2, 1]


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match=r"gone\.parquet is missing, but the table's log lists it"):
        TableFiles(str(tmp_path)).open("gone.parquet")


def test_large_tables_are_split_and_small_ones_are_not(tmp_path: Path) -> None:
    files = TableFiles(str(tmp_path))
    many = rows(*(number.to_bytes(2, "big") for number in range(1000)))
    parts = files.write_split(many, size=many.nbytes // 4)
    assert [part.entry.row_count for part in parts] == [200] * 5
    assert len(files.write_split(many, size=many.nbytes * 3 // 4)) == 1
    assert files.write_split(many.slice(0, 0)) == []
    entries = in_order([FileEntry(part.entry.path, 0, 0) for part in reversed(parts)], files)
    assert [each.path for each, _ in entries] == [part.entry.path for part in parts]


def test_object_stores_are_written_and_read_like_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Use the store of delta-rs over a local directory, as over a bucket.
    monkeypatch.setattr(lake_files, "_LOCAL", re.compile("never"))
    (tmp_path / "other").mkdir()
    files, other = TableFiles(f"file://{tmp_path}"), TableFiles(f"file://{tmp_path}/other")
    files.make_directory()
    written = files.write(rows(b"a", b"b"))
    assert written.entry.size == (tmp_path / written.entry.path).stat().st_size
    assert files.read(written.entry.path, SCHEMA.file_schema) == rows(b"a", b"b")
    assert found_in(PinnedTable(files, (written.entry.path,)), b"b") == {b"b": packed(1, "62")}
    files.copy_to(other, written.entry.path)
    assert other.read(written.entry.path, SCHEMA.file_schema) == rows(b"a", b"b")
    with pytest.raises(LakeError, match="is missing"):
        files.open("gone.parquet")
