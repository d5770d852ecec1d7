"""Reads our own logs from a position on while they are being written, for lagging relays and for JOIN.

Reading blocks on the disk, so it runs in a worker thread, one call at a time. Rows after the limit that the caller
passes are never returned: rows whose write the journal has not reported may still be rolled back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.constants import VCLOCK_MAX
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab
from flowstone.outside import Disk
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import ListedFile, scan_directory
from flowstone.xlog.reader import LogFile

ROWS_MAX: Final = 16384
"""Maximum number of rows in a piece, except for a single larger block: the relay has other work to do in between."""

LISTINGS_MAX: Final = 10
"""Maximum number of directory listings per call. The collector may delete a listed log before it is opened, but rarely
does; a file that is listed every time but never found is an error."""


class LogsGone(FlowstoneError):
    """The logs between `have` and `need` have been deleted."""

    def __init__(self, have: VClock, need: VClock) -> None:
        super().__init__(f"no log has the rows between {have} and {need}", hint="rejoin the replica")
        self.have = have
        self.need = need


class LogPiece(NamedTuple):
    """Consecutive rows of the log. Some may be before the requested position. `after` is the position after them."""

    slab: Slab
    after: VClock


class LogReader:
    """Reads the rows after `position` from the logs in `directory`. Local rows do not count for the position."""

    def __init__(self, disk: Disk, directory: str, position: VClock) -> None:
        self._disk = disk
        self._directory = directory
        self._position = position.without_zero()
        self._log: LogFile | None = None
        self._ahead: deque[ListedFile] = deque()
        """Logs after the open one, as of the last listing; cached, because there may be thousands of files."""
        self._offset = 0
        self._rest: Slab | None = None

    def read(self, limit: VClock) -> LogPiece | None:
        """Return the next rows up to `limit`, a position of the log; None if there are no more yet.

        Raise LogsGone if rows are missing.
        """
        if self._log is None:
            self._begin(limit)
        listings = 1
        while True:
            piece, is_at_limit = self._next(limit)
            if piece is not None or is_at_limit:
                return piece
            # The end of the open log is final only when a next log exists: until then the journal may append to it.
            following = self._following()
            if following is None:
                return None
            # The journal may have written more rows to this log between our last read and the start of the next log.
            piece, is_at_limit = self._next(limit)
            if piece is not None or is_at_limit:
                return piece
            try:
                self._check(following)
                self._open(following)
            except FileNotFoundError:  # deleted since the listing
                if listings == LISTINGS_MAX:
                    raise
                listings += 1
                self._ahead.clear()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _begin(self, limit: VClock) -> None:
        """Open the first log. Retry if logs are deleted between the listing and the reading of their headers."""
        for _ in range(LISTINGS_MAX - 1):
            try:
                self._open(self._first(limit))
            except FileNotFoundError:
                continue
            return
        self._open(self._first(limit))

    def _first(self, limit: VClock) -> ListedFile:
        """Return the last log that begins at or before the position."""
        logs = scan_directory(self._disk, self._directory).logs
        # Each log begins where the one before it ended, so the starts are in order.
        count = bisect_left(logs, True, key=lambda log: not VClock(log.meta.vclock).without_zero() <= self._position)
        if not count:
            raise LogsGone(self._position, VClock(logs[0].meta.vclock) if logs else limit)
        self._ahead = deque(logs[count:])
        return logs[count - 1]

    def _following(self) -> ListedFile | None:
        """Return the log after the open one; None if there is none yet."""
        assert self._log is not None
        if not self._ahead:
            signature = VClock(self._log.meta.vclock).signature
            logs = scan_directory(self._disk, self._directory).logs
            self._ahead = deque(log for log in logs if log.signature > signature)
        return self._ahead[0] if self._ahead else None

    def _check(self, following: ListedFile) -> None:
        """Raise LogsGone if `following` does not continue the open log, as the first log after a rejoin does not.

        A log begins where the previous one ended, and its header has the start of the previous one.
        """
        assert self._log is not None
        named, start = following.meta.prev_vclock, VClock(following.meta.vclock)
        # Both are needed: a header may lack PrevVClock, and after a rejoin the vclock alone may look continuous.
        if (named is not None and named != self._log.meta.vclock) or not start.without_zero() <= self._position:
            raise LogsGone(self._position, start)

    def _open(self, listed: ListedFile) -> None:
        log = LogFile.open(self._disk, listed.path)
        # Only after the open: if that fails, the reader can continue with the current log.
        self.close()
        self._log = log
        if self._ahead and self._ahead[0] is listed:
            self._ahead.popleft()
        self._offset = log.first_block
        self._position = self._position.merged(VClock(log.meta.vclock).without_zero())

    def _next(self, limit: VClock) -> tuple[LogPiece | None, bool]:
        """Return the next rows of the open log, or None; and whether the log has more rows, all after `limit`."""
        if self._rest is None:
            is_at_limit = self._load(limit)
            if self._rest is None:
                return None, is_at_limit
        piece, self._rest = _split(self._rest)
        self._position = self._position.merged(VClock(piece.newest()).without_zero())
        return LogPiece(piece, self._position), False

    def _load(self, limit: VClock) -> bool:
        """Decode the next blocks up to `limit`; return True if there are blocks, but all rows are after `limit`.

        Rows after the limit are read again later: they may be rolled back, and others written in their place.
        """
        assert self._log is not None
        chunk = next(self._log.chunks(self._offset), None)
        if chunk is None:
            return False
        slab = chunk.decode()
        stop = _count_up_to(slab, limit)
        # Rewind to the start of the block that has the first row after the limit. Its earlier rows are decoded again.
        self._offset = chunk.end if stop == len(slab) else int(slab.offsets[slab.cells[scan.SPAN, stop]])
        self._rest = _part(slab, 0, stop) if stop else None
        return not stop


def _part(slab: Slab, start: int, stop: int) -> Slab:
    return Slab(slab.path, slab.payload, slab.buf, slab.cells[:, start:stop], slab.offsets)


def _split(slab: Slab) -> tuple[Slab, Slab | None]:
    """Split off the first blocks, of about ROWS_MAX rows; return both parts. Blocks have whole transactions."""
    if len(slab) <= ROWS_MAX:
        return slab, None
    spans = slab.cells[scan.SPAN]
    # At a block boundary, which is a transaction boundary.
    at = int(np.searchsorted(spans, spans[ROWS_MAX]))
    if at == 0:
        at = int(np.searchsorted(spans, spans[0], side="right"))
    return _part(slab, 0, at), _part(slab, at, len(slab)) if at < len(slab) else None


def _count_up_to(slab: Slab, limit: VClock) -> int:
    """Return the number of rows up to `limit`. The rows of the slab are in the order of the log."""
    lsns: Cells = np.zeros(VCLOCK_MAX, np.int64)
    for replica_id, lsn in limit:
        lsns[replica_id] = lsn
    beyond = slab.cells[scan.LSN] > lsns[slab.cells[scan.REPLICA_ID]]
    return int(np.argmax(beyond)) if beyond.any() else len(slab)
