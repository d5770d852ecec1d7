"""Collecting the rows of a frame: all of them, or an error if the JVM dies while it sends them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pyspark.sql import SparkSession

from flowstone.spark.collect import rows_of

DYING = """
import os, signal, threading, time
from flowstone.spark.collect import rows_of
from flowstone.spark.spark_session import session

with session("dying", master="local[1]", memory="512m") as spark:
    java = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
    rows_of(spark.range(10))

    def slowly(batches):
        for batch in batches:
            for at in range(batch.num_rows):
                time.sleep(0.002)
                yield batch.slice(at, 1)

    threading.Timer(2, os.kill, (java, signal.SIGKILL)).start()
    print("rows:", len(rows_of(spark.range(0, 100_000, 1, 50).mapInArrow(slowly, "id long"))))
"""


def test_rows_are_mappings_of_their_columns(spark: SparkSession) -> None:
    frame = spark.sql("SELECT * FROM VALUES (1, X'00ff', map(2L, 3L)), (4, NULL, NULL) AS t(a, b, c)")
    assert rows_of(frame) == [{"a": 1, "b": b"\x00\xff", "c": [(2, 3)]}, {"a": 4, "b": None, "c": None}]


@pytest.mark.usefixtures("java")
def test_jvm_that_dies_during_a_collect_is_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "rows:" not in done.stdout
