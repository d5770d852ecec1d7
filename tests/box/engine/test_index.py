"""An index finds its tuples and keeps them ordered under any sequence of writes and reads."""

from __future__ import annotations

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.keys import Key, Span
from tests.box.spaces import box_with, definition, on

KEYS = st.integers(0, 12)
WRITES = st.tuples(KEYS, st.none() | st.binary(min_size=1, max_size=1))


def index_of(type: str = "tree", parts: str = "0:unsigned") -> EngineIndex:
    index = box_with(definition(512, on(parts, type=type))).space(512).primary
    assert index is not None
    return index


@given(st.lists(WRITES | st.none(), max_size=60))
def test_order_is_correct_at_any_time(program: list[tuple[int, bytes | None] | None]) -> None:
    """In `program`, None is an ordered read."""
    index = index_of()
    wanted: dict[Key, bytes] = {}
    for step in program:
        if step is None:
            assert list(index.scan()) == sorted(wanted.items())
            continue
        key, value = step
        assert index.set(key, value) == wanted.pop(key, None)
        if value is not None:
            wanted[key] = value
        assert len(index) == len(wanted)
    assert list(index.scan()) == sorted(wanted.items())


BOUNDS = st.none() | st.integers(-1, 13)


@given(st.sets(KEYS), st.sets(KEYS), BOUNDS, BOUNDS, st.booleans())
def test_span_includes_low_and_excludes_high(
    keys: set[int], gone: set[int], low: int | None, high: int | None, reverse: bool
) -> None:
    index, ordered = index_of(), sorted(keys - gone)
    for key in sorted(keys):
        index.set(key, b"%d" % key)
    for key in sorted(gone):
        index.set(key, None)
    first = 0 if low is None else bisect.bisect_left(ordered, low)
    last = len(ordered) if high is None else bisect.bisect_left(ordered, high)
    wanted = ordered[first:last][:: -1 if reverse else 1]
    span = Span(low, high, reverse)
    assert [key for key, _ in index.scan(span)] == wanted
    assert index.count(span) == len(wanted)
    for key in ordered:
        assert index.get(key) == b"%d" % key


def test_key_deleted_and_inserted_again_is_listed_once() -> None:
    index = index_of()
    for _ in range(3):
        index.set(5, b"a")
        index.set(5, None)
        index.set(5, b"b")
        assert list(index.scan()) == [(5, b"b")]


def test_hash_index_promises_no_order() -> None:
    index = index_of("hash")
    for key in (5, 3, 9):
        index.set(key, b"%d" % key)
    index.set(3, None)
    assert not index.is_ordered
    assert dict(index.scan()) == {5: b"5", 9: b"9"}
    assert index.count(Span(None, None, False)) == 2


@pytest.mark.parametrize("type", ["tree", "hash"])
def test_random_returns_every_tuple_for_some_number(type: str) -> None:
    index = index_of(type)
    assert index.random(7) is None
    for key in range(4):
        index.set(key, b"%d" % key)
    assert {index.random(number) for number in range(100, 104)} == {b"0", b"1", b"2", b"3"}


def test_unsupported_index_types_are_recognized() -> None:
    assert index_of().is_served
    assert index_of("hash").is_served
    assert not index_of("rtree", "0:array").is_served
    assert not index_of("bitset").is_served


def test_every_open_view_receives_the_previous_tuple() -> None:
    box = box_with(definition(512, on("0:unsigned")))
    index = box.space(512).index(0)
    index.set(1, b"old")
    with box.open_view() as first:
        index.set(1, b"newer")
        with box.open_view() as second:
            index.set(1, None)
            index.set(2, b"other")
        assert first.changes == {index: {1: b"old", 2: None}}
        assert second.changes == {}
