"""A box with only the settled transactions of a log: the data of a replica inside a program.

Applies whole transactions from slabs, in log order. A synchronous transaction and all later ones are held, undecoded,
until it is confirmed or rolled back (`replication/settled_position.py`). So changes that are visible in the box or in
`on_transaction` are never rolled back. Rows of spaces that were not chosen are skipped undecoded; definitions are
always kept. Runs of plain rows are applied by `box/lane/`. Never talks to a peer and never writes to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from flowstone.box.box import Box
from flowstone.box.definitions import read_space
from flowstone.box.dialect import Dialect
from flowstone.box.engine.space import EngineSpace, Values
from flowstone.box.engine.transaction import BoxTransaction, Statement
from flowstone.box.lane.rows import are_alone, codes_of, tables_of
from flowstone.box.lane.statement_lane import StatementLane
from flowstone.box.lane.table import Table
from flowstone.box.lane.writes import Writes
from flowstone.box.system import FIRST_USER_SPACE_ID, SPACE_ID, TRUNCATE_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors, scan
from flowstone.iproto.constants import VCLOCK_MAX, Flag, Key, RequestType
from flowstone.iproto.msgpack import unpack, unpack_body
from flowstone.iproto.row import Row
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab
from flowstone.node.changes import SettledChange
from flowstone.node.wal.replay import BULK_MIN, OF_A_PEER, Replay, Synchro, execute
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.settled_position import SettledTracker, Tracked
from flowstone.replication.vclock import VClock, VClockBuilder
from flowstone.xlog.transactions import CONTROL_TYPES
from flowstone.xlog.transactions import LogTransaction as Rows

Listener = Callable[[list[SettledChange]], None]
"""Called with the changes of each transaction, after they are in the box."""

_CONTROL: Final = frozenset(int(kind) for kind in CONTROL_TYPES)
_INSERT, _REPLACE, _DELETE = RequestType.INSERT.value, RequestType.REPLACE.value, RequestType.DELETE.value
_NOP: Final = RequestType.NOP.value
_COMMIT: Final = Flag.COMMIT.value
_LOOK: Final = -1
"""Code of rows that must be processed one by one."""


class CannotApply(FlowstoneError):
    """A row of the log cannot be applied, because the log does not continue these data."""


class RowsNeeded(FlowstoneError):
    """A renamed space is now followed, but its earlier tuples were skipped: a snapshot is needed."""


class FollowedSpaces:
    """The spaces to follow, by name or id; None: all. System spaces are always kept."""

    def __init__(self, spaces: Collection[str | int] | None = None) -> None:
        self.is_everything = spaces is None
        self._spaces: frozenset[str | int] = frozenset(spaces or ())

    def names(self, space: EngineSpace) -> bool:
        """True if the space was chosen. Only then are changes of a system space reported."""
        return self.is_everything or space.name in self._spaces or space.id in self._spaces

    def keeps(self, space: EngineSpace) -> bool:
        """True if the tuples of the space are kept."""
        return space.id < FIRST_USER_SPACE_ID or self.names(space)


@dataclass(frozen=True, slots=True)
class _Arrived(Tracked):
    """A received transaction; its rows start at row `first` of `slab`."""

    slab: Slab
    first: int
    touches_synchronous: bool = False


class _Seen(BoxTransaction):
    """A transaction that records the old and the new tuple of each change."""

    def __init__(self, box: Box) -> None:
        super().__init__(box)
        self.images: list[tuple[bytes | None, bytes | None]] = []

    def write(
        self,
        space: EngineSpace,
        old: bytes | None,
        new: bytes | None,
        old_values: Values | None,
        new_values: Values | None,
    ) -> None:
        super().write(space, old, new, old_values, new_values)
        self.images.append((old, new))


class SnapshotBox:
    """A snapshot that is being received into its own box, which is not visible before it is complete."""

    def __init__(self, dialect: Dialect, vclock: VClock, choice: FollowedSpaces) -> None:
        self.box = Box(dialect)
        self.box.is_recovering = True
        self.vclock = vclock.without_zero()
        self._choice = choice
        self._replay = Replay(self.box, hint=OF_A_PEER)

    @property
    def synchro(self) -> Synchro:
        return self._replay.synchro

    @property
    def row_count(self) -> int:
        return self._replay.row_count

    def push(self, slab: Slab) -> None:
        """Add the next rows of the snapshot."""
        if self._choice.is_everything:
            self._replay.push_snapshot(slab)
            return
        # Apply the definitions first: the choice needs the names of the spaces.
        space_ids = slab.cells[scan.SPACE_ID]
        is_users = space_ids >= FIRST_USER_SPACE_ID
        first = int(np.argmax(is_users)) if is_users.any() else len(slab)
        self._replay.push_snapshot(replace(slab, cells=slab.cells[:, :first]))
        kept = [space.id for space in self.box.spaces.values() if self._choice.keeps(space)]
        wanted = np.flatnonzero(~is_users | np.isin(space_ids, kept))
        rest = np.ascontiguousarray(slab.cells[:, wanted[wanted >= first]])
        self._replay.push_snapshot(replace(slab, cells=rest))

    def complete(self) -> None:
        """Finish the box after the last row: end recovery."""
        self.box.is_recovering = False


class SettledBox:
    """A box that is always at a settled position. `guard` is held while a transaction is applied."""

    def __init__(
        self, snapshot: SnapshotBox, choice: FollowedSpaces, *, guard: AbstractContextManager[Any] | None = None
    ) -> None:
        self.on_transaction: list[Listener] = []
        self.box = snapshot.box
        self.box.is_read_only = True
        self._lane = StatementLane(self.box)
        self._choice = choice
        self._guard = guard if guard is not None else nullcontext()
        self._by_schema = False
        self._begin(snapshot)

    def _begin(self, snapshot: SnapshotBox) -> None:
        self._vclock = VClockBuilder(snapshot.vclock)
        self._seen = VClockBuilder(snapshot.vclock)
        self._kept = self._find_kept()
        self._held_definitions: dict[int, bool] = {}
        self._tracker: SettledTracker[_Arrived] = SettledTracker()
        self._tracker.start(snapshot.vclock, snapshot.synchro.promote())

    def replace(self, snapshot: SnapshotBox) -> None:
        """Replace the data with another snapshot at once. Handles of spaces remain valid."""
        with self._guard:
            self.box.take_over(snapshot.box)
            self.box.is_read_only = True
            self._begin(snapshot)

    @property
    def vclock(self) -> VClock:
        """The settled position, which the box is at."""
        return self._vclock.vclock()

    @property
    def held_count(self) -> int:
        """The number of transactions that are pending or wait for a pending one."""
        return len(self._tracker.pending)

    def follows(self, space: EngineSpace) -> bool:
        """True if the tuples of the space are kept."""
        return self._choice.keeps(space)

    def resume(self, *, has_flags: bool) -> None:
        """Prepare for a new subscription at `vclock`: discard the held transactions, which are sent again.

        `has_flags`: rows have a flag for synchronous transactions; otherwise the definitions of their spaces decide.
        """
        before = self._tracker
        touches = None if has_flags else _touches_synchronous
        self._tracker = SettledTracker(is_synchronous=touches)
        promote = Promote(before.owner_id, before.confirmed_lsn, before.term)
        self._tracker.start(self.vclock, promote, before.tenure.voids)
        self._by_schema = not has_flags
        self._held_definitions = {}
        self._seen = VClockBuilder(self.vclock)

    # --- slabs ---

    def push(self, slab: Slab) -> None:
        """Process the next rows of the log, which must be whole transactions. Rows received before are skipped.

        Raise CannotApply or RowsNeeded for a transaction that cannot be applied; the box is then as before it.
        """
        slab = self._news(slab)
        if not len(slab):
            return
        codes = _codes(slab.cells)
        edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(slab)]
        for first, stop in pairwise(edges):
            is_plain = codes[first] != _LOOK and self._tracker.is_quiet
            self._each(slab, self._in_bulk(slab, first, stop) if is_plain else first, stop)

    def _news(self, slab: Slab) -> Slab:
        """Return the slab without rows received before, such as over an earlier connection."""
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        if replica_ids.max(initial=0) >= VCLOCK_MAX:
            raise errors.UnknownReplica(f"Replica {replica_ids.max()} is not registered with this replica set")
        known = np.array([self._seen.get(number) for number in range(int(replica_ids.max(initial=0)) + 1)], np.int64)
        is_new = lsns > known[replica_ids]
        return slab if is_new.all() else replace(slab, cells=np.ascontiguousarray(slab.cells[:, is_new]))

    def _in_bulk(self, slab: Slab, first: int, stop: int) -> int:
        """Apply single-row transactions of one type and space; return the end of those that do not need `_each`."""
        cells = slab.cells[:, first:stop]
        space = self.box.spaces.get(int(cells[scan.SPACE_ID, 0]))
        if space is None or space.id < FIRST_USER_SPACE_ID or (self._by_schema and space.definition.is_sync):
            return first
        if space.id not in self._kept:
            self._pass_by(slab, cells)
            return stop
        tables = tables_of(self.box, codes_of(cells), lambda _: True) if len(cells[0]) >= BULK_MIN else {}
        if not tables:
            return first
        if self.on_transaction:
            return self._put_each(space, tables, slab, first, stop)
        with self._guard:
            end = first + len(self._execute_rows(slab, first, stop, tables).marks)
            self._pass_by(slab, slab.cells[:, first:end])
        return end

    def _execute_rows(self, slab: Slab, first: int, stop: int, tables: dict[int, Table]) -> Writes:
        """Execute rows up to one that the lane cannot execute."""
        written = Writes()
        self._lane.begin(written, 0)
        self.box.is_recovering = True  # the upstream has already checked the rows
        try:
            self._lane.execute_rows(slab.buf, slab.cells, first, stop, tables)
        finally:
            self.box.is_recovering = False
        return written

    def _pass_by(self, slab: Slab, cells: Cells) -> None:
        """Advance the positions past rows that are applied or skipped."""
        if not cells.shape[1]:
            return
        newest = VClock(replace(slab, cells=cells).newest())
        with self._guard:
            self._vclock.merge(newest)
        self._seen.merge(newest)
        self._tracker.skip_to(self.vclock)

    def _put_each(self, space: EngineSpace, tables: dict[int, Table], slab: Slab, first: int, stop: int) -> int:
        """Apply the rows one by one, and call the listeners after each; return the end of the rows applied."""
        end = first
        for row in slab.rows(np.arange(first, stop)):
            with self._guard:
                written = self._execute_rows(slab, end, end + 1, tables)
                if not written:
                    break
                self._vclock.follow(row.replica_id, row.lsn)
            end += 1
            if written.changes:
                index, key, old = written.changes[:3]
                change = SettledChange(Statement(row.type, space, row.body), row, old, index.get(key))
                for listener in self.on_transaction:
                    listener([change])
        self._pass_by(slab, slab.cells[:, first:end])
        return end

    def _each(self, slab: Slab, first: int, stop: int) -> None:
        """Pass the transactions to the tracker one by one, and apply the transactions that it releases."""
        rows: list[Row] = []
        for number, row in enumerate(slab.rows(np.arange(first, stop)), first):
            rows.append(row)
            self._seen.follow(row.replica_id, row.lsn)
            if not row.flags & _COMMIT:
                continue
            first = number + 1 - len(rows)
            touches = self._by_schema and self._touches_synchronous(slab, first, number + 1)
            arrived, rows = _Arrived(Rows(tuple(rows)), slab, first, touches), []
            for decided, is_kept in self._tracker.push(arrived):
                self._settle(decided, is_kept=is_kept)
            self._note_held(arrived)

    def _touches_synchronous(self, slab: Slab, first: int, stop: int) -> bool:
        """True if a row is of a synchronous space, by the definitions in the box and in held transactions."""
        held, spaces = self._held_definitions, self.box.spaces
        return any(
            held[number] if number in held else number in spaces and spaces[number].definition.is_sync
            for number in slab.cells[scan.SPACE_ID, first:stop].tolist()
        )

    def _note_held(self, arrived: _Arrived) -> None:
        """Record space definitions in a held transaction: they decide whether later transactions are synchronous.

        An UPDATE of `_space` is not decoded; it takes effect only when it is applied.
        """
        if self._tracker.is_quiet:
            self._held_definitions = {}
            return
        for number, row in enumerate(arrived.rows, arrived.first):
            if int(arrived.slab.cells[scan.SPACE_ID, number]) == SPACE_ID and row.type in (_INSERT, _REPLACE):
                definition = read_space(unpack_body(row.body)[Key.TUPLE.value])
                self._held_definitions[definition.id] = definition.is_sync

    # --- transactions ---

    def _settle(self, decided: _Arrived, *, is_kept: bool) -> None:
        changes: list[SettledChange] = []
        with self._guard:
            if is_kept and decided.rows[0].type not in _CONTROL:
                changes = self._apply(decided)
            for row in decided.rows:
                self._vclock.follow(row.replica_id, row.lsn)
        if changes:
            for listener in self.on_transaction:
                listener(changes)

    def _apply(self, decided: _Arrived) -> list[SettledChange]:
        box, effect = self.box, _Seen(self.box)
        changes: list[SettledChange] = []
        box.is_recovering = True  # the upstream has already checked the rows
        try:
            for number, row in enumerate(decided.rows, decided.first):
                if row.type != _NOP:
                    changes += self._execute(effect, decided.slab, number, row)
        except RowsNeeded:
            effect.rollback()
            raise
        except FlowstoneError as error:
            effect.rollback()
            raise CannotApply(
                f"cannot apply transaction with LSN {decided.lsn} of replica {decided.replica_id}: {error.message}",
                hint="the log does not continue the replica's data: call follow again",
            ) from error
        finally:
            box.is_recovering = False
        return changes

    def _execute(self, effect: _Seen, slab: Slab, number: int, row: Row) -> list[SettledChange]:
        """Apply a row, if its space is kept. Return the changes to report to the listeners."""
        space_id = int(slab.cells[scan.SPACE_ID, number])
        if space_id >= FIRST_USER_SPACE_ID and space_id not in self._kept:
            return []
        space, count = self.box.space(space_id), len(effect.images)
        execute(self.box, effect, slab, number)
        changes: list[SettledChange] = []
        if self.on_transaction and self._choice.names(space):
            statement = Statement(row.type, space, row.body)
            changes = [SettledChange(statement, row, old, new) for old, new in effect.images[count:]]
        if space_id in (SPACE_ID, TRUNCATE_ID):
            for old, new in effect.images[count:]:
                changes += self._redefined(effect, row, space_id, old, new)
        return changes

    # --- definitions ---

    def _find_kept(self) -> dict[int, EngineSpace]:
        """Return the spaces that are kept, by id."""
        return {space.id: space for space in self.box.spaces.values() if self._choice.keeps(space)}

    def _redefined(
        self, effect: _Seen, row: Row, space_id: int, old: bytes | None, new: bytes | None
    ) -> list[SettledChange]:
        """After a change of `_space` or `_truncate`, update the kept spaces. Return the TRUNCATE or DROP to report."""
        raw = new or old
        assert raw is not None
        about = unpack(raw)[0]
        before, kept = self._kept, self._find_kept()
        was_kept = before.get(about)
        if space_id == TRUNCATE_ID:
            emptied = "TRUNCATE" if new is not None else ""
        else:
            emptied = "DROP" if new is None else ""
            self._change_kept(effect, about, was_kept, kept)
        self._kept = kept
        effect.on_rollback(lambda: setattr(self, "_kept", before))
        if not emptied or was_kept is None or not self.on_transaction or about < FIRST_USER_SPACE_ID:
            return []
        return [SettledChange(Statement(row.type, was_kept, row.body), row, type=emptied)]

    def _change_kept(
        self, effect: _Seen, about: int, was_kept: EngineSpace | None, kept: dict[int, EngineSpace]
    ) -> None:
        """Handle a space that a rename adds to, or removes from, the kept spaces."""
        space = self.box.spaces.get(about)
        if space is None or (about in kept) == (was_kept is not None):
            return
        if was_kept is not None:
            self.box.put_space(space.empty(self.box.collations))
            effect.on_rollback(lambda: self.box.put_space(space))
        elif space.indexes:  # a new space has no indexes, and so no tuples
            raise RowsNeeded(f"space '{space.name}' was not followed under its former name")


def _touches_synchronous(arrived: _Arrived) -> bool:
    return arrived.touches_synchronous


def _codes(cells: Cells) -> Cells:
    """Return a code of type and space for each row that is an asynchronous transaction of its own; else _LOOK."""
    is_plain = are_alone(cells) & (cells[scan.SPACE_ID] >= 0)
    codes: Cells = np.where(is_plain, cells[scan.SPACE_ID] * 256 + cells[scan.TYPE], _LOOK)
    return codes
