"""First load of a lake in executors: each task writes the rows of its keys to files of the tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from flowstone.lake.misfits import MisfitRows
from flowstone.lake.table_files import FILE_SIZE, TableFiles
from flowstone.lake.table_schema import LakeSchema, prefixed
from flowstone.spark.worker_errors import clear_errors

LOADED: Final = pa.schema(
    [
        pa.field("space_id", pa.int64()),
        pa.field("path", pa.string()),
        pa.field("size", pa.int64()),
        pa.field("row_count", pa.int64()),
        pa.field("statistics", pa.string()),
        pa.field("misfits", pa.binary()),
    ]
)
LOADED_DDL: Final = "space_id BIGINT, path STRING, size BIGINT, row_count BIGINT, statistics STRING, misfits BINARY"
"""Files, and misfits as an Arrow stream. A row without a path has misfits only."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Destination of the rows of one space in a first load. `states` are the history columns, equal in all rows.

    Misfits are collected if `keeps_misfits`; otherwise they are errors.
    """

    files: TableFiles
    schema: LakeSchema
    prefix: bytes
    states: dict[str, Any] | None = None
    keeps_misfits: bool = False


class RowsToFiles:
    """Executor function of a first load: rows in (space id, sort key, tuple), files out (`LOADED`).

    Only file names pass through the driver. Files of a failed task attempt are left as orphans.
    """

    def __init__(self, targets: dict[int, LoadTarget], size: int = FILE_SIZE) -> None:
        self.targets = targets
        self.size = size

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with clear_errors():
            yield from self._write_all(batches)

    def _write_all(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kept: dict[int, list[pa.Table]] = {}
        sizes: dict[int, int] = {}
        for batch in batches:
            for space_id, rows in _by_space(batch):
                if space_id in self.targets:
                    kept.setdefault(space_id, []).append(rows)
                    sizes[space_id] = sizes.get(space_id, 0) + rows.nbytes
            # Typed columns take about as much memory as keys and tuples.
            while sizes and (max(sizes.values()) > self.size // 2 or sum(sizes.values()) > 2 * self.size):
                largest = max(sizes, key=sizes.__getitem__)
                del sizes[largest]
                yield self._write(largest, kept.pop(largest))
        for space_id, parts in kept.items():
            yield self._write(space_id, parts)

    def _write(self, space_id: int, parts: list[pa.Table]) -> pa.RecordBatch:
        target = self.targets[space_id]
        rows = pa.concat_tables(parts).combine_chunks()
        rows = rows.take(pc.sort_indices(rows.column("sort_key")))
        states = None
        if target.states is not None:
            kinds = target.schema.file_schema
            states = {
                name: pa.repeat(pa.scalar(value, kinds.field(name).type), len(rows))
                for name, value in target.states.items()
            }
        keys = prefixed(target.prefix, rows.column("sort_key"))
        misfits = MisfitRows() if target.keeps_misfits else None
        filled = target.schema.rows(keys, rows.column("tuple"), states, misfits=misfits, origins={})
        written = target.files.write_split(filled, None if states is None else True, self.size)
        return pa.RecordBatch.from_pylist(
            [
                {
                    "space_id": space_id,
                    "path": each.entry.path,
                    "size": each.entry.size,
                    "row_count": each.entry.row_count,
                    "statistics": each.statistics,
                }
                for each in written
            ]
            + [{"space_id": space_id, "misfits": _stream_of(each)} for each in (misfits.new if misfits else ())],
            schema=LOADED,
        )


def _stream_of(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue())


def misfits_of(stream: bytes) -> pa.Table:
    """Return the misfits that a task sent."""
    with pa.ipc.open_stream(stream) as reader:
        return reader.read_all()


def _by_space(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.Table]]:
    rows = pa.Table.from_batches([batch]).rename_columns(["space_id", "sort_key", "tuple"])
    space_ids = rows.column("space_id")
    for space_id in pc.unique(space_ids).to_pylist():
        chosen = rows if rows.num_rows and pc.all(pc.equal(space_ids, space_id)).as_py() else None
        if chosen is None:
            chosen = rows.filter(pc.equal(space_ids, space_id))
        yield space_id, chosen.select(["sort_key", "tuple"])
