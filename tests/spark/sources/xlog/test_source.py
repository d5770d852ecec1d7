"""Source `xlog` in a real Spark session: batches, resumed streams, a change of format, and error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from flowstone.outside import production
from flowstone.spark.sources.xlog.source import XlogSource
from tests.node.archived_rows import SYNC, confirm, rollback
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, define, delete, insert, update, whole

OTHER_UUID = "bbbbbbbb-0000-4000-8000-000000000001"


@pytest.fixture
def archive(tmp_path: Path, spark: SparkSession) -> WrittenArchive:
    spark.dataSource.register(XlogSource)
    archive = WrittenArchive(production().disk, str(tmp_path / "archive"))
    archive.define_orders()
    archive.write(whole(insert(3, 3, "three"), insert(4, 4, "four")))
    archive.write(whole(insert(5, 5, "kept"), flags=SYNC), confirm(6, 5))
    archive.write(whole(insert(7, 7, "gone"), flags=SYNC), rollback(8, 7))
    archive.write(whole(update(9, 3, ("=", 2, "drei")), delete(10, 4)))
    archive.save()
    return archive


def stream(spark: SparkSession, archive: WrittenArchive, checkpoint: Path, **options: str) -> list[list[int]]:
    """Return the LSNs of each batch available now."""
    batches: list[list[int]] = []

    def keep(batch: DataFrame, number: int) -> None:
        batches.append([row["_lsn"] for row in batch.select("_lsn").collect()])

    source = spark.readStream.format("xlog").options(space="orders", **options).load(archive.directory)
    query = source.writeStream.foreachBatch(keep).trigger(availableNow=True)
    query.option("checkpointLocation", str(checkpoint)).start().awaitTermination()
    return [batch for batch in batches if batch]


def test_batch_has_the_settled_changes(spark: SparkSession, archive: WrittenArchive) -> None:
    frame = spark.read.format("xlog").option("space", "orders").load(archive.directory)
    rows = frame.select("_operation", "_commit_version", "_lsn", "id", "name", "_replicaset_uuid").collect()
    assert [tuple(row)[:5] for row in rows] == [
        ("insert", 4, 3, 3, "three"),
        ("insert", 4, 4, 4, "four"),
        ("insert", 5, 5, 5, "kept"),
        ("update", 10, 9, 3, None),
        ("delete", 10, 10, 4, None),
    ]
    assert rows[0]["_replicaset_uuid"] == UUID


def test_batch_without_changes_is_empty(spark: SparkSession, archive: WrittenArchive) -> None:
    options = {"space": "orders", "startingOffsets": "latest"}
    assert spark.read.format("xlog").options(**options).load(archive.directory).count() == 0


def test_past_state_has_the_columns_of_its_space(spark: SparkSession, archive: WrittenArchive) -> None:
    reader = spark.read.format("xlog").options(mode="state", space="orders")
    assert sorted(map(tuple, reader.load(archive.directory).collect())) == [(3, "drei", None), (5, "kept", None)]
    then = reader.option("asOf", "1970-01-01T00:01:44Z").load(archive.directory)  # the time at which LSN 4 was written
    assert then.columns == ["id", "name", "_extra"]
    assert sorted(row["name"] for row in then.collect()) == ["four", "three"]


def test_several_directories_are_one_frame(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    other = WrittenArchive(production().disk, str(tmp_path / "other"), uuid=OTHER_UUID)
    other.define_orders()
    other.write(whole(insert(3, 3, "other")))
    other.save()
    frame = spark.read.format("xlog").option("space", "orders").load(f"{archive.directory},{other.directory}")
    assert {tuple(row) for row in frame.select("_replicaset_uuid", "_lsn").collect()} == {
        *((UUID, lsn) for lsn in (3, 4, 5, 9, 10)),
        (OTHER_UUID, 3),
    }


def test_stream_resumes_where_it_stopped(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    assert stream(spark, archive, checkpoint, maxRowsPerTrigger="3") == [[3, 4], [5], [9, 10]]
    archive.write(whole(insert(11, 11, "eleven")))
    archive.save()
    assert stream(spark, archive, checkpoint) == [[11]]
    assert not stream(spark, archive, checkpoint)


def test_stream_stops_at_a_change_of_format_and_resumes_with_the_new_columns(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    source = spark.readStream.format("xlog").options(space="orders", columns="_lsn,id").load(archive.directory)
    query = source.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    query.processAllAvailable()
    archive.write(whole(insert(11, 11, "eleven")))
    archive.write(whole(define(12, 512, "orders", ("id", "unsigned"), ("name", "string"), ("note", "string"))))
    archive.write(whole(insert(13, 13, "thirteen", "new")))
    archive.save()
    with pytest.raises(PySparkException) as caught:
        query.awaitTermination(60)
    message = "format of space 'orders' changes after {1: 11}, but the query has the old columns"
    assert "Traceback" not in str(caught.value).split(message)[0]
    assert message in str(caught.value)
    assert query.lastProgress is not None
    archive.write(whole(define(14, 512, "orders", ("id", "unsigned"))), whole(insert(15, 15)))
    archive.save()
    # By now there is a third format; the checkpoint names the format with which the query continues.
    with pytest.raises(PySparkException, match=r"changes after \{1: 13\}"):
        stream(spark, archive, checkpoint, columns="_lsn,note", schemaAt=str(checkpoint))
    assert stream(spark, archive, checkpoint, columns="_lsn,id", schemaAt=str(checkpoint)) == [[15]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": "nope"}, "no space 'nope' in "),
        ({"startingOffset": "latest"}, "source 'xlog' has no option 'startingoffset'; did you mean startingOffsets?"),
        ({"images": "full"}, "no images of the rows after {}"),
        ({"mode": "state", "space": "orders", "asOf": "1"}, "the position after LSN 1 is not settled"),
    ],
)
def test_mistakes_are_one_sentence_at_the_start(
    spark: SparkSession, archive: WrittenArchive, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PySparkException) as caught:
        spark.read.format("xlog").options(**options).load(archive.directory).collect()
    text = str(caught.value)
    assert message in text
    assert "Traceback" not in text.split(message)[0]
