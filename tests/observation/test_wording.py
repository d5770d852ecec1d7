"""Findings say positions, counts and times alike."""

from __future__ import annotations

import pytest

from flowstone.observation.wording import position, rows_text, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (3.21, "3.2 s"), (59.6, "60 s"), (150, "2 min"), (7200, "2.0 h"), (200_000, "2.3 days")],
)
def test_a_span_of_time_is_told_in_the_unit_that_people_would_use(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_one_row_is_not_one_rows() -> None:
    assert (rows_text(1), rows_text(2)) == ("1 row", "2 rows")


def test_a_position_is_sorted_by_replica() -> None:
    assert position({2: 3, 1: 10}) == "{1: 10, 2: 3}"
