"""Keys stay ordered, piece by piece, under any batches."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowstone.box.engine import order as order_module
from flowstone.box.engine.keys import Key
from flowstone.box.engine.order import PIECE, OrderedKeys, in_order

NUMBERS = st.integers(0, 60)
BATCHES = st.lists(st.tuples(st.booleans(), st.sets(NUMBERS)), max_size=12)
BOUNDS = st.none() | NUMBERS


@pytest.fixture(autouse=True, params=["ints", "bytes"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(order_module, "PIECE", 4)
    monkeypatch.setattr(order_module, "_FEW", 2)
    name: str = request.param
    return name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=BATCHES, low=BOUNDS, high=BOUNDS, reverse=st.booleans())
def test_batches_of_any_size_are_added_and_removed(
    kind: str, batches: list[tuple[bool, set[int]]], low: int | None, high: int | None, reverse: bool
) -> None:
    def key(number: int) -> Key:
        return number if kind == "ints" else b"%03d" % number

    order, wanted = OrderedKeys([]), set[Key]()
    for is_added, numbers in batches:
        keys = {key(number) for number in numbers}
        if is_added:
            order.add(sorted(keys - wanted))
            wanted |= keys
        else:
            order.remove(sorted(keys & wanted))
            wanted -= keys
        found = sorted(wanted)
        assert list(order) == found
        assert len(order) == len(found)
        start = 0 if low is None else bisect_left(found, key(low))
        end = len(found) if high is None else bisect_left(found, key(high))
        span = order.span(None if low is None else key(low), None if high is None else key(high), reverse)
        assert list(span) == found[start:end][:: -1 if reverse else 1]
        assert order.rank(key(30)) == bisect_left(found, key(30))
        assert [order[number] for number in range(len(found))] == found
        with pytest.raises(IndexError):
            order[len(found)]


@pytest.mark.parametrize("most", [2**40, 2**63, 2**64])
def test_many_numbers_of_any_size_are_sorted(most: int) -> None:
    keys: list[Key] = [(number * 7919 * 7919) % most for number in range(5000)]
    keys[17] = most - 1
    assert in_order(keys) == sorted(keys)


def test_many_strings_are_sorted() -> None:
    keys: list[Key] = [b"%d" % (number * 7919) for number in range(5000)]
    assert in_order(keys) == sorted(keys)


def test_pieces_keep_a_uniform_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    order = OrderedKeys(list(range(0, 100_000, 2)))
    order.add(list(range(1, 100_000, 2)))
    order.remove([key for key in range(100_000) if key % 100])
    pieces = [piece for piece, _ in order._by_piece(list(order))]
    assert len(pieces) <= 2 * 1000 // PIECE + 1
