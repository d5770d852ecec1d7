"""Settled rows of a log, slab by slab: the fast way around `replication.settled` where nothing waits.

A slab in which nothing is synchronous passes whole. Any other goes through the tracker transaction by transaction; the
rows of transactions that wait keep their slab alive until they are decided.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np

from flowstone.box.schema import Schema
from flowstone.errors import RemoteProtocolError
from flowstone.iproto import scan as rows_of
from flowstone.iproto.constants import Flag
from flowstone.iproto.row import Row
from flowstone.iproto.scan import Cells
from flowstone.replication.settled import SettledTracker
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import DamagedFile
from flowstone.xlog.meta import Meta
from flowstone.xlog.reader import Slab
from flowstone.xlog.transactions import CONTROL_TYPES, Transaction, group

CONTROL = np.array(sorted(CONTROL_TYPES), np.int64)
WAIT_ACK = Flag.WAIT_ACK.value


Part = tuple[Schema, Cells]
"""Numbers of rows that stand one behind the other, all under one schema."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A transaction, and where it came from. It has several parts where it changes the schema itself."""

    transaction: Transaction
    slab: Slab
    parts: tuple[Part, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.transaction.rows

    @property
    def replica_id(self) -> int:
        return self.transaction.replica_id

    @property
    def lsn(self) -> int:
        return self.transaction.lsn

    @property
    def flags(self) -> int:
        return self.transaction.flags


class Settling:
    """What is settled of one instance's log."""

    def __init__(self) -> None:
        self._by_schema = False
        self._tracker: SettledTracker[_Placed] | None = None
        self._started_at = VClock()
        self.rolled_back = 0

    @property
    def pending(self) -> int:
        """Rows of transactions that wait for their verdict."""
        return sum(len(placed.rows) for placed in self._tracker.pending) if self._tracker else 0

    def pass_snapshot(self, meta: Meta) -> None:
        """A snapshot holds settled data only. One in front of the logs says where they start."""
        if self._tracker is None:
            self._started_at = VClock(meta.vclock)

    def push(self, slab: Slab, parts: Sequence[Part], by_schema: bool) -> Iterator[tuple[Slab, Schema, Cells]]:
        """Takes all rows of the next slab, in parts; gives (slab, schema, row numbers) of all that is settled now."""
        tracker = self._tracker
        if tracker is None or by_schema != self._by_schema:
            tracker = self._tracker = self._new_tracker(by_schema)
        synchronous = (
            frozenset[int]().union(*(schema.synchronous for schema, _ in parts)) if by_schema else frozenset[int]()
        )
        if tracker.is_quiet and not _may_wait(slab.cells, synchronous):
            tracker.skip_to(_after(tracker.vclock, slab.cells))
            for schema, numbers in parts:
                yield slab, schema, numbers
            return
        yield from _together(self._decided(tracker, slab, parts))

    def _decided(self, tracker: SettledTracker[_Placed], slab: Slab, parts: Sequence[Part]) -> Iterator[_Placed]:
        ends = list(accumulate(len(numbers) for _, numbers in parts))
        position = 0
        try:
            # Transactions are told apart before schemas are: one that defines a space may go on to fill it.
            for transaction in group(slab.rows()):
                own = tuple(_between(parts, ends, position, position + len(transaction.rows)))
                position += len(transaction.rows)
                for placed, kept in tracker.push(_Placed(transaction, slab, own)):
                    if kept:
                        yield placed
                    else:
                        self.rolled_back += len(placed.rows)
        except RemoteProtocolError as error:
            block = slab.cells[rows_of.SPAN, min(position, len(slab) - 1)]
            raise DamagedFile(slab.path, int(slab.offsets[block]), str(error)) from error

    def _new_tracker(self, by_schema: bool) -> SettledTracker[_Placed]:
        before, self._by_schema = self._tracker, by_schema
        tracker: SettledTracker[_Placed] = SettledTracker(is_synchronous=_touches_sync_space if by_schema else None)
        tracker.start(before.vclock if before else self._started_at)
        return tracker


def _together(decided: Iterator[_Placed]) -> Iterator[tuple[Slab, Schema, Cells]]:
    """Neighbours of one slab and schema as one, so that what follows works on many rows at a time."""
    pieces = ((placed.slab, schema, numbers) for placed in decided for schema, numbers in placed.parts)
    for (_, _), run in groupby(pieces, lambda piece: (id(piece[0]), id(piece[1]))):
        same = list(run)
        yield same[0][0], same[0][1], np.concatenate([numbers for _, _, numbers in same])


def _between(parts: Sequence[Part], ends: list[int], start: int, end: int) -> Iterator[Part]:
    """What of the parts lies between two positions; `ends` are the positions where the parts end."""
    for at in range(bisect_right(ends, start), bisect_left(ends, end) + 1):
        schema, numbers = parts[at]
        begin = ends[at] - len(numbers)
        yield schema, numbers[max(start - begin, 0) : end - begin]


def _touches_sync_space(placed: _Placed) -> bool:
    space_ids = placed.slab.cells[rows_of.SPACE_ID]
    return any(not schema.synchronous.isdisjoint(space_ids[numbers].tolist()) for schema, numbers in placed.parts)


def _may_wait(cells: Cells, synchronous: frozenset[int]) -> bool:
    if (cells[rows_of.FLAGS] & WAIT_ACK).any() or np.isin(cells[rows_of.TYPE], CONTROL).any():
        return True
    return bool(synchronous) and bool(np.isin(cells[rows_of.SPACE_ID], sorted(synchronous)).any())


def _after(vclock: VClock, cells: Cells) -> VClock:
    """`vclock` moved over all rows of the table."""
    replica_ids = cells[rows_of.REPLICA_ID]
    newest = {
        replica_id: int(cells[rows_of.LSN, replica_ids == replica_id].max())
        for replica_id in np.unique(replica_ids).tolist()
    }
    return vclock.merged(VClock(newest))
