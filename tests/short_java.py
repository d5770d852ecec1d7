"""Options for the JVMs of the tests, which run for seconds: little compilation, and classes from an archive.

A JVM of Spark loads and verifies thousands of classes before its first job. With an archive of these classes, and
without the second compiler, it takes a quarter of the processor time (7 s instead of 31 s when measured). The archive
is created once, next to the PySpark installation. The tested code is not affected.
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
    """Set these options for the drivers of this process and its children. Options of the user are kept."""
    if VARIABLE not in os.environ:
        _make_archive()
        os.environ[VARIABLE] = USE


def _make_archive() -> None:
    """Create the archive, or wait for the process that does: starting a JVM without the archive takes nearly as long.
    If the archive cannot be written or takes too long, JVMs load their classes as usual.
    """
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
    """Acquire the lock, or return False once the process that holds it has finished."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return False
    return not ARCHIVE.exists()
