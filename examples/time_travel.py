"""Read past states: a server's log files contain every state it ever had, and Spark can read any of them.

python examples/time_travel.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import flowstone.spark
from flowstone.spark import session
from shop_node import ShopNode

with tempfile.TemporaryDirectory() as work, session("time travel") as spark:
    directory = Path(work, "node")
    with ShopNode(directory) as shop:
        shop.sell(300)
        before = shop.position
        shop.raise_prices(50)  # somebody forgot a WHERE
        shop.sell(100)

    flowstone.spark.register(spark)
    states = spark.read.format("xlog").option("space", "orders").option("mode", "state")

    now = states.load(str(directory))
    # The earlier state: the newest snapshot before it, and the changes up to it. A time or an LSN works as well.
    then = states.option("asOf", json.dumps(before)).load(str(directory))
    for when, orders in (("then:", then), ("now: ", now)):
        count, revenue = orders.selectExpr("count(*)", "sum(price)").collect()[0]
        print(f"{when} {count} orders, {revenue} in all")

    print("what the mistake changed most:")
    joined = (
        then.alias("then")
        .join(now.alias("now"), "id")
        .selectExpr("id", "then.price AS before", "now.price AS after", "now.price - then.price AS difference")
    )
    joined.orderBy("difference", ascending=False).show(3)

    # The origin of the mistake: the changes themselves, each with its transaction.
    changes = spark.read.format("xlog").option("space", "orders").load(str(directory))
    changes.where("_operation = 'update'").select("_commit_timestamp", "_replica_id", "_lsn", "id", "_operations").show(
        3, truncate=False
    )
