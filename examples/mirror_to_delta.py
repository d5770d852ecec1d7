"""Mirror a live server into Delta tables, and query them. Each further run reads only new changes.

python examples/mirror_to_delta.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from deltalake import DeltaTable

from flowstone.spark import Mirror, session
from shop_node import ShopNode

with tempfile.TemporaryDirectory() as work, session("mirror to Delta") as spark:
    lake = Path(work, "lake")

    with ShopNode(Path(work, "node")) as shop:
        # In a shell: flowstone mirror --once URI LAKE. `run` instead of `run_once` runs until `stop` is called.
        mirror = Mirror(shop.uri, lake, spark=spark)
        shop.sell(500)
        print(mirror.run_once())  # a snapshot
        shop.sell(500)
        print(mirror.run_once())  # the changes since: INSERTs, and UPDATEs that have only operations

    # Any engine that reads Delta works; this is delta-rs, which needs no Spark.
    orders = DeltaTable(lake / "orders")
    print(f"orders: {len(orders.to_pyarrow_table())} rows in version {orders.version()}")

    # Spark reads the files of a version, with or without Delta's jars.
    for name in ("orders", "customers"):
        spark.read.parquet(*DeltaTable(lake / name).file_uris()).createOrReplaceTempView(name)
    spark.sql(
        """
        SELECT city, count(*) AS orders, sum(price) AS revenue
        FROM orders JOIN customers ON orders.customer = customers.id
        GROUP BY city ORDER BY revenue DESC
        """
    ).show()
