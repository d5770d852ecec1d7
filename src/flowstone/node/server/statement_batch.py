"""Executes plain statements of a turn together: one pass checks them, one encodes their rows, one their replies.

A plain statement is a SELECT, INSERT, REPLACE or DELETE by primary key on a space with a lane (`box/engine/bulk.py`).
`StatementBatches.plan` first finds the space, the rights and the key of every statement; there is no plan if one of
them is not plain. `execute` executes the statements in their order, run by run of one kind on one space, up to the
first one that fails. A session executes this statement, and reports the error; then `execute` continues with the rest
of the plan. INSERTs and REPLACEs into a synchronous space become one run of transactions, which the queue confirms or
rolls back in whole or in part. Other writes that wait for a verdict become an entry of the queue each, and all are
logged together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from flowstone.box.box import Box
from flowstone.box.engine import bulk
from flowstone.box.engine.bulk import BulkWrite, Lane, SingleWrite
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
DELETE = RequestType.DELETE.value
_READ, _WRITE = 1, 2  # of box.access.Privilege


class Run(NamedTuple):
    """Statements `first` to `end` of a plan: of one kind, on one space."""

    kind: int
    lane: Lane
    is_sync: bool
    """True for writes into a synchronous space."""
    first: int
    end: int


class Plan(NamedTuple):
    """Checked statements: the key of each, its tuple (empty if it has none), and the runs that are not executed yet."""

    part: BatchPart
    keys: list[Key]
    tuples: list[bytes]
    runs: list[Run]
    stores_only: bool
    """True if all statements store tuples; their replies repeat the tuples of the requests."""

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

    def statements(self) -> Iterator[tuple[Run, Key, bytes | None]]:
        """Return the run, the key and the tuple of each statement."""
        for run in self.runs:
            has_tuple = run.kind in (INSERT, REPLACE)
            for number in range(run.first, run.end):
                yield run, self.keys[number], self.tuples[number] if has_tuple else None


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

    def execute(self, plan: Plan, outbox: Outbox) -> int:
        """Execute statements from the start of `plan`; return their number. A session has to execute the next one."""
        write = plan.first_write
        if write is not None and (write.is_sync or not self._commits.queue.is_empty):
            return self._execute_run(plan) or self._execute_waiting(plan, write.is_sync, outbox)
        with BulkWrite() as written:
            results = self._execute(plan, written)
            if results:
                done = plan.part.first(len(results))
                if plan.stores_only:
                    ats, ends = done.line(scan.TUPLE_AT), done.line(scan.TUPLE_END)
                    replace = self._reply(done, done.buf, ats, ends - ats, outbox)
                else:
                    replace = self._reply(done, *_joined(results), outbox)
                if written:
                    self._log(done, written, replace, outbox)
        return len(results)

    # --- checks ---

    def plan(self, part: BatchPart) -> Plan | None:
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
        planned: list[Run] = []
        for code, first, end in runs:
            kind, lane = code >> scan.TYPE_SHIFT, lanes[code]
            planned.append(Run(kind, lane, kind != SELECT and lane.space.definition.is_sync, first, end))
        stores = {code >> scan.TYPE_SHIFT in (INSERT, REPLACE) for code in lanes}
        tuples: list[bytes] = []
        if True in stores:
            tuples = bulk.slices(part.data, part.line(scan.TUPLE_AT), part.line(scan.TUPLE_END))
        return Plan(part, keys, tuples, planned, stores_only=False not in stores)

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

    def _execute(self, plan: Plan, written: BulkWrite) -> list[bytes | None]:
        """Execute statements up to the first one that a session has to execute; return their results."""
        results: list[bytes | None] = []
        size = 0
        for kind, lane, is_sync, first, end in plan.runs:
            if is_sync:
                break
            keys, before = plan.keys[first:end], len(results)
            if kind == SELECT:
                found = list(map(lane.primary.map.get, keys))
                room = REPLIES_SIZE_MAX - size
                size += sum(len(raw) for raw in found if raw is not None)
                results += found if size <= REPLIES_SIZE_MAX else _up_to(found, room)
            elif kind == DELETE:
                results += bulk.delete_many(lane, keys, written)
            else:
                results += _store(kind, lane, keys, plan.tuples[first:end], written)
            count = len(results) - before
            self._counters.operations[kind] += count
            if count < end - first:
                break
        return results

    def _execute_run(self, plan: Plan) -> int:
        """Store tuples in a synchronous space as one run of transactions; return 0, with nothing done, on failure."""
        kind, lane, is_sync, first, end = plan.runs[0]
        keys = plan.keys[first:end]
        if len(plan.runs) > 1 or kind == DELETE or not is_sync:
            return 0
        if kind == REPLACE and len(set(keys)) < len(keys):
            return 0  # rolling back a part would restore the tuple from before both writes
        with BulkWrite() as written:
            count = len(_store(kind, lane, keys, plan.tuples[first:end], written))
            if not count:
                return 0
            part = plan.part.first(count)
            ats, ends = part.line(scan.TUPLE_AT), part.line(scan.TUPLE_END)
            out, edges = self._build_replies(part, part.buf, ats, ends - ats)
        late = self._late.run(part.by_peer(), _syncs(part), out[: edges[-1]].tobytes(), edges.tolist())
        entry = self._commits.queue.submit_run(Waiter(written, late), count, int((ends - ats).sum()))
        if entry is None:
            written.rollback()
            return 0
        entry.lsn = self._journal.next_lsn(self._journal.replica_id) + count - 1
        self._log_waiting(part, [entry])
        self._counters.operations[kind] += count
        for peer, first, end in part.by_peer():
            peer.postponed(end - first)
        return count

    def _execute_waiting(self, plan: Plan, is_sync: bool, outbox: Outbox) -> int:
        """Execute statements, each write as an entry of the queue, so that each can be rolled back separately.

        Stop before a statement that fails, and before a write that is synchronous if the others are not, or the
        reverse, because the flags of its row differ. Return the number of statements executed.
        """
        queue, journal, size = self._commits.queue, self._journal, 0
        lsn = journal.next_lsn(journal.replica_id)
        peers = [peer for peer, first, end in plan.part.by_peer() for _ in range(first, end)]
        results: list[bytes | None] = []
        lates: list[LateReply | None] = []
        entries: list[LimboEntry[Waiter]] = []
        for (run, key, raw), peer, sync in zip(plan.statements(), peers, _syncs(plan.part), strict=True):
            index = run.lane.primary
            old = index.map.get(key)
            if run.kind == SELECT:
                size += len(old) if old is not None else 0
                if size > REPLIES_SIZE_MAX:
                    break
                results.append(old)
                lates.append(None)
                continue
            if run.is_sync is not is_sync or (run.kind == INSERT and old is not None):
                break
            late, effect = self._late.reply(peer, sync), SingleWrite(index, key, raw)
            try:
                entry = queue.submit(Waiter(effect, late), is_synchronous=is_sync, size=len(raw or b""))
            except TarantoolError:
                effect.rollback()
                break
            assert entry is not None, "the queue is not empty, or they are synchronous"
            entry.lsn = lsn + len(entries)
            entries.append(entry)
            results.append(old if run.kind == DELETE else raw)
            lates.append(late)
        if results:
            part = plan.part.first(len(results))
            packets = self._packets(part, results, entries)
            if entries:
                self._log_waiting(part, entries)
            self._distribute(part, packets, lates, peers, outbox)
        return len(results)

    def _packets(self, part: BatchPart, results: list[bytes | None], entries: list[LimboEntry[Waiter]]) -> list[bytes]:
        """Return a reply per statement; withdraw the entries if that fails."""
        try:
            out, edges = self._build_replies(part, *_joined(results))
        except BaseException:
            for entry in reversed(entries):
                entry.transaction.effect.rollback()
                self._commits.queue.withdraw(entry)
            raise
        data = out[: edges[-1]].tobytes()
        return [data[at:end] for at, end in pairwise(edges.tolist())]

    def _distribute(
        self,
        part: BatchPart,
        packets: list[bytes],
        lates: list[LateReply | None],
        peers: list[BatchPeer],
        outbox: Outbox,
    ) -> None:
        """Queue the replies to reads; keep the replies to writes until their verdicts."""
        kinds = (part.line(scan.CODE) >> scan.TYPE_SHIFT).tolist()
        for kind, packet, late, peer in zip(kinds, packets, lates, peers, strict=False):
            self._counters.operations[kind] += 1
            if late is None:
                outbox.add(peer, packet)
            else:
                late.packet = packet
                peer.postponed(1)

    def _log_waiting(self, part: BatchPart, entries: list[LimboEntry[Waiter]]) -> None:
        journal = self._journal
        rows, count = self._rows(part, self._commits.queue.limbo.row_flags(entries[0]))
        self._commits.submit_waiting(entries, lambda done: journal.submit(rows, count, done))

    # --- rows and replies ---

    def _rows(self, part: BatchPart, flags: int) -> tuple[bytes, int]:
        """Encode the rows of the writes; return their number, too."""
        journal = self._journal
        # The content of a packet is more than that of its row.
        content = int((part.line(scan.PACKET_END) - part.line(scan.PACKET_AT)).sum())
        out: Bytes = np.empty(batches.rows_bound(part.end - part.start, content), np.uint8)
        replica_id, now = journal.replica_id, self._clock.wall()
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
        """Turn all replies of a part into errors, even replies to reads, because the reads have seen writes that are
        rolled back."""
        syncs = _syncs(part)
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


def _store(kind: int, lane: Lane, keys: list[Key], tuples: list[bytes], written: BulkWrite) -> list[bytes]:
    """Execute INSERTs up to the first that fails, or REPLACEs; return the tuples stored."""
    if kind == REPLACE:
        bulk.replace_many(lane, keys, tuples, written)
    elif not bulk.insert_many(lane, keys, tuples, written):
        count = bulk.count_new(lane, keys)
        keys, tuples = keys[:count], tuples[:count]
        if keys:
            bulk.insert_many(lane, keys, tuples, written)
    return tuples


def _up_to(tuples: list[bytes | None], size_max: int) -> list[bytes | None]:
    """Return the first tuples, as many as have `size_max` bytes together."""
    sizes = np.cumsum([0 if raw is None else len(raw) for raw in tuples])
    return tuples[: int(np.searchsorted(sizes, size_max, side="right"))]


def _syncs(part: BatchPart) -> list[int]:
    syncs: list[int] = part.syncs.astype(np.uint64).tolist()
    return syncs
