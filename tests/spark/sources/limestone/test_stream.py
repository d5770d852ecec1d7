"""The stream of source `limestone`: offsets are durable epochs, and repeated batches are equal."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format.entries import put
from flowstone.spark.index.limestone_index import EpochLost, NotDurable
from flowstone.spark.sources.limestone.stream import LimestoneStreamReader
from flowstone.spark.sources.options import WrongOption, limestone_options
from tests.spark.limestone_directories import UUID, WrittenDirectory, random_directory, random_sessions, version

Row = dict[str, Any]


class Query:
    """A query that plans batches and keeps state as Spark does."""

    def __init__(self, directory: WrittenDirectory, **options: str) -> None:
        self.options = {"path": directory.path, **options}
        self.offset: Mapping[str, Any] = {}
        self.planned: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        self.restart()

    def restart(self) -> None:
        self.reader = LimestoneStreamReader(limestone_options(self.options, streaming=True))

    def batches(self, limit: ReadLimit | None = None) -> Iterator[list[Row]]:
        """Return the batches available now."""
        while True:
            end = self.reader.latestOffset(self.offset, limit or self.reader.getDefaultReadLimit())
            if end == self.offset:
                return
            self.planned.append((self.offset, end))
            yield self.read(*self.planned[-1])
            self.offset = end

    def read(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[Row]:
        executor = pickle.loads(pickle.dumps(self.reader))
        parts = [pickle.loads(pickle.dumps(part)) for part in self.reader.partitions(start, end)]
        return [row for part in parts for batch in executor.read(part) for row in batch.to_pylist()]

    def epochs(self) -> list[list[int]]:
        return [sorted({row["_commit_version"] for row in batch}) for batch in self.batches()]


def changes(rows: list[Row]) -> list[tuple[Any, ...]]:
    return sorted(
        (row["_commit_version"], row["storage_id"], row["key"] or b"", int(row["version_minor"])) for row in rows
    )


def written(directory: WrittenDirectory, start: int, end: int) -> list[tuple[Any, ...]]:
    return sorted(
        (epoch, entry.storage_id, entry.key, entry.version.minor)
        for epoch, entries in directory.sessions
        for entry in entries
        if start < epoch <= end
    )


def test_each_durable_epoch_is_delivered_once_and_batches_are_repeatable(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 21, 30)
    query = Query(directory, maxRowsPerTrigger="40")
    found = list(query.batches())
    assert len(found) > 5
    assert changes([row for batch in found for row in batch]) == written(directory, 0, 30)
    query.restart()
    for planned, batch in zip(query.planned, found, strict=True):
        assert changes(query.read(*planned)) == changes(batch)
    assert query.offset == {UUID: 30}


def test_stream_follows_a_directory_that_is_written_rotated_and_compacted(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    query = Query(directory)
    assert query.epochs() == []
    found: list[Row] = []
    detached: list[str] = []
    for channel, epoch, entries in random_sessions(22, 40):
        directory.session(channel, epoch, *entries)
        if not channel:
            continue
        found += [row for batch in query.batches() for row in batch]
        assert changes(found) == written(directory, 0, epoch - 1), "an epoch was delivered before it was durable"
        directory.durable(epoch)
        if epoch % 7 == 0:
            query.restart()
        if epoch % 10 == 0:
            planned = query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
            detached += [directory.rotate(number, epoch) for number in range(2)]
            directory.compact(*detached, epoch=epoch)
            assert changes(query.read(query.offset, planned)) == written(directory, epoch - 1, epoch)
    found += [row for batch in query.batches() for row in batch]
    assert changes(found) == written(directory, 0, 40)
    assert changes(query.read({}, {UUID: 40})) == written(directory, 0, 40), "detached files still exist"


def test_stream_begins_at_its_starting_offsets(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 23, 6, has_tail=False)
    assert Query(directory, startingOffsets="4").epochs() == [[5, 6]]
    latest = Query(directory, startingOffsets="latest")
    assert latest.epochs() == [[]]
    snapshot = Query(directory, startingOffsets="snapshot")
    (rows,) = snapshot.batches()
    assert sorted(row["key"] for row in rows) == sorted(row[1] for row in directory.state(6))
    assert {(row["_operation"], row["_commit_version"]) for row in rows} == {("replace", 6)}
    directory.session(0, 7, put(1, b"new", b"", version(7)))
    directory.durable(7)
    assert latest.epochs() == snapshot.epochs() == [[7]]


def test_available_now_ends_at_the_epoch_of_its_start(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 24, 5, has_tail=False)
    query = Query(directory)
    query.reader.prepareForTriggerAvailableNow()
    directory.session(0, 6, put(1, b"new", b"", version(6)))
    directory.durable(6)
    assert query.epochs() == [[1, 2, 3, 4, 5]]
    assert list(query.batches(ReadMaxRows(1))) == []


def test_missing_epochs_end_a_stream_or_are_skipped(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 25, 8, has_tail=False)
    query = Query(directory, startingOffsets="2")
    careless = Query(directory, startingOffsets="2", failOnDataLoss="false")
    for name in ("pwal_0000", "pwal_0001"):
        os.unlink(f"{directory.path}/{name}")
    directory.compact(epoch=8)
    directory.session(0, 9, put(1, b"new", b"", version(9)))
    directory.durable(9)
    with pytest.raises(EpochLost, match="changes after epoch 2 were removed by compaction"):
        query.epochs()
    assert careless.epochs() == [[9]]


def test_epoch_that_is_no_longer_durable_is_an_error(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 26, 8, has_tail=False)
    query, careless = Query(directory), Query(directory, failOnDataLoss="false")
    assert query.epochs() == careless.epochs() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    os.unlink(f"{directory.path}/epoch")
    directory.durable(5)
    with pytest.raises(NotDurable, match="epoch 8 was durable, but the durable epoch is now 5"):
        query.epochs()
    assert careless.epochs() == []
    with pytest.raises(NotDurable):
        careless.reader.partitions({UUID: 5}, {UUID: 8})


def test_checkpoint_of_another_instance_is_refused(tmp_path: Path) -> None:
    query = Query(random_directory(tmp_path / "d", 27, 2))
    for offset in ({"other": 3}, {UUID: {"1": 3}}, {UUID: 1, "other": 2}):
        with pytest.raises(WrongOption, match="checkpoint belongs to instance"):
            query.reader.latestOffset(offset, query.reader.getDefaultReadLimit())


def test_sessions_without_epochs_cannot_be_streamed(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    directory.session(0, 0, put(1, b"a", b"1", version(1)))
    directory.durable(3)
    with pytest.raises(LimestoneError, match="sessions of epoch 0"):
        Query(directory).epochs()
