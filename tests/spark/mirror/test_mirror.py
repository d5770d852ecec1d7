"""`flowstone.spark.Mirror` in a program: several runs on one session, stopping, and rejected arguments."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import flowstone
import flowstone.spark
from flowstone.outside import production
from flowstone.spark import Mirror, MirrorCaughtUp, MirrorEvent, MirrorProgress, MirrorStopped
from tests.real_tarantool import free_port
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, insert, whole
from tests.spark.lakes import rows_of, tuples_of


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    written.write(whole(insert(3, 1, "a")))
    written.save()
    return written


def test_mirror_runs_resume_where_the_last_one_stopped(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake, told = tmp_path / "lake", list[MirrorEvent]()
    with Mirror(Path(archive.directory), lake, on_event=told.append) as mirror:
        first = mirror.run_once()
        archive.write(whole(insert(4, 2, "b")))
        archive.save()
        second = mirror.run_once()
    assert (first.positions, second.positions) == ({UUID: {1: 3}}, {UUID: {1: 4}})
    assert tuples_of(lake, "orders") == [(1, "a"), (2, "b")]
    assert [type(event) for event in told].count(MirrorCaughtUp) == 2
    assert told[-1] == second
    assert spark.range(1).count() == 1, "the running session is not stopped"


def test_mirror_without_a_block_uses_the_session_of_the_call(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    mirror = Mirror(
        [archive.directory],
        str(lake),
        spark=spark,
        columns={"orders": ["name"]},
        mask={"orders.name": "redact"},
        spool=tmp_path / "spool",
    )
    assert mirror.run_once().changes == 1
    assert [row["name"] for row in rows_of(lake, "orders")] == ["***"]
    assert "id" not in rows_of(lake, "orders")[0]


def test_mirror_runs_until_another_thread_stops_it(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake, results = tmp_path / "lake", list[MirrorStopped]()

    def stop(event: MirrorEvent) -> None:
        if isinstance(event, MirrorProgress) and event.positions == {UUID: {1: 3}}:
            mirror.stop()

    mirror = Mirror(archive.directory, lake, spark=spark, on_event=stop, trigger_seconds=0)
    thread = threading.Thread(target=lambda: results.append(mirror.run()))
    thread.start()
    thread.join(60)
    assert [result.positions for result in results] == [{UUID: {1: 3}}]


def test_stop_before_a_run_ends_only_that_run(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    mirror = Mirror(archive.directory, tmp_path / "lake", spark=spark)
    mirror.stop()
    assert mirror.run().changes == 0
    assert mirror.run_once().changes == 1


@pytest.mark.parametrize(
    ("sources", "options", "error", "message"),
    [
        ("/nowhere/archive", {}, flowstone.spark.WrongPlace, "no such directory"),
        (["nosuch"], {}, flowstone.spark.WrongPlace, "neither an existing directory nor an address"),
        ("user:secret@nosuch", {}, flowstone.UriError, "'nosuch' is not a valid address"),
        ("127.0.0.1:1", {"password": "secret"}, flowstone.UriError, "password given without a user"),
        ("127.0.0.1:1", {"mask": {"users.email": "md5"}}, flowstone.spark.WrongMask, "'md5'"),
        ("127.0.0.1:1", {"mask": {"users.email": "null"}}, flowstone.spark.WrongPlace, "needs --spool"),
        ("127.0.0.1:1", {"space": "a", "exclude": ["a"]}, flowstone.spark.WrongChoice, "both chosen and excluded"),
        ("127.0.0.1:1", {"columns": {"a": "id"}}, flowstone.spark.WrongChoice, "list of names"),
        ("127.0.0.1:1", {"columns": {"a": ["id", "id"]}}, flowstone.spark.WrongChoice, "has a duplicate"),
    ],
)
def test_wrong_arguments_are_rejected_by_the_constructor(
    sources: Any, options: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        Mirror(sources, tmp_path / "lake", **options)
    assert list(tmp_path.iterdir()) == []


def test_unreachable_source_is_reported_before_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.spark.spark_session.session", None)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(flowstone.FlowstoneError, match=address), Mirror(address, tmp_path / "lake"):
        pass
    assert list(tmp_path.iterdir()) == []
