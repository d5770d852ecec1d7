"""A read view shows all spaces as of its opening, despite later writes."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.box import Box
from flowstone.box.engine import statements
from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.keys import Key, Span
from flowstone.box.engine.read_view import (
    Changes,
    KeyOrder,
    Layer,
    ReadViewClosed,
    Spans,
    ViewSource,
    contains,
    successor,
)
from flowstone.box.system import TRUNCATE_ID
from flowstone.iproto.msgpack import pack
from tests.box.spaces import box_with, definition, on

KEYS = st.integers(0, 9)
CONTENT = st.dictionaries(KEYS, st.binary(min_size=1, max_size=1))
WRITES = st.lists(st.tuples(KEYS, st.none() | st.binary(min_size=1, max_size=1)), max_size=12)
SPANS = st.builds(Span, st.none() | KEYS, st.none() | KEYS, st.booleans())


def box_of(type: str = "tree") -> tuple[Box, EngineIndex]:
    box = box_with(definition(512, on("0:unsigned", type=type)))
    return box, box.space(512).index(0)


def layered(base: ViewSource, changes: Changes) -> Layer:
    return Layer(base, changes, KeyOrder(changes))


def within(content: dict[Key, bytes], span: Span) -> list[tuple[Key, bytes]]:
    found: list[Any] = [(key, content[key]) for key in content if contains(span, key)]
    return sorted(found, reverse=span.reverse)


@given(CONTENT, WRITES, SPANS)
def test_view_reads_the_state_at_its_creation(
    content: dict[Key, bytes], writes: list[tuple[int, bytes | None]], span: Span
) -> None:
    box, index = box_of()
    for key, value in content.items():
        index.set(key, value)
    with box.open_view() as view:
        for key, new in writes:
            index.set(key, new)
        assert list(view.scan(index, span)) == within(content, span)
        assert {key: view.get(index, key) for key in range(10)} == {key: content.get(key) for key in range(10)}


@given(CONTENT, st.dictionaries(KEYS, st.none() | st.binary(max_size=1)), SPANS)
def test_layer_shows_its_base_with_its_changes(
    content: dict[Key, bytes], changes: dict[Key, bytes | None], span: Span
) -> None:
    _, index = box_of()
    for key, value in content.items():
        index.set(key, value)
    wanted = {key: value for key, value in (content | changes).items() if value is not None}
    layer = layered(index, dict(changes))
    assert list(layer.scan(span)) == within(wanted, span)
    over = layered(layer, {5: b"top", 6: None})
    wanted = {key: value for key, value in (wanted | {5: b"top"}).items() if key != 6}
    assert list(over.scan(span)) == within(wanted, span)


@given(st.lists(st.tuples(KEYS, st.booleans(), SPANS), max_size=40))
def test_changed_keys_stay_ordered_when_keys_change_between_scans(
    steps: list[tuple[int, bool, Span]],
) -> None:
    changes: Changes = {}
    order = KeyOrder(changes)
    for key, is_looked_at, span in steps:
        if changes.pop(key, b"") == b"":
            changes[key] = None
        else:
            order.remove(key)
        if is_looked_at:
            assert list(order.within(span)) == [key for key, _ in within(dict.fromkeys(changes, b""), span)]


@given(st.lists(SPANS, max_size=6), st.integers(-1, 10))
def test_key_is_in_spans_when_one_span_contains_it(spans: list[Span], key: int) -> None:
    assert (key in Spans(spans)) is any(contains(span, key) for span in spans)


class Counted(int):
    """A key that counts its comparisons."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return super().__lt__(other)

    def __ge__(self, other: int) -> bool:
        Counted.compared += 1
        return super().__ge__(other)


def test_lookup_in_spans_does_not_visit_each_span() -> None:
    spans = Spans([Span(low, low + 1 + low % 3, False) for low in range(0, 4000, 2)])
    Counted.compared = 0
    assert Counted(2000) in spans
    assert Counted(4001) not in spans
    assert Counted.compared < 50


def test_short_scan_does_not_visit_all_changes() -> None:
    box, index = box_of()
    for key in range(4000):
        index.set(key, b"a")
    with box.open_view() as view:
        for key in range(2000, 4000):
            index.set(Counted(key), b"b")
        list(islice(view.scan(index), 1))
        for limit in (1, 5):
            Counted.compared = 0
            index.set(Counted(1000 + limit), b"b")
            assert len(list(islice(view.scan(index, Span(1000, None, False)), limit))) == limit
            assert Counted.compared < 100


@pytest.mark.parametrize("type", ["tree", "hash"])
@given(content=CONTENT, size=st.integers(1, 4), writes=st.lists(WRITES, max_size=12))
def test_slices_equal_the_whole_view_despite_writes_between_them(
    type: str, content: dict[Key, bytes], size: int, writes: list[list[tuple[int, bytes | None]]]
) -> None:
    box, index = box_of(type)
    for key, value in content.items():
        index.set(key, value)
    found: list[bytes] = []
    with box.open_view() as view:
        for piece in view.slices(index, size):
            found += piece
            for key, new in writes.pop() if writes else ():
                index.set(key, new)
    wanted = [value for _, value in within(content, Span(None, None, False))]
    assert found == wanted if type == "tree" else sorted(found) == sorted(wanted)


def test_views_opened_at_different_times_are_independent() -> None:
    box, index = box_of()
    views = []
    for number in range(5):
        views.append(box.open_view())
        index.set(1, b"%d" % number)
    assert [view.get(index, 1) for view in views] == [None, b"0", b"1", b"2", b"3"]
    for view in views[1::2]:
        view.close()
    index.set(1, None)
    assert [view.get(index, 1) for view in views[::2]] == [None, b"1", b"3"]


def test_view_keeps_a_truncated_and_a_dropped_space() -> None:
    box, index = box_of()
    space = box.space(512)
    transaction = box.begin()
    statements.insert(transaction, space, pack((1,)))
    with box.open_view() as view:
        statements.replace(transaction, box.space(TRUNCATE_ID), pack((512, 1)))
        statements.insert(transaction, box.space(512), pack((2,)))
        assert list(view.spaces[512].tuples()) == [pack((1,))]
        assert list(box.space(512).tuples()) == [pack((2,))]
        box.remove_space(512)
        assert [raw for _, raw in view.scan(index)] == [pack((1,))]


def test_closed_view_collects_no_changes() -> None:
    box, index = box_of()
    view = box.open_view()
    index.set(1, b"a")
    view.close()
    view.close()
    index.set(2, b"b")
    assert view.changes == {}
    assert box.views == []


@pytest.mark.parametrize("type", ["tree", "hash"])
def test_reading_a_closed_view_raises_an_error(type: str) -> None:
    box, index = box_of(type)
    for key in (1, 2, 3):
        index.set(key, b"a")
    view = box.open_view()
    slices = view.slices(index, 1)
    next(slices)
    view.close()
    for read in (lambda: view.get(index, 1), lambda: list(view.scan(index)), lambda: next(slices)):
        with pytest.raises(ReadViewClosed, match="the read view is closed; read from it before"):
            read()


def test_no_key_sorts_between_a_key_and_its_successor() -> None:
    assert successor(5) == 6
    assert successor(b"ab") == b"ab\0"
    assert b"ab" < b"ab\0" <= b"ab\0" < b"ab\0\0" < b"abc"
