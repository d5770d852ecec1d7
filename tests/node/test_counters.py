"""Counters of a node: histograms, and the counts from turns, sessions, the log and relays."""

from __future__ import annotations

import pytest

from flowstone.iproto.constants import RequestType
from flowstone.node.counters import Histogram
from tests.node.server.test_executor import (
    DELETE,
    INSERT,
    NUMBERS,
    SELECT,
    Served,
    in_bulk,
    numbered,
    plainly,
    statement,
)


def test_histogram_counts_a_value_in_the_first_bucket_that_includes_it() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.count == 5
    assert histogram.sum == pytest.approx(8.65)


@pytest.mark.parametrize("way", [plainly, in_bulk])
async def test_requests_are_counted_on_every_path(way: object) -> None:
    served = Served()
    counters = served.counters
    requests = numbered(INSERT, range(20)) + numbered(SELECT, [1, 2, 3]) + numbered(DELETE, [4])
    with way():  # type: ignore[operator]
        await served.run([requests])
    assert counters.operations[INSERT] == 20
    assert counters.operations[SELECT] == 3
    assert counters.operations[DELETE] == 1
    assert sum(counters.operations) == 24
    assert counters.errors == 0


async def test_single_request_is_counted_once() -> None:
    served = Served()
    counters = served.counters
    for request in (numbered(INSERT, [1]), numbered(SELECT, [1]), statement(RequestType.PING, NUMBERS, ())):
        await served.run([request])
    assert (counters.operations[INSERT], counters.operations[SELECT]) == (1, 1)
    assert sum(counters.operations) == 3


async def test_errors_are_counted() -> None:
    served = Served()
    counters = served.counters
    await served.run([numbered(INSERT, [1])])
    await served.run([numbered(INSERT, [1])])
    assert served.peers[0].codes() == [0, 3]
    assert (counters.operations[INSERT], counters.errors) == (2, 1)
    served.disk.broken.add("append")
    with in_bulk():
        await served.run([numbered(INSERT, range(5, 25))])
    assert counters.errors == 21
