"""Spaces of a node and of a replica with rows as objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import flowstone
from tests.node.upstream_server import Upstream


@dataclass
class Fruit:
    id: int
    name: str


@pytest.fixture
async def upstream(tmp_path: Path) -> AsyncIterator[Upstream]:
    upstream = Upstream(tmp_path / "node", dialect="2.11")
    await upstream.start()
    yield upstream
    await upstream.stop()


async def test_rows_are_objects_of_the_class(upstream: Upstream) -> None:
    fruit = upstream.fruit.as_(Fruit)
    assert await fruit.insert(Fruit(1, "fig")) == Fruit(1, "fig")
    assert await fruit.replace({"id": 2, "name": "kiwi"}) == Fruit(2, "kiwi")
    await fruit.upsert((3, "plum"), {"name": "none"})
    assert await fruit.update(3, {"name": "pear"}) == Fruit(3, "pear")
    assert fruit.index("by_name").select("fig") == [Fruit(1, "fig")]
    assert (len(fruit), 3 in fruit, fruit.get(9)) == (3, True, None)
    assert await fruit.delete(1) == Fruit(1, "fig")
    assert list(fruit) == [Fruit(2, "kiwi"), Fruit(3, "pear")]
    assert fruit[2].name == "kiwi"
    with pytest.raises(KeyError):
        fruit[1]
    with pytest.raises(flowstone.RowMismatch, match="field 'name' is missing, got id"):
        await fruit.insert({"id": 4})


async def test_replica_reads_objects(upstream: Upstream) -> None:
    await upstream.fruit.insert((1, "fig"))
    async with flowstone.follow(upstream.uri) as replica:
        assert replica.space("fruit").as_(Fruit)[1] == Fruit(1, "fig")


async def test_row_is_found_by_its_key_or_is_a_key_error(upstream: Upstream) -> None:
    await upstream.fruit.insert((1, "fig"))
    await upstream.fruit.insert((2, "kiwi"))
    assert upstream.fruit[1] == (1, "fig")
    with pytest.raises(KeyError):
        upstream.fruit[7]
    assert list(reversed(upstream.fruit)) == [(2, "kiwi"), (1, "fig")]
    assert list(reversed(upstream.fruit.index("by_name"))) == [(2, "kiwi"), (1, "fig")]
