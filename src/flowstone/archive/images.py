"""Images: the old and new tuples of each change, added to the rows of an archive as WAL extensions.

Keeps the state of all spaces, loaded from the archive's own files, and applies each row to it before the row is
written; a transaction that is rolled back is undone. A row that replaces or deletes a tuple gets OLD_TUPLE. An UPDATE
or UPSERT gets NEW_TUPLE, because its row has only operations. Real servers, also 2.6, ignore both keys in recovery.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from flowstone.archive.settled_tracker import FLAGS_SINCE, newest
from flowstone.box.box import Box
from flowstone.box.engine.space import EngineSpace, Values
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.box.lane.rows import are_alone, codes_of, tables_of
from flowstone.box.lane.statement_lane import StatementLane
from flowstone.box.lane.writes import Writes
from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.iproto.slab import Slab
from flowstone.node.wal.recovery import RecoveredBox, dialect_of, recover
from flowstone.node.wal.replay import BULK_MIN, Applied, execute
from flowstone.outside import Outside
from flowstone.replication.row_stream import slab_of_rows
from flowstone.replication.settled_position import SettledTracker
from flowstone.replication.vclock import VClock, VClockBuilder
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.transactions import CONTROL_TYPES, group
from flowstone.xlog.transactions import LogTransaction as Rows

_CONTROL: Final = frozenset(int(kind) for kind in CONTROL_TYPES)
_INSERT, _REPLACE, _NOP = RequestType.INSERT.value, RequestType.REPLACE.value, RequestType.NOP.value
_WAIT_ACK: Final = Flag.WAIT_ACK.value
_HAVE_TUPLE: Final = frozenset((_INSERT, _REPLACE))
_OLD, _NEW = bytes((Key.OLD_TUPLE,)), bytes((Key.NEW_TUPLE,))

Image = tuple[bytes | None, bytes | None]
"""The tuple before and after a change."""


class CannotImage(FlowstoneError):
    """A row cannot be applied to the state of the archive."""


class _Seen(BoxTransaction):
    """A transaction that records the old and the new tuple of each change."""

    def __init__(self, box: Box) -> None:
        super().__init__(box)
        self.images: list[Image] = []

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


class Images:
    """The state after all rows so far. `add` applies the next rows and returns them with images."""

    def __init__(self, box: Box, recovered: RecoveredBox, version: tuple[int, ...]) -> None:
        self._box = box
        self._box.is_recovering = True  # the upstream has already checked the rows
        self._lane = StatementLane(box)
        self._by_schema = version < FLAGS_SINCE
        self._vclock = VClockBuilder(recovered.vclock)
        self._tracker: SettledTracker[Applied] = SettledTracker(
            is_synchronous=(lambda applied: applied.touches_synchronous) if self._by_schema else None
        )
        pending = recovered.synchro.pending
        self._tracker.start(_before(recovered.vclock, pending), recovered.synchro.promote())
        for applied in pending:
            self._tracker.push(applied)

    @classmethod
    async def load(cls, outside: Outside, directory: str, version: tuple[int, ...]) -> Images:
        """Load the state from the files of an archive, for rows of a server that runs `version`."""
        files = scan_directory(outside.disk, directory)
        dialect = dialect_of(files)
        assert dialect is not None
        box = Box(dialect)
        return cls(box, await recover(outside, files, box), version)

    def add(self, rows: bytes) -> bytes:
        """Apply the next rows, which must be whole transactions, and return them with images."""
        slab = slab_of_rows(rows, "the stream")
        parts: list[bytes] = []
        at = 0
        for first, stop in _runs(slab):
            parts += self._each(slab, at, first)
            parts += self._in_bulk(slab, first, stop) or self._each(slab, first, stop)
            at = stop
        parts += self._each(slab, at, len(slab))
        return b"".join(parts)

    def _in_bulk(self, slab: Slab, first: int, stop: int) -> list[bytes]:
        """Apply single-row INSERTs or REPLACEs of one space; return [] if they have to be applied one by one."""
        if not self._tracker.is_quiet:
            return []
        codes = codes_of(slab.cells[:, first:stop])
        tables = tables_of(self._box, codes, lambda table: not table.is_sync)
        with Writes() as written:
            self._lane.begin(written, 0)
            if self._lane.execute_rows(slab.buf, slab.cells, first, stop, tables) < stop - first:
                written.rollback()
                return []
        self._vclock.merge(newest(slab, first, stop))
        return [_with_image(slab, number, old, None) for number, old in enumerate(written.olds(), first)]

    def _each(self, slab: Slab, first: int, stop: int) -> list[bytes]:
        parts: list[bytes] = []
        for transaction in group(slab.rows(np.arange(first, stop))):
            parts += self._apply(slab, first, transaction)
            first += len(transaction.rows)
        return parts

    def _apply(self, slab: Slab, first: int, transaction: Rows) -> list[bytes]:
        """Apply one transaction, whose rows start at row `first` of the slab, and return its rows with images."""
        was_quiet = self._tracker.is_quiet
        effect = _Seen(self._box)
        parts: list[bytes] = []
        is_control = transaction.rows[0].type in _CONTROL
        try:
            for number, row in enumerate(transaction.rows, first):
                count = len(effect.images)
                if not is_control and row.type != _NOP:
                    execute(self._box, effect, slab, number)
                old, new = effect.images[count] if len(effect.images) > count else (None, None)
                parts.append(_with_image(slab, number, old, new if row.type not in _HAVE_TUPLE else None))
        except FlowstoneError as error:
            effect.rollback()
            which = f"LSN {transaction.lsn} of replica {transaction.replica_id}"
            raise CannotImage(
                f"cannot add images to transaction with {which}: {error.message}", hint="archive without images"
            ) from error
        waits = transaction.flags & _WAIT_ACK or (self._by_schema and effect.is_sync)
        if is_control or waits or not was_quiet:
            self._decide(Applied(transaction, effect, effect.is_sync))
        for row in transaction.rows:
            self._vclock.follow(row.replica_id, row.lsn)
        return parts

    def _decide(self, applied: Applied) -> None:
        """Pass a transaction to the tracker, and undo the transactions that it rolls back, newest first."""
        if self._tracker.is_quiet:
            self._tracker.skip_to(self._tracker.vclock.merged(self._vclock.vclock()))
        for decided, kept in reversed(self._tracker.push(applied)):
            if not kept:
                decided.effect.rollback()


def _before(vclock: VClock, pending: tuple[Applied, ...]) -> VClock:
    """Return the position before the first pending transaction."""
    lsns = vclock.to_mapping()
    for applied in pending:
        for row in applied.rows:
            lsns[row.replica_id] = min(lsns.get(row.replica_id, 0), row.lsn - 1)
    return VClock(lsns)


def _runs(slab: Slab) -> Iterator[tuple[int, int]]:
    """Yield long runs of rows that can be applied in bulk: asynchronous single-row INSERTs or REPLACEs of one space."""
    cells = slab.cells
    types = cells[scan.TYPE]
    is_candidate = are_alone(cells) & ((types == _INSERT) | (types == _REPLACE))
    is_candidate &= cells[scan.SPACE_ID] >= FIRST_USER_SPACE_ID
    kind = np.where(is_candidate, cells[scan.SPACE_ID] * 256 + types, -1)
    edges = np.concatenate(([0], np.flatnonzero(np.diff(kind)) + 1, [len(slab)]))
    is_long = (np.diff(edges) >= BULK_MIN) & (kind[edges[:-1]] >= 0)
    yield from zip(edges[:-1][is_long].tolist(), edges[1:][is_long].tolist(), strict=True)


def _with_image(slab: Slab, number: int, old: bytes | None, new: bytes | None) -> bytes:
    """Return the bytes of a row with the tuples added at the end of its body; rows of system spaces stay unchanged."""
    at, body, end, space_id = slab.cells[[scan.ROW_AT, scan.BODY_AT, scan.ROW_END, scan.SPACE_ID], number].tolist()
    if (old is None and new is None) or space_id < FIRST_USER_SPACE_ID or slab.payload[body] & 0xF0 != 0x80:
        return slab.payload[at:end]
    parts = [slab.payload[at:body], b"", slab.payload[body + 1 : end]]
    count = slab.payload[body]
    for key, image in ((_OLD, old), (_NEW, new)):
        if image is not None:
            parts += (key, image)
            count += 1
    parts[1] = bytes((count,))
    return b"".join(parts)
