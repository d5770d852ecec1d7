"""Plain rows applied in bulk have the same effect as one by one, or none."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from flowstone.box.box import Box
from flowstone.box.engine import statements
from flowstone.iproto.msgpack import pack, unpack
from flowstone.node.upstream.plain_rows import PlainRows
from flowstone.node.wal.replay import execute
from tests.box.spaces import box_with, definition, on
from tests.node.applied_rows import DELETE, INSERT, NOP, REPLACE, UPDATE, Master, drop, put, slab

ONE, TWO, TEXTS, LOCAL, TEMPORARY, SYNC = 512, 513, 514, 515, 516, 517
SPACES = (ONE, TWO, TEXTS)


def made() -> Box:
    return box_with(
        definition(ONE, on("0:unsigned")),
        definition(TWO, on("0:unsigned"), on("1:unsigned", unique=True), on("2:string", unique=False)),
        definition(TEXTS, on("0:string")),
        definition(LOCAL, on("0:unsigned"), flags={"group_id": 1}),
        definition(TEMPORARY, on("0:unsigned"), flags={"temporary": True}),
        definition(SYNC, on("0:unsigned"), flags={"is_sync": True}),
    )


def content(box: Box) -> dict[int, list[list[Any]]]:
    """Return all entries of all indexes, in order."""
    return {
        number: [[unpack(raw) for _, raw in index.scan()] for index in box.space(number).served] for number in SPACES
    }


def change(rng: Random) -> tuple[int, Any]:
    space = rng.choice(SPACES)
    key: Any = rng.randrange(30) if space != TEXTS else f"k{rng.randrange(30)}"
    match rng.choice((REPLACE, REPLACE, UPDATE, DELETE, NOP)):
        case 3:
            return put(REPLACE, key, key if space == TWO else rng.randrange(9), rng.choice("abc"), space=space)
        case 4:
            return UPDATE, {0x10: space, 0x20: (key,), 0x21: (("=", 2, rng.choice("abc")),)}
        case 5:
            return drop(key, space=space)
    return NOP, None


@pytest.mark.parametrize("seed", range(15))
def test_bulk_rows_equal_single_rows_and_can_be_rolled_back(seed: int) -> None:
    rng = Random(seed)
    one_by_one, together = made(), made()
    master = Master()
    for _ in range(4):
        rows = slab(*(master.does(change(rng)) for _ in range(60)))
        before = content(together)
        assert PlainRows(together).found(rows).all()
        effect = PlainRows(together).apply(rows, 0, len(rows))
        assert effect is not None
        after = content(together)
        effect.rollback()
        assert content(together) == before
        assert PlainRows(together).apply(rows, 0, len(rows)) is not None
        for number in range(len(rows)):
            execute(one_by_one, one_by_one.begin(), rows, number)
        assert content(together) == after == content(one_by_one)


@pytest.mark.parametrize("space", [ONE, TWO])
@pytest.mark.parametrize("mixed", [False, True])
def test_insert_of_an_existing_key_changes_nothing(space: int, mixed: bool) -> None:
    box, master = made(), Master()
    statements.insert(box.begin(), box.space(space), pack((5, 5, "old")))
    before = content(box)
    changes = [put(INSERT, key, key, "new", space=space) for key in range(10)]
    if mixed:
        changes[1:1] = [put(REPLACE, 90, 90, "new", space=ONE), drop(7, space=space)]
    rows = slab(*(master.does(each) for each in changes))
    assert PlainRows(box).apply(rows, 0, len(rows)) is None
    assert content(box) == before


def test_duplicate_key_of_another_index_changes_nothing() -> None:
    box, master = made(), Master()
    statements.insert(box.begin(), box.space(TWO), pack((50, 5, "old")))
    before = content(box)
    rows = slab(*(master.does(put(REPLACE, key, key, "new", space=TWO)) for key in range(10)))
    assert PlainRows(box).apply(rows, 0, len(rows)) is None
    assert content(box) == before


def test_tuple_that_does_not_fit_changes_nothing() -> None:
    box, master = made(), Master()
    rows = slab(*(master.does(put(REPLACE, key)) for key in range(10)), master.does(put(REPLACE, "eleven")))
    assert PlainRows(box).apply(rows, 0, len(rows)) is None
    assert content(box) == content(made())


def test_rows_with_side_effects_are_not_plain() -> None:
    box, master = made(), Master()
    rows = slab(
        master.does(put(REPLACE, 1)),
        master.does(put(REPLACE, 1, space=LOCAL)),
        master.does(put(REPLACE, 1, space=TEMPORARY)),
        master.does(put(REPLACE, 1, space=SYNC)),
        master.does(put(REPLACE, 1), flags=2),
        master.does((INSERT, {0x10: 280, 0x21: (600, 1, "made", "memtx", 0, {}, ())})),
        master.does(put(REPLACE, 1, space=999)),
        master.does((UPDATE, {0x10: ONE, 0x20: (1,), 0x21: (("=", 1, 2),)})),
        master.does((DELETE, {0x10: TWO, 0x11: 1, 0x20: (1,)})),
        master.does((NOP, None)),
    )
    assert PlainRows(box).found(rows).tolist() == [True, *[False] * 6, True, True, True]
