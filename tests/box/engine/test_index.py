"""An index finds its tuples and keeps them ordered under any sequence of writes and reads."""

from __future__ import annotations

import bisect
from bisect import bisect_left
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowstone.box.engine import index as index_module
from flowstone.box.engine import order as order_module
from flowstone.box.engine.index import DEBT_MAX, RUN, EngineIndex
from flowstone.box.engine.keys import Key, Span
from tests.box.spaces import box_with, definition, on

KEYS = st.integers(0, 12)
WRITES = st.tuples(KEYS, st.none() | st.binary(min_size=1, max_size=1))
BULK = st.lists(KEYS, min_size=1, max_size=5, unique=True)


def index_of(type: str = "tree", parts: str = "0:unsigned") -> EngineIndex:
    index = box_with(definition(512, on(parts, type=type))).space(512).primary
    assert index is not None
    return index


@pytest.fixture(params=["few", "many"], autouse=True)
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits, so that a few keys exercise runs, reads beside pending keys, and merges by writes."""
    if request.param == "many":
        monkeypatch.setattr(index_module, "RUN", 3)
        monkeypatch.setattr(index_module, "SETTLED_BY_READ", 1)
        monkeypatch.setattr(index_module, "RUNS_MAX", 2)
        monkeypatch.setattr(index_module, "DEBT_MAX", 8)
        monkeypatch.setattr(order_module, "PIECE", 4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WRITES | BULK | st.none(), max_size=60))
def test_order_is_correct_at_any_time(
    program: list[tuple[int, bytes | None] | list[int] | None],
) -> None:
    """In `program`, None is an ordered read, and a list contains keys that are inserted in bulk."""
    index = index_of()
    wanted: dict[Key, bytes] = {}
    for step in program:
        if step is None:
            assert list(index.scan()) == sorted(wanted.items())
        elif isinstance(step, list):
            fresh: list[Key] = [key for key in step if key not in wanted]
            new = dict.fromkeys(fresh, b"bulk")
            index.map.update(new)
            index.add_fresh(fresh)
            wanted |= new
        else:
            key, value = step
            assert index.set(key, value) == wanted.pop(key, None)
            if value is not None:
                wanted[key] = value
        assert len(index) == len(wanted)
    assert list(index.scan()) == sorted(wanted.items())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WRITES | st.sampled_from([1, 2, 5]), max_size=60))
def test_partly_merged_order_is_correct(program: list[tuple[int, bytes | None] | int]) -> None:
    """In `program`, a number is how many keys to sort."""
    index = index_of()
    wanted: dict[Key, bytes] = {}
    for step in program:
        if isinstance(step, int):
            index.settle_partly(step)
            continue
        key, value = step
        index.set(key, value)
        wanted.pop(key, None)
        if value is not None:
            wanted[key] = value
    for _ in range(100):
        if index.settle_partly(1):
            break
    assert index.settle_partly(1)
    assert list(index.scan()) == sorted(wanted.items())


BOUNDS = st.none() | st.integers(-1, 13)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_many_deleted_keys_are_removed_together_and_few_one_by_one() -> None:
    for gone in (10, 900):
        index = index_of()
        for key in range(1000):
            index.set(key, b"x")
        assert index.count(Span(0, 500, False)) == 500
        for key in range(gone):
            index.set(key, None)
        assert [key for key, _ in index.scan()] == list(range(gone, 1000))


def scattered(count: int, start: int = 0) -> list[Key]:
    """Return distinct keys in random order."""
    return [(number * 7919) % 1_000_003 for number in range(start, start + count)]


def put(index: EngineIndex, keys: list[Key]) -> None:
    index.map.update(dict.fromkeys(keys, b"x"))
    index.add_fresh(keys)


@pytest.mark.parametrize("limits", ["few"], indirect=True)
class TestManyKeysAtOnce:
    """Check which keys an operation sorts or merges, instead of measuring time."""

    def test_first_read_after_many_new_keys_merges_none_of_them(self) -> None:
        index = index_of()
        for start in range(0, 3 * RUN, RUN):
            put(index, scattered(RUN, start))
        put(index, scattered(RUN // 2, 3 * RUN))
        before = index.debt
        wanted = sorted(index.map)
        assert [key for key, _ in islice(index.scan(Span(500, None, False)), 3)] == wanted[bisect_left(wanted, 500) :][
            :3
        ]
        assert index.debt == before == len(index.map)
        assert index.count(Span(500, 5000, False)) == bisect_left(wanted, 5000) - bisect_left(wanted, 500)
        while not index.settle_partly(2000):
            pass
        assert index.debt == 0
        assert [key for key, _ in index.scan()] == wanted

    def test_first_read_after_many_deletions_removes_none_of_them(self) -> None:
        index = index_of()
        put(index, scattered(50_000))
        index.settle()
        gone = scattered(20_000)
        for key in gone:
            index.set(key, None)
        wanted = sorted(index.map)
        assert index.debt == 20_000
        assert next(index.scan(Span(None, None, True)))[0] == wanted[-1]
        assert index.count(Span(0, 777_777, False)) == bisect_left(wanted, 777_777)
        assert index.debt == 20_000
        while not index.settle_partly(2000):
            pass
        assert [key for key, _ in index.scan()] == wanted

    def test_inserted_and_deleted_keys_leave_no_garbage(self) -> None:
        index = index_of()
        for key in range(5 * DEBT_MAX):
            index.set(key, b"x")
            index.set(key - 50, None)
            if key % 1000 == 0:
                assert index.debt <= 2 * DEBT_MAX
        assert len(index) == 50

    def test_long_load_of_new_keys_has_bounded_debt(self) -> None:
        index = index_of()
        for start in range(0, 120 * RUN, RUN):
            put(index, list(range(start, start + RUN)))
        assert index.debt <= 101 * RUN
        assert index.count(Span(5, 120 * RUN, False)) == 120 * RUN - 5

    def test_read_merges_few_keys_into_many(self) -> None:
        """Otherwise every write between two reads would add a run."""
        index = index_of()
        put(index, scattered(3 * RUN))
        for key in range(2_000_000, 2_000_500):
            index.set(key, b"x")
            assert next(index.scan(Span(key, None, False)))[0] == key
        assert index.debt == 3 * RUN


def test_hash_index_is_not_ordered() -> None:
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


def test_hash_index_continues_after_a_key_while_the_key_exists() -> None:
    """Clients read a hash index in pages with the GT iterator."""
    index = index_of("hash")
    for key in (5, 3, 9, 1):
        index.set(key, b"%d" % key)
    gt = index.key.span(6, (3,))
    assert [key for key, _ in index.scan(gt)] == [9, 1]
    assert index.count(gt) == 2
    assert list(index.scan(index.key.span(6, (1,)))) == []
    assert list(index.scan(index.key.span(6, (7,)))) == []
