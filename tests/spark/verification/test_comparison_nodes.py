"""Two live nodes during writes: a real server and a Flowstone node that follows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tarantool as client
from pyspark.sql import SparkSession

from flowstone.iproto.uri import parse_uri
from flowstone.spark.verification.comparison import VerifyOptions
from flowstone.spark.verification.report import VerifyReport
from flowstone.spark.verification.sides import NodeSide
from tests import real_tarantool, served_node
from tests.conftest import FULL
from tests.spark.comparisons import verify_sides
from tests.spark.planted import SETUP

WAIT_SECONDS = 60.0


@contextmanager
def written_to(port: int) -> Iterator[None]:
    """Run transactions, one after another, for the duration of the block."""
    ended = threading.Event()

    def write() -> None:
        connection = client.connect("127.0.0.1", port)
        number = 0
        while not ended.wait(0.01):
            number += 1
            connection.replace("orders", (1000 + number % 50, f"name {number}", number))
            connection.update("orders", 1, [("=", 1, f"changed {number}")])
        connection.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def compared(spark: SparkSession, a: str, b: str, wait: float) -> VerifyReport:
    sides = NodeSide(parse_uri(a)), NodeSide(parse_uri(b))
    try:
        return verify_sides(spark, *sides, VerifyOptions(wait=wait))
    finally:
        for side in sides:
            side.close()


def test_replica_equals_its_master_under_writes_and_lacks_rows_after_a_stop(
    spark: SparkSession, tarantool: object, tmp_path: Path
) -> None:
    with real_tarantool.serve(tmp_path / "master", setup=SETUP) as master:
        follow = f"--replication=127.0.0.1:{master.port}"
        with served_node.serve(tmp_path / "replica", follow, "--read-only", dialect="2.6") as node:
            replica = f"127.0.0.1:{node.port}"
            with written_to(master.port):
                report = compared(spark, master.uri, replica, WAIT_SECONDS)
            assert report.is_equal, report
            assert report.a.position == report.b.position
            if not FULL:
                return
            written, followed = (client.connect("127.0.0.1", port) for port in (master.port, node.port))
            written.replace("orders", (1999, "the last that is followed"))
            ends_at = time.monotonic() + WAIT_SECONDS
            while not followed.select("orders", 1999) and time.monotonic() < ends_at:
                time.sleep(0.02)
            followed.call("box.cfg", {"replication": []})
            written.replace("orders", (2000, "late"))
            written.close()
            followed.close()
            report = compared(spark, master.uri, replica, 0.0)
            lsn = report.a.position[1]
            assert (report.a.lacks, report.b.lacks) == ((), ((1, lsn, lsn),))
            assert [(each.key, each.kind) for each in report.differences] == [("[2000]", "missing in B")]
