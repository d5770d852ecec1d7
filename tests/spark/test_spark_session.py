"""The session of the commands: it starts, leaves no files, and reports missing requirements."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from flowstone.errors import FlowstoneError
from flowstone.spark.spark_session import (
    SparkJobFailed,
    SparkUnavailable,
    check_java,
    is_local,
    is_one_process,
    session,
)
from flowstone.spark.worker_errors import clear_errors
from tests import short_java

OWN_SESSION = """
import os, sys, tempfile
from pathlib import Path
from flowstone.spark.spark_session import session

with session("own", master="local[1]", memory="512m", conf={"spark.sql.shuffle.partitions": "7"}) as spark:
    java = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
    settings = spark.sparkContext.getConf()
    print(settings.get("spark.driver.memory"), spark.conf.get("spark.sql.shuffle.partitions"))
    print(settings.get("spark.driver.host"), spark.sparkContext.pythonExec == sys.executable)
    spark.sql("CREATE TABLE numbers USING parquet AS SELECT 1 AS number")
    print(spark.table("numbers").count())
print(Path(f"/proc/{java}").exists(), os.listdir("."), os.listdir(os.environ["TMPDIR"]))
"""


def test_new_session_is_quiet_and_leaves_no_files(java: None, tmp_path: Path) -> None:
    work, scratch = tmp_path / "work", tmp_path / "scratch"
    work.mkdir()
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", OWN_SESSION],
        cwd=work,
        env={"TMPDIR": str(scratch), "PATH": "/usr/bin:/bin", short_java.VARIABLE: os.environ[short_java.VARIABLE]},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines() == ["512m 7", "127.0.0.1 True", "1", "False [] []"]
    assert done.stderr == ""


def test_running_session_is_reused_and_left_running(spark: SparkSession) -> None:
    with session("another", master="local[1]") as taken:
        assert taken is spark
    assert spark.range(3).count() == 3


def _fail(batches: Iterator[Any]) -> Iterator[Any]:
    with clear_errors():
        for _ in batches:
            raise FlowstoneError("the log is deleted", hint="make it again")
        yield from ()


def _divide(batches: Iterator[Any]) -> Iterator[Any]:
    for _ in batches:
        1 / 0
    yield from ()


def test_errors_of_workers_outlive_the_session(spark: SparkSession) -> None:
    with pytest.raises(SparkJobFailed) as ours, session("failing") as running:
        running.range(9).mapInArrow(_fail, "id long").count()
    assert str(ours.value) == "the log is deleted; make it again"
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*ZeroDivisionError"), session("failing") as running:
        running.range(9).mapInArrow(_divide, "id long").count()


def test_error_for_missing_java_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(SparkUnavailable, match="Java, which is not installed") as caught:
        check_java()
    assert "openjdk-17-jre-headless" in str(caught.value.hint)


def test_error_for_a_java_that_cannot_start_spark_quotes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin/java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho this Java is from long ago >&2\nexit 1\n")
    java.chmod(0o755)
    code = "from flowstone.spark.spark_session import session\nwith session('none'): pass"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "Spark did not start: this Java is from long ago" in done.stderr


@pytest.mark.parametrize(
    ("master", "is_here", "is_one"),
    [
        ("local", True, True),
        ("local[*]", True, True),
        ("local-cluster[2,1,1024]", True, False),
        ("spark://db1:7077", False, False),
    ],
)
def test_only_a_remote_master_needs_the_network(master: str, is_here: bool, is_one: bool) -> None:
    assert (is_local(master), is_one_process(master)) == (is_here, is_one)
