"""Reading our own logs from a position on while they are being written: for relays that are behind, and for JOIN.

Blocks on the disk, so it runs in a worker; one call at a time. Nothing beyond the position that the caller names is
given out: what the journal has not reported may still be taken back.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.constants import VCLOCK_MAX
from flowstone.iproto.scan import Cells
from flowstone.outside import Disk
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import ListedFile, scan_directory
from flowstone.xlog.reader import LogFile, Slab

ROWS_MAX: Final = 16384
"""Rows that are given out at once, unless they are one block: whoever gets them has something else to do, too."""


class LogsGone(FlowstoneError):
    """Logs between `have` and `need` are not there any more."""

    def __init__(self, have: VClock, need: VClock) -> None:
        super().__init__(f"no log holds what comes between {have} and {need}", hint="take a new snapshot")
        self.have = have
        self.need = need


class Piece(NamedTuple):
    """Consecutive rows of the log. Some may be older than the position that was asked for."""

    slab: Slab
    after: VClock


class LogReader:
    """Gives out the rows of the logs in `directory` behind `position`, which local rows have no part in."""

    def __init__(self, disk: Disk, directory: str, position: VClock) -> None:
        self._disk = disk
        self._directory = directory
        self._position = position.without_zero()
        self._log: LogFile | None = None
        self._offset = 0
        self._rest: Slab | None = None

    def read(self, limit: VClock) -> Piece | None:
        """The next rows, none of them behind `limit`, which is a position of the log; None: there are no more yet.

        LogsGone where rows are missing.
        """
        if self._log is None:
            self._open(self._first(limit))
        while True:
            piece, is_at_limit = self._next(limit)
            if piece is not None or is_at_limit:
                return piece
            following = self._following()
            if following is None:
                return None
            # The journal may have ended this log after we came to its end, and before it began the next.
            piece, is_at_limit = self._next(limit)
            if piece is not None or is_at_limit:
                return piece
            self._check(following)
            self._open(following)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _first(self, limit: VClock) -> ListedFile:
        """The last log that begins at or before the position."""
        logs = scan_directory(self._disk, self._directory).logs
        for log in reversed(logs):
            if VClock(log.meta.vclock).without_zero() <= self._position:
                return log
        raise LogsGone(self._position, VClock(logs[0].meta.vclock) if logs else limit)

    def _following(self) -> ListedFile | None:
        assert self._log is not None
        signature = VClock(self._log.meta.vclock).signature
        logs = scan_directory(self._disk, self._directory).logs
        return next((log for log in logs if log.signature > signature), None)

    def _check(self, following: ListedFile) -> None:
        """Each log begins where the one before it ended, and names its start; but for what a new JOIN came before."""
        assert self._log is not None
        named, start = following.meta.prev_vclock, VClock(following.meta.vclock)
        if (named is not None and named != self._log.meta.vclock) or not start.without_zero() <= self._position:
            raise LogsGone(self._position, start)

    def _open(self, listed: ListedFile) -> None:
        log = LogFile.open(self._disk, listed.path)
        self.close()
        self._log = log
        self._offset = log.first_block
        self._position = self._position.merged(VClock(log.meta.vclock).without_zero())

    def _next(self, limit: VClock) -> tuple[Piece | None, bool]:
        """The next rows of this log, and whether there are more that `limit` keeps back."""
        if self._rest is None:
            is_at_limit = self._load(limit)
            if self._rest is None:
                return None, is_at_limit
        piece, self._rest = _split(self._rest)
        self._position = self._position.merged(VClock(piece.newest()).without_zero())
        return Piece(piece, self._position), False

    def _load(self, limit: VClock) -> bool:
        """Decodes the next blocks, as far as they are not behind `limit`; whether nothing is left of them then.

        What is behind it is read again later: it may have been taken back and be something else by then.
        """
        assert self._log is not None
        chunk = next(self._log.chunks(self._offset), None)
        if chunk is None:
            return False
        slab = chunk.decode()
        stop = _count_up_to(slab, limit)
        self._offset = chunk.end if stop == len(slab) else int(slab.offsets[slab.cells[scan.SPAN, stop]])
        self._rest = _part(slab, 0, stop) if stop else None
        return not stop


def _part(slab: Slab, start: int, stop: int) -> Slab:
    return Slab(slab.path, slab.payload, slab.buf, slab.cells[:, start:stop], slab.offsets)


def _split(slab: Slab) -> tuple[Slab, Slab | None]:
    """The first blocks, of about ROWS_MAX rows, and the others: blocks hold whole transactions."""
    if len(slab) <= ROWS_MAX:
        return slab, None
    spans = slab.cells[scan.SPAN]
    at = int(np.searchsorted(spans, spans[ROWS_MAX]))
    if at == 0:
        at = int(np.searchsorted(spans, spans[0], side="right"))
    return _part(slab, 0, at), _part(slab, at, len(slab)) if at < len(slab) else None


def _count_up_to(slab: Slab, limit: VClock) -> int:
    """How many rows of the slab, which are in the order of the log, are not behind `limit`."""
    lsns: Cells = np.zeros(VCLOCK_MAX, np.int64)
    for replica_id, lsn in limit:
        lsns[replica_id] = lsn
    beyond = slab.cells[scan.LSN] > lsns[slab.cells[scan.REPLICA_ID]]
    return int(np.argmax(beyond)) if beyond.any() else len(slab)
