"""Positions of rows in a stream: versions increase by transaction, times never decrease, whatever the batches are."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.replication.vclock import VClock
from flowstone.spark.sources.stream_order import (
    BatchWindow,
    SplitTransaction,
    StreamPlace,
    Withdrawn,
    rows_between,
    stamp,
)
from flowstone.xlog.errors import DamagedLog
from tests.node.archived_rows import slab
from tests.spark.change_rows import insert, whole


def log(sizes: list[tuple[int, int, float]]) -> list[bytes]:
    """Return transactions with this number of rows, origin and time."""
    lsns = {1: 10, 2: 5}
    found = []
    for origin, size, at in sizes:
        rows = [insert(lsns[origin] + number, number, origin=origin, at=at) for number in range(1, size + 1)]
        lsns[origin] += size
        found.append(whole(*rows))
    return found


BEFORE = StreamPlace(VClock({1: 10, 2: 5}), 7_000_000)
LOGS = st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(1, 4), st.floats(0, 100)), min_size=1, max_size=12)


def test_transaction_has_the_signature_and_the_largest_time_up_to_its_end() -> None:
    together = slab(*log([(1, 2, 8.5), (2, 1, 3.25), (1, 1, 9.0)]))
    stamps, behind = stamp(together.cells, BEFORE, "log")
    assert stamps.versions.tolist() == [17, 17, 18, 19]
    assert stamps.times.tolist() == [8_500_000, 8_500_000, 8_500_000, 9_000_000]
    assert behind == StreamPlace(VClock({1: 13, 2: 6}), 9_000_000)


@settings(max_examples=50)
@given(LOGS, st.integers(0, 12))
def test_stamps_do_not_depend_on_the_start_of_a_stretch(sizes: list[tuple[int, int, float]], cut: int) -> None:
    transactions = log(sizes)
    stamps, behind = stamp(slab(*transactions).cells, BEFORE, "log")
    first, middle = stamp(slab(*transactions[:cut]).cells, BEFORE, "log")
    second, end = stamp(slab(*transactions[cut:]).cells, middle, "log")
    assert np.concatenate([first.versions, second.versions]).tolist() == stamps.versions.tolist()
    assert np.concatenate([first.times, second.times]).tolist() == stamps.times.tolist()
    assert end == behind
    assert (np.diff(stamps.versions) >= 0).all()
    assert len(np.unique(stamps.versions)) == len(transactions)
    assert (np.diff(stamps.times) >= 0).all()


def test_rolled_back_rows_count_for_the_versions_of_later_rows() -> None:
    rows = slab(*log([(1, 1, 1.0), (2, 2, 1.0), (1, 1, 1.0)]))
    stamps, _ = stamp(rows.cells, BEFORE, "log")
    kept = rows_between(rows.cells, BatchWindow(BEFORE.vclock, VClock({1: 12, 2: 7}), ((2, 6, 7),)))
    assert kept.tolist() == [True, False, False, True]
    assert stamps.versions[kept].tolist() == [16, 19]


def test_window_contains_rows_after_its_start_up_to_its_end() -> None:
    rows = slab(*log([(1, 2, 1.0), (2, 1, 1.0), (1, 1, 1.0)]))
    window = BatchWindow(VClock({1: 12, 2: 5}), VClock({1: 12, 2: 6}))
    assert rows_between(rows.cells, window).tolist() == [False, False, True, False]
    assert not rows_between(rows.cells[:, :0], window).size


@pytest.mark.parametrize(
    "window", [BatchWindow(VClock({1: 11}), VClock({1: 20, 2: 20})), BatchWindow(VClock(), VClock({1: 11, 2: 20}))]
)
def test_transaction_is_never_split(window: BatchWindow) -> None:
    rows = slab(*log([(2, 1, 1.0), (1, 3, 1.0)]))
    with pytest.raises(SplitTransaction, match="inside the transaction with LSN 11 of replica 1"):
        rows_between(rows.cells, window)


def test_rows_without_the_end_of_their_transaction_are_refused() -> None:
    rows = slab(*log([(1, 3, 1.0)]))
    with pytest.raises(DamagedLog, match="inside the transaction"):
        stamp(rows.cells[:, :2], BEFORE, "log")


def test_adjacent_ranges_of_a_stretch_are_merged() -> None:
    withdrawn = Withdrawn()
    withdrawn.add([(1, 5, 6), (2, 1, 1), (1, 7, 9)])
    withdrawn.add([(1, 20, 21), (1, 1, 2)])
    assert withdrawn.within(VClock({1: 2}), VClock({1: 10, 2: 4})) == ((1, 5, 9), (2, 1, 1))
    assert withdrawn.within(VClock({1: 7}), VClock({1: 8})) == ((1, 5, 9),)
    assert withdrawn.within(VClock({1: 9}), VClock({1: 20})) == ((1, 20, 21),)
    assert not withdrawn.within(VClock({1: 9}), VClock({1: 19}))


def test_ranges_by_binary_search_equal_those_by_a_full_scan() -> None:
    random = Random(3)
    withdrawn = Withdrawn()
    starts = random.sample(range(1, 400), 60)
    ranges = [(random.randint(1, 3), 3 * start, 3 * start + 1) for start in starts]
    withdrawn.add(ranges)
    for _ in range(200):
        before = VClock({number: random.randint(0, 1200) for number in (1, 2, 3)})
        end = before.merged(VClock({number: random.randint(0, 1200) for number in (1, 2)}))
        wanted = [each for each in withdrawn.ranges if before.get(each[0]) < each[2] and each[1] <= end.get(each[0])]
        assert list(withdrawn.within(before, end)) == wanted
