"""Slabs: the newest LSN of each origin, and rows as objects."""

from __future__ import annotations

import numpy as np
import pytest

from flowstone.iproto.row import Row
from tests.xlog.slabs import slab_of


def raw(replica_id: int, lsn: int) -> bytes:
    return Row(12, replica_id=replica_id, lsn=lsn, timestamp=1.5, tsn=lsn).encode()


@pytest.mark.parametrize(
    ("origins", "newest"),
    [([], {}), ([(1, 7)], {1: 7}), ([(1, 7), (1, 9), (1, 8)], {1: 9}), ([(1, 7), (2, 3), (1, 8)], {1: 8, 2: 3})],
)
def test_newest_is_the_highest_lsn_of_each_origin(origins: list[tuple[int, int]], newest: dict[int, int]) -> None:
    assert slab_of([raw(*origin) for origin in origins]).newest() == newest


def test_rows_equal_those_encoded() -> None:
    given = [raw(1, 7), raw(2, 3), raw(1, 8)]
    slab = slab_of(given)
    assert len(slab) == 3
    assert [row.raw for row in slab.rows()] == given
    assert [(row.replica_id, row.lsn, row.timestamp) for row in slab.rows(np.array([2, 0]))] == [
        (1, 8, 1.5),
        (1, 7, 1.5),
    ]
