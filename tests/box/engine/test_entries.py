"""Entries are found by key, in order and by number under any sequence of changes, compiled and interpreted."""

from __future__ import annotations

import random
import tracemalloc
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from flowstone.box.engine.entries import Entries
from flowstone.box.engine.keys import Key
from tests.native.twins import interpreted_module

FORMS: list[type[Entries]] = [Entries, interpreted_module(Entries.__module__).Entries]

MAPPED = 700
"""Keys of each family: enough for leaves of 64 to split and to merge, and for an inner node."""


def text_of(number: int) -> bytes:
    """Return a different text of zeros and ones per number, many of them the beginning of another."""
    found = b""
    while number:
        number -= 1
        found += bytes([number & 1])
        number >>= 1
    return found


FAMILIES: dict[str, Callable[[int], Key]] = {
    "small numbers": lambda number: number - 300,
    "numbers at 2^63": lambda number: (1 << 63) - 300 + number,
    "numbers at 2^64": lambda number: (1 << 64) - 1 - number,
    "numbers of the whole range": lambda number: -(1 << 63) + number * ((3 << 63) // MAPPED),
    "short texts": text_of,
    "texts with one prefix": lambda number: b"order-\x00" + text_of(number),
    "long texts": lambda number: bytes(40) + text_of(number),
    "texts after an integer part": lambda number: (
        b"@" + (number % 7 << number % 59).to_bytes(8, "big") + text_of(number)
    ),
    "texts like an integer part": lambda number: b"@" + text_of(number),
    "different texts": lambda number: random.Random(number).randbytes(number % 30) + b"%d" % number,
}

forms = pytest.mark.parametrize("form", FORMS, ids=["compiled", "interpreted"])
families = pytest.mark.parametrize("family", FAMILIES)


def filled(form: type[Entries], family: str, numbers: Any) -> tuple[Entries, dict[Key, bytes]]:
    key_of = FAMILIES[family]
    entries, wanted = form(isinstance(key_of(1), bytes)), {}
    for number in numbers:
        key, raw = key_of(number), b"%d" % number
        assert entries.put(key, raw) is None
        wanted[key] = raw
    return entries, wanted


def assert_same(entries: Entries, wanted: dict[Key, bytes]) -> None:
    ordered: list[Any] = sorted(wanted.items())
    assert len(entries) == len(ordered)
    assert list(entries.span()) == ordered
    assert list(entries.span(None, None, True)) == ordered[::-1]
    assert entries.collect() == [raw for _, raw in ordered]


def put_all(entries: Entries, keys: list[Any], raws: list[bytes]) -> list[bytes | None]:
    """Store each tuple at its key; return the tuples that they replaced."""
    return [entries.put(key, raw) for key, raw in zip(keys, raws, strict=True)]


NUMBERS = st.integers(0, MAPPED - 1)
STRIDES = st.integers(1, MAPPED).filter(lambda stride: MAPPED % stride)  # a run visits its numbers in this order
BOUNDS = st.none() | st.integers(-5, MAPPED + 5)


class Changes(RuleBasedStateMachine):
    """Both forms are changed in the same way, and compared with a dictionary."""

    family: str

    @initialize()
    def begin(self) -> None:
        self.key_of = FAMILIES[self.family]
        self.both = [form(isinstance(self.key_of(1), bytes)) for form in FORMS]
        self.wanted: dict[Any, bytes] = {}

    @rule(number=NUMBERS, raw=st.binary(max_size=3))
    def put(self, number: int, raw: bytes) -> None:
        key = self.key_of(number)
        old = self.wanted.get(key)
        self.wanted[key] = raw
        for entries in self.both:
            assert entries.put(key, raw) == old
            assert entries.get(key) == raw

    @rule(start=NUMBERS, count=st.integers(1, 300), stride=STRIDES)
    def put_run(self, start: int, count: int, stride: int) -> None:
        keys = [self.key_of((start + at * stride) % MAPPED) for at in range(count)]
        raws = [b"%d" % at for at in range(count)]
        olds = []
        for key, raw in zip(keys, raws, strict=True):
            olds.append(self.wanted.get(key))
            self.wanted[key] = raw
        for entries in self.both:
            assert put_all(entries, keys, raws) == olds

    @rule(start=NUMBERS, count=st.integers(1, MAPPED), stride=STRIDES)
    def pop_run(self, start: int, count: int, stride: int) -> None:
        for at in range(count):
            key = self.key_of((start + at * stride) % MAPPED)
            old = self.wanted.pop(key, None)
            for entries in self.both:
                assert entries.pop(key) == old

    @rule(
        low=BOUNDS, high=BOUNDS, reverse=st.booleans(), offset=st.integers(0, 20), limit=st.none() | st.integers(0, 90)
    )
    def read(self, low: int | None, high: int | None, reverse: bool, offset: int, limit: int | None) -> None:
        least, above = (None if bound is None else self._bound(bound) for bound in (low, high))
        ordered = sorted(self.wanted)
        first = 0 if least is None else bisect_left(ordered, least)
        keys = ordered[first : None if above is None else bisect_left(ordered, above)]
        found = [(key, self.wanted[key]) for key in (reversed(keys) if reverse else keys)]
        for entries in self.both:
            assert list(entries.span(least, above, reverse)) == found
            assert entries.count(least, above) == len(found)
            if least is not None:
                assert entries.rank(least) == first
                assert (least in entries) is (least in self.wanted)
            raws = [raw for _, raw in found[offset:]]
            assert entries.collect(least, above, reverse, offset) == raws
            if limit is not None:
                assert entries.collect(least, above, reverse, offset, limit) == raws[:limit]

    def _bound(self, number: int) -> Key:
        """Return a key of the family, or for numbers one beyond its ends."""
        end = self.key_of(max(0, min(number, MAPPED - 1)))
        return end + (number - max(0, min(number, MAPPED - 1))) if isinstance(end, int) else end

    @rule(number=NUMBERS, start=NUMBERS, stride=STRIDES, reverse=st.booleans(), is_removed=st.booleans())
    def iterate_under_change(self, number: int, start: int, stride: int, reverse: bool, is_removed: bool) -> None:
        """An iterator continues behind its last key, whatever was added or removed."""
        low = self.key_of(start)
        span = (None, low, True) if reverse else (low, None, False)
        iterators = [entries.span(*span) for entries in self.both]
        for at in range(30):
            entry = next(iterators[0], None)
            assert next(iterators[1], None) == entry
            if entry is None:
                break
            assert self.wanted[entry[0]] == entry[1]
            follows: list[Any] = [key for key in self.wanted if (key < entry[0] if reverse else key > entry[0])]
            changed: Any = entry[0] if at % 3 == 0 and is_removed else self.key_of((number + at * stride) % MAPPED)
            if is_removed:
                self.wanted.pop(changed, None)
            else:
                self.wanted[changed] = b"changed"
            for entries in self.both:
                _ = entries.pop(changed) if is_removed else entries.put(changed, b"changed")
            if changed not in follows and follows and not at % 7:
                following = max(follows) if reverse else min(follows)
                if is_removed or not (following < changed < entry[0] if reverse else entry[0] < changed < following):
                    for iterator in iterators:
                        assert next(iterator) == (following, self.wanted[following])

    @invariant()
    def are_the_same(self) -> None:
        for entries in getattr(self, "both", []):
            assert_same(entries, self.wanted)


@families
def test_both_forms_equal_a_dictionary_after_any_changes(family: str) -> None:
    machine = type("Machine", (Changes,), {"family": family})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=20, deadline=None))


@forms
@families
def test_entries_are_found_by_number(form: type[Entries], family: str) -> None:
    entries, wanted = filled(form, family, range(MAPPED))
    assert [entries.at(number) for number in range(MAPPED)] == sorted(wanted.items())
    with pytest.raises(IndexError, match="none has the number"):
        entries.at(MAPPED)


TEXTS = st.binary(max_size=12) | st.builds(
    lambda zeros, rest: b"@" + bytes(zeros) + rest, st.integers(0, 8), st.binary(max_size=8)
)


@given(st.lists(TEXTS, unique=True), st.lists(TEXTS))
def test_texts_are_ordered_as_bytes(keys: list[Key], bounds: list[Any]) -> None:
    for form in FORMS:
        entries = form(True)
        put_all(entries, keys, [b"x"] * len(keys))
        assert [key for key, _ in entries.span()] == sorted(keys)
        for bound in bounds:
            assert entries.rank(bound) == sum(key < bound for key in keys)
            assert (entries.get(bound) is not None) is (bound in keys)


@given(st.lists(st.integers(-(1 << 63), (1 << 64) - 1), unique=True), st.lists(st.integers()))
def test_numbers_are_ordered_as_numbers(keys: list[Any], bounds: list[int]) -> None:
    for form in FORMS:
        entries = form(False)
        put_all(entries, keys, [b"x"] * len(keys))
        assert [key for key, _ in entries.span()] == sorted(keys)
        for bound in (*bounds, -(1 << 63) - 1, 1 << 64, -(1 << 80), 1 << 80):
            assert entries.rank(bound) == sum(key < bound for key in keys)
            assert entries.get(bound) == (b"x" if bound in keys else None)
            assert entries.pop(bound) == (b"x" if bound in keys else None)
            keys = [key for key in keys if key != bound]


@forms
def test_trees_of_many_levels_keep_their_order(form: type[Entries]) -> None:
    """Inner nodes split and merge, too, wherever the keys are added and removed."""
    count = 12_000
    orders = [list(range(count)), list(range(count))[::-1], random.Random(1).sample(range(count), count)]
    for added, removed in ((0, 1), (1, 0), (2, 2), (0, 0)):
        entries, wanted = filled(form, "small numbers", orders[added])
        assert_same(entries, wanted)
        for number in orders[removed][: count - 50]:
            assert entries.pop(number - 300) == wanted.pop(number - 300)
        assert_same(entries, wanted)
        assert entries.count(0, 6000) == sum(0 <= key < 6000 for key in wanted if isinstance(key, int))
        for number in orders[removed][count - 50 :]:
            assert entries.pop(number - 300) is not None
        assert_same(entries, {})
        assert entries.pop(1) is None


@forms
@pytest.mark.parametrize("is_text", [False, True])
def test_wrong_keys_and_tuples_are_rejected(form: type[Entries], is_text: bool) -> None:
    entries: Any = form(is_text)
    key, wrong = (b"a", 1) if is_text else (1, b"a")
    for call in (entries.get, entries.pop, entries.rank, entries.__contains__, lambda key: entries.put(key, b"x")):
        with pytest.raises(TypeError, match="keys of this index are"):
            call(wrong)
    for raw in ("text", None):
        with pytest.raises(TypeError, match="bytes"):
            entries.put(key, raw)
    if not is_text:
        for number in (-(1 << 63) - 1, 1 << 64):
            with pytest.raises(OverflowError, match="not in the range"):
                entries.put(number, b"x")
    assert_same(entries, {})


def traced(build: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result, and the memory that it takes. What it stores must not be allocated by `build`."""
    tracemalloc.start()
    try:
        built = build()
        return built, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


compiled_only = pytest.mark.skipif(
    not str(__import__(Entries.__module__, fromlist=["Entries"]).__file__).endswith(".so"), reason="needs the tree"
)


@compiled_only
@pytest.mark.parametrize("is_descending", [False, True])
def test_keys_in_order_fill_the_leaves(is_descending: bool) -> None:
    keys: list[Key] = list(range(1_000_000, 1_050_000))
    raws = [b"tuple"] * len(keys)
    entries = Entries(False)
    _, size = traced(lambda: len(put_all(entries, keys[::-1] if is_descending else keys, raws)))
    # A hint and a tuple take 16 bytes; a list of the reversed keys is gone by now.
    assert size / len(keys) < 18


@compiled_only
@pytest.mark.parametrize("is_text", [False, True])
def test_memory_is_freed_when_a_queue_moves_on(is_text: bool) -> None:
    length = 1000
    entries = Entries(is_text)

    def key_of(number: int) -> Key:
        return b"job %020d" % number if is_text else number

    def move() -> None:
        for number in range(20 * length):
            entries.put(key_of(number), b"x")
            if number >= length:
                entries.pop(key_of(number - length))

    _, size = traced(move)
    assert len(entries) == length
    assert size < length * 100


@compiled_only
@families
def test_memory_is_freed_when_all_entries_are_removed(family: str) -> None:
    def churn() -> Entries:
        entries, wanted = filled(Entries, family, random.Random(2).sample(range(MAPPED), MAPPED))
        for key in sorted(wanted):
            entries.pop(key)
        return entries

    entries, size = traced(churn)
    assert_same(entries, {})
    assert size < 4000
