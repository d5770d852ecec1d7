"""Transactions and read views of a node."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowstone
from flowstone.box.engine.read_view import ReadViewClosed
from flowstone.iproto import errors


@pytest.fixture
def fruit(node: flowstone.Node) -> flowstone.Space:
    return node.space("fruit")


async def test_transaction_is_committed_as_a_whole(node: flowstone.Node, fruit: flowstone.Space) -> None:
    async with node.transaction() as transaction:
        inside = transaction.space("fruit")
        inside.insert((1, "apple", 5))
        inside.upsert((1, "apple", 5), [("+", "count", 1)])
        inside.replace({"id": 2, "name": "banana"})
        assert inside.get(1) == (1, "apple", 6)
        assert [row.id for row in inside.index("by_name").select()] == [1, 2]
        assert len(fruit) == 0
    assert [row.id for row in fruit.select()] == [1, 2]


async def test_exception_rolls_the_transaction_back(node: flowstone.Node, fruit: flowstone.Space) -> None:
    async def fail() -> None:
        async with node.transaction() as transaction:
            transaction.space("fruit").insert((1, "apple", 5))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert len(fruit) == 0


async def test_rejected_statement_is_rolled_back_alone(node: flowstone.Node, fruit: flowstone.Space) -> None:
    await fruit.insert((1, "apple", 5))
    async with node.transaction() as transaction:
        inside = transaction.space("fruit")
        inside.update(1, [("=", "count", 7)])
        with pytest.raises(errors.TupleFound):
            inside.insert((2, "apple", 1))
        inside.index("by_name").delete("pear")
    assert [tuple(row) for row in fruit] == [(1, "apple", 7)]


async def test_first_transaction_to_commit_wins(node: flowstone.Node, fruit: flowstone.Space) -> None:
    await fruit.insert((1, "apple", 5))

    async def add_ten_too_late() -> None:
        async with node.transaction() as transaction:
            inside = transaction.space("fruit")
            seen = inside.get(1)
            assert seen is not None
            await fruit.update(1, [("+", "count", 1)])
            inside.update(1, [("=", "count", seen.count + 10)])

    with pytest.raises(errors.TransactionConflict):
        await add_ten_too_late()
    assert fruit.get(1) == (1, "apple", 6)


async def test_caught_conflict_is_raised_again_at_the_end(node: flowstone.Node, fruit: flowstone.Space) -> None:
    other = await node.create_space("other")
    await other.create_index("primary")

    async def go_on_all_the_same() -> None:
        async with node.transaction() as transaction:
            transaction.space("fruit").insert((1, "apple", 5))
            await other.truncate()
            with pytest.raises(errors.TransactionConflict):
                transaction.space("other").insert((1,))
            with pytest.raises(errors.TransactionConflict):
                transaction.space("fruit").insert((2, "banana", 3))

    with pytest.raises(errors.TransactionConflict):
        await go_on_all_the_same()
    assert len(fruit) == len(other) == 0


async def test_handle_is_unusable_after_its_transaction(node: flowstone.Node, fruit: flowstone.Space) -> None:
    async with node.transaction() as transaction:
        inside = transaction.space("fruit")
    with pytest.raises(errors.NoTransaction):
        inside.insert((1, "apple", 5))
    with pytest.raises(errors.NoTransaction):
        inside.get(1)


async def test_transaction_has_no_conflict_when_its_reads_are_unchanged(
    node: flowstone.Node, fruit: flowstone.Space
) -> None:
    await fruit.insert((1, "apple", 5))
    async with node.transaction() as transaction:
        transaction.space("fruit").update(1, [("+", "count", 1)])
        await fruit.insert((2, "banana", 1))
    assert [row.id for row in fruit] == [1, 2]


async def test_rollback_in_the_block_leaves_an_empty_transaction(node: flowstone.Node, fruit: flowstone.Space) -> None:
    async with node.transaction() as transaction:
        inside = transaction.space("fruit")
        inside.insert((1, "apple", 5))
        await fruit.insert((3, "cherry", 1))
        assert inside.get(3) is None
        transaction.rollback()
        assert inside.get(3) == (3, "cherry", 1)
        inside.insert((2, "banana", 3))
    assert [row.id for row in fruit] == [2, 3]


async def test_a_transaction_ends_with_its_block(node: flowstone.Node) -> None:
    async with node.transaction() as transaction:
        pass
    with pytest.raises(errors.NoTransaction):
        transaction.space("fruit")


async def test_invalid_definitions_are_rejected_by_the_commit(node: flowstone.Node) -> None:
    with pytest.raises(errors.DropSpace):
        async with node.transaction() as transaction:
            transaction.space("_space").delete(node.space("fruit").id)
    assert len(node.space("fruit")) == 0


async def test_transaction_is_rolled_back_after_txn_timeout(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path, txn_timeout=1e-9) as node:
        space = await node.create_space("space")
        await space.create_index("primary")
        with pytest.raises(errors.TransactionTimeout):
            async with node.transaction() as transaction:
                transaction.space("space").insert((1,))
        assert len(space) == 0


async def test_transaction_may_have_a_shorter_timeout(node: flowstone.Node, fruit: flowstone.Space) -> None:
    with pytest.raises(errors.TransactionTimeout):
        async with node.transaction(timeout=1e-9) as transaction:
            transaction.space("fruit").insert((1, "apple", 5))
    assert len(fruit) == 0
    with pytest.raises(errors.IllegalParams, match="timeout must be a number greater than 0"):
        node.transaction(timeout=0)


async def test_unknown_isolation_level_is_rejected(node: flowstone.Node) -> None:
    with pytest.raises(errors.IllegalParams, match="txn_isolation"):
        node.transaction("strict")


async def test_read_view_does_not_change(node: flowstone.Node, fruit: flowstone.Space) -> None:
    await fruit.insert((1, "apple", 5))
    with node.read_view() as view:
        await fruit.replace((1, "pear", 6))
        await fruit.insert((2, "banana", 3))
        await node.create_space("later")
        inside = view.space("fruit")
        assert [tuple(row) for row in inside.select()] == [(1, "apple", 5)]
        assert inside.get(1) == (1, "apple", 5)
        assert (inside.get(2), len(inside)) == (None, 1)
        assert inside.index("by_name").get("apple") == (1, "apple", 5)
        with pytest.raises(errors.NoSuchSpace):
            view.space("later")
    assert fruit.get(1) == (1, "pear", 6)


async def test_closed_read_view_raises(node: flowstone.Node, fruit: flowstone.Space) -> None:
    with node.read_view() as view:
        inside = view.space("fruit")
    await fruit.insert((1, "apple", 5))
    for read in (lambda: inside.get(1), inside.select, lambda: len(inside), lambda: view.space("fruit")):
        with pytest.raises(ReadViewClosed):
            read()


async def test_transaction_on_any_space_may_wait_for_a_quorum(node: flowstone.Node, fruit: flowstone.Space) -> None:
    with pytest.raises(errors.SyncQueueUnclaimed):
        async with node.transaction(is_sync=True) as transaction:
            transaction.space("fruit").insert((1, "apple", 5))
    assert len(fruit) == 0


async def test_2_6_rejects_is_sync_for_other_spaces(tmp_path: Path) -> None:
    async with flowstone.Node(tmp_path / "old", dialect="2.6") as node:
        with pytest.raises(errors.Unsupported):
            node.transaction(is_sync=True)
