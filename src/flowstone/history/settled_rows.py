"""The settled rows of a log, slab by slab, with a fast path around `replication.settled_position`.

A slab without synchronous or control rows passes as a whole if no transaction is pending. Any other slab goes through
the tracker transaction by transaction; pending transactions keep their slab in memory. A transaction that is pending
where rows are missing from the log is never settled: one of the missing rows may have rolled it back. This module has
no schema: in logs whose rows have no flags, the caller specifies which rows are synchronous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from flowstone.errors import RemoteProtocolError
from flowstone.iproto import scan as rows_of
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab
from flowstone.replication.limbo.control_rows import Promote, decode_control
from flowstone.replication.settled_position import Decision, SettledTracker, Tracked
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import DamagedLog
from flowstone.xlog.meta import Meta
from flowstone.xlog.transactions import CONTROL_TYPES, group

CONTROL = np.array(sorted(CONTROL_TYPES), np.int64)
LOOKED_AT = np.array(sorted((*CONTROL_TYPES, RequestType.NOP)), np.int64)
"""Row types that the tracker has to see: control rows, and NOPs, which replace rolled back transactions."""

WAIT = (Flag.WAIT_ACK | Flag.WAIT_SYNC).value
"""Flags of rows whose transaction waits for a quorum, or for an earlier one that does."""


@dataclass(frozen=True, slots=True)
class _Placed(Tracked):
    """A transaction, its slab and first row number, and whether the schema makes it synchronous."""

    slab: Slab
    first: int
    touches_synchronous: bool


class Settling:
    """Finds the settled rows in the log of one instance."""

    def __init__(self) -> None:
        self._by_schema = False
        self._tracker: SettledTracker[_Placed] | None = None
        self._started_at = VClock()
        self._promoted: Promote | None = None
        self._given_up = 0
        self._reached = ("", -1)
        """File and block offset of the last row."""
        self.rolled_back = 0

    @property
    def pending(self) -> int:
        """Number of rows in pending transactions, including transactions whose verdict may be missing from the log."""
        return self._given_up + self._waiting()

    @property
    def first_pending(self) -> tuple[int, int] | None:
        """Replica id and LSN of the first pending transaction."""
        waiting = self._tracker.pending if self._tracker else ()
        return (waiting[0].replica_id, waiting[0].lsn) if waiting else None

    def _waiting(self) -> int:
        return sum(len(placed.rows) for placed in self._tracker.pending) if self._tracker else 0

    def pass_snapshot(self, meta: Meta, slab: Slab) -> None:
        """Take the start position and the owner of the limbo from a snapshot before the logs.

        A snapshot contains settled data only. Snapshots after the first log are ignored.
        """
        if self._tracker is not None:
            return
        self._started_at = VClock(meta.vclock)
        for row in slab.rows(np.flatnonzero(slab.cells[rows_of.TYPE] == RequestType.RAFT_PROMOTE)):
            body = decode_control(row.type, row.body)
            self._promoted = body if isinstance(body, Promote) else None

    def push(
        self, slab: Slab, synchronous: NDArray[np.bool_] | None, holes: Sequence[int] = ()
    ) -> Iterator[tuple[Slab, Cells]]:
        """Take the next slab of the log; yield slab and row numbers of all rows that are settled now, in log order.

        `synchronous` says for each row whether its space is synchronous, in logs whose rows have no flags; None
        otherwise. `holes` are the file offsets at which damaged bytes were skipped.
        """
        tracker = self._tracker_for(synchronous is not None)
        if tracker.is_quiet and not _may_wait(slab.cells, synchronous):
            tracker.skip_to(tracker.vclock.merged(VClock(slab.newest())))
            yield slab, np.arange(len(slab), dtype=np.int64)
        else:
            yield from _together(self._decided(tracker, slab, synchronous, holes))
        if len(slab):
            self._reached = slab.path, _block_of(slab, len(slab) - 1)

    def pass_gap(self) -> Iterator[tuple[Slab, Cells]]:
        """Handle missing rows between the previous slab and the next one; yield settled rows as `push` does."""
        if self._tracker is not None:
            yield from _together(self._give_up(self._tracker))

    def _give_up(self, tracker: SettledTracker[_Placed]) -> Iterator[_Placed]:
        waiting = self._waiting()
        decided = tracker.give_up()
        self._given_up += waiting - sum(len(placed.rows) for placed, _ in decided)
        return self._kept(decided)

    def _kept(self, decided: list[Decision[_Placed]]) -> Iterator[_Placed]:
        for placed, kept in decided:
            if kept:
                yield placed
            else:
                self.rolled_back += len(placed.rows)

    def _decided(
        self,
        tracker: SettledTracker[_Placed],
        slab: Slab,
        synchronous: NDArray[np.bool_] | None,
        holes: Sequence[int],
    ) -> Iterator[_Placed]:
        first = 0
        try:
            for transaction in group(slab.rows()):
                if holes and self._is_behind_hole(slab, first, holes):
                    yield from self._give_up(tracker)
                end = first + len(transaction.rows)
                touches = synchronous is not None and bool(synchronous[first:end].any())
                yield from self._kept(tracker.push(_Placed(transaction, slab, first, touches)))
                first = end
        except RemoteProtocolError as error:
            raise DamagedLog(slab.path, _block_of(slab, first), str(error)) from error

    def _is_behind_hole(self, slab: Slab, number: int, holes: Sequence[int]) -> bool:
        """Return True if bytes of the file were skipped between this row and the previous one."""
        if number:
            before = _block_of(slab, number - 1)
        else:
            path, reached = self._reached
            before = reached if path == slab.path else -1
        return any(before < hole < _block_of(slab, number) for hole in holes)

    def _tracker_for(self, by_schema: bool) -> SettledTracker[_Placed]:
        """Return the tracker. Create a new one when rows begin or cease to have flags, as after an upgrade of the
        server, but only once the old one has no pending transactions."""
        before = self._tracker
        if before is not None and (by_schema == self._by_schema or not before.is_quiet):
            return before
        by_space = (lambda placed: placed.touches_synchronous) if by_schema else None
        self._by_schema = by_schema
        self._tracker = SettledTracker(is_synchronous=by_space)
        if before is None:
            self._tracker.start(self._started_at, self._promoted)
        else:
            owner = Promote(before.owner_id, before.confirmed_lsn, before.term)
            self._tracker.start(before.vclock, owner, before.tenure.voids)
        return self._tracker


def _together(decided: Iterator[_Placed]) -> Iterator[tuple[Slab, Cells]]:
    """Merge adjacent transactions of one slab."""
    for _, run in groupby(decided, lambda placed: id(placed.slab)):
        together = list(run)
        numbers = [np.arange(placed.first, placed.first + len(placed.rows)) for placed in together]
        yield together[0].slab, np.concatenate(numbers)


def _block_of(slab: Slab, number: int) -> int:
    """Return the file offset of the block that contains a row."""
    return int(slab.offsets[slab.cells[rows_of.SPAN, min(number, len(slab) - 1)]])


def _may_wait(cells: Cells, synchronous: NDArray[np.bool_] | None) -> bool:
    if (cells[rows_of.FLAGS] & WAIT).any() or np.isin(cells[rows_of.TYPE], LOOKED_AT).any():
        return True
    return synchronous is not None and bool(synchronous.any())
