"""Executes a single plain statement, and writes its row at once.

A single request cannot share costs with others, so its cost is the number of steps. A statement on a user space skips
sessions, transactions and queues: the lane (`box/lane/`) executes it. A statement that does not qualify, or would fail,
is left to the session.
"""

from __future__ import annotations

import numpy as np

from flowstone.box.access import Privilege
from flowstone.box.box import Box
from flowstone.box.engine.transaction import ADMIN
from flowstone.box.lane.statement_lane import StatementLane
from flowstone.box.lane.table import Table, table_of
from flowstone.box.lane.writes import Writes
from flowstone.errors import FlowstoneError
from flowstone.iproto import batches
from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.replies import encode_error
from flowstone.iproto.request_scan_kernels import scan_packet
from flowstone.iproto.scan import Bytes, Cells
from flowstone.node.counters import Counters
from flowstone.node.server.statement_batch import REPLIES_SIZE_MAX, SPACE_ID_MASK
from flowstone.node.wal.commits import Commits, client_error
from flowstone.node.wal.journal import Journal
from flowstone.outside import Clock

SELECT = RequestType.SELECT.value
_READ, _WRITE = Privilege.READ.value, Privilege.WRITE.value


class SingleStatements:
    """Executes single plain statements. `wide` selects the encoding of replies, see `iproto/replies.py`."""

    def __init__(
        self, box: Box, journal: Journal, commits: Commits, clock: Clock, counters: Counters, *, wide: bool
    ) -> None:
        self._counters = counters
        self._box = box
        self._journal = journal
        self._commits = commits
        self._clock = clock
        self._wide = wide
        self._lane = StatementLane(box)
        self._cells: Cells = np.empty((scan.LINES, 1), np.int64)
        self._edges: Cells = np.empty(2, np.int64)

    def execute(self, user: int, packet: bytes) -> bytes | None:
        """Return the reply; None, with nothing done, if the session has to execute the request."""
        buf, cells, lane = np.frombuffer(packet, np.uint8), self._cells, self._lane
        if not packet or not scan_packet(buf, cells):
            return None
        code = int(cells[scan.CODE, 0])
        table = self._table(user, code)
        if table is None:
            return None
        written = Writes()
        lane.begin(written, REPLIES_SIZE_MAX)
        if not lane.execute(buf, cells, 0, 1, {code: table}, False):
            return None
        self._counters.operations[code >> scan.TYPE_SHIFT] += 1
        if written:
            self._commits.queue.note_async_commit()
            try:
                self._journal.write_now(self._row(buf), 1)
            except FlowstoneError as error:
                written.rollback()
                self._counters.errors += 1
                sync = int(cells[scan.SYNC, 0]) % (1 << 64)
                return encode_error(sync, self._box.schema_version, client_error(error), self._wide)
        out: Bytes = np.empty(batches.replies_bound(lane.results), np.uint8)
        version = self._box.schema_version
        size = batches.build_replies(lane.results, cells, 0, out, version, int(self._wide), self._edges)
        return out[:size].tobytes()

    def _table(self, user: int, code: int) -> Table | None:
        """Return the table of a statement that may be executed at once; None if the session must."""
        box, kind, space_id = self._box, code >> scan.TYPE_SHIFT, code & SPACE_ID_MASK
        space = box.spaces.get(space_id)
        table = table_of(space) if space is not None else None
        privilege = _READ if kind == SELECT else _WRITE
        if table is None or (user != ADMIN and not box.access.allows(user, space_id) & privilege):
            return None
        if kind == SELECT or (table.takes(kind) and not box.is_read_only and self._commits.is_quiet):
            return table
        return None

    def _row(self, buf: Bytes) -> bytes:
        journal, logged = self._journal, self._lane.logged
        replica_id = journal.replica_id
        out: Bytes = np.empty(batches.rows_bound(len(buf), logged), np.uint8)
        lsn, now = journal.next_lsn(replica_id), self._clock.wall()
        size, _ = batches.build_rows(buf, self._cells, 0, logged, out, replica_id, lsn, now, 0)
        return out[:size].tobytes()
