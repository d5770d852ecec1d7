"""The replica set of the demo: it elects a leader, survives its loss, and accepts a killed member back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowstone.cli.demo.cluster import Cluster, NotReady
from flowstone.cli.demo.sales import IDS, Shop
from flowstone.client.connection import Connection
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.outside import production

CUSTOMERS = 50


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.stop()


async def orders_in(cluster: Cluster) -> set[int]:
    leader = await cluster.leader()
    async with await Connection.open(production(), leader.uri) as connection:
        body = {Key.SPACE_ID.value: IDS["orders"], Key.KEY.value: (), Key.LIMIT.value: 1_000_000, Key.ITERATOR.value: 2}
        rows = (await connection.request(RequestType.SELECT, pack(body)))[Key.DATA]
    return {row[0] for row in rows}


async def sold(shop: Shop, count: int) -> None:
    """Wait until `count` more orders are answered."""
    wanted = len(shop.orders) + count
    async with asyncio.timeout(60):
        while len(shop.orders) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_acknowledged_orders_survive_the_loss_of_the_leader(cluster: Cluster) -> None:
    cluster.start()
    first = await cluster.leader()
    await cluster.until_equal()
    shop = Shop(cluster.leader, CUSTOMERS, 600)
    await shop.open()
    selling = asyncio.ensure_future(shop.sell())
    await sold(shop, 100)
    first.kill()
    second = await cluster.leader()
    assert second is not first
    assert (await cluster.statuses())[first.name] is None
    await sold(shop, 100)
    first.start()
    shop.is_open = False
    await selling
    place = await cluster.until_equal()
    assert len(place) == 2
    there = await orders_in(cluster)
    assert shop.orders <= there
    assert there - shop.orders <= shop.uncertain


async def test_stopped_node_is_not_a_leader(cluster: Cluster) -> None:
    for member in cluster.members:
        member.log.write_text("ended early\n")
    with pytest.raises(NotReady, match="ended early"):
        await cluster.leader()
