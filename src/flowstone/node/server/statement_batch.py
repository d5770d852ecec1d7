"""Executes plain statements of a turn together: one compiled pass executes them, others encode their rows and replies.

A plain statement is one that the request scanner (`iproto/request_scan.py`) knows, on a user space: `box/lane/`
executes it. `StatementBatches.plan` first finds the space and the rights of every kind of statement. `execute` executes
the statements in their order, up to the first one that fails or is too unusual. A session executes this statement, and
reports the error; then `execute` continues with the rest of the plan. INSERTs and REPLACEs into a synchronous space
become one run of transactions, which the queue confirms or rolls back in whole or in part. Other writes that wait for a
verdict become an entry of the queue each, and all are logged together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from flowstone.box.box import Box
from flowstone.box.engine.transaction import ADMIN
from flowstone.box.lane.statement_lane import StatementLane
from flowstone.box.lane.table import Table, table_of
from flowstone.box.lane.writes import Writes
from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import batches
from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.replies import encode_error
from flowstone.iproto.scan import Bytes, Cells
from flowstone.node.counters import Counters
from flowstone.node.server.late_replies import LateReplies, LateReply
from flowstone.node.server.request_batch import BatchPart, BatchPeer, Outbox
from flowstone.node.synchro.limbo_driver import Waiter
from flowstone.node.wal.commits import Commits, client_error
from flowstone.node.wal.journal import Journal
from flowstone.outside import Clock
from flowstone.replication.limbo.queue import LimboEntry

REPLIES_SIZE_MAX: Final = 4 * 1024 * 1024
"""Maximum size of tuples read in a batch. Larger reads go to their sessions, which make such clients wait."""

SPACE_ID_MASK: Final = (1 << scan.TYPE_SHIFT) - 1
SELECT, INSERT, REPLACE = RequestType.SELECT.value, RequestType.INSERT.value, RequestType.REPLACE.value
_STORES: Final = (INSERT, REPLACE)
_READ, _WRITE = 1, 2  # of box.access.Privilege


class Run(NamedTuple):
    """Statements `first` to `end` of a plan: of one kind, on one space."""

    kind: int
    is_sync: bool
    """True for writes into a synchronous space."""
    first: int
    end: int


class Plan(NamedTuple):
    """Statements, the table for each code, and the runs that are not executed yet."""

    part: BatchPart
    tables: dict[int, Table]
    runs: list[Run]

    @property
    def first_write(self) -> Run | None:
        return next((run for run in self.runs if run.kind != SELECT), None)

    def rest(self, count: int) -> Plan:
        """Return the plan without its first `count` statements, which leave some others."""
        at = self.runs[0].first + count
        # A plan may have thousands of runs, and as many rests: finding and copying them has to be cheap.
        number = bisect_right(self.runs, at, key=lambda run: run.end)
        runs = [self.runs[number]._replace(first=at), *self.runs[number + 1 :]]
        return self._replace(part=self.part.rest(count), runs=runs)


class StatementBatches:
    """Executes batches of plain statements. `wide` selects the encoding of replies, see `iproto/replies.py`."""

    def __init__(
        self,
        box: Box,
        journal: Journal,
        commits: Commits,
        clock: Clock,
        counters: Counters,
        late: LateReplies,
        *,
        wide: bool,
    ) -> None:
        self._box = box
        self._journal = journal
        self._commits = commits
        self._clock = clock
        self._counters = counters
        self._late = late
        self._wide = wide
        self._lane = StatementLane(box)

    def execute(self, plan: Plan, outbox: Outbox) -> int:
        """Execute statements from the start of `plan`; return their number. A session has to execute the next one."""
        write = plan.first_write
        if write is not None and (write.is_sync or not self._commits.queue.is_empty):
            return self._execute_run(plan) or self._execute_waiting(plan, write.is_sync, outbox)
        part, lane = plan.part, self._lane
        with Writes() as written:
            lane.begin(written, REPLIES_SIZE_MAX)
            count = lane.execute(part.buf, part.cells, part.start, part.end, plan.tables, False)
            if count:
                done = part.first(count)
                replace = self._reply(done, lane.results, outbox)
                if written:
                    self._log(done, lane.logged, written, replace, outbox)
                self._count(done)
        return count

    # --- checks ---

    def plan(self, part: BatchPart) -> Plan | None:
        """Find the tables of all statements that the senders may execute.

        Return None if there is a statement on a system space: it may change the tables.
        """
        codes = part.line(scan.CODE)
        runs = scan.runs(codes)
        tables: dict[int, Table] = {}
        for code in dict.fromkeys(code for code, _, _ in runs):
            if code & SPACE_ID_MASK < FIRST_USER_SPACE_ID:
                return None
            which = np.flatnonzero(codes == code)
            table = self._table(code, part.choose(which) if len(which) < len(codes) else part)
            if table is not None:
                tables[code] = table
        planned: list[Run] = []
        for code, first, end in runs:
            kind, found = code >> scan.TYPE_SHIFT, tables.get(code)
            planned.append(Run(kind, kind != SELECT and found is not None and found.is_sync, first, end))
        return Plan(part, tables, planned)

    def _table(self, code: int, part: BatchPart) -> Table | None:
        """Return the table of these statements; None if the space has none, or a sender lacks a right."""
        box, kind = self._box, code >> scan.TYPE_SHIFT
        space = box.spaces.get(code & SPACE_ID_MASK)
        table = table_of(space) if space is not None else None
        if space is None or table is None or not self._may(space.id, part, _READ if kind == SELECT else _WRITE):
            return None
        if kind == SELECT:
            return table
        return table if table.takes(kind) and not self._commits.has_listeners and not box.is_read_only else None

    def _may(self, space_id: int, part: BatchPart, privilege: int) -> bool:
        allows = self._box.access.allows
        users = dict.fromkeys(peer.user for peer in part.peers_of())
        return all(user == ADMIN or allows(user, space_id) & privilege for user in users)

    # --- execution of writes that wait for a verdict ---

    def _execute_run(self, plan: Plan) -> int:
        """Store tuples in a synchronous space as one run of transactions; return 0, with nothing done, on failure."""
        kind, is_sync, _, _ = plan.runs[0]
        if len(plan.runs) > 1 or kind not in _STORES or not is_sync:
            return 0
        part, lane = plan.part, self._lane
        with Writes() as written:
            lane.begin(written, REPLIES_SIZE_MAX)
            count = lane.execute(part.buf, part.cells, part.start, part.end, plan.tables, True)
            if not count:
                return 0
            part = part.first(count)
            out, edges = self._build_replies(part, lane.results)
        late = self._late.run(part.by_peer(), _syncs(part), out[: edges[-1]].tobytes(), edges.tolist())
        size = int((part.line(scan.TUPLE_END) - part.line(scan.TUPLE_AT)).sum())
        entry = self._commits.queue.submit_run(Waiter(written, late), count, size)
        if entry is None:
            written.rollback()
            return 0
        entry.lsn = self._journal.next_lsn(self._journal.replica_id) + count - 1
        self._log_waiting(part, lane.logged, [entry])
        self._count(part)
        for peer, first, end in part.by_peer():
            peer.postponed(end - first)
        return count

    def _execute_waiting(self, plan: Plan, is_sync: bool, outbox: Outbox) -> int:
        """Execute statements, each write as an entry of the queue, so that each can be rolled back separately.

        Stop before a statement that fails, and before a write that is synchronous if the others are not, or the
        reverse, because the flags of its row differ. Return the number of statements executed.
        """
        queue, journal, lane, part = self._commits.queue, self._journal, self._lane, plan.part
        lsn = journal.next_lsn(journal.replica_id)
        peers = [peer for peer, first, end in part.by_peer() for _ in range(first, end)]
        sizes = (part.line(scan.PACKET_END) - part.line(scan.PACKET_AT)).tolist()
        results: list[bytes | list[bytes] | None] = []
        logged: list[bytes | None] = []
        lates: list[LateReply | None] = []
        entries: list[LimboEntry[Waiter]] = []
        room = REPLIES_SIZE_MAX
        for number, (peer, sync) in enumerate(zip(peers, _syncs(part), strict=True)):
            effect, row = Writes(), part.start + number
            lane.begin(effect, room)
            if not lane.execute(part.buf, part.cells, row, row + 1, plan.tables, is_sync):
                break
            late = None
            if effect:
                late = self._late.reply(peer, sync)
                try:
                    entry = queue.submit(Waiter(effect, late), is_synchronous=is_sync, size=sizes[number])
                except TarantoolError:
                    effect.rollback()
                    break
                assert entry is not None, "the queue is not empty, or they are synchronous"
                entry.lsn = lsn + len(entries)
                entries.append(entry)
            room -= lane.size
            results += lane.results
            logged += lane.logged
            lates.append(late)
        if results:
            part = part.first(len(results))
            packets = self._packets(part, results, entries)
            if entries:
                self._log_waiting(part, logged, entries)
            self._count(part)
            self._distribute(packets, lates, peers, outbox)
        return len(results)

    def _packets(
        self, part: BatchPart, results: list[bytes | list[bytes] | None], entries: list[LimboEntry[Waiter]]
    ) -> list[bytes]:
        """Return a reply per statement; withdraw the entries if that fails."""
        try:
            out, edges = self._build_replies(part, results)
        except BaseException:
            for entry in reversed(entries):
                entry.transaction.effect.rollback()
                self._commits.queue.withdraw(entry)
            raise
        data = out[: edges[-1]].tobytes()
        return [data[at:end] for at, end in pairwise(edges.tolist())]

    @staticmethod
    def _distribute(
        packets: list[bytes], lates: list[LateReply | None], peers: list[BatchPeer], outbox: Outbox
    ) -> None:
        """Queue the replies to reads; keep the replies to writes until their verdicts."""
        for packet, late, peer in zip(packets, lates, peers, strict=False):
            if late is None:
                outbox.add(peer, packet)
            else:
                late.packet = packet
                peer.postponed(1)

    def _log_waiting(self, part: BatchPart, logged: list[bytes | None], entries: list[LimboEntry[Waiter]]) -> None:
        journal = self._journal
        rows, count = self._rows(part, logged, self._commits.queue.limbo.row_flags(entries[0]))
        self._commits.submit_waiting(entries, lambda done: journal.submit(rows, count, done))

    # --- rows and replies ---

    def _count(self, part: BatchPart) -> None:
        for kind, count in enumerate(np.bincount(part.line(scan.TYPE)).tolist()):
            if count:
                self._counters.operations[kind] += count

    def _rows(self, part: BatchPart, logged: list[bytes | None], flags: int) -> tuple[bytes, int]:
        """Encode the rows of the writes; return their number, too."""
        journal = self._journal
        # The content of a packet is more than that of its row.
        content = int((part.line(scan.PACKET_END) - part.line(scan.PACKET_AT)).sum())
        out: Bytes = np.empty(batches.rows_bound(content, logged), np.uint8)
        replica_id, now = journal.replica_id, self._clock.wall()
        lsn = journal.next_lsn(replica_id)
        size, count = batches.build_rows(part.buf, part.cells, part.start, logged, out, replica_id, lsn, now, flags)
        return out[:size].tobytes(), count

    def _log(
        self,
        part: BatchPart,
        logged: list[bytes | None],
        written: Writes,
        replace: list[Callable[[bytes], None]],
        outbox: Outbox,
    ) -> None:
        rows, count = self._rows(part, logged, 0)

        def done(error: FlowstoneError | None) -> None:
            self._commits.settle(written, error)
            if error is not None:
                self._refuse(part, replace, client_error(error))
            outbox.release()

        outbox.hold()
        self._commits.queue.note_async_commit()
        self._box.in_flight.append(written)
        self._journal.submit(rows, count, done)

    def _refuse(self, part: BatchPart, replace: list[Callable[[bytes], None]], error: TarantoolError) -> None:
        """Turn all replies of a part into errors, even replies to reads, because the reads have seen writes that are
        rolled back."""
        syncs = _syncs(part)
        for instead, (_, first, end) in zip(replace, part.by_peer(), strict=True):
            self._counters.errors += end - first
            version = self._box.schema_version
            instead(b"".join(encode_error(sync, version, error, self._wide) for sync in syncs[first:end]))

    def _reply(
        self, part: BatchPart, results: list[bytes | list[bytes] | None], outbox: Outbox
    ) -> list[Callable[[bytes], None]]:
        """Queue a reply to each request; return one replacing function per connection."""
        out, edges = self._build_replies(part, results)
        return [outbox.add(peer, out[edges[first] : edges[end]].tobytes()) for peer, first, end in part.by_peer()]

    def _build_replies(self, part: BatchPart, results: list[bytes | list[bytes] | None]) -> tuple[Bytes, Cells]:
        """Return the concatenated replies to the requests, and the offset of each."""
        out: Bytes = np.empty(batches.replies_bound(results), np.uint8)
        edges: Cells = np.empty(len(results) + 1, np.int64)
        version, wide = self._box.schema_version, int(self._wide)
        batches.build_replies(results, part.cells, part.start, out, version, wide, edges)
        return out, edges


def _syncs(part: BatchPart) -> list[int]:
    syncs: list[int] = part.syncs.astype(np.uint64).tolist()
    return syncs
