"""The source of the examples: a small shop on a Flowstone node in this program. A Tarantool server works, too."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import flowstone

CITIES = ("London", "Berlin", "Nairobi", "Lima", "Osaka")


class ShopNode:
    """`with ShopNode(directory) as shop:` serves two spaces, `customers` and `orders`, at `shop.uri`.

    The node runs on an event loop in its own thread, so that a script can wait for Spark meanwhile.
    """

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._node = flowstone.Node(directory, listen="127.0.0.1:0", user=("app", "secret"))
        self._next = 1

    @property
    def uri(self) -> str:
        return f"app:secret@{self._node.address}"

    @property
    def position(self) -> dict[int, int]:
        """Return the vclock: the number of rows that each member has written."""
        return dict(self._node.info()["vclock"])

    def sell(self, count: int) -> None:
        """Insert `count` new orders."""
        self._do(self._sell(count))

    def raise_prices(self, percent: int) -> None:
        """Raise the prices of all past orders by mistake, as a reason to look at an earlier state."""
        self._do(self._raise_prices(percent))

    async def _sell(self, count: int) -> None:
        orders, customers = self._node.space("orders"), self._node.space("customers")
        for number in range(self._next, self._next + count):
            customer, price = random.randint(1, 100), random.randint(5, 500)
            await orders.insert([number, customer, price])
            await customers.update(customer, [("+", "spent", price)])
        self._next += count

    async def _raise_prices(self, percent: int) -> None:
        orders = self._node.space("orders")
        for order in list(orders):
            await orders.update(order.id, [("=", "price", order.price * (100 + percent) // 100)])

    async def _open(self) -> None:
        await self._node.start()
        format = [("id", "unsigned"), ("name", "string"), ("city", "string"), ("spent", "unsigned")]
        customers = await self._node.create_space("customers", format=format)
        await customers.create_index("primary")
        for number in range(1, 101):
            await customers.insert([number, f"customer {number}", CITIES[number % len(CITIES)], 0])
        format = [("id", "unsigned"), ("customer", "unsigned"), ("price", "unsigned")]
        orders = await self._node.create_space("orders", format=format)
        await orders.create_index("primary")

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._node.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
