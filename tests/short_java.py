"""The JVMs of the tests: they live for seconds, so they compile little, and take their classes from an archive.

A JVM of Spark's loads and checks thousands of classes before its first job: with an archive of them, and without the
second compiler, it takes a quarter of the processor time that it takes else (31 s and 7 s on the machine where it was
measured). The archive is made once, beside the PySpark whose classes it has. What is tested is not concerned.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

import pyspark

VARIABLE = "SPARK_SUBMIT_OPTS"
"""What `spark-submit` gives to the JVM of a driver."""

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SILENT = "-Xlog:cds=off -Xlog:cds+dynamic=off"
ARCHIVE = Path(sys.prefix) / f"flowstone-tests-spark-{pyspark.__version__}.jsa"
USE = f"{QUICK} -XX:SharedArchiveFile={ARCHIVE} {SILENT}"
SECONDS = 200

PROGRAM = f"""
import sys
from flowstone.spark import register, session, spark_session

spark_session.STOP_SECONDS = {SECONDS}  # it writes the archive when it ends, which may take longer than an end else may
with session("classes", master="local[2]", memory="600m") as spark:
    register(spark)
    numbers = spark.range(0, 1000, 1, 2).selectExpr("id", "id % 7 as rest", "cast(id as string) as text")
    numbers.mapInArrow(lambda batches: batches, numbers.schema).repartition(2, "rest").toArrow()
    numbers.write.parquet(sys.argv[1] + "/parquet")
    spark.read.parquet(sys.argv[1] + "/parquet").groupBy("rest").count().orderBy("rest").collect()
    stream = spark.readStream.format("rate").load().writeStream.foreachBatch(lambda batch, number: batch.count())
    stream = stream.option("checkpointLocation", sys.argv[1] + "/checkpoint").trigger(availableNow=True)
    stream.start().awaitTermination()
"""


def shorten() -> None:
    """Lets the drivers of this process and of its children start like that. What the user has set stands."""
    if VARIABLE not in os.environ:
        _make_archive()
        os.environ[VARIABLE] = USE


def _make_archive() -> None:
    """Make it, or wait for the process that does: a JVM without it takes nearly as long as making it. Where it cannot
    be written or takes too long, JVMs load their classes as always."""
    if ARCHIVE.exists() or not os.access(ARCHIVE.parent, os.W_OK):
        return
    with ARCHIVE.with_suffix(".lock").open("wb") as lock:
        if not _taken(lock):
            return
        with tempfile.TemporaryDirectory(dir=ARCHIVE.parent) as directory:
            made = Path(directory) / "classes.jsa"
            options = f"{QUICK} -XX:ArchiveClassesAtExit={made} {SILENT}"
            command = [sys.executable, "-c", PROGRAM, directory]
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    command, env=os.environ | {VARIABLE: options}, capture_output=True, timeout=SECONDS, check=True
                )
                made.rename(ARCHIVE)


def _taken(lock: IO[bytes]) -> bool:
    """Take the lock, or return False when the process that has it is done."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return False
    return not ARCHIVE.exists()
