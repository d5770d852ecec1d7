"""The data pipeline: settled changes and states of logs as Arrow batches, for Apache Spark through PySpark.

What says which columns there are, which options, which offsets, and what turns rows into batches needs no Spark and no
JVM; only the modules of the data sources themselves import pyspark. Rows are never handled one by one in Python where
a batch can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Lets `spark` read formats `xlog`, `tarantool` and `limestone` and write `tarantool`. Twice does no harm.

        flowstone.spark.register(spark)
        spark.read.format("tarantool").option("uri", "db1:3301").option("space", "orders").load()

    Of a session on this machine whose Python was left open, executors get the Python that calls this. Elsewhere they
    need flowstone installed in the Python that `PYSPARK_PYTHON` or `spark.pyspark.python` names.
    """
    from flowstone.spark.registration import register_sources

    register_sources(spark)
