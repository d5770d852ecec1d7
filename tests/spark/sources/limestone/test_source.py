"""Source `limestone` as a batch: changes and states through Spark, options and their errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import flowstone.spark
from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format.entries import put
from flowstone.spark.index.limestone_index import EpochLost, NotALimestone, NotDurable
from flowstone.spark.sources.limestone.source import LimestoneReader, LimestoneSource
from flowstone.spark.sources.options import WrongOption, limestone_options
from tests.spark.limestone_directories import UUID, WrittenDirectory, random_directory, snippet, version


@pytest.fixture
def directory(tmp_path: Path) -> WrittenDirectory:
    return random_directory(tmp_path / "d", 11, 20)


def read(directory: WrittenDirectory, **options: str) -> list[dict[str, Any]]:
    """Read as Spark does, without Spark."""
    reader = LimestoneReader(limestone_options({"path": directory.path, **options}))
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_spark_reads_changes_and_states(spark: SparkSession, directory: WrittenDirectory) -> None:
    flowstone.spark.register(spark)
    changes = spark.read.format("limestone").load(directory.path)
    expected = sum(len(entries) for _, entries in directory.sessions)
    assert changes.count() == expected
    assert changes.where("size(blob_ids) > 0").count() == len(
        [entry for _, entries in directory.sessions for entry in entries if entry.blob_ids]
    )
    state = spark.read.format("limestone").options(mode="state", asOf="13").load(directory.path)
    rows = [
        (
            row.storage_id,
            bytes(row.key),
            bytes(row.value),
            row.version_major,
            int(row.version_minor),
            tuple(row.blob_ids),
        )
        for row in state.collect()
    ]
    assert sorted(rows) == directory.state(13)


@pytest.mark.parametrize("durable", [None, 7])
def test_directory_without_durable_entries_has_no_rows(
    spark: SparkSession, tmp_path: Path, durable: int | None
) -> None:
    flowstone.spark.register(spark)
    directory = WrittenDirectory(tmp_path / "d")
    directory.append("pwal_0000", snippet(5, put(1, b"a", b"", version(5)), is_void=True))
    directory.append("pwal_0001", snippet(9, put(1, b"b", b"", version(9))))
    if durable is not None:
        directory.durable(durable)
    for options in ({}, {"mode": "state"}):
        assert spark.read.format("limestone").options(**options).load(directory.path).count() == 0
    for starting in ("earliest", "snapshot"):
        stream = spark.readStream.format("limestone").option("startingOffsets", starting).load(directory.path)
        name = f"nothing_{starting}_{durable}"
        query = stream.writeStream.format("memory").queryName(name).trigger(availableNow=True).start()
        query.awaitTermination()
        assert spark.table(name).count() == 0


def test_changes_are_those_between_their_offsets(directory: WrittenDirectory) -> None:
    assert len(read(directory)) == len(read(directory, startingOffsets="0", endingOffsets="latest"))
    epochs = {row["_commit_version"] for row in read(directory, startingOffsets="4", endingOffsets="6")}
    assert epochs == {5, 6}
    assert read(directory, startingOffsets="latest") == []
    first = next(row for row in read(directory, columns="_replicaset_uuid,_space", storage="256"))
    assert first == {"_replicaset_uuid": UUID, "_space": "storage_256"}


def test_changes_lost_to_compaction_are_an_error_or_skipped(directory: WrittenDirectory) -> None:
    for name in ("pwal_0000", "pwal_0001"):
        os.unlink(f"{directory.path}/{name}")
    directory.compact(epoch=20)
    directory.session(0, 22, put(1, b"new", b"", version(22)))
    directory.durable(22)
    assert [row["key"] for row in read(directory)] == [b"new"], "earliest means the first available"
    with pytest.raises(EpochLost, match="start after epoch 20"):
        read(directory, startingOffsets="3")
    assert [row["key"] for row in read(directory, startingOffsets="3", failOnDataLoss="false")] == [b"new"]
    assert len(read(directory, mode="state")) == len(directory.state(22))


def test_invalid_options_are_refused(directory: WrittenDirectory) -> None:
    def refused(match: str, *, streaming: bool | None = False, **options: str) -> None:
        with pytest.raises(WrongOption, match=match):
            limestone_options({"path": directory.path, **options}, streaming=streaming)

    refused("no option 'space'", space="1")
    refused("asOf needs mode=state", asOf="3")
    refused("asOf is 'now'", mode="state", asOf="now")
    refused("mode=state cannot be streamed", mode="state", streaming=True)
    refused("startingOffsets does not apply to a state", mode="state", startingOffsets="1")
    refused("storage is 'x'", storage="x")
    refused("startingOffsets is '{}'", startingOffsets="{}")
    refused("startingOffsets=snapshot does not apply to a batch query", startingOffsets="snapshot")
    refused("endingOffsets is 'earliest'", endingOffsets="earliest")
    refused("endingOffsets does not apply to a stream", endingOffsets="7", streaming=True)
    refused("maxRowsPerTrigger does not apply to a batch query", maxRowsPerTrigger="7")
    refused("unsignedAs is 'double'", unsignedAs="double")
    with pytest.raises(WrongOption, match="option path is missing"):
        limestone_options({})
    with pytest.raises(WrongOption, match="batch starts at 9, but ends at 3"):
        read(directory, startingOffsets="9", endingOffsets="3")


def test_unavailable_epochs_are_refused(directory: WrittenDirectory, tmp_path: Path) -> None:
    with pytest.raises(NotDurable, match="epoch 21 is not durable; the durable epoch is 20"):
        read(directory, mode="state", asOf="21")
    with pytest.raises(NotDurable, match="epoch 99 is not durable"):
        read(directory, endingOffsets="99")
    with pytest.raises(NotALimestone):
        LimestoneSource({"path": str(tmp_path)}).schema()
    directory.durable(21)
    with pytest.raises(DamagedFile, match="pwal_0001 is damaged"):
        read(directory)


def test_schema_is_known_without_a_log(directory: WrittenDirectory) -> None:
    schema = LimestoneSource({"path": directory.path, "mode": "state", "columns": "key,value"}).schema()
    assert schema == "`key` BINARY NOT NULL, `value` BINARY NOT NULL"
