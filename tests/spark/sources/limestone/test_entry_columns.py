"""The columns of source `limestone`: types, values, choice; the winning entry of a key."""

from __future__ import annotations

import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowstone.limestone.format.entries import Entry, EntryType, put, remove
from flowstone.outside import production
from flowstone.spark.index.limestone_index import LimestoneIndex
from flowstone.spark.sources.limestone.entry_columns import EntryContract, TooLarge, newest, place_column, places_of
from flowstone.spark.sources.limestone.entry_reader import chunks_of, counted
from flowstone.text.row_table import UnknownColumn
from tests.spark.limestone_directories import UUID, WrittenDirectory, clear, version

LONG = 1 << 63


def batch_of(path: Path, contract: EntryContract, *entries: Entry) -> pa.RecordBatch:
    directory = WrittenDirectory(path / "d")
    directory.session(0, 5, *entries)
    directory.durable(5)
    index = LimestoneIndex.open(production().disk, directory.path)
    (part,) = index.slices(0, 5)
    (chunk,) = chunks_of(index.disk, part)
    found = pickle.loads(pickle.dumps(contract)).batch(chunk, contract.chosen(chunk, counted(chunk, 0, 5)))
    found.validate(full=True)
    return found


def test_every_kind_of_entry_becomes_a_row(tmp_path: Path) -> None:
    found = batch_of(
        tmp_path,
        EntryContract(UUID),
        put(1, b"k", b"v", version(4, LONG | 3)),
        put(1, b"", b"", version(4, 4), (7, 8)),
        remove(2, b"k", version(4, 5)),
        clear(1, 4, 6),
        clear(3, 4, 7, EntryType.ADD_STORAGE),
        clear(3, 4, 8, EntryType.REMOVE_STORAGE),
    ).to_pylist()

    def row(operation: str, storage: int, key: Any, value: Any, minor: int, blobs: Any) -> dict[str, Any]:
        return {
            "_operation": operation,
            "_commit_version": 5,
            "_space": f"storage_{storage}",
            "storage_id": storage,
            "key": key,
            "value": value,
            "version_major": 4,
            "version_minor": Decimal(minor),
            "blob_ids": blobs,
            "_replicaset_uuid": UUID,
        }

    assert found == [
        row("replace", 1, b"k", b"v", LONG | 3, []),
        row("replace", 1, b"", b"", 4, [7, 8]),
        row("delete", 2, b"k", None, 5, None),
        row("truncate", 1, None, None, 6, None),
        row("add_storage", 3, None, None, 7, None),
        row("remove_storage", 3, None, None, 8, None),
    ]


def test_columns_and_storages_can_be_chosen(tmp_path: Path) -> None:
    contract = EntryContract(UUID, wanted=("value", "_operation"), storages=(2, 1 << 40))
    entries = [put(storage, b"k", b"%d" % storage, version(1)) for storage in (1, 2, 3, 1 << 40)]
    found = batch_of(tmp_path, contract, *entries)
    assert found.to_pylist() == [
        {"value": b"2", "_operation": "replace"},
        {"value": b"1099511627776", "_operation": "replace"},
    ]
    assert contract.spark_schema == "`value` BINARY, `_operation` STRING NOT NULL"
    with pytest.raises(UnknownColumn, match="no column 'tuple'"):
        _ = EntryContract(UUID, wanted=("tuple",)).schema
    with pytest.raises(UnknownColumn, match="no column '_operation'"):
        _ = EntryContract(UUID, "state", wanted=("_operation",)).schema


def test_batch_without_columns_keeps_its_row_count(tmp_path: Path) -> None:
    assert batch_of(tmp_path, EntryContract(UUID, wanted=()), put(1, b"k", b"v", version(1))).num_rows == 1


def test_numbers_above_bigint_are_decimals_or_an_error(tmp_path: Path) -> None:
    entry = put(LONG + 1, b"k", b"v", version(LONG + 2, LONG + 3), (LONG + 4,))
    (row,) = batch_of(tmp_path, EntryContract(UUID, unsigned_as="decimal"), entry).to_pylist()
    assert (row["storage_id"], row["version_major"], row["blob_ids"]) == (LONG + 1, LONG + 2, [LONG + 4])
    with pytest.raises(TooLarge, match="storage_id 9223372036854775809 of an entry does not fit BIGINT") as caught:
        batch_of(tmp_path / "again", EntryContract(UUID), entry)
    assert caught.value.hint == "set unsignedAs=decimal"


def test_entries_of_one_key_are_ordered_by_version_file_and_offset(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    versions = [(1, 5), (2, 1), (1, LONG), (2, 1)]
    directory.session(0, 1, *(put(1, b"k", b"", version(*each)) for each in versions))
    directory.durable(1)
    index = LimestoneIndex.open(production().disk, directory.path)
    (chunk,) = chunks_of(index.disk, index.slices(0, 1)[0])
    rows = counted(chunk, 0, 1)
    places = [
        place_column(chunk, rows, 0, is_compacted=True),
        place_column(chunk, rows, 4),
        place_column(chunk, rows, 3),
    ]
    column = pa.concat_arrays(places)
    table = pa.table({"key": pa.array(["a"] * 8 + ["b"] * 4), "place": column, "row": pa.array(range(12))})
    assert sorted(newest(table, ["key"])["row"].to_pylist()) == [7, 11]
    assert newest(table.slice(0, 4), ["key"])["row"].to_pylist() == [3], "compacted entries are ordered by offset"
    assert sorted(newest(table, ["row"])["row"].to_pylist()) == list(range(12))
    assert newest(table.slice(0, 0), ["key"]).num_rows == 0
    in_bytes = sorted(range(12), key=lambda row: column[row].as_py())
    numbers = places_of(column)
    assert in_bytes == sorted(range(12), key=lambda row: tuple(numbers[row].tolist())), (
        "their bytes are in the same order"
    )
