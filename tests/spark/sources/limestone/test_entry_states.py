"""States at durable epochs equal a model that keeps every entry, for any shares, also after compaction."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import names
from flowstone.limestone.format.entries import put, remove
from flowstone.limestone.store.recovery import recover
from flowstone.outside import production
from flowstone.spark.index.limestone_index import EpochLost, LimestoneIndex
from flowstone.spark.sources.limestone import entry_states as limestone_state
from flowstone.spark.sources.limestone.entry_columns import EntryContract
from flowstone.spark.sources.limestone.entry_states import plan_state, read_state
from tests.limestone.recorded import HERE
from tests.spark.limestone_directories import (
    UUID,
    Row,
    WrittenDirectory,
    clear,
    random_directory,
    random_sessions,
    version,
)

DISK = production().disk


def rows_at(directory: WrittenDirectory, epoch: int, count: int = 1, **contract: Any) -> list[Row]:
    index = LimestoneIndex.open(DISK, directory.path)
    (whole,) = plan_state(index, epoch, EntryContract(UUID, "state", **contract))
    shares = [pickle.loads(pickle.dumps(replace(whole, number=number, count=count))) for number in range(count)]
    found = [row for share in shares for batch in read_state(DISK, share) for row in batch.to_pylist()]
    return sorted(
        (
            row["storage_id"],
            row["key"],
            row["value"],
            row["version_major"],
            int(row["version_minor"]),
            tuple(row["blob_ids"]),
        )
        for row in found
    )


@pytest.mark.parametrize("seed", range(3))
def test_state_at_any_epoch_equals_the_model(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limestone_state, "FOLD_ROWS", 50)
    directory = random_directory(tmp_path / "d", seed, 25, is_late=bool(seed % 2))
    for epoch in (0, 1, 7, 25):
        assert rows_at(directory, epoch) == directory.state(epoch)
    assert rows_at(directory, 25, count=3) == directory.state(25)


RECORDED = sorted(path.parent for path in HERE.rglob(names.MANIFEST))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: str(path.relative_to(HERE)))
def test_state_of_recorded_directories_equals_the_recovered_rows(path: Path) -> None:
    def state() -> list[tuple[Any, ...]]:
        index = LimestoneIndex.open(DISK, str(path))
        shares = plan_state(index, index.durable, EntryContract(UUID, "state"))
        rows = [row for share in shares for batch in read_state(DISK, share) for row in batch.to_pylist()]
        return sorted((row["storage_id"], row["key"], row["value"], tuple(row["blob_ids"])) for row in rows)

    try:
        found = recover(DISK, str(path), repairs=False).snapshot.rows()
    except DamagedFile:
        with pytest.raises(DamagedFile):
            state()
    else:
        assert state() == sorted((row.storage_id, row.key, row.value, row.blob_ids) for row in found)


def test_state_after_compaction_equals_the_model(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    for channel, epoch, entries in random_sessions(8, 10):
        directory.session(channel, epoch, *entries)
    directory.durable(10)
    files = [directory.rotate(0), directory.rotate(1)]
    directory.compact(*files, epoch=10)
    compacted = {row[:2] for row in directory.state(10)}
    (storage, removed), (_, replaced) = sorted(compacted)[:2]
    directory.session(
        0, 11, remove(storage, removed, version(11)), put(storage, replaced, b"new", version(11)), clear(256, 11, 5)
    )
    directory.session(1, 12, put(256, b"new", b"", version(12)))
    directory.durable(12)

    def without_versions(rows: list[Row]) -> list[tuple[Any, ...]]:
        return [(*row[:3], row[5]) for row in rows]

    for epoch in (3, 9, 10, 11, 12):
        assert without_versions(rows_at(directory, epoch)) == without_versions(directory.state(epoch))
    assert {row[3:5] for row in rows_at(directory, 10)} == {(0, 0)}, "compaction removes versions"
    for name in files:
        os.unlink(f"{directory.path}/{name}")
    assert without_versions(rows_at(directory, 12)) == without_versions(directory.state(12))
    with pytest.raises(EpochLost, match="oldest available state is at epoch 10"):
        rows_at(directory, 9)


def test_storages_can_be_chosen(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 2, 10)
    assert rows_at(directory, 10, storages=(2,)) == [row for row in directory.state(10) if row[0] == 2]


def test_state_as_changes_has_the_commit_version_of_its_epoch(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 2, 10)
    index = LimestoneIndex.open(DISK, directory.path)
    contract = EntryContract(UUID, wanted=("_operation", "_commit_version", "key"))
    (share,) = plan_state(index, 9, contract)
    found = [row for batch in read_state(DISK, share) for row in batch.to_pylist()]
    assert {(row["_operation"], row["_commit_version"]) for row in found} == {("replace", 9)}
    assert sorted(row["key"] for row in found) == sorted(row[1] for row in directory.state(9))
