"""Settled rows of a log, slab by slab: the fast way around `replication.settled` where nothing waits.

A slab in which nothing is synchronous passes whole. Any other goes through the tracker transaction by transaction; the
rows of transactions that wait keep their slab alive until they are decided. It knows no schema: where rows do not say
themselves that they are synchronous, the caller does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from flowstone.errors import RemoteProtocolError
from flowstone.iproto import scan as rows_of
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.scan import Cells
from flowstone.replication.settled import SettledTracker, Tracked
from flowstone.replication.synchro import Promote, decode_control
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import DamagedFile
from flowstone.xlog.meta import Meta
from flowstone.xlog.reader import Slab
from flowstone.xlog.transactions import CONTROL_TYPES, group

CONTROL = np.array(sorted(CONTROL_TYPES), np.int64)
WAIT_ACK = Flag.WAIT_ACK.value


@dataclass(frozen=True, slots=True)
class _Placed(Tracked):
    """A transaction, where it came from, and whether the schema makes it synchronous."""

    slab: Slab
    first: int
    touches_synchronous: bool


class Settling:
    """What is settled of one instance's log."""

    def __init__(self) -> None:
        self._by_schema = False
        self._tracker: SettledTracker[_Placed] | None = None
        self._started_at = VClock()
        self._promoted: Promote | None = None
        self.rolled_back = 0

    @property
    def pending(self) -> int:
        """Rows of transactions that wait for their verdict."""
        return sum(len(placed.rows) for placed in self._tracker.pending) if self._tracker else 0

    def pass_snapshot(self, meta: Meta, slab: Slab) -> None:
        """A snapshot holds settled data only. One in front of the logs says where they start, and under whom."""
        if self._tracker is not None:
            return
        self._started_at = VClock(meta.vclock)
        for row in slab.rows(np.flatnonzero(slab.cells[rows_of.TYPE] == RequestType.RAFT_PROMOTE)):
            body = decode_control(row.type, row.body)
            self._promoted = body if isinstance(body, Promote) else None

    def push(self, slab: Slab, synchronous: NDArray[np.bool_] | None) -> Iterator[tuple[Slab, Cells]]:
        """Takes the next slab of the log; gives slab and row numbers of all that is settled now, in log order.

        `synchronous` says of each row whether its space is, in logs whose rows have no flags for it; None otherwise.
        """
        tracker = self._tracker_for(synchronous is not None)
        if tracker.is_quiet and not _may_wait(slab.cells, synchronous):
            tracker.skip_to(tracker.vclock.merged(VClock(slab.newest())))
            yield slab, np.arange(len(slab), dtype=np.int64)
            return
        for _, run in groupby(self._decided(tracker, slab, synchronous), lambda placed: id(placed.slab)):
            together = list(run)
            numbers = [np.arange(placed.first, placed.first + len(placed.rows)) for placed in together]
            yield together[0].slab, np.concatenate(numbers)

    def _decided(
        self, tracker: SettledTracker[_Placed], slab: Slab, synchronous: NDArray[np.bool_] | None
    ) -> Iterator[_Placed]:
        first = 0
        try:
            for transaction in group(slab.rows()):
                end = first + len(transaction.rows)
                touches = synchronous is not None and bool(synchronous[first:end].any())
                for placed, kept in tracker.push(_Placed(transaction, slab, first, touches)):
                    if kept:
                        yield placed
                    else:
                        self.rolled_back += len(placed.rows)
                first = end
        except RemoteProtocolError as error:
            block = slab.cells[rows_of.SPAN, min(first, len(slab) - 1)]
            raise DamagedFile(slab.path, int(slab.offsets[block]), str(error)) from error

    def _tracker_for(self, by_schema: bool) -> SettledTracker[_Placed]:
        """The tracker, a new one after an upgrade of the server; but never while something waits in the old one."""
        before = self._tracker
        if before is not None and (by_schema == self._by_schema or not before.is_quiet):
            return before
        by_space = (lambda placed: placed.touches_synchronous) if by_schema else None
        self._by_schema = by_schema
        self._tracker = SettledTracker(is_synchronous=by_space)
        if before is None:
            self._tracker.start(self._started_at, self._promoted)
        else:
            self._tracker.start(before.vclock)
        return self._tracker


def _may_wait(cells: Cells, synchronous: NDArray[np.bool_] | None) -> bool:
    if (cells[rows_of.FLAGS] & WAIT_ACK).any() or np.isin(cells[rows_of.TYPE], CONTROL).any():
        return True
    return synchronous is not None and bool(synchronous.any())
