"""The changes in a slice of the log as record batches of a contract. Runs in executors.

Relies on `spark/index/log_index.py` for the position and the schema before the slice; reads only the blocks of the
slice. Kernels decode whole chunks; only rows that define spaces are read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa

from flowstone.box.schema import Schema, SchemaTracker
from flowstone.box.system import TRUNCATE_ID
from flowstone.columns.change_contract import ChangeContract, Stamps
from flowstone.errors import FlowstoneError
from flowstone.history.log_reading import Piece
from flowstone.history.secrets import hide_secrets
from flowstone.iproto import scan
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import Slice
from flowstone.spark.index.schema_epochs import defining
from flowstone.spark.index.slice_bytes import open_slice
from flowstone.spark.sources.stream_order import BatchWindow, StreamPlace, rows_between, stamp
from flowstone.xlog.meta import Meta


class FormatChanged(FlowstoneError):
    """The definition of a space differs from the one with which a query began."""


def read_slice(
    disk: Disk,
    part: Slice,
    start: VClock,
    end: VClock,
    contract: ChangeContract,
    *,
    show_secrets: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the settled changes of a slice after `start` up to `end`; both positions are settled.

    All rows of a snapshot are returned, each as an `insert` at the snapshot's position.
    """
    # If another log of the replica set was read before, versions continue from the position that it reached.
    place, tracker = StreamPlace(part.before.vclock.merged(start), part.before.time), part.definitions
    is_behind_start = start <= part.before.vclock
    with open_slice(disk, part) as log:
        for slab in log.slabs(part.offset, part.end):
            if part.is_snapshot:
                yield from _of_snapshot(log.meta, slab, part, contract, show_secrets)
                continue
            stamps, place = stamp(slab.cells, place, part.path)
            # Definitions apply from the beginning of the slice, even if the window begins later.
            settled = np.arange(len(slab))
            if part.rolled_back or not place.vclock <= end:
                settled = np.flatnonzero(rows_between(slab.cells, BatchWindow(VClock(), end, part.rolled_back)))
            rows = settled
            if not is_behind_start:
                rows = np.flatnonzero(rows_between(slab.cells, BatchWindow(start, end, part.rolled_back)))
            definitions = defining(slab, settled)
            if len(definitions):
                tracker = tracker.copy()
            yield from _by_schema(log.meta, slab, rows, definitions, stamps, tracker, contract, show_secrets)


def _of_snapshot(
    meta: Meta, slab: Slab, part: Slice, contract: ChangeContract, show_secrets: bool
) -> Iterator[pa.RecordBatch]:
    rows = np.arange(len(slab))
    stamps = Stamps(np.full(len(slab), part.before.vclock.signature), np.full(len(slab), part.before.time))
    schema = part.definitions.schema
    contract = contract.of_snapshot()
    shown = slab if show_secrets else next(hide_secrets([Piece(meta, slab, rows, schema)])).slab
    # Rows of `_truncate` in a snapshot stand for earlier truncations, which no longer empty anything.
    is_truncate = slab.cells[scan.SPACE_ID] == TRUNCATE_ID
    _check_format(contract, schema, slab, rows[~is_truncate])
    yield from contract.batches(shown, rows[~is_truncate], stamps, schema)
    if contract.keeps_truncate:
        yield from contract.plain(shown, rows[is_truncate], stamps, schema)


def _by_schema(
    meta: Meta,
    slab: Slab,
    rows: Cells,
    definitions: Cells,
    stamps: Stamps,
    tracker: SchemaTracker,
    contract: ChangeContract,
    show_secrets: bool,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows in parts that share a schema; `tracker` follows the definitions."""
    shown = slab if show_secrets else next(hide_secrets([Piece(meta, slab, rows, tracker.schema)])).slab
    cuts = np.searchsorted(rows, definitions, side="right")
    edges = [0, *cuts.tolist(), len(rows)]
    applied = 0
    for number, (first, stop) in enumerate(pairwise(edges)):
        if number:
            (row,) = slab.rows(definitions[applied : applied + 1])
            tracker.apply(row.type, row.body)
            applied += 1
        if first < stop:
            _check_format(contract, tracker.schema, slab, rows[first:stop])
            yield from contract.batches(shown, rows[first:stop], stamps, tracker.schema)


def _check_format(contract: ChangeContract, schema: Schema, slab: Slab, rows: Cells) -> None:
    """Raise FormatChanged if rows have other columns than the contract: they would be decoded wrongly."""
    space = contract.space
    if space is None or contract.follows_format:
        return
    now = schema.get(space.id)
    is_same = now is not None and now.shape == space.shape
    if not is_same and (slab.cells[scan.SPACE_ID, rows] == space.id).any():
        raise FormatChanged(
            f"format of space {space.name!r} changed while the query was running",
            hint="restart the query (source xlog: with schemaAt); it resumes where it stopped, with the new columns",
        )
