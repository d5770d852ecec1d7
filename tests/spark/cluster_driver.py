"""What is tried on clusters: a program that drives one, in a process of its own, and prints what each job found.

python -m tests.spark.cluster_driver MASTER DIRECTORY HIDDEN
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from flowstone.outside import production
from flowstone.spark.session import session
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import delete, insert, update, whole

EXECUTOR = {"spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.cores.max": "2"}


@dataclass(frozen=True)
class Place:
    """`shared` is seen by executors, too, `hidden` only by the driver."""

    shared: Path
    hidden: Path


Job = Callable[[SparkSession, Place], Any]
JOBS: dict[str, Job] = {}


def job(function: Job) -> Job:
    JOBS[function.__name__] = function
    return function


@job
def processes(spark: SparkSession, place: Place) -> Any:
    """Who executes, what it sees of `hidden`, and where it works."""
    hidden = place.hidden / "only the driver's"
    hidden.write_text("seen")

    def look(batches: Any) -> Any:
        import os

        import pyarrow as pa

        for _ in batches:
            try:
                seen = hidden.read_text()
            except FileNotFoundError:
                seen = ""
            yield pa.RecordBatch.from_pydict({"directory": [os.getcwd()], "seen": [seen]})

    found = spark.range(0, 100, 1, 2).mapInArrow(look, "directory string, seen string").collect()
    return {
        "driver_sees": hidden.read_text(),
        "executors_see": [row.seen for row in found],
        "directories": sorted({row.directory for row in found} | {str(Path.cwd())}),
    }


@job
def xlog_changes(spark: SparkSession, place: Place) -> Any:
    """A batch of an archive in shared storage."""
    from flowstone.spark.xlog_source import XlogSource

    spark.dataSource.register(XlogSource)
    frame = spark.read.format("xlog").option("space", "orders").load(str(written_archive(place.shared / "archive")))
    return sorted([row["_operation"], row["_lsn"], row["id"], row["name"]] for row in frame.collect())


def written_archive(directory: Path) -> Path:
    archive = WrittenArchive(production().disk, str(directory))
    archive.define_orders()
    archive.write(whole(insert(3, 3, "three"), insert(4, 4, "four")))
    archive.write(whole(update(5, 3, ("=", 2, "drei")), delete(6, 4)))
    archive.save()
    return directory


def main(master: str, directory: str, hidden: str) -> None:
    place = Place(Path(directory), Path(hidden))
    with session("cluster", master=master, conf=EXECUTOR) as spark:
        for name, run in JOBS.items():
            print(json.dumps({"job": name, "found": run(spark, place)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
