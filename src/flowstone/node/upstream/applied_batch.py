"""A batch: rows of a slab that have been applied but not yet submitted, and the effects that roll them back.

`row_applier.py` fills batches and submits them to the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

from flowstone.box.engine.read_view import ReadView
from flowstone.box.engine.transaction import BoxTransaction, Statement
from flowstone.box.lane.writes import Writes
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row, encode_header
from flowstone.iproto.slab import Slab
from flowstone.node.wal.replay import BULK_MIN
from flowstone.replication.row_stream import journal_rows, replaces_control

_NOP: Final = RequestType.NOP.value
_FEW: Final = 2
"""Up to this number of rows, encoding them here is faster than calling a kernel."""

_columns: Final = itemgetter(
    scan.TYPE, scan.REPLICA_ID, scan.GROUP_ID, scan.LSN, scan.TSN, scan.FLAGS, scan.BODY_AT, scan.ROW_END
)


class Together:
    """The effects of several transactions, rolled back as one."""

    __slots__ = ("_effects",)

    def __init__(self, effects: Sequence[Writes | BoxTransaction]) -> None:
        self._effects = effects

    def rollback(self) -> None:
        for effect in reversed(self._effects):
            effect.rollback()

    def hide_from(self, view: ReadView) -> None:
        for effect in reversed(self._effects):
            effect.hide_from(view)


class AppliedBatch:
    """Consecutive rows of a slab, from `first` to `stop`, that have been applied but not submitted."""

    def __init__(self, slab: Slab, at: int) -> None:
        self.slab = slab
        self.first = self.stop = at
        self.effects: list[Writes | BoxTransaction] = []
        self.statements: list[Statement] = []
        self._changed: list[tuple[int, int, bytes]] = []
        self.has_facts = False
        """True if a row has an effect: NOPs only advance the vclock."""

    def add(
        self,
        stop: int,
        effect: Writes | BoxTransaction,
        rows: bytes | None = None,
        *,
        has_effect: bool | None = None,
    ) -> None:
        """Add the rows up to `stop`, which `effect` rolls back.

        `rows` replaces them in the log. `has_effect` is False if all rows are NOPs or were made NOPs; if it is None,
        the types of the rows decide.
        """
        if has_effect is None:
            has_effect = not (self.slab.cells[scan.TYPE, self.stop : stop] == _NOP).all()
        self.has_facts = self.has_facts or has_effect
        if rows is not None:
            self._changed.append((self.stop, stop, rows))
        self.stop = stop
        self.effects.append(effect)
        if isinstance(effect, BoxTransaction):
            self.statements += effect.statements

    def rows(self, now: float) -> bytes:
        """Return the rows for the log, with replacements."""
        if not self._changed:
            return _log_rows(self.slab, self.first, self.stop, now)
        parts, at = [], self.first
        for first, stop, rows in self._changed:
            parts += [_log_rows(self.slab, at, first, now), rows]
            at = stop
        return b"".join([*parts, _log_rows(self.slab, at, self.stop, now)])

    def lsns(self) -> dict[int, int]:
        """Return the last LSN of each originator."""
        cells = self.slab.cells[:, self.first : self.stop]
        if cells.shape[1] < BULK_MIN:
            # The last LSN of an originator is its highest.
            return dict(zip(cells[scan.REPLICA_ID].tolist(), cells[scan.LSN].tolist(), strict=True))
        return replace(self.slab, cells=cells).newest()

    def go_on(self, at: int) -> None:
        """Empty the batch; the next rows begin at `at`."""
        self.first = self.stop = at
        self.effects, self.statements, self._changed, self.has_facts = [], [], [], False


def _log_rows(slab: Slab, first: int, stop: int, now: float) -> bytes:
    """Encode rows for our log: with our own timestamp, and without what only streams have."""
    if stop - first > _FEW:
        return journal_rows(slab, first, stop, now)
    parts: list[bytes] = []
    for number, row in enumerate(slab.cells[:, first:stop].T.tolist(), first):
        kind, replica_id, group_id, lsn, tsn, flags, body_at, end = _columns(row)
        is_explicit = kind == _NOP and replaces_control(slab, number)
        header = Row(kind, replica_id, group_id, lsn, now, tsn, flags)
        parts += [encode_header(header, is_explicit=is_explicit), slab.payload[body_at:end]]
    return b"".join(parts)
