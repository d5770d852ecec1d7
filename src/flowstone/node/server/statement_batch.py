"""Executes plain statements of a turn together: one pass checks them, one encodes their rows, one their replies.

A plain statement is a SELECT, INSERT, REPLACE or DELETE by primary key on a space with a lane (`box/engine/bulk.py`).
`StatementBatches.execute` first finds the space, the rights and the key of every statement, and does nothing if one of
them is not plain. Then it executes the statements in their order, run by run of one kind on one space, up to the first
run that fails; the sessions execute the rest, and report the errors. INSERTs and REPLACEs into a synchronous space
become one run of transactions, which the queue confirms or rolls back in whole or in part. Writes that have to wait for
a verdict otherwise are left to the sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from flowstone.box.box import Box
from flowstone.box.engine import bulk
from flowstone.box.engine.bulk import BulkWrite, Lane
from flowstone.box.engine.keys import Key
from flowstone.box.engine.statements import TUPLE_HEAD_SIZE
from flowstone.box.engine.transaction import ADMIN
from flowstone.errors import FlowstoneError
from flowstone.iproto import batches
from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.replies import encode_error
from flowstone.iproto.scan import Bytes, Cells
from flowstone.node.counters import Counters
from flowstone.node.server.late_replies import LateReplies
from flowstone.node.server.request_batch import BatchPart, Outbox
from flowstone.node.synchro.limbo_driver import Waiter
from flowstone.node.wal.commits import Commits, client_error
from flowstone.node.wal.journal import Journal
from flowstone.outside import Clock

REPLIES_SIZE_MAX: Final = 4 * 1024 * 1024
"""Maximum size of tuples read in a batch. Larger reads go to their sessions, which make such clients wait."""

SPACE_ID_MASK: Final = (1 << scan.TYPE_SHIFT) - 1
SELECT, INSERT, REPLACE = RequestType.SELECT.value, RequestType.INSERT.value, RequestType.REPLACE.value
DELETE = RequestType.DELETE.value
_READ, _WRITE = 1, 2  # of box.access.Privilege


class _Run(NamedTuple):
    """Statements `first` to `end` of a part: of one kind, on one space."""

    kind: int
    lane: Lane
    first: int
    end: int


class _Plan(NamedTuple):
    """Checked statements: the key of each, its tuple (empty if it has none), and their runs."""

    keys: list[Key]
    tuples: list[bytes]
    runs: list[_Run]

    @property
    def writes(self) -> list[_Run]:
        return [run for run in self.runs if run.kind != SELECT]

    @property
    def stores_only(self) -> bool:
        """True if all statements store tuples; their replies repeat the tuples of the requests."""
        return all(run.kind in (INSERT, REPLACE) for run in self.runs)


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

    def execute(self, part: BatchPart, outbox: Outbox) -> int:
        """Execute statements from the start of `part`; return their number. The sessions have to execute the rest."""
        plan = self._plan(part) if not part.is_waiting else None
        if plan is None:
            return 0
        writes = plan.writes
        if writes and (not self._commits.queue.is_empty or any(run.lane.space.definition.is_sync for run in writes)):
            return self._execute_synchronous(part, plan)
        with BulkWrite() as written:
            results = self._execute(plan, written)
            if results:
                done = part.first(len(results))
                if plan.stores_only:
                    ats, ends = done.line(scan.TUPLE_AT), done.line(scan.TUPLE_END)
                    replace = self._reply(done, done.buf, ats, ends - ats, outbox)
                else:
                    replace = self._reply(done, *_joined(results), outbox)
                if written:
                    self._log(done, written, replace, outbox)
        return len(results)

    # --- checks ---

    def _plan(self, part: BatchPart) -> _Plan | None:
        """Check all statements; return None if one of them has to be executed by its session."""
        codes = part.line(scan.CODE)
        runs = scan.runs(codes)
        lanes: dict[int, Lane] = {}
        keys: list[Key] = [0] * len(codes)
        for code in dict.fromkeys(code for code, _, _ in runs):
            which = np.flatnonzero(codes == code)
            chosen = part.choose(which) if len(which) < len(codes) else part
            lane = self._lane(code, chosen)
            found = self._keys(code, lane, chosen) if lane is not None else None
            if lane is None or found is None:
                return None
            lanes[code] = lane
            if chosen is part:
                keys = found
            else:
                for i, key in zip(which.tolist(), found, strict=True):
                    keys[i] = key
        planned = [_Run(code >> scan.TYPE_SHIFT, lanes[code], first, end) for code, first, end in runs]
        tuples: list[bytes] = []
        if any(run.kind in (INSERT, REPLACE) for run in planned):
            tuples = bulk.slices(part.data, part.line(scan.TUPLE_AT), part.line(scan.TUPLE_END))
        return _Plan(keys, tuples, planned)

    def _lane(self, code: int, part: BatchPart) -> Lane | None:
        """Return the lane of these statements; None if the space has none, or a sender lacks a right."""
        box, kind = self._box, code >> scan.TYPE_SHIFT
        space = box.spaces.get(code & SPACE_ID_MASK)
        lane = bulk.lane_of(space) if space is not None else None
        if lane is None or not self._may(lane.space.id, part, _READ if kind == SELECT else _WRITE):
            return None
        if kind == SELECT:
            return lane
        may_write = bulk.takes_waiting_writes(lane) and not self._commits.has_listeners and not box.is_read_only
        return lane if may_write else None

    def _may(self, space_id: int, part: BatchPart, privilege: int) -> bool:
        allows = self._box.access.allows
        users = dict.fromkeys(peer.user for peer in part.peers_of())
        return all(user == ADMIN or allows(user, space_id) & privilege for user in users)

    def _keys(self, code: int, lane: Lane, part: BatchPart) -> list[Key] | None:
        """Return the keys of all statements of the part; None if one of them has to be executed by its session."""
        if code >> scan.TYPE_SHIFT in (SELECT, DELETE):
            ats, ends = part.line(scan.KEY_AT), part.line(scan.KEY_END)
            return bulk.request_keys(lane, part.data, part.buf, ats, ends)
        ats, ends = part.line(scan.TUPLE_AT), part.line(scan.TUPLE_END)
        if int((ends - ats).max()) + TUPLE_HEAD_SIZE > self._box.tuple_size_max:
            return None
        return bulk.tuple_keys(lane, part.data, part.buf, ats, ends)

    # --- execution ---

    def _execute(self, plan: _Plan, written: BulkWrite) -> list[bytes | None]:
        """Execute runs up to the first one that a session has to execute; return the results of their statements."""
        results: list[bytes | None] = []
        size = 0
        for kind, lane, first, end in plan.runs:
            keys = plan.keys[first:end]
            if kind == SELECT:
                found = list(map(lane.primary.map.get, keys))
                size += sum(len(raw) for raw in found if raw is not None)
                if size > REPLIES_SIZE_MAX:
                    break
                results += found
            elif kind == DELETE:
                results += bulk.delete_many(lane, keys, written)
            else:
                tuples = plan.tuples[first:end]
                store = bulk.insert_many if kind == INSERT else bulk.replace_many
                if not store(lane, keys, tuples, written):
                    break
                results += tuples
            self._counters.operations[kind] += end - first
        return results

    def _execute_synchronous(self, part: BatchPart, plan: _Plan) -> int:
        """Store tuples in a synchronous space as one run of transactions; return 0, with nothing done, on failure."""
        kind, lane, _, count = plan.runs[0]
        if len(plan.runs) > 1 or kind == DELETE or not lane.space.definition.is_sync:
            return 0
        if len(set(plan.keys)) < count:  # rolling back a part would restore the tuple from before both writes
            return 0
        ats, ends, written = part.line(scan.TUPLE_AT), part.line(scan.TUPLE_END), BulkWrite()
        out, edges = self._build_replies(part, part.buf, ats, ends - ats)
        syncs = part.syncs.astype(np.uint64).tolist()
        late = self._late.run(part.by_peer(), syncs, out[: edges[-1]].tobytes(), edges.tolist())
        store = bulk.insert_many if kind == INSERT else bulk.replace_many
        if not store(lane, plan.keys, plan.tuples, written):
            return 0
        queue = self._commits.queue
        entry = queue.submit_run(Waiter(written, late), count, int((ends - ats).sum()))
        if entry is None:
            written.rollback()
            return 0
        self._counters.operations[kind] += count
        for peer, first, end in part.by_peer():
            peer.postponed(end - first)
        journal = self._journal
        entry.lsn = journal.next_lsn(journal.replica_id) + count - 1
        rows, _ = self._rows(part, queue.limbo.row_flags(entry))
        self._commits.submit_waiting([entry], lambda done: journal.submit(rows, count, done))
        return count

    # --- rows and replies ---

    def _rows(self, part: BatchPart, flags: int) -> tuple[bytes, int]:
        """Encode the rows of the writes; return their number, too."""
        journal = self._journal
        # The content of a packet is more than that of its row.
        content = int((part.line(scan.PACKET_END) - part.line(scan.PACKET_AT)).sum())
        out: Bytes = np.empty(batches.rows_bound(part.end - part.start, content), np.uint8)
        replica_id, now = journal.replica_id, batches.float_bits(self._clock.wall())
        size, count = batches.build_rows(
            part.buf, part.cells, part.start, part.end, out, replica_id, journal.next_lsn(replica_id), now, flags
        )
        return out[:size].tobytes(), count

    def _log(self, part: BatchPart, written: BulkWrite, replace: list[Callable[[bytes], None]], outbox: Outbox) -> None:
        rows, count = self._rows(part, 0)

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
        """Turn all replies of a part into errors, even those to reads: these have seen writes that are rolled back."""
        syncs = part.syncs.astype(np.uint64).tolist()
        for instead, (_, first, end) in zip(replace, part.by_peer(), strict=True):
            self._counters.errors += end - first
            version = self._box.schema_version
            instead(b"".join(encode_error(sync, version, error, self._wide) for sync in syncs[first:end]))

    def _reply(
        self, part: BatchPart, source: Bytes, ats: Cells, sizes: Cells, outbox: Outbox
    ) -> list[Callable[[bytes], None]]:
        """Queue a reply to each request; return one replacing function per connection."""
        out, edges = self._build_replies(part, source, ats, sizes)
        return [outbox.add(peer, out[edges[first] : edges[end]].tobytes()) for peer, first, end in part.by_peer()]

    def _build_replies(self, part: BatchPart, source: Bytes, ats: Cells, sizes: Cells) -> tuple[Bytes, Cells]:
        """Return the concatenated replies to the requests, and the offset of each."""
        count = part.end - part.start
        out: Bytes = np.empty(batches.replies_bound(count, int(np.maximum(sizes, 0).sum())), np.uint8)
        edges: Cells = np.empty(count + 1, np.int64)
        version, wide = self._box.schema_version, int(self._wide)
        batches.build_replies(source, ats, sizes, part.cells, part.start, part.end, out, version, wide, edges)
        return out, edges


def _joined(tuples: Sequence[bytes | None]) -> tuple[Bytes, Cells, Cells]:
    """Return the concatenated tuples, the offset of each, and its size; -1 if there is none."""
    sizes = np.array([-1 if raw is None else len(raw) for raw in tuples], np.int64)
    content = np.maximum(sizes, 0)
    source = b"".join([raw for raw in tuples if raw is not None])
    return np.frombuffer(source, np.uint8), np.cumsum(content) - content, sizes
