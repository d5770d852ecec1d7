"""Writes: they are undone newest first, in whole or in part, and hidden from views."""

from __future__ import annotations

from flowstone.box.engine.space import EngineSpace
from flowstone.box.lane.writes import Writes
from tests.box.spaces import box_with, definition, on


def written(space: EngineSpace, *statements: list[tuple[int, bytes | None]]) -> Writes:
    """Execute statements, each of which is a list of changes of the primary index."""
    writes, index = Writes(), space.served[0]
    for changes in statements:
        for key, raw in changes:
            writes.changes += [index, key, index.set(key, raw)]
        writes.marks.append(len(writes.changes))
    return writes


def contents(space: EngineSpace) -> dict[object, bytes]:
    return dict(space.served[0].scan())


SPACE = definition(512, on("0:unsigned"))
STATEMENTS: tuple[list[tuple[int, bytes | None]], ...] = ([(1, b"a")], [], [(1, b"b"), (2, b"c")], [(1, None)])


def test_rollback_undoes_repeated_writes_of_a_key() -> None:
    space = box_with(SPACE).space(512)
    written(space, [(1, b"old")])
    written(space, *STATEMENTS).rollback()
    assert contents(space) == {1: b"old"}


def test_first_and_last_statements_can_be_split_off() -> None:
    space = box_with(SPACE).space(512)
    writes = written(space, *STATEMENTS)
    first, last = writes.take_first(1), writes.take_last(1)
    assert [len(each.marks) for each in (first, writes, last)] == [1, 2, 1]
    last.rollback()
    assert contents(space) == {1: b"b", 2: b"c"}
    writes.rollback()
    assert contents(space) == {1: b"a"}
    first.rollback()
    assert contents(space) == {}


def test_block_that_raises_rolls_back() -> None:
    space = box_with(SPACE).space(512)
    try:
        with written(space, *STATEMENTS) as writes:
            assert writes
            raise ValueError
    except ValueError:
        assert contents(space) == {}


def test_statement_without_a_change_counts_as_written() -> None:
    writes = written(box_with(SPACE).space(512), [])
    assert writes
    assert not Writes()


def test_view_opened_later_does_not_see_the_writes() -> None:
    box = box_with(SPACE)
    space = box.space(512)
    writes = written(space, *STATEMENTS)
    with box.open_view() as view:
        writes.hide_from(view)
        assert list(view.scan(space.served[0])) == []
