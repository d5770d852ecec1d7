"""Arrays of tuples as slabs: every Arrow layout yields the same rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flowstone.columns.tuple_slabs import slab_of_tuples
from flowstone.iproto import scan
from tests.spark.lake_rows_given import packed


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_slab_has_one_insert_per_tuple_for_every_binary_type(kind: pa.DataType) -> None:
    tuples = [packed(number, "x" * number) for number in range(20)]
    slab = slab_of_tuples(pa.array(tuples, kind), 512, "orders")
    starts, ends = slab.cells[scan.TUPLE_AT], slab.cells[scan.TUPLE_END]
    found = [slab.buf[start:end].tobytes() for start, end in zip(starts, ends, strict=True)]
    assert found == tuples
    assert set(slab.cells[scan.SPACE_ID].tolist()) == {512}
    assert slab.cells[scan.LSN].tolist() == list(range(1, 21))


def test_slice_of_an_array_is_a_slab_of_its_tuples_only() -> None:
    tuples = pa.array([packed(number) for number in range(20)], pa.binary())
    slab = slab_of_tuples(tuples.slice(5, 3), 512, "orders")
    found = [
        slab.buf[start:end].tobytes()
        for start, end in zip(slab.cells[scan.TUPLE_AT], slab.cells[scan.TUPLE_END], strict=True)
    ]
    assert found == [packed(number) for number in (5, 6, 7)]
    assert len(slab_of_tuples(tuples.slice(0, 0), 512, "orders")) == 0
