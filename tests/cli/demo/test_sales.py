"""The demo's workload on one node: the effects of a sale, and the shop's memory of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flowstone
from flowstone.cli.demo.replication import LOGIN
from flowstone.cli.demo.sales import PRODUCTS, Shop
from flowstone.client.connection import Connection
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production


async def test_turn_sells_orders_and_cancels_one_in_ten(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path / "node", listen="127.0.0.1:0", user=LOGIN) as node:
        await node.promote()
        uri = parse_uri(f"{LOGIN[0]}:{LOGIN[1]}@{node.address}")

        class Leader:
            def __init__(self) -> None:
                self.uri = uri

        async def leader() -> Any:
            return Leader()

        shop = Shop(leader, 20, 620)
        await shop.open()
        assert (len(node.space("customers")), len(node.space("products"))) == (20, PRODUCTS)
        async with await Connection.open(production(), uri) as connection:
            await shop._turn(connection)
        assert shop.orders == set(range(1, 11)) - {10}
        assert {row[0] for row in node.space("orders")} == shop.orders
        assert not shop.uncertain
        assert sum(100_000 - row[2] for row in node.space("products")) == 10
        assert shop.answered == 20 + PRODUCTS + 31
