"""Codes of rows: they tell type and space apart, and find the tables of statements."""

from __future__ import annotations

from typing import cast

import numpy as np

from flowstone.box.engine.sequence import SpaceSequence
from flowstone.box.lane.rows import codes_of, distinct, space_of, tables_of, type_of
from flowstone.iproto import scan
from flowstone.iproto.scan import Cells
from tests.box.spaces import box_with, definition, on


def rows(*pairs: tuple[int, int]) -> Cells:
    """Return a table of rows with these types and spaces."""
    cells: Cells = np.zeros((scan.LINES, len(pairs)), np.int64)
    cells[scan.TYPE], cells[scan.SPACE_ID] = zip(*pairs, strict=True)
    return cells


def test_code_has_type_and_space() -> None:
    pairs = ((3, 512), (12, -1), (9, 2**32 - 1))
    codes = codes_of(rows(*pairs)).tolist()
    assert [(type_of(code), space_of(code)) for code in codes] == list(pairs)


def test_tables_are_found_for_statements_on_accepted_spaces() -> None:
    box = box_with(definition(512, on("0:unsigned")), definition(513, on("0:unsigned"), flags={"is_sync": True}))
    codes = codes_of(rows((3, 512), (3, 513), (12, 512), (3, 999), (3, 280)))
    tables = tables_of(box, codes, lambda table: not table.is_sync)
    assert [(type_of(code), space_of(code)) for code in tables] == [(3, 512)]
    assert tables_of(box, codes[:0], lambda _: True) == {}


def test_statements_that_number_tuples_have_no_table() -> None:
    box = box_with(definition(512, on("0:unsigned")))
    box.space(512).sequence = cast("SpaceSequence", object())
    codes = codes_of(rows((2, 512), (3, 512), (5, 512)))
    assert [type_of(code) for code in tables_of(box, codes, lambda _: True)] == [5]


def test_distinct_numbers_are_sorted() -> None:
    assert distinct(np.array([3, 1, 3, 2])) == [1, 2, 3]
    assert distinct(np.array([7, 7])) == [7]
