"""Tracks the settled position of an archived log. Every row passes once, when it is written or read again.

Runs `replication.settled_position` over slabs. Rows that are neither synchronous nor control rows nor definitions pass
as a whole; other rows are processed transaction by transaction. Rows of servers before 2.8.1 have no flag for
synchronous transactions; for them, the definitions of the spaces decide. A definition that is rolled back is
undone here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowstone.box.schema import SchemaTracker
from flowstone.box.system import INDEX_ID, SPACE_ID
from flowstone.iproto import scan
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.settled_position import SettledTracker, Tenure, Tracked
from flowstone.replication.vclock import VClock
from flowstone.xlog.transactions import CONTROL_TYPES, group

FLAGS_SINCE = (2, 8, 1)
"""The first release whose rows have a flag for synchronous transactions."""

_CONTROL = np.array(sorted(CONTROL_TYPES), np.int64)
_NOP = RequestType.NOP.value
_WAIT = (Flag.WAIT_ACK | Flag.WAIT_SYNC).value

Range = tuple[int, int, int]
"""Originator, first and last LSN."""


class Judged(NamedTuple):
    """Kinds of rows in a part of the log, and the rows that it rolled back."""

    has_definitions: bool = False
    has_synchronous: bool = False
    has_control: bool = False
    rolled_back: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class _Placed(Tracked):
    """A transaction, whether the schema makes it synchronous, and the schema before it if it changes the schema."""

    touches_synchronous: bool
    schema_before: SchemaTracker | None


class Verdicts:
    """Tracks the settled position of one log. At a snapshot, call `define` with its rows, then `start`."""

    def __init__(self) -> None:
        self._schema = SchemaTracker()
        self._by_schema = False
        self._tracker: SettledTracker[_Placed] = SettledTracker()

    @property
    def settled(self) -> VClock:
        return self._tracker.vclock

    @property
    def is_quiet(self) -> bool:
        """True if no transaction is pending."""
        return self._tracker.is_quiet

    @property
    def pending_transactions(self) -> int:
        return len(self._tracker.pending)

    @property
    def owner(self) -> tuple[int, int, int] | None:
        """The owner of the limbo, its last confirmed LSN and the term; None if the limbo never had an owner."""
        tracker = self._tracker
        has_owner = tracker.owner_id or tracker.term
        return (tracker.owner_id, tracker.confirmed_lsn, tracker.term) if has_owner else None

    @property
    def tenure(self) -> Tenure:
        """The current tenure; see `SettledTracker.tenure`."""
        return self._tracker.tenure

    @property
    def schema(self) -> SchemaTracker:
        """The schema after all rows so far. Callers may change it only before `start`."""
        return self._schema

    def define(self, slab: Slab) -> None:
        """Read the definitions of spaces from rows of a snapshot."""
        for row in slab.rows(np.flatnonzero(_defining(slab, 0, len(slab)))):
            self._schema.apply(row.type, row.body)

    def start(self, vclock: VClock, promote: Promote | None = None) -> None:
        """Start at a snapshot of `vclock`, with no pending transactions."""
        self._tracker.start(vclock, promote)

    def follow_version(self, version: tuple[int, ...]) -> None:
        """Set the version of the server that wrote the next rows. No effect while transactions are pending."""
        by_schema = version < FLAGS_SINCE
        # Pending transactions keep the rules of the log that they were written to.
        if by_schema == self._by_schema or not self._tracker.is_quiet:
            return
        before = self._tracker
        self._by_schema = by_schema
        self._tracker = SettledTracker(
            is_synchronous=(lambda placed: placed.touches_synchronous) if by_schema else None
        )
        owner = Promote(before.owner_id, before.confirmed_lsn, before.term)
        self._tracker.start(before.vclock, owner, before.tenure.voids)

    def skip(self, vclock: VClock) -> None:
        """Skip rows up to `vclock`, all of which must be plain. Allowed only while no transaction is pending."""
        self._tracker.skip_to(self._tracker.vclock.merged(vclock))

    def push(self, slab: Slab, first: int, stop: int) -> Judged:
        """Process rows `first` to `stop`, which are the next transactions of the log and must be whole."""
        defining = _defining(slab, first, stop)
        synchronous = self._synchronous(slab, first, stop)
        has_control = bool(np.isin(slab.cells[scan.TYPE, first:stop], _CONTROL).any())
        has_definitions, has_synchronous = bool(defining.any()), bool(synchronous.any())
        # Once the limbo has had an owner, NOPs show which transactions were rolled back.
        has_synchronous |= bool(self._tracker.term) and bool((slab.cells[scan.TYPE, first:stop] == _NOP).any())
        if self._tracker.is_quiet and not (has_definitions or has_synchronous or has_control):
            self._tracker.skip_to(self._tracker.vclock.merged(newest(slab, first, stop)))
            return Judged()
        rolled_back: list[Range] = []
        for placed in self._placed(slab, first, stop):
            has_synchronous |= placed.touches_synchronous
            withdrawn = [each for each, kept in self._tracker.push(placed) if not kept]
            rolled_back += [span for each in withdrawn for span in _ranges(each.rows)]
            self._take_back_definitions(withdrawn)
        return Judged(has_definitions, has_synchronous, has_control, tuple(rolled_back))

    def _synchronous(self, slab: Slab, first: int, stop: int) -> NDArray[np.bool_]:
        """Return which rows are synchronous, without regard to definitions among these rows."""
        waits: NDArray[np.bool_] = (slab.cells[scan.FLAGS, first:stop] & _WAIT) != 0
        if self._by_schema and (spaces := self._schema.schema.synchronous):
            waits |= np.isin(slab.cells[scan.SPACE_ID, first:stop], sorted(spaces))
        return waits

    def _placed(self, slab: Slab, first: int, stop: int) -> Iterator[_Placed]:
        """Yield the transactions. A definition takes effect after its own transaction."""
        space_ids = slab.cells[scan.SPACE_ID]
        defining = np.zeros(len(slab), np.bool_)
        defining[first:stop] = _defining(slab, first, stop)
        for transaction in group(slab.rows(np.arange(first, stop))):
            end = first + len(transaction.rows)
            touches = self._by_schema and not self._schema.schema.synchronous.isdisjoint(space_ids[first:end].tolist())
            before = None
            if defining[first:end].any():
                # Without pending transactions, a definition cannot be rolled back; copying the schema for each would be
                # slow.
                before = deepcopy(self._schema) if not self._tracker.is_quiet else None
                for row in slab.rows(first + np.flatnonzero(defining[first:end])):
                    self._schema.apply(row.type, row.body)
            yield _Placed(transaction, touches, before)
            first = end

    def _take_back_definitions(self, withdrawn: list[_Placed]) -> None:
        """Restore the schema before the first of the transactions: a rollback always covers the end of the log."""
        before = next((placed.schema_before for placed in withdrawn if placed.schema_before is not None), None)
        if before is not None:
            self._schema = before


def _defining(slab: Slab, first: int, stop: int) -> NDArray[np.bool_]:
    space_ids = slab.cells[scan.SPACE_ID, first:stop]
    defining: NDArray[np.bool_] = (space_ids == SPACE_ID) | (space_ids == INDEX_ID)
    return defining


def newest(slab: Slab, first: int, stop: int) -> VClock:
    """Return the highest LSN of each originator among rows `first` to `stop`."""
    return VClock(replace(slab, cells=slab.cells[:, first:stop]).newest())


def _ranges(rows: tuple[Row, ...]) -> list[Range]:
    found: dict[int, tuple[int, int]] = {}
    for row in rows:
        first, last = found.get(row.replica_id, (row.lsn, row.lsn))
        found[row.replica_id] = min(first, row.lsn), max(last, row.lsn)
    return [(replica_id, first, last) for replica_id, (first, last) in found.items()]
