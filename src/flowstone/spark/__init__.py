"""The data pipeline: settled changes and states of logs as Arrow batches, for Apache Spark through PySpark.

The modules for columns, options, offsets and the conversion of rows into batches need neither Spark nor a JVM; only the
modules of the data sources themselves import pyspark. Rows are never handled one by one in Python where a batch is
possible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Register formats `xlog`, `tarantool` and `limestone` for reading, and `tarantool` for writing. Idempotent.

        flowstone.spark.register(spark)
        spark.read.format("tarantool").option("uri", "db1:3301").option("space", "orders").load()

    If the session runs on this machine and does not configure a Python, executors use the caller's Python. Otherwise
    flowstone must be installed in the Python that `PYSPARK_PYTHON` or `spark.pyspark.python` names.
    """
    from flowstone.spark.registration import register_sources

    register_sources(spark)
