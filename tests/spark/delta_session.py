"""A Spark session with Delta's jars, resolved with Maven: for tests at full scale, in a separate process."""

from __future__ import annotations

import os
import sys
from functools import cache

from pyspark.sql import SparkSession

from flowstone.spark.mirror.spark_table import DELTA_CONF, PACKAGE


@cache
def session_with_delta() -> SparkSession:
    """Return a session for the life of the process."""
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    conf: dict[str, bool | float | int | str | None] = {
        **DELTA_CONF,
        "spark.jars.packages": PACKAGE,
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        # For queries on the Delta log, because tables here have only a few files.
        "spark.databricks.delta.snapshotPartitions": "1",
    }
    session = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session
