"""Revenue by second, from a live server, as a stream with a watermark.

python examples/streaming_aggregation.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql.functions import col, count, sum, window

import flowstone.spark
from flowstone.spark import session
from shop_node import ShopNode


def show(batch: DataFrame, number: int) -> None:
    print(f"batch {number}:")
    batch.orderBy("window").selectExpr("window.start", "orders", "revenue").show(truncate=False)


with tempfile.TemporaryDirectory() as work, session("revenue") as spark, ShopNode(Path(work, "node")) as shop:
    flowstone.spark.register(spark)
    changes = (
        spark.readStream.format("tarantool")
        .option("uri", shop.uri)
        .option("space", "orders")
        .option("spoolLocation", f"{work}/spool")  # keeps the rows of offered offsets until Spark has committed them
        .load()  # a snapshot first, then every settled change
    )
    # The commit timestamps of the server never decrease, so a short watermark drops no rows.
    revenue = (
        changes.where("_operation = 'insert'")
        .withWatermark("_commit_timestamp", "5 seconds")
        .groupBy(window("_commit_timestamp", "1 second"))
        .agg(count("*").alias("orders"), sum(col("price")).alias("revenue"))
    )
    query = (
        revenue.writeStream.outputMode("update")
        .foreachBatch(show)
        .option("checkpointLocation", f"{work}/checkpoint")
        .start()
    )
    for _ in range(3):
        shop.sell(200)
        time.sleep(1)
    query.processAllAvailable()
    query.stop()
