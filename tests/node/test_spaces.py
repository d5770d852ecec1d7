"""Spaces of a node as objects: reads, changes, definitions."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import Any

import pytest

import flowstone
from flowstone.iproto import errors


@pytest.fixture
def fruit(node: flowstone.Node) -> flowstone.Space:
    return node.space("fruit")


async def fill(fruit: flowstone.Space, *rows: Any) -> None:
    for row in rows or ((1, "apple", 5), (2, "banana", 3), (3, "cherry", 9)):
        await fruit.insert(row)


async def test_inserted_tuple_is_found_through_all_indexes(fruit: flowstone.Space) -> None:
    stored = await fruit.insert((1, "apple", 5))
    assert stored == (1, "apple", 5)
    found = fruit.get(1)
    assert found is not None
    assert (found.id, found["name"], found[2]) == (1, "apple", 5)
    assert fruit.index("by_name").get("apple") == (1, "apple", 5)
    assert fruit.get(2) is None
    assert 1 in fruit
    assert 2 not in fruit


async def test_fields_may_be_given_by_name(fruit: flowstone.Space) -> None:
    assert await fruit.insert({"name": "apple", "id": 1}) == (1, "apple")
    assert await fruit.replace({"count": 4, "name": "apple", "id": 1}) == (1, "apple", 4)
    with pytest.raises(errors.TarantoolError, match="Field 'colour' was not found"):
        await fruit.insert({"id": 2, "colour": "red"})


async def test_duplicate_key_is_rejected_and_changes_nothing(fruit: flowstone.Space) -> None:
    await fill(fruit)
    with pytest.raises(errors.TupleFound, match="unique index 'primary' in space 'fruit'"):
        await fruit.insert((1, "other", 0))
    with pytest.raises(errors.TupleFound, match="unique index 'by_name' in space 'fruit'"):
        await fruit.insert((4, "apple", 0))
    assert len(fruit) == 3
    assert fruit.get(4) is None


async def test_wrong_key_is_an_error_even_in_an_empty_index(fruit: flowstone.Space) -> None:
    with pytest.raises(errors.KeyPartType):
        fruit.get("one")
    with pytest.raises(errors.KeyPartType):
        fruit.get(-1)
    with pytest.raises(errors.ExactMatch):
        fruit.get((1, 2))


async def test_select_accepts_iterators_limits_and_positions(fruit: flowstone.Space) -> None:
    await fill(fruit)
    assert [row.id for row in fruit.select()] == [1, 2, 3]
    assert [row.id for row in fruit.select(2, iterator="GE")] == [2, 3]
    assert [row.id for row in fruit.select(2, iterator="lt")] == [1]
    assert [row.id for row in fruit.select(iterator="ALL", offset=1, limit=1)] == [2]
    first = fruit.select(limit=2)
    assert [row.id for row in fruit.select(after=first[-1])] == [3]
    assert [row.id for row in fruit.index("by_name").select("b", iterator="GE")] == [2, 3]
    with pytest.raises(errors.IllegalParams, match="unknown iterator type 'NEAR'"):
        fruit.select(iterator="NEAR")


async def test_count_min_and_max(fruit: flowstone.Space) -> None:
    assert (len(fruit), fruit.count(), fruit.min(), fruit.max()) == (0, 0, None, None)
    await fill(fruit)
    by_name = fruit.index("by_name")
    assert (len(fruit), fruit.count(2, iterator="GT"), by_name.count("apple")) == (3, 1, 1)
    assert fruit.min() == (1, "apple", 5)
    assert by_name.max() == (3, "cherry", 9)
    assert [row.name for row in fruit] == ["apple", "banana", "cherry"]
    assert fruit.random(4) == (2, "banana", 3)


async def test_update_by_name_number_and_secondary_index(fruit: flowstone.Space) -> None:
    await fill(fruit)
    assert await fruit.update(1, [("+", "count", 1), ("=", 1, "pear")]) == (1, "pear", 6)
    assert await fruit.index("by_name").update("banana", [("=", -1, None)]) == (2, "banana", None)
    assert await fruit.update(9, [("=", 1, "x")]) is None
    with pytest.raises(errors.TarantoolError, match="part of index 'primary'"):
        await fruit.update(1, [("=", 0, 7)])


async def test_upsert_and_delete(fruit: flowstone.Space) -> None:
    await fruit.upsert((1, "apple", 1), [("+", 2, 1)])
    await fruit.upsert((1, "apple", 1), [("+", 2, 1)])
    assert fruit.get(1) == (1, "apple", 2)
    assert await fruit.index("by_name").delete("apple") == (1, "apple", 2)
    assert await fruit.delete(1) is None


async def test_stored_tuple_can_be_inserted_into_another_space(node: flowstone.Node, fruit: flowstone.Space) -> None:
    await fill(fruit)
    copies = await node.create_space("copies")
    await copies.create_index("primary")
    for row in fruit:
        await copies.insert(row)
    assert [tuple(row) for row in copies] == [tuple(row) for row in fruit]


async def test_values_of_every_kind_round_trip(node: flowstone.Node) -> None:
    space = await node.create_space("values")
    await space.create_index("primary")
    row = (1, None, True, -5, 2**64 - 1, 1.5, "text", b"\x00", [1, [2]], {"a": {"b": 1}}, Decimal("1.50"))
    await space.insert(row)
    assert space.get(1) == (
        1,
        None,
        True,
        -5,
        2**64 - 1,
        1.5,
        "text",
        b"\x00",
        (1, (2,)),
        {"a": {"b": 1}},
        Decimal("1.50"),
    )


async def test_a_sequence_numbers_tuples(node: flowstone.Node) -> None:
    events = await node.create_space("events", format=[("id", "unsigned"), ("what", "string")])
    await events.create_index("primary", sequence=True)
    first = await events.insert((None, "one"))
    second = await events.insert({"what": "two"})
    assert (first.id, second.id) == (1, 2)


async def test_space_handle_remains_valid_after_definition_changes(fruit: flowstone.Space) -> None:
    await fill(fruit)
    await fruit.set_format([("key", "unsigned"), ("label", "string")])
    found = fruit.get(1)
    assert found is not None
    assert (found.label, fruit.format[0]["name"]) == ("apple", "key")
    await fruit.rename("produce")
    assert fruit.name == "produce"
    await fruit.create_index("third", parts=[{"field": 3, "type": "integer", "is_nullable": True}], unique=False)
    assert list(fruit.indexes) == ["primary", "by_name", "third"]
    assert [row[0] for row in fruit.index("third").select()] == [2, 1, 3]
    await fruit.truncate()
    assert (len(fruit), fruit.get(1)) == (0, None)


async def test_dropped_space_is_absent(node: flowstone.Node, fruit: flowstone.Space) -> None:
    await fill(fruit)
    await fruit.drop()
    with pytest.raises(errors.NoSuchSpace):
        fruit.get(1)
    with pytest.raises(errors.NoSuchSpace, match="Space 'fruit' does not exist"):
        node.space("fruit")


async def test_hash_index_has_no_min_and_max(node: flowstone.Node) -> None:
    space = await node.create_space("hashed")
    await space.create_index("primary", type="hash")
    await space.insert((1,))
    assert space.get(1) == (1,)
    with pytest.raises(errors.UnsupportedIndexFeature, match=r"does not support min\(\)"):
        space.min()


async def test_string_keys_are_found(node: flowstone.Node) -> None:
    space = await node.create_space("words")
    await space.create_index("primary", parts=[(1, "string")])
    await space.insert(("grün", 1))
    assert space.get("grün") == ("grün", 1)
    assert space.get("blau") is None


async def test_get_costs_little_more_than_a_dict_lookup(fruit: flowstone.Space) -> None:
    """A bound far above the measured cost (`make bench`), to notice when the fast path is no longer taken."""
    await fill(fruit)
    begun = time.perf_counter()
    for _ in range(100_000):
        found = fruit.get(2)
        assert found is not None
        found[1]
    assert 100_000 / (time.perf_counter() - begun) > 200_000


async def test_space_handle_remains_valid_after_a_truncation(node: flowstone.Node, fruit: flowstone.Space) -> None:
    await fill(fruit)
    by_name = fruit.index("by_name")
    assert fruit.get(1) == by_name.get("apple") == (1, "apple", 5)
    await fruit.truncate()
    assert (fruit.get(1), by_name.get("apple"), len(fruit), fruit.select(), fruit.random(0)) == (
        None,
        None,
        0,
        [],
        None,
    )
    assert await fruit.insert((1, "acorn", 1)) == (1, "acorn", 1)
    assert fruit.get(1) == by_name.get("acorn") == node.space("fruit").get(1) == (1, "acorn", 1)
    assert node.space("fruit").select() == fruit.select()
