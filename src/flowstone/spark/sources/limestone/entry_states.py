"""The state of a Limestone directory at a durable epoch, for readers that cannot run jobs: each task folds some keys.

Keys are assigned to tasks by a hash; each task reads everything and keeps only its own keys. Jobs that have a session
shuffle instead (`spark/fold/limestone_fold.py`). For each key the entry with the highest write version wins, unless its
storage was cleared later (`docs/spec/limestone.md#winning-entry`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flowstone.limestone.format.entries import EntryType
from flowstone.limestone.format.entry_table import STORAGE_ID, TYPE
from flowstone.outside.disk import Disk
from flowstone.spark.index.limestone_index import LimestoneIndex, PieceSlice
from flowstone.spark.index.limestone_kernels import key_shares
from flowstone.spark.index.limestone_pieces import Version
from flowstone.spark.index.limestone_walk import EntryChunk
from flowstone.spark.sources.limestone.entry_columns import EntryContract, key_column, newest, place_column
from flowstone.spark.sources.limestone.entry_reader import Rows, chunks_of, counted, points, surviving
from flowstone.spark.sources.limestone.table_contract import TableContract

Contract = EntryContract | TableContract
"""The columns of a query: of entries, or of one of Tsurugi's tables."""

SHARE_SIZE: Final = 32 << 20
"""Bytes of files per task."""

SHARES_MAX: Final = 8
FOLD_ROWS: Final = 1 << 20
"""Number of entries to gather before superseded ones are discarded."""

STORAGE, KEY, PLACE, GONE = "#storage", "#key", "place", "#gone"
"""Columns in addition to the contract: storage and key for grouping, the order that decides which entry wins, and a
flag for removal."""


@dataclass(frozen=True)
class StateShare:
    """The input of one task, which keeps the keys of share `number` of `count`."""

    slices: tuple[PieceSlice, ...]
    clears: Mapping[int, Version]
    epoch: int
    contract: Contract
    number: int = 0
    count: int = 1


def plan_state(index: LimestoneIndex, epoch: int, contract: Contract) -> list[StateShare]:
    """Return tasks that together read each row of the state once."""
    slices = tuple(index.state_slices(epoch))
    clears = index.clears(epoch, with_detached=epoch < index.horizon)
    count = max(1, min(SHARES_MAX, sum(part.size for part in slices) // SHARE_SIZE))
    return [StateShare(slices, clears, epoch, contract, number, count) for number in range(count)]


def read_state(disk: Disk, share: StateShare) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one share. With a contract of changes, each row is a `replace` at the epoch of the state."""
    held: list[pa.Table] = []
    count = 0
    for part in share.slices:
        for chunk in chunks_of(disk, part):
            rows = _own(chunk, share, is_compacted=part.is_compacted)
            if len(rows):
                held.append(_folding(chunk, rows, share.contract, part))
                count += len(rows)
            if count >= FOLD_ROWS:
                held = [newest(pa.concat_tables(held).combine_chunks(), (STORAGE, KEY), PLACE)]
                count = held[0].num_rows // 2  # avoids folding too often if there are many distinct keys
    if not held:
        return
    state = newest(pa.concat_tables(held).combine_chunks(), (STORAGE, KEY), PLACE)
    state = state.filter(pc.invert(state[GONE]))
    schema = share.contract.schema
    if "_commit_version" in schema.names:
        versions = pa.repeat(pa.scalar(share.epoch, pa.int64()), state.num_rows)
        state = state.set_column(
            state.schema.get_field_index("_commit_version"), schema.field("_commit_version"), versions
        )
    for batch in state.select(schema.names).to_batches(max_chunksize=1 << 16):
        yield batch.cast(schema)


def _own(chunk: EntryChunk, share: StateShare, *, is_compacted: bool) -> Rows:
    rows = share.contract.chosen(chunk, points(chunk, counted(chunk, -1, share.epoch)))
    rows = surviving(chunk, rows, share.clears, is_compacted=is_compacted)
    if share.count == 1 or not len(rows):
        return rows
    shares: Rows = np.empty(len(rows), np.int64)
    key_shares(chunk.buf, chunk.table, rows, share.count, shares)
    is_own: NDArray[np.bool_] = shares == share.number
    return rows[is_own]


def _folding(chunk: EntryChunk, rows: Rows, contract: Contract, part: PieceSlice) -> pa.Table:
    batch = contract.batch(chunk, rows)
    gone = chunk.table[TYPE, rows] == np.uint64(EntryType.REMOVE)
    # A remove has nulls, which the state's columns do not allow until removes are filtered out.
    schema = pa.schema([each.with_nullable(True) for each in batch.schema])
    found = pa.Table.from_arrays(batch.columns, schema=schema)
    found = found.append_column(STORAGE, pa.array(chunk.table[STORAGE_ID, rows].view(np.int64)))
    found = found.append_column(KEY, key_column(chunk, rows))
    found = found.append_column(PLACE, place_column(chunk, rows, part.number, is_compacted=part.is_compacted))
    return found.append_column(GONE, pa.array(gone))
