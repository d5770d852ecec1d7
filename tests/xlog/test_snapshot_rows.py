"""Snapshot rows encoded in bulk equal those that the writer encodes one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto.constants import GROUP_LOCAL
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.snapshot_rows import tuple_rows
from flowstone.xlog.writer import SnapWriter
from tests.node.archived_rows import INSTANCE, new_disk

TIME = 1794773471.9940653


def one_by_one(tuples: list[bytes], space_id: int, group_id: int, number: int) -> bytes:
    writer = SnapWriter(new_disk(), ".", Meta(FileType.SNAP, INSTANCE, {1: 1}), TIME)
    writer.row_count = number
    writer.add_tuples(space_id, tuples, group_id)
    return b"".join(writer._rows)


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=6),
    st.sampled_from((0, 1, 127, 128, 65535, 1 << 32)),
    st.sampled_from((0, 280, 512, 1 << 31)),
    st.sampled_from((0, GROUP_LOCAL)),
    st.integers(0, 3),
)
def test_bulk_rows_equal_those_of_the_writer(
    tuples: list[bytes], number: int, space_id: int, group_id: int, before: int
) -> None:
    buf = np.frombuffer(bytes(before) + b"".join(tuples), np.uint8)
    offsets = before + np.cumsum([0, *map(len, tuples)])
    found = tuple_rows(buf, offsets, space_id, group_id=group_id, number=number, timestamp=TIME)
    assert found == one_by_one(tuples, space_id, group_id, number)


@pytest.mark.parametrize("group_id", [0, GROUP_LOCAL])
def test_bulk_rows_may_contain_large_tuples(group_id: int) -> None:
    tuples = [bytes(100_000), bytes(1)]
    buf, offsets = np.frombuffer(b"".join(tuples), np.uint8), np.cumsum([0, *map(len, tuples)])
    found = tuple_rows(buf, offsets, 512, group_id=group_id, number=5, timestamp=TIME)
    assert len(found) > 100_000
