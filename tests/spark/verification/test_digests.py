"""Digests and differing keys over small frames: each kind of difference, and allowed differences."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from pyspark.sql import DataFrame, SparkSession

from flowstone.spark.verification.digests import (
    DIFFERS,
    ENCODED,
    MISSING_IN_A,
    MISSING_IN_B,
    SIDE_COLUMNS,
    TWICE,
    compare_digests,
    counts_by_kind,
    differing_keys,
    first_differences,
)

Rows = list[tuple[int, bytes, bytes, str | None]]


def row(space_id: int, number: int, *values: Any, wrong: str | None = None) -> tuple[int, bytes, bytes, str | None]:
    return space_id, number.to_bytes(8, "big"), msgpack.packb([number, *values]), wrong


def frame(spark: SparkSession, rows: Rows) -> DataFrame:
    return spark.createDataFrame(rows, SIDE_COLUMNS)


def test_equal_sides_have_equal_digests_in_any_order_of_rows(spark: SparkSession) -> None:
    rows = [row(512, number, f"name {number}") for number in range(500)] + [row(513, 1)]
    found = compare_digests(frame(spark, rows), frame(spark, rows[::-1]))
    assert [(each.space_id, each.rows_a, each.rows_b, each.differing_buckets) for each in found] == [
        (512, 500, 500, ()),
        (513, 1, 1, ()),
    ]


def test_each_kind_of_difference_is_found_and_named(spark: SparkSession) -> None:
    same: Rows = [row(512, number, "same") for number in range(100)]
    a = frame(spark, [*same, row(513, 1, 5), row(513, 2, "only A"), row(513, 4, 7), row(513, 5, "x")])
    longer = (513, *row(513, 4)[1:2], b"\x92\x04\xcc\x07", None)
    b = frame(spark, [*same, row(513, 1, 5.0), row(513, 3, "only B"), longer, *[row(513, 5, "x")] * 3])
    digests = compare_digests(a, b)
    assert [each.space_id for each in digests if each.differing_buckets] == [513]
    differences = differing_keys(spark, a, b, {513: digests[1].differing_buckets})
    assert counts_by_kind(differences) == {513: {DIFFERS: 1, MISSING_IN_A: 1, MISSING_IN_B: 1, ENCODED: 1, TWICE: 1}}
    shown = first_differences(differences, 10)
    assert [(int.from_bytes(each.sort_key, "big"), each.kind) for each in shown] == [
        (1, DIFFERS), (2, MISSING_IN_B), (3, MISSING_IN_A), (5, TWICE)
    ]  # fmt: skip
    assert (shown[0].a, shown[0].b) == (msgpack.packb([1, 5]), msgpack.packb([1, 5.0]))
    assert (shown[1].a, shown[1].b) == (msgpack.packb([2, "only A"]), None)
    assert (shown[3].count_a, shown[3].count_b) == (1, 3)
    assert len(first_differences(differences, 2)) == 2


@pytest.mark.parametrize("times", [2, 3])
def test_duplicate_row_does_not_cancel_itself(spark: SparkSession, times: int) -> None:
    """With a plain XOR of hashes, pairs would cancel each other."""
    rows: Rows = [row(512, 1, "a"), row(512, 2, "b")]
    found = compare_digests(frame(spark, rows), frame(spark, [rows[0], *[rows[1]] * times]))
    assert found[0].differing_buckets


def test_swapped_values_of_two_keys_differ(spark: SparkSession) -> None:
    a = [row(512, 1, "a"), row(512, 2, "b")]
    b: Rows = [(512, a[0][1], a[1][2], None), (512, a[1][1], a[0][2], None)]
    assert compare_digests(frame(spark, a), frame(spark, b))[0].differing_buckets


def test_inconsistent_rows_are_counted_by_side(spark: SparkSession) -> None:
    a, b = [row(512, 1), row(512, 2)], [row(512, 1, wrong="its key"), row(512, 2)]
    (found,) = compare_digests(frame(spark, a), frame(spark, b))
    assert (found.wrong_a, found.wrong_b, found.differing_buckets) == (0, 1, ())


def test_side_without_rows_is_compared(spark: SparkSession) -> None:
    (found,) = compare_digests(frame(spark, [row(512, 1)]), frame(spark, []))
    assert (found.rows_a, found.rows_b) == (1, 0)
    assert compare_digests(frame(spark, []), frame(spark, [])) == []
