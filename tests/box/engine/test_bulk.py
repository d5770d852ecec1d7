"""Bulk statements equal the single statements, can be rolled back, and are invisible to views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.box import Box
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.engine import bulk, statements
from flowstone.box.engine.bulk import BulkWrite, Lane
from flowstone.box.engine.keys import Key
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack
from tests.box.spaces import box_with, definition, on

NUMBERS = definition(512, on("0:unsigned"))
TEXTS = definition(512, on("1:string"), fields="a:any b:string")
KEYS = st.integers(0, 6)
STRETCHES = st.lists(
    st.tuples(st.sampled_from(("insert", "replace", "delete")), st.lists(KEYS, min_size=1, max_size=5)), max_size=6
)


def lane_in(box: Box) -> Lane:
    lane = bulk.lane_of(box.space(512))
    assert lane is not None
    return lane


def laid_out(raws: list[bytes]) -> tuple[bytes, Any, Any, Any]:
    """Return the tuples in one buffer, and the start and end of each."""
    data = b"".join(raws)
    ends = np.cumsum([len(raw) for raw in raws])
    return data, np.frombuffer(data, np.uint8), ends - [len(raw) for raw in raws], ends


def in_bulk(lane: Lane, kind: str, rows: list[tuple[Any, ...]], written: BulkWrite) -> bool | list[bytes | None]:
    raws = [pack(row) for row in rows]
    data, buf, ats, ends = laid_out(raws)
    if kind == "delete":
        field = lane.primary.definition.parts[0].field
        found = bulk.request_keys(lane, *laid_out([pack(row[field : field + 1]) for row in rows]))
        assert found is not None
        return bulk.delete_many(lane, found, written)
    found = bulk.tuple_keys(lane, data, buf, ats, ends)
    assert found is not None
    put = bulk.insert_many if kind == "insert" else bulk.replace_many
    return put(lane, found, bulk.slices(data, ats, ends), written)


def one_by_one(box: Box, kind: str, rows: list[tuple[Any, ...]]) -> bool | list[bytes | None]:
    """Execute the statements one by one; roll all inserts back if one of them fails."""
    transaction, space = box.begin(), box.space(512)
    index = space.index(0)
    if kind == "delete":
        field = index.definition.parts[0].field
        return [statements.delete(transaction, space, 0, pack(row[field : field + 1])) for row in rows]
    try:
        for row in rows:
            (statements.insert if kind == "insert" else statements.replace)(transaction, space, pack(row))
    except errors.TupleFound:
        transaction.rollback()
        return False
    return True


def content(box: Box) -> list[tuple[Key, bytes]]:
    return list(box.space(512).index(0).scan())


@pytest.mark.parametrize("defined", [NUMBERS, TEXTS], ids=["numbers", "texts"])
@given(before=st.lists(KEYS), stretches=STRETCHES, reads=st.sets(st.integers(0, 5)))
def test_bulk_load_equals_loading_one_by_one(
    defined: SpaceDefinition, before: list[int], stretches: list[tuple[str, list[int]]], reads: set[int]
) -> None:
    boxes = box_with(defined), box_with(defined)
    numbered = iter(range(1000))

    def rows(keys: list[int]) -> list[tuple[Any, ...]]:
        """Return rows that all differ."""
        return [(key, next(numbered)) if defined is NUMBERS else (next(numbered), "t" * key) for key in keys]

    for row in rows(before):
        for box in boxes:
            statements.replace(box.begin(), box.space(512), pack(row))
    start, written = content(boxes[0]), BulkWrite()
    with boxes[0].open_view() as view:
        for number, (kind, keys) in enumerate(stretches):
            chosen = rows(keys)
            assert in_bulk(lane_in(boxes[0]), kind, chosen, written) == one_by_one(boxes[1], kind, chosen)
            if number in reads:  # this also merges the order of the index
                assert content(boxes[0]) == content(boxes[1])
        assert content(boxes[0]) == content(boxes[1])
        index = boxes[0].space(512).index(0)
        assert list(view.scan(index)) == start
        boxes[0].in_flight.append(written)
        with boxes[0].open_view(confirmed=True) as confirmed:
            assert list(confirmed.scan(index)) == start
        written.rollback()
        assert content(boxes[0]) == start
        assert list(view.scan(index)) == start


def test_empty_bulk_write_returns_false() -> None:
    written = BulkWrite()
    assert not written
    box = box_with(NUMBERS)
    assert in_bulk(lane_in(box), "insert", [(1,)], written) is True
    assert written


@pytest.mark.parametrize(
    "defined",
    [
        definition(512, on("0:number")),
        definition(512, on("0:unsigned 1:unsigned")),
        definition(512, on("0:unsigned"), on("1.a:unsigned", unique=False)),
        definition(512),
    ],
    ids=["a number", "two parts", "a path", "no index"],
)
def test_space_unsupported_by_kernels_has_no_lane(defined: SpaceDefinition) -> None:
    assert bulk.lane_of(box_with(defined).space(512)) is None


def test_system_spaces_have_no_lane() -> None:
    assert bulk.lane_of(box_with().space("_truncate")) is None


def test_tuples_of_a_snapshot_are_loaded_into_all_indexes() -> None:
    box = box_with(definition(512, on("0:unsigned"), on("1:string", unique=False), fields="id:unsigned name:string"))
    rows = [(3, "a"), (1, "b"), (2, "a")]
    assert bulk.load(box.space(512), *laid_out([pack(row) for row in rows]))
    space = box.space(512)
    assert [unpack(raw)[0] for _, raw in space.index(0).scan()] == [1, 2, 3]
    assert [unpack(raw)[0] for _, raw in space.index(1).scan()] == [2, 3, 1]


@pytest.mark.parametrize("rows", [[(1, "a"), (1, "b")], [(2, "x")], [(3, 5)], [("x", "x")], [(4,)]])
def test_load_that_needs_full_checks_changes_nothing(rows: list[tuple[Any, ...]]) -> None:
    box = box_with(definition(512, on("0:unsigned"), on("1:string", unique=False), fields="id:unsigned name:string"))
    statements.insert(box.begin(), box.space(512), pack((2, "b")))
    assert not bulk.load(box.space(512), *laid_out([pack(row) for row in rows]))
    assert [unpack(raw) for raw in box.space(512).tuples()] == [(2, "b")]


def test_load_into_a_space_without_a_lane_changes_nothing() -> None:
    box = box_with(definition(512, on("0:number")))
    assert not bulk.load(box.space(512), *laid_out([pack((1,))]))
    assert len(box.space(512)) == 0


def test_snapshot_with_a_duplicate_unique_key_is_rejected() -> None:
    box = box_with(definition(512, on("0:unsigned"), on("1:string")))
    with pytest.raises(errors.TupleFound, match="unique index 'i1'"):
        bulk.load(box.space(512), *laid_out([pack((1, "a")), pack((2, "a"))]))
