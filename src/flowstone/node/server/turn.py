"""Turns: all requests that arrived since the last turn are executed, logged with one write, and answered together.

The cost of serving is per message and per system call, not per byte. So a turn takes the bytes of all connections that
have some, finds the packets in one pass, and executes runs of equal plain statements in bulk (`box/engine/bulk.py`).
Other requests, and runs that are too short, are executed one by one by their sessions; a single plain statement uses
the quick lane (`quick.py`). Replies to writes are sent when the rows are in the log; a failed write turns its replies
into errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from flowstone.box.box import Box
from flowstone.box.engine import bulk
from flowstone.box.engine.bulk import BulkWrite, Lane, SingleWrite
from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.keys import Key
from flowstone.box.engine.space import EngineSpace
from flowstone.box.engine.statements import TUPLE_HEAD_SIZE
from flowstone.box.engine.transaction import ADMIN, BoxTransaction
from flowstone.errors import FlowstoneError
from flowstone.iproto import batches
from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.packet import PacketError, split
from flowstone.iproto.replies import encode_error
from flowstone.iproto.scan import Bytes, Cells
from flowstone.node.counters import Counters
from flowstone.node.server.late_replies import LateReplies
from flowstone.node.server.quick import QuickLane
from flowstone.node.server.turn_batch import BatchPart, BatchPeer, Reply, ScannedBatch
from flowstone.node.synchro.limbo_driver import Waiter
from flowstone.node.wal.commits import Commits, client_error
from flowstone.node.wal.journal import Journal
from flowstone.outside import Clock
from flowstone.replication.limbo.queue import LimboEntry

BULK_COUNT_MIN: Final = 12
"""A bulk run calls four kernels at about 20 µs each: fewer requests are faster one by one."""

BULK_SIZE_MIN: Final = 400
"""Minimum size of a turn that is scanned; a smaller one has too few requests for a bulk run."""

BULK_SIZE_MAX: Final = 64 * 1024 * 1024
"""Maximum size of a bulk run: its rows are written as one block, whose size is limited."""

TURN_REQUESTS_MAX: Final = 16384
"""Maximum number of requests per scan. Further requests wait for the next turn, so that other work is not delayed."""

NOT_SIMPLE, MIXED = -1, -2
"""Used in place of a code: requests for their sessions; plain statements of several kinds."""

SPACE_ID_MASK: Final = (1 << scan.TYPE_SHIFT) - 1

REPLIES_SIZE_MAX: Final = 4 * 1024 * 1024
"""Maximum size of tuples read in bulk. Larger reads go to their sessions, which make such clients wait."""

SELECT, INSERT, REPLACE = RequestType.SELECT.value, RequestType.INSERT.value, RequestType.REPLACE.value
DELETE = RequestType.DELETE.value
_READ, _WRITE = 1, 2  # of box.access.Privilege
_PACKET_LINES: Final = (scan.SPAN, scan.PACKET_AT, scan.PACKET_END)


class _Outbox:
    """The replies of a turn, in order by connection; sent when the log has all rows of the turn."""

    def __init__(self) -> None:
        self._replies: dict[BatchPeer, list[bytes]] = {}
        self._waiting = 1  # the turn itself

    def add(self, peer: BatchPeer, packet: bytes) -> Callable[[bytes], None]:
        """Queue `packet`; return a function that replaces it with another packet."""
        peer.replying(len(packet))
        packets = self._replies.setdefault(peer, [])
        place = len(packets)
        packets.append(packet)

        def replace(other: bytes) -> None:
            packets[place] = other

        return replace

    def hold(self) -> None:
        self._waiting += 1

    def release(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            for peer, packets in self._replies.items():
                peer.send(packets)


class Turns:
    """Executes the requests of a server. `wide` selects the encoding of the schema version, see `iproto/replies.py`."""

    def __init__(
        self,
        box: Box,
        journal: Journal,
        commits: Commits,
        clock: Clock,
        counters: Counters | None = None,
        *,
        wide: bool,
    ) -> None:
        self._counters = counters = counters or Counters()
        self._box = box
        self._journal = journal
        self._commits = commits
        self._clock = clock
        self._wide = wide
        self._quick = QuickLane(box, journal, commits, clock, counters, wide=wide)
        self._late = LateReplies(box, counters, wide=wide)
        self._table: Cells = np.empty((scan.LINES, TURN_REQUESTS_MAX), np.int64)

    def run(self, peers: Sequence[BatchPeer]) -> None:
        """Run one turn for all connections with unread bytes. Some may keep whole packets for the next turn."""
        if len(peers) == 1 and len(peers[0].unread) < BULK_SIZE_MIN and self._run_single(peers[0]):
            return
        outbox = _Outbox()
        if sum(len(peer.unread) for peer in peers) < BULK_SIZE_MIN:
            self._run_plain(peers, outbox)
        else:
            self._run_scanned(peers, outbox)
        self._journal.flush()
        outbox.release()

    def _run_single(self, peer: BatchPeer) -> bool:
        """Fast path for a single request. Return False, with nothing done, if `peer` sent anything else."""
        unread = peer.unread
        if len(unread) < 6 or unread[0] != 0xCE or len(unread) != 5 + int.from_bytes(unread[1:5], "big"):
            return False
        packet = bytes(unread[5:])
        unread.clear()
        answer = self._quick.execute(peer.user, packet) if not peer.is_waiting else None
        if answer is not None:
            peer.replying(len(answer))
            peer.send((answer,))
            return True
        outbox = _Outbox()
        self._handle(peer, packet, outbox)
        self._journal.flush()
        outbox.release()
        return True

    def _run_plain(self, peers: Sequence[BatchPeer], outbox: _Outbox) -> None:
        for peer in peers:
            try:
                packets, end = split(peer.unread, size_max=peer.packet_size_max)
            except PacketError as error:
                peer.refuse(str(error))
                continue
            del peer.unread[:end]
            for packet in packets:
                self._handle(peer, packet, outbox)

    def _run_scanned(self, peers: Sequence[BatchPeer], outbox: _Outbox) -> None:
        data = b"".join([peer.unread for peer in peers])
        buf: Bytes = np.frombuffer(data, np.uint8)
        spans: Cells = np.zeros((len(peers), scan.SPAN_COLUMNS), np.int64)
        ends = np.cumsum([len(peer.unread) for peer in peers])
        spans[:, scan.END] = ends
        spans[1:, scan.START] = ends[:-1]
        spans[:, scan.AT] = spans[:, scan.START]
        spans[:, scan.SIZE_MAX] = [peer.packet_size_max for peer in peers]
        count = scan.scan_requests(buf, spans, self._table)
        batch = ScannedBatch(data, buf, self._table, peers)
        for code, start, end in _stretches(scan.runs(self._table[scan.CODE, :count])):
            if code == NOT_SIMPLE or batch.size(start, end) > BULK_SIZE_MAX:
                self._one_by_one(batch, start, end, outbox)
            elif code == MIXED:
                self._run_mixed(batch, start, end, outbox)
            elif self._run_bulk(code, batch.part(start, end), outbox):
                self._counters.operations[code >> scan.TYPE_SHIFT] += end - start
            else:
                self._one_by_one(batch, start, end, outbox)
        self._leave(peers, spans)

    def _one_by_one(self, batch: ScannedBatch, start: int, end: int, outbox: _Outbox) -> None:
        spans, ats, ends = (batch.cells[line, start:end].tolist() for line in _PACKET_LINES)
        for span, at, behind in zip(spans, ats, ends, strict=True):
            self._handle(batch.peers[span], batch.data[at:behind], outbox)

    def _leave(self, peers: Sequence[BatchPeer], spans: Cells) -> None:
        """Remove the executed requests from each connection, and close connections that sent invalid packets."""
        for peer, (start, _, at, _, status) in zip(peers, spans.tolist(), strict=True):
            if status == scan.WRONG_LENGTH:
                peer.refuse("packet does not start with its length")
            elif status == scan.TOO_LARGE:
                peer.refuse(f"packet is empty or larger than {peer.packet_size_max} bytes")
            else:
                del peer.unread[: at - start]

    def _handle(self, peer: BatchPeer, packet: bytes, outbox: _Outbox) -> None:
        reply = peer.handle(packet)
        if isinstance(reply, Reply):
            self._answer(peer, reply, outbox)
        else:
            peer.start(reply)

    def _answer(self, peer: BatchPeer, reply: Reply, outbox: _Outbox) -> None:
        if reply.transaction is None:
            if reply.packet:
                outbox.add(peer, reply.packet)
            return
        if self._commits.must_wait(reply.transaction):
            self._answer_later(peer, reply, reply.transaction)
            return
        replace = outbox.add(peer, reply.packet)

        def done(error: FlowstoneError | None) -> None:
            if error is not None:
                replace(self._error(reply.sync, client_error(error)))
            outbox.release()

        outbox.hold()
        try:
            self._commits.submit(reply.transaction, done)
        except TarantoolError as error:
            replace(self._error(reply.sync, error))
            outbox.release()

    def _answer_later(self, peer: BatchPeer, reply: Reply, transaction: BoxTransaction) -> None:
        """Submit a transaction that waits for a verdict, without delaying the other replies of the turn."""
        peer.postponed(1)
        late = self._late.reply(peer, reply.sync, reply.packet)
        try:
            self._commits.submit(transaction, late)
        except TarantoolError as error:
            late(error)

    def _run_waiting(self, kind: int, lane: Lane, keys: list[Key], part: BatchPart) -> bool:
        """Execute writes that wait for a verdict; each can be rolled back separately. Return False, with nothing
        done, if one of them cannot be executed."""
        index, queue = lane.primary, self._commits.queue
        if kind == INSERT and (not index.map.keys().isdisjoint(keys) or len(set(keys)) < len(keys)):
            return False
        if kind != DELETE and lane.space.definition.is_sync and self._run_together(lane, keys, part):
            return True
        tuples: Sequence[bytes | None] = [None] * len(keys)
        if kind != DELETE:
            tuples = bulk.slices(part.data, part.line(scan.TUPLE_AT), part.line(scan.TUPLE_END))
        syncs = part.syncs.astype(np.uint64).tolist()
        reply = self._late.reply
        lates = [reply(peer, sync) for peer, first, behind in part.by_peer() for sync in syncs[first:behind]]
        for peer, first, behind in part.by_peer():
            peer.postponed(behind - first)
        journal, is_sync = self._journal, lane.space.definition.is_sync
        lsn = journal.next_lsn(journal.replica_id)
        entries: list[LimboEntry[Waiter]] = []
        olds: list[bytes | None] = []
        refusal: TarantoolError | None = None
        for key, raw, late in zip(keys, tuples, lates, strict=True):
            effect = SingleWrite(index, key, raw)
            try:
                entry = queue.submit(Waiter(effect, late), is_synchronous=is_sync, size=len(raw) if raw else 0)
            except TarantoolError as error:
                effect.rollback()
                refusal = error
                break
            assert entry is not None, "the queue is not empty, or they are synchronous"
            entry.lsn = lsn + len(entries)
            entries.append(entry)
            olds.append(effect.old)
        results = olds if kind == DELETE else tuples[: len(entries)]
        for late, packet in zip(lates, self._packets(part, results), strict=False):
            late.packet = packet
        if entries:
            self._log_waiting(part, entries, lsn, len(entries))
        if refusal is not None:
            for late in lates[len(entries) :]:
                late(refusal)
        return True

    def _run_together(self, lane: Lane, keys: list[Key], part: BatchPart) -> bool:
        """Store tuples as one run of transactions. Return False, with nothing done, if that is not possible."""
        if len(set(keys)) < len(keys):  # rolling back a part of the run would restore the tuple from before both writes
            return False
        ats, ends, count, written = part.line(scan.TUPLE_AT), part.line(scan.TUPLE_END), len(keys), BulkWrite()
        out, edges = self._build_replies(part, count, part.buf, ats, ends - ats)
        syncs = part.syncs.astype(np.uint64).tolist()
        late = self._late.run(part.by_peer(), syncs, out[: edges[-1]].tobytes(), edges.tolist())
        bulk.replace_many(lane, keys, bulk.slices(part.data, ats, ends), written)
        entry = self._commits.queue.submit_run(Waiter(written, late), count, int((ends - ats).sum()))
        if entry is None:
            written.rollback()
            return False
        for peer, first, behind in part.by_peer():
            peer.postponed(behind - first)
        lsn = self._journal.next_lsn(self._journal.replica_id)
        entry.lsn = lsn + count - 1
        self._log_waiting(part, [entry], lsn, count)
        return True

    def _log_waiting(self, part: BatchPart, entries: list[LimboEntry[Waiter]], lsn: int, count: int) -> None:
        journal, flags = self._journal, self._commits.queue.limbo.row_flags(entries[0])
        start, end = part.start, part.start + count
        content = int((part.cells[scan.PACKET_END, start:end] - part.cells[scan.PACKET_AT, start:end]).sum())
        out: Bytes = np.empty(batches.rows_bound(count, content), np.uint8)
        now = batches.float_bits(self._clock.wall())
        size, _ = batches.build_rows(part.buf, part.cells, start, end, out, journal.replica_id, lsn, now, flags)
        rows = out[:size].tobytes()
        self._commits.submit_waiting(entries, lambda done: journal.submit(rows, count, done))

    def _error(self, sync: int, error: TarantoolError) -> bytes:
        self._counters.errors += 1
        return encode_error(sync, self._box.schema_version, error, self._wide)

    def _lane(self, code: int, part: BatchPart) -> Lane | None:
        """Return the lane of requests that can be executed in bulk; None if they cannot, or a sender lacks a right."""
        box, kind = self._box, code >> scan.TYPE_SHIFT
        space = box.spaces.get(code & SPACE_ID_MASK)
        lane = bulk.lane_of(space) if space is not None else None
        if lane is None or part.is_waiting or not self._may(lane.space, part, _READ if kind == SELECT else _WRITE):
            return None
        if kind == SELECT:
            return lane
        may_write = bulk.takes_waiting_writes(lane) and not self._commits.has_listeners and not box.is_read_only
        return lane if may_write else None

    def _must_wait(self, lane: Lane) -> bool:
        """Return True if writes need a verdict: the space is synchronous, or earlier transactions are pending."""
        return lane.space.definition.is_sync or not self._commits.queue.is_empty

    def _may(self, space: EngineSpace, part: BatchPart, privilege: int) -> bool:
        allows = self._box.access.allows
        users = dict.fromkeys(peer.user for peer in part.peers_of())
        return all(user == ADMIN or allows(user, space.id) & privilege for user in users)

    def _keys(self, code: int, lane: Lane, part: BatchPart) -> list[Key] | None:
        """Return the keys of all requests of the part; None if one of them has to be executed by its session."""
        if code >> scan.TYPE_SHIFT in (SELECT, DELETE):
            ats, ends = part.line(scan.KEY_AT), part.line(scan.KEY_END)
            return bulk.request_keys(lane, part.data, part.buf, ats, ends)
        ats, ends = part.line(scan.TUPLE_AT), part.line(scan.TUPLE_END)
        if int((ends - ats).max()) + TUPLE_HEAD_SIZE > self._box.tuple_size_max:
            return None
        return bulk.tuple_keys(lane, part.data, part.buf, ats, ends)

    def _run_bulk(self, code: int, part: BatchPart, outbox: _Outbox) -> bool:
        """Execute all requests of one type on one space. Return False, with nothing done, if that is not possible."""
        lane = self._lane(code, part)
        keys = self._keys(code, lane, part) if lane is not None else None
        if lane is None or keys is None:
            return False
        kind = code >> scan.TYPE_SHIFT
        if kind == SELECT:
            found = list(map(lane.primary.map.get, keys))
            if sum(len(raw) for raw in found if raw is not None) > REPLIES_SIZE_MAX:
                return False
            self._reply_tuples(part, found, outbox)
            return True
        if self._must_wait(lane):
            return self._run_waiting(kind, lane, keys, part)
        with BulkWrite() as written:
            if kind == DELETE:
                replace = self._reply_tuples(part, bulk.delete_many(lane, keys, written), outbox)
            else:
                ats, ends = part.line(scan.TUPLE_AT), part.line(scan.TUPLE_END)
                put = bulk.insert_many if kind == INSERT else bulk.replace_many
                if not put(lane, keys, bulk.slices(part.data, ats, ends), written):
                    return False
                replace = self._reply(part, part.buf, ats, ends - ats, outbox)
            self._log(part, written, replace, outbox)
        return True

    def _run_mixed(self, batch: ScannedBatch, start: int, end: int, outbox: _Outbox) -> None:
        """Execute plain statements of several kinds in their order; others are executed one by one."""
        plan = self._plan(batch.part(start, end))
        if plan is None:
            self._one_by_one(batch, start, end, outbox)
            return
        while start < end:
            with BulkWrite() as written:
                results = self._execute(plan, written)
                part = batch.part(start, start + len(results))
                if results:
                    self._count(part)
                    replace = self._reply_tuples(part, results, outbox)
                    if written:
                        self._log(part, written, replace, outbox)
            start += len(results)
            if start < end:
                self._one_by_one(batch, start, start + 1, outbox)
                start += 1
            if batch.part(start, end).is_waiting or not self._commits.queue.is_empty:
                self._one_by_one(batch, start, end, outbox)
                return
            plan = plan[len(results) + 1 :]

    def _count(self, part: BatchPart) -> None:
        kinds, counts = np.unique(part.line(scan.CODE) >> scan.TYPE_SHIFT, return_counts=True)
        for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            self._counters.operations[kind] += count

    def _plan(self, part: BatchPart) -> list[_Step] | None:
        """Return the index, key and tuple of each request; None if one of them has to be executed by its session."""
        codes = part.line(scan.CODE)
        steps: list[_Step | None] = [None] * len(codes)
        for code in np.unique(codes).tolist():
            which = np.flatnonzero(codes == code)
            chosen = part.choose(which)
            lane = self._lane(code, chosen)
            keys = self._keys(code, lane, chosen) if lane is not None else None
            kind = code >> scan.TYPE_SHIFT
            if lane is None or keys is None or (kind != SELECT and self._must_wait(lane)):
                return None
            tuples: Sequence[bytes | None] = [None] * len(keys)
            if kind in (INSERT, REPLACE):
                tuples = bulk.slices(part.data, chosen.line(scan.TUPLE_AT), chosen.line(scan.TUPLE_END))
            for i, key, raw in zip(which.tolist(), keys, tuples, strict=True):
                steps[i] = (kind, lane.primary, key, raw)
        return [step for step in steps if step is not None]

    def _execute(self, plan: Sequence[_Step], written: BulkWrite) -> list[bytes | None]:
        """Execute the steps up to the first one that a session has to execute; return their results."""
        results: list[bytes | None] = []
        size = 0
        for kind, index, key, raw in plan:
            old = index.map.get(key)
            if kind == SELECT:
                size += len(old) if old is not None else 0
                if size > REPLIES_SIZE_MAX:
                    break
                results.append(old)
                continue
            if kind == INSERT and old is not None:
                break
            index.set(key, raw)
            written.add(index, (key,), (old,))
            results.append(old if kind == DELETE else raw)
        return results

    def _reply_tuples(
        self, part: BatchPart, tuples: list[bytes | None], outbox: _Outbox
    ) -> list[Callable[[bytes], None]]:
        return self._reply(part, *_joined(tuples), outbox)

    def _reply(
        self, part: BatchPart, source: Bytes, ats: Cells, sizes: Cells, outbox: _Outbox
    ) -> list[Callable[[bytes], None]]:
        """Queue a reply to each request; return one replacing function per connection."""
        out, edges = self._build_replies(part, part.end - part.start, source, ats, sizes)
        return [outbox.add(peer, out[edges[first] : edges[behind]].tobytes()) for peer, first, behind in part.by_peer()]

    def _build_replies(
        self, part: BatchPart, count: int, source: Bytes, ats: Cells, sizes: Cells
    ) -> tuple[Bytes, Cells]:
        """Return the concatenated replies to the first `count` requests, and the offset of each."""
        out: Bytes = np.empty(batches.replies_bound(count, int(np.maximum(sizes, 0).sum())), np.uint8)
        edges: Cells = np.empty(count + 1, np.int64)
        version, wide, end = self._box.schema_version, int(self._wide), part.start + count
        batches.build_replies(source, ats, sizes, part.cells, part.start, end, out, version, wide, edges)
        return out, edges

    def _packets(self, part: BatchPart, tuples: Sequence[bytes | None]) -> list[bytes]:
        """Return the replies to the first requests of a part as separate packets."""
        source, ats, sizes = _joined(tuples)
        out, edges = self._build_replies(part, len(tuples), source, ats, sizes)
        data, ends = out[: edges[-1]].tobytes(), edges.tolist()
        return [data[at:end] for at, end in pairwise(ends)]

    def _log(
        self, part: BatchPart, written: BulkWrite, replace: list[Callable[[bytes], None]], outbox: _Outbox
    ) -> None:
        journal = self._journal
        count = part.end - part.start
        # The content of a packet is more than that of its row.
        content = int((part.line(scan.PACKET_END) - part.line(scan.PACKET_AT)).sum())
        out: Bytes = np.empty(batches.rows_bound(count, content), np.uint8)
        lsn, now = journal.next_lsn(journal.replica_id), batches.float_bits(self._clock.wall())
        size, rows = batches.build_rows(
            part.buf, part.cells, part.start, part.end, out, journal.replica_id, lsn, now, 0
        )

        def done(error: FlowstoneError | None) -> None:
            self._commits.settle(written, error)
            if error is not None:
                self._refuse(part, replace, client_error(error))
            outbox.release()

        outbox.hold()
        self._commits.queue.note_async_commit()
        self._box.in_flight.append(written)
        journal.submit(out[:size].tobytes(), rows, done)

    def _refuse(self, part: BatchPart, replace: list[Callable[[bytes], None]], error: TarantoolError) -> None:
        """Turn all replies of a part into errors, even those to reads: these have seen writes that are rolled back."""
        syncs = part.syncs.astype(np.uint64).tolist()
        for instead, (_, first, behind) in zip(replace, part.by_peer(), strict=True):
            instead(b"".join(self._error(sync, error) for sync in syncs[first:behind]))


def _joined(tuples: Sequence[bytes | None]) -> tuple[Bytes, Cells, Cells]:
    """Return the concatenated tuples, the offset of each, and its size; -1 if there is none."""
    sizes = np.array([-1 if raw is None else len(raw) for raw in tuples], np.int64)
    content = np.maximum(sizes, 0)
    source = b"".join([raw for raw in tuples if raw is not None])
    return np.frombuffer(source, np.uint8), np.cumsum(content) - content, sizes


_Step = tuple[int, EngineIndex, Key, bytes | None]


def _stretches(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return runs of equal code that are long enough for bulk execution, and MIXED and NOT_SIMPLE runs between them."""
    stretches: list[tuple[int, int, int]] = []
    for code, start, end in runs:
        kind = code if code >= 0 and end - start >= BULK_COUNT_MIN else MIXED if code >= 0 else NOT_SIMPLE
        if kind < 0 and stretches and stretches[-1][0] == kind:
            start = stretches.pop()[1]
        stretches.append((kind, start, end))
    return [
        (NOT_SIMPLE if kind == MIXED and end - start < BULK_COUNT_MIN else kind, start, end)
        for kind, start, end in stretches
    ]
