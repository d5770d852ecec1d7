"""The jobs of the cluster tests: a program that drives a cluster in its own process, and prints the result of each job.

python -m tests.spark.cluster_driver MASTER DIRECTORY HIDDEN
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import flowstone.spark
from examples.shop_node import ShopNode
from flowstone.cli import run
from flowstone.outside import production
from flowstone.spark.spark_session import session
from tests.short_java import USE
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import delete, insert, update, whole

SETTINGS = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": USE,
    "spark.cores.max": "2",
    "spark.sql.shuffle.partitions": "2",
}


@dataclass(frozen=True)
class Place:
    """Directories of a cluster test: `shared` is also visible to executors, `hidden` only to the driver."""

    shared: Path
    hidden: Path


Job = Callable[[SparkSession, Place], Any]
JOBS: dict[str, Job] = {}


def job(function: Job) -> Job:
    JOBS[function.__name__] = function
    return function


@job
def processes(spark: SparkSession, place: Place) -> Any:
    """Return the executors, what they see of `hidden`, and their directories."""
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
    """Read a batch of an archive in shared storage."""
    frame = spark.read.format("xlog").option("space", "orders").load(str(written_archive(place.shared / "archive")))
    return sorted([row["_operation"], row["_lsn"], row["id"], row["name"]] for row in frame.collect())


@job
def restored(spark: SparkSession, place: Place) -> Any:
    """Restore the archive's last state, as a snapshot and as Parquet."""
    out = place.shared / "restored"
    formats = ["--format", "snap", "--format", "parquet"]
    code = command("restore", *formats, "--to", "6", "--out", str(out), str(place.shared / "archive"))
    rows = spark.read.parquet(str(out / "parquet" / "orders")).select("id", "name").collect()
    return {"code": code, "snapshots": len(list((out / "snap").glob("*.snap"))), "rows": [list(row) for row in rows]}


@job
def live(spark: SparkSession, place: Place) -> Any:
    """Read a node's rows, its changes without a shared spool, and its mirror, which is verified twice."""
    found: dict[str, Any] = {}
    with ShopNode(place.hidden / "node") as shop:
        shop.sell(50)
        source = spark.read.format("tarantool").option("uri", shop.uri)
        found["rows"] = source.option("space", "customers").load().count()
        for transport in ("inline", "tcp"):
            found[transport] = streamed(spark, shop.uri, place, transport)
        lake, spool = str(place.shared / "lake"), str(place.hidden / "mirror-spool")
        mirror = ("mirror", "--once", "--transport", "tcp", "--spool", spool, shop.uri, lake)
        found["mirror"] = [command(*mirror)]
        shop.sell(50)
        found["mirror"].append(command(*mirror))
        found["verify"] = [command("verify", shop.uri, lake)]
        shop.raise_prices(10)
        found["verify"].append(command("verify", "--wait", "1", shop.uri, lake))
    return found


def streamed(spark: SparkSession, uri: str, place: Place, transport: str) -> list[int]:
    """Return orders in the order of their changes."""
    orders: list[int] = []

    def keep(batch: DataFrame, number: int) -> None:
        orders.extend(row["id"] for row in batch.orderBy("_commit_version").select("id").collect())

    spool, checkpoint = place.hidden / f"spool-{transport}", place.shared / f"checkpoint-{transport}"
    options = {"uri": uri, "space": "orders", "spoolLocation": str(spool), "transport": transport}
    source = spark.readStream.format("tarantool").options(**options).load()
    query = source.writeStream.foreachBatch(keep).option("checkpointLocation", str(checkpoint))
    query.trigger(availableNow=True).start().awaitTermination()
    return orders


def command(*arguments: str) -> int:
    """Run a command of ours in this process, on this session; its output goes to standard error."""
    with redirect_stdout(sys.stderr):
        return run(arguments)


def written_archive(directory: Path) -> Path:
    archive = WrittenArchive(production().disk, str(directory))
    archive.define_orders()
    archive.write(whole(insert(3, 3, "three"), insert(4, 4, "four")))
    archive.write(whole(update(5, 3, ("=", 2, "drei")), delete(6, 4)))
    archive.save()
    return directory


def main(master: str, directory: str, hidden: str) -> None:
    place = Place(Path(directory), Path(hidden))
    with session("cluster", master=master, conf=SETTINGS) as spark:
        flowstone.spark.register(spark)
        for name, each in JOBS.items():
            print(json.dumps({"job": name, "found": each(spark, place)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
