"""Spaces of a client with rows as objects."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import flowstone
from tests.node.upstream_server import Upstream


@dataclass
class Fruit:
    id: int
    name: str


async def test_rows_are_objects_of_the_class(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        fruit = client.space("fruit").as_(Fruit)
        assert await fruit.insert(Fruit(1, "fig")) == Fruit(1, "fig")
        assert await fruit.replace({"id": 2, "name": "kiwi"}) == Fruit(2, "kiwi")
        await fruit.upsert(Fruit(3, "plum"), {"name": "none"})
        assert await fruit.get(3) == Fruit(3, "plum")
        assert await fruit.update(3, {"name": "pear"}) == Fruit(3, "pear")
        assert await fruit.index("by_name").select("fig") == [Fruit(1, "fig")]
        assert await fruit.insert_many(Fruit(number, "berry") for number in range(10, 20)) == 10
        assert await fruit.delete(1) == Fruit(1, "fig")
        async with client.transaction() as transaction:
            assert await transaction.space("fruit").as_(Fruit).get(2) == Fruit(2, "kiwi")


async def test_object_that_does_not_fit_is_not_sent(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        fruit = client.space("fruit").as_(Fruit)
        with pytest.raises(flowstone.RowMismatch, match="field 'name': expected `str`, got `int`"):
            await fruit.insert(Fruit(1, 2))  # type: ignore[arg-type]
        assert len(node.fruit) == 0


async def test_stored_row_that_does_not_fit_is_an_error_of_the_read(node: Upstream) -> None:
    @dataclass
    class Numbered:
        id: int
        name: int

    await node.fruit.insert((1, "fig"))
    async with flowstone.connect(node.uri) as client:
        with pytest.raises(flowstone.RowMismatch, match="field 'name': expected `int`, got `str`"):
            await client.space("fruit").as_(Numbered).get(1)
        assert await client.space("fruit").get(1) == (1, "fig")


async def test_handles_show_what_they_refer_to(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        assert repr(client.space("fruit")) == "<ClientSpace 'fruit'>"
        assert repr(client.space("fruit").index("by_name")) == "<ClientIndex 'by_name' of 'fruit'>"
