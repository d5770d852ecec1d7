"""Plan the batches of one replica set in a live stream: where the next batch ends, and what executors read for it.

Works on the index of a spool; `offsets.py` defines the positions. A batch is a range of snapshot chunks or of changes,
never both. Chunk numbers are absolute: a snapshot is always divided in the same way. If gaps are allowed, a stream
crosses a gap to the snapshot after it with a batch without rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from flowstone.box.system import TRUNCATE_ID
from flowstone.columns.change_contract import ChangeContract
from flowstone.errors import FlowstoneError
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import ArchiveIndex, DataLoss, Slice
from flowstone.spark.index.log_runs import SnapshotFile
from flowstone.spark.index.slice_bytes import INLINE_SLICE_MAX
from flowstone.spark.sources.change_batches import FormatChanged
from flowstone.spark.sources.offsets import Position
from flowstone.spark.sources.stream_order import StreamPlace

_log = logging.getLogger("flowstone.spark")

CHUNK_SIZE: Final = 4 * 1024 * 1024
"""Bytes of a snapshot per chunk. Offsets count chunks, so this number must never change."""

SLICE_SIZE_MIN: Final = 1024 * 1024
SLICES_WANTED: Final = 4


class SnapshotLost(FlowstoneError):
    """The rest of a partially delivered snapshot is gone."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The size limits of a batch, in rows and in bytes."""

    rows: int | None = None
    size: int | None = None

    def share(self, count: int) -> BatchLimits:
        """Return the limits for one of `count` replica sets."""
        return BatchLimits(_part(self.rows, count), _part(self.size, count))


@dataclass(frozen=True, slots=True)
class StreamSlice:
    """The input of one task: a slice, the settled positions that bound its rows, and their columns."""

    part: Slice
    start: VClock
    end: VClock
    contract: ChangeContract


def next_position(
    index: ArchiveIndex,
    at: Position,
    limits: BatchLimits,
    contract: ChangeContract,
    *,
    target: VClock | None = None,
    over_gaps: bool = False,
) -> Position:
    """Return the end of the batch after `at`, or `at` itself if there are no rows yet or `target` is reached.

    A batch may go beyond the target: a position of another member is not necessarily one of this log.
    """
    if at.chunk is not None:
        return _next_chunk(index, at, limits)
    if target is not None and target <= at.vclock:
        return at
    try:
        end = index.cut(at.vclock, max_rows=limits.rows, max_bytes=limits.size)
    except DataLoss:
        gap = index.first_gap(at.vclock, index.settled)
        if gap is None or not over_gaps:
            raise
        _log.warning("%s: %s after %s: %s", index.directory, gap, at.vclock, gap.why)
        until = VClock(gap.until)
        # A plain log directory may have no snapshot at this position.
        return Position(until, at.stamp, 0 if any(each.vclock == until for each in index.snapshots) else None)
    end = _before_format_change(index, contract, at.vclock, end)
    return at if end == at.vclock else Position(end, max(at.stamp, index.time_at(end)))


def slices_between(index: ArchiveIndex, start: Position, end: Position, contract: ChangeContract) -> list[StreamSlice]:
    """Return the slices after `start` up to `end`. Both are positions that this stream has reported."""
    if start.chunk is not None and start.vclock == end.vclock:
        chunks = _chunks(index, snapshot_of(index, start))[start.chunk : end.chunk]
        return [_placed(part, start, start.vclock, start.vclock, contract) for part in chunks]
    if end.chunk is not None or index.first_gap(start.vclock, end.vclock) is not None:
        return []  # the batch crosses a gap
    size = min(INLINE_SLICE_MAX, max(SLICE_SIZE_MIN, index.size_between(start.vclock, end.vclock) // SLICES_WANTED))
    parts = index.slices(start.vclock, end.vclock, size=size, spaces=_spaces(contract))
    return [_placed(part, start, start.vclock, end.vclock, contract) for part in parts]


def snapshot_of(index: ArchiveIndex, at: Position) -> SnapshotFile:
    """Return the snapshot that a position is inside of. Raise SnapshotLost if it is gone."""
    for snapshot in index.snapshots:
        if snapshot.vclock == at.vclock:
            return snapshot
    raise SnapshotLost(
        f"{index.directory}: snapshot at {at.vclock} was deleted after {at.chunk} of its chunks were delivered",
        hint="no other snapshot can continue it; delete the checkpoint and the query's output, and start again",
    )


def _next_chunk(index: ArchiveIndex, at: Position, limits: BatchLimits) -> Position:
    """Return the position after the next chunks.

    The number of rows in a chunk is unknown before it is read, so with a row limit a batch is one chunk.
    """
    assert at.chunk is not None
    chunks = _chunks(index, snapshot_of(index, at))
    size, number = 0, at.chunk
    while number < len(chunks):
        size += chunks[number].end - chunks[number].offset
        is_full = limits.rows is not None or (limits.size is not None and size > limits.size)
        if is_full and number > at.chunk:
            break
        number += 1
    return Position(at.vclock, at.stamp, number if number < len(chunks) else None)


def _chunks(index: ArchiveIndex, snapshot: SnapshotFile) -> list[Slice]:
    return index.snapshot_slices(snapshot, size=CHUNK_SIZE)


def _placed(part: Slice, at: Position, start: VClock, end: VClock, contract: ChangeContract) -> StreamSlice:
    """Return the task for a slice. Its commit times continue the commit times of the stream.

    A spool that was lost and started again does not know the earlier times.
    """
    before = StreamPlace(part.before.vclock, max(part.before.time, at.stamp))
    return StreamSlice(replace(part, before=before), start, end, contract)


def _spaces(contract: ChangeContract) -> Sequence[int]:
    # Truncations are logged as rows of another space.
    return () if contract.space is None else (contract.space.id, TRUNCATE_ID)


def _before_format_change(index: ArchiveIndex, contract: ChangeContract, start: VClock, end: VClock) -> VClock:
    """Return `end`, or an earlier position before the format of the space changes: a query has a fixed schema.

    Raise FormatChanged if the change comes right after `start`.
    """
    space = contract.space
    if space is None:
        return end
    for change in index.format_changes(space.id, start, end):
        if change.space is not None and change.space.shape == space.shape:
            continue
        if change.before == start:
            raise FormatChanged(
                f"format of space {space.name!r} changes after {start}, but the query has the old columns",
                hint="restart the query; it resumes where it stopped, with the new columns",
            )
        return change.before
    return end


def _part(limit: int | None, count: int) -> int | None:
    return None if limit is None else max(1, limit // count)
