"""The order of rows in a stream of changes: commit version and time of each row, and the rows of a batch.

Pure: tables of the row scanner in, arrays out, one range of whole transactions at a time. Versions and times are
counted over all rows of the log, including rolled back rows and control rows, from the position before the range. So
they depend only on the log, never on the boundaries of a batch, and are the same when the log is read again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowstone.columns.change_contract import Stamps
from flowstone.errors import FlowstoneError
from flowstone.history.selection import Mask
from flowstone.iproto import scan
from flowstone.iproto.scan import Cells
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import DamagedLog

Range = tuple[int, int, int]
"""A range of rows: originator, first LSN, last LSN."""


class SplitTransaction(FlowstoneError):
    """The start or the end of a batch lies inside a transaction."""


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A place between two transactions of a log: its position, and the greatest commit time before it."""

    vclock: VClock
    time: int = 0


@dataclass(frozen=True, slots=True)
class BatchWindow:
    """The rows of a batch: after `start`, up to `end`, without rolled back rows."""

    start: VClock
    end: VClock
    rolled_back: tuple[Range, ...] = ()


def stamp(cells: Cells, before: StreamPlace, path: str) -> tuple[Stamps, StreamPlace]:
    """Return the stamps of whole transactions that follow `before`, and the place after them."""
    if not cells.shape[1]:
        return Stamps(np.empty(0, np.int64), np.empty(0, np.int64)), before
    if not cells[scan.FLAGS, -1] & scan.COMMIT:
        raise DamagedLog(path, 0, f"rows end inside the transaction of LSN {cells[scan.LSN, -1]}")
    last = _last_rows(cells)
    steps, newest = _steps(cells, before.vclock)
    versions = before.vclock.signature + np.cumsum(steps)
    times = commit_times(cells, before.time)
    return Stamps(versions[last], times[last]), StreamPlace(before.vclock.merged(newest), int(times[-1]))


def rows_between(cells: Cells, window: BatchWindow) -> Mask:
    """Return a mask of the rows inside the window. The rows form whole transactions."""
    inside = _later_than(cells, window.start) & ~_later_than(cells, window.end)
    if not len(inside) or not inside.any():
        return inside
    if not inside.all():
        _check_whole(cells, inside)
    for origin, first, last in window.rolled_back:
        lsns = cells[scan.LSN]
        inside &= ~((cells[scan.REPLICA_ID] == origin) & (lsns >= first) & (lsns <= last))
    return inside


@dataclass
class Withdrawn:
    """Ranges of rolled back rows, by originator and LSN. Adjacent ranges are merged."""

    ranges: list[Range] = field(default_factory=list)

    def add(self, ranges: Iterable[Range]) -> None:
        for span in ranges:
            insort(self.ranges, span)
        joined: list[Range] = []
        for origin, first, last in self.ranges:
            if joined and joined[-1][0] == origin and first <= joined[-1][2] + 1:
                joined[-1] = origin, joined[-1][1], max(last, joined[-1][2])
            else:
                joined.append((origin, first, last))
        self.ranges = joined

    def within(self, before: VClock, end: VClock) -> tuple[Range, ...]:
        """Return the ranges that have rows after `before` up to `end`."""
        found: list[Range] = []
        for origin, limit in end:
            start = bisect_left(self.ranges, (origin, before.get(origin)))
            # The preceding range may extend past `before`.
            near = self.ranges[max(start - 1, 0) : bisect_left(self.ranges, (origin, limit + 1))]
            found += [span for span in near if span[0] == origin and span[2] > before.get(origin)]
        return tuple(found)


def commit_times(cells: Cells, before: int) -> Cells:
    """Return for each row the greatest time so far, in microseconds. `before` is the greatest time of earlier rows."""
    seconds = np.ascontiguousarray(cells[scan.TIMESTAMP]).view(np.float64)
    micros = np.rint(np.clip(seconds, 0.0, 9e12) * 1e6).astype(np.int64)
    return np.maximum.accumulate(np.maximum(micros, before))


def _last_rows(cells: Cells) -> Cells:
    """Return for each row the number of the last row of its transaction."""
    commits = np.flatnonzero(cells[scan.FLAGS] & scan.COMMIT)
    if len(commits) == cells.shape[1]:
        return commits
    last: Cells = commits[np.searchsorted(commits, np.arange(cells.shape[1]))]
    return last


def _steps(cells: Cells, before: VClock) -> tuple[Cells, VClock]:
    """Return by how much each row advances the signature, and the newest LSN of each originator."""
    origins, lsns = cells[scan.REPLICA_ID], cells[scan.LSN]
    steps: Cells = np.zeros(len(lsns), np.int64)
    newest: dict[int, int] = {}
    for origin in _distinct(origins):
        mine = np.flatnonzero(origins == origin)
        reached = np.maximum.accumulate(np.maximum(lsns[mine], before.get(origin)))
        steps[mine] = np.diff(reached, prepend=before.get(origin))
        newest[origin] = int(reached[-1])
    return steps, VClock(newest)


def _later_than(cells: Cells, vclock: VClock) -> Mask:
    origins, lsns = cells[scan.REPLICA_ID], cells[scan.LSN]
    limits: Cells = np.zeros(len(lsns), np.int64)
    for origin in _distinct(origins):
        limits[origins == origin] = vclock.get(origin)
    later: Mask = lsns > limits
    return later


def _distinct(origins: Cells) -> Sequence[int]:
    is_one = len(origins) > 0 and origins.min() == origins.max()
    found: list[int] = (origins[:1] if is_one else np.unique(origins)).tolist()
    return found


def _check_whole(cells: Cells, inside: Mask) -> None:
    split = np.flatnonzero(inside != inside[_last_rows(cells)])
    if len(split):
        origin, lsn, tsn = cells[[scan.REPLICA_ID, scan.LSN, scan.TSN], split[0]].tolist()
        raise SplitTransaction(
            f"batch boundary is inside the transaction with LSN {tsn} of replica {origin}, at its row {lsn}",
            hint="use a position between two transactions, such as one reported by a stream",
        )
