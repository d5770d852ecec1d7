"""The workload of `flowstone demo`: a shop that sends sales to the leader at a fixed rate.

All its spaces are synchronous, so acknowledged changes are never lost. The shop records the ids of acknowledged orders,
to compare them with the lake at the end; orders in flight when a leader dies may or may not be there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flowstone.cli.demo.cluster import DemoMember, call
from flowstone.client.connection import Connection
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.outside import production

SPACES: Final[dict[str, Sequence[tuple[str, str]]]] = {
    "customers": (("id", "unsigned"), ("name", "string"), ("city", "string"), ("spent", "unsigned")),
    "products": (("id", "unsigned"), ("name", "string"), ("stock", "integer")),
    "orders": (("id", "unsigned"), ("customer", "unsigned"), ("product", "unsigned"), ("price", "unsigned")),
}
CITIES: Final = ("London", "Berlin", "Nairobi", "Lima", "Osaka")
THINGS: Final = ("lamp", "desk", "chair", "shelf", "clock", "rug", "vase", "mirror")
PRODUCTS: Final = 200
TURN_SECONDS: Final = 0.05
ANSWER_SECONDS: Final = 5.0

IDS: Final = {name: 512 + number for number, name in enumerate(SPACES)}


@dataclass
class Shop:
    """The shop. `rate` is the number of changes per second, if the cluster is fast enough.

    `orders` has the ids of acknowledged orders that were not cancelled, `uncertain` the ids of orders whose outcome is
    unknown.
    """

    leader: Callable[[], Coroutine[Any, Any, DemoMember]]
    customers: int
    rate: int
    answered: int = 0
    orders: set[int] = field(default_factory=set)
    uncertain: set[int] = field(default_factory=set)
    is_open: bool = False
    _next_order: int = 1
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    async def open(self) -> None:
        """Create the spaces, and insert customers and products."""
        async with await self._connect() as connection:
            for name, fields in SPACES.items():
                options = {"id": IDS[name], "is_sync": True, "format": [{"name": n, "type": t} for n, t in fields]}
                await call(connection, "box.schema.space.create", name, options)
                await call(connection, f"box.space.{name}:create_index", "primary")
            people = ((n, f"customer {n}", CITIES[n % len(CITIES)], 0) for n in range(1, self.customers + 1))
            goods = ((n, f"{THINGS[n % len(THINGS)]} {n}", 100_000) for n in range(1, PRODUCTS + 1))
            await self._all(connection, [_replace("customers", each) for each in people])
            await self._all(connection, [_replace("products", each) for each in goods])

    async def sell(self) -> None:
        """Sell until cancelled, or until `is_open` is False. If the leader is lost, continue with the next one."""
        self.is_open = True
        while self.is_open:
            try:
                async with await self._connect() as connection:
                    while self.is_open:
                        began = time.monotonic()
                        await self._turn(connection)
                        await asyncio.sleep(max(0.0, TURN_SECONDS - (time.monotonic() - began)))
            except FlowstoneError:
                await asyncio.sleep(TURN_SECONDS)

    async def _connect(self) -> Connection:
        return await Connection.open(production(), (await self.leader()).uri, timeout=ANSWER_SECONDS)

    async def _turn(self, connection: Connection) -> None:
        """Make orders, with their changes of stock and customer, and cancel one in ten of them."""
        sales = max(1, int(self.rate * TURN_SECONDS / 3.1))
        new = range(self._next_order, self._next_order + sales)
        self._next_order = new.stop
        cancelled = [order for order in new if order % 10 == 0]
        self.uncertain.update(new)
        requests = [request for order in new for request in self._sale(order)]
        await self._all(connection, requests)
        self.orders.update(order for order in new if order not in cancelled)
        await self._all(connection, [_delete("orders", order) for order in cancelled])
        self.uncertain.difference_update(new)

    def _sale(self, order: int) -> list[tuple[RequestType, bytes]]:
        customer, product = self._random.randint(1, self.customers), self._random.randint(1, PRODUCTS)
        price = self._random.randint(5, 500)
        return [
            _replace("orders", (order, customer, product, price)),
            _request(RequestType.UPDATE, "products", {Key.KEY: (product,), Key.TUPLE: (("-", 2, 1),)}),
            _request(
                RequestType.UPSERT,
                "customers",
                {Key.TUPLE: (customer, f"customer {customer}", "", price), Key.OPS: (("+", 3, price),)},
            ),
        ]

    async def _all(self, connection: Connection, requests: Sequence[tuple[RequestType, bytes]]) -> None:
        """Send all requests and wait for all responses; only then raise the first error among them."""
        under_way = [connection.send(type, body) for type, body in requests]
        answers = [await connection.answer(answer, timeout=ANSWER_SECONDS) for answer in under_way]
        for answer in answers:
            connection.values(answer)
        self.answered += len(answers)


def _request(type: RequestType, space: str, body: dict[Key, Any]) -> tuple[RequestType, bytes]:
    whole = {Key.SPACE_ID: IDS[space], **body}
    return type, pack({key.value: value for key, value in whole.items()})


def _replace(space: str, values: tuple[Any, ...]) -> tuple[RequestType, bytes]:
    return _request(RequestType.REPLACE, space, {Key.TUPLE: values})


def _delete(space: str, key: int) -> tuple[RequestType, bytes]:
    return _request(RequestType.DELETE, space, {Key.KEY: (key,)})
