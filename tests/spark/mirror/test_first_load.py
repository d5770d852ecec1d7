"""First load: each task writes sorted files, and reports them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from flowstone.lake.table_files import TableFiles
from flowstone.lake.table_schema import LakeSchema
from flowstone.spark.mirror.first_load import LoadTarget, RowsToFiles
from tests.spark.lake_rows_given import ORDERS, packed

SCHEMA = LakeSchema(ORDERS)


def test_executors_write_the_rows_of_each_space_sorted(tmp_path: Path) -> None:
    files = {number: TableFiles(str(tmp_path / str(number))) for number in (512, 513)}
    for each in files.values():
        each.make_directory()
    targets = {number: LoadTarget(each, SCHEMA, b"p-") for number, each in files.items()}
    batches = [
        pa.RecordBatch.from_arrays(
            [
                pa.array(ids, pa.int32()),
                pa.array([f"{part}{at}".encode() for at in range(len(ids))], pa.binary()),
                pa.array([packed(at) for at in range(len(ids))], pa.binary()),
            ],
            names=["x", "y", "z"],
        )
        for part, ids in enumerate([[513] * 30, [512, 513, 999], [512] * 30])
    ]
    written = pa.Table.from_batches(RowsToFiles(targets, size=300)(reversed(batches))).to_pylist()
    assert sum(row["row_count"] for row in written if row["space_id"] == 512) == 31
    assert sum(row["row_count"] for row in written if row["space_id"] == 513) == 31
    assert len(written) > 3
    for row in written:
        there = files[row["space_id"]].read(row["path"], SCHEMA.file_schema)["_key"].to_pylist()
        assert there == sorted(there)
        assert all(key.startswith(b"p-") for key in there)
        assert row["size"] == (tmp_path / str(row["space_id"]) / row["path"]).stat().st_size
