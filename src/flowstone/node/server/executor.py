"""The executor: executes the requests of all connections, logs them with one write, and sends their replies.

The server collects the bytes of its connections and calls `Executor.execute`, once per turn, and nothing else here. The
cost of serving is per message and per system call, not per byte, so the executor does, in this order:

1. A single plain statement (`single_statement.py`) is executed, logged and answered at once.
2. Otherwise, one compiled pass finds the packets of all connections, and the plain statements among them
   (`iproto/request_scan.py`, `request_batch.py`).
   Turns of less than SCAN_SIZE_MIN bytes are not scanned: their sessions execute them.
3. Stretches of plain statements are executed together (`statement_batch.py`).
4. Other requests are executed by their sessions, one by one (`session.py`), in the order of arrival: requests that are
   not plain, requests in stretches too short for a batch, a statement that fails between two batches, and whole
   stretches that turn out to contain a statement that is not plain.
5. The journal writes the rows of the turn with one write.
6. Replies are sent when the log has the rows of the whole turn; a failed write turns replies into errors. Replies that
   need the verdict of other members, and replies to requests that take time, are sent later (`late_replies.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from flowstone.box.box import Box
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.errors import FlowstoneError
from flowstone.iproto import request_scan as scan
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.packet import PacketError, split
from flowstone.iproto.replies import encode_error
from flowstone.iproto.request_scan_kernels import scan_requests
from flowstone.iproto.scan import Bytes, Cells
from flowstone.node.counters import Counters
from flowstone.node.server.late_replies import LateReplies
from flowstone.node.server.request_batch import BatchPeer, Outbox, Reply, ScannedBatch
from flowstone.node.server.single_statement import SingleStatements
from flowstone.node.server.statement_batch import StatementBatches
from flowstone.node.wal.commits import Commits, client_error
from flowstone.node.wal.journal import Journal
from flowstone.outside import Clock

BATCH_COUNT_MIN: Final = 12
"""Sessions execute shorter stretches. Chosen when a batch cost more; the lane may pay off for fewer statements."""

SCAN_SIZE_MIN: Final = 400
"""Minimum size of a turn that is scanned; a smaller one has too few requests for a batch."""

BATCH_SIZE_MAX: Final = 64 * 1024 * 1024
"""Maximum size of a batch: its rows are written as one block, whose size is limited."""

TURN_REQUESTS_MAX: Final = 16384
"""Maximum number of requests per scan. Further requests wait for the next turn, so that other work is not delayed."""

_PACKET_LINES: Final = (scan.SPAN, scan.PACKET_AT, scan.PACKET_END)


class Executor:
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
        self._wide = wide
        self._late = LateReplies(box, counters, wide=wide)
        self._single = SingleStatements(box, journal, commits, clock, counters, wide=wide)
        self._batches = StatementBatches(box, journal, commits, clock, counters, self._late, wide=wide)
        self._table: Cells = np.empty((scan.LINES, TURN_REQUESTS_MAX), np.int64)

    def execute(self, peers: Sequence[BatchPeer]) -> None:
        """Execute what these connections have sent. Some may keep whole packets for the next turn."""
        if len(peers) == 1 and len(peers[0].unread) < SCAN_SIZE_MIN and self._execute_single(peers[0]):
            return
        outbox = Outbox()
        if sum(len(peer.unread) for peer in peers) < SCAN_SIZE_MIN:
            self._execute_few(peers, outbox)
        else:
            self._execute_scanned(peers, outbox)
        self._journal.flush()
        outbox.release()

    def _execute_single(self, peer: BatchPeer) -> bool:
        """Execute a request that came alone. Return False, with nothing done, if `peer` sent anything else."""
        unread = peer.unread
        if len(unread) < 6 or unread[0] != 0xCE or len(unread) != 5 + int.from_bytes(unread[1:5], "big"):
            return False
        packet = bytes(unread[5:])
        unread.clear()
        answer = self._single.execute(peer.user, packet) if not peer.is_waiting else None
        if answer is not None:
            peer.replying(len(answer))
            peer.send((answer,))
            return True
        outbox = Outbox()
        self._handle(peer, packet, outbox)
        self._journal.flush()
        outbox.release()
        return True

    def _execute_few(self, peers: Sequence[BatchPeer], outbox: Outbox) -> None:
        for peer in peers:
            try:
                packets, end = split(peer.unread, size_max=peer.packet_size_max)
            except PacketError as error:
                peer.refuse(str(error))
                continue
            del peer.unread[:end]
            for packet in packets:
                self._handle(peer, packet, outbox)

    def _execute_scanned(self, peers: Sequence[BatchPeer], outbox: Outbox) -> None:
        data = b"".join([peer.unread for peer in peers])
        buf: Bytes = np.frombuffer(data, np.uint8)
        spans: Cells = np.zeros((len(peers), scan.SPAN_COLUMNS), np.int64)
        ends = np.cumsum([len(peer.unread) for peer in peers])
        spans[:, scan.END] = ends
        spans[1:, scan.START] = ends[:-1]
        spans[:, scan.AT] = spans[:, scan.START]
        spans[:, scan.SIZE_MAX] = [peer.packet_size_max for peer in peers]
        count = scan_requests(buf, spans, self._table)
        batch = ScannedBatch(data, buf, self._table, peers)
        for is_plain, start, end in _stretches(scan.runs(self._table[scan.CODE, :count])):
            if is_plain and batch.size(start, end) <= BATCH_SIZE_MAX:
                self._execute_in_batches(batch, start, end, outbox)
            else:
                self._execute_by_sessions(batch, start, end, outbox)
        self._leave(peers, spans)

    def _execute_in_batches(self, batch: ScannedBatch, start: int, end: int, outbox: Outbox) -> None:
        """Execute plain statements in batches. Statements that fail between the batches are executed by their
        sessions."""
        plan, step = self._batches.plan(batch.part(start, end)), 1
        while plan is not None and not plan.part.is_waiting:
            count = self._batches.execute(plan, outbox)
            # Where most statements fail, a batch for each of the others would cost more than the sessions.
            step = 1 if count >= BATCH_COUNT_MIN else 2 * step
            done = min(end - start, count + step)
            self._execute_by_sessions(batch, start + count, start + done, outbox)
            start += done
            plan = plan.rest(done) if end - start >= BATCH_COUNT_MIN else None
        self._execute_by_sessions(batch, start, end, outbox)

    def _execute_by_sessions(self, batch: ScannedBatch, start: int, end: int, outbox: Outbox) -> None:
        spans, ats, ends = (batch.cells[line, start:end].tolist() for line in _PACKET_LINES)
        for span, at, packet_end in zip(spans, ats, ends, strict=True):
            self._handle(batch.peers[span], batch.data[at:packet_end], outbox)

    def _leave(self, peers: Sequence[BatchPeer], spans: Cells) -> None:
        """Remove the executed requests from each connection, and close connections that sent invalid packets."""
        for peer, (start, _, at, _, status) in zip(peers, spans.tolist(), strict=True):
            if status == scan.WRONG_LENGTH:
                peer.refuse("packet does not start with its length")
            elif status == scan.TOO_LARGE:
                peer.refuse(f"packet is empty or larger than {peer.packet_size_max} bytes")
            else:
                del peer.unread[: at - start]

    # --- requests that a session executes ---

    def _handle(self, peer: BatchPeer, packet: bytes, outbox: Outbox) -> None:
        reply = peer.handle(packet)
        if isinstance(reply, Reply):
            self._answer(peer, reply, outbox)
        else:
            peer.start(reply)

    def _answer(self, peer: BatchPeer, reply: Reply, outbox: Outbox) -> None:
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

    def _error(self, sync: int, error: TarantoolError) -> bytes:
        self._counters.errors += 1
        return encode_error(sync, self._box.schema_version, error, self._wide)


def _stretches(runs: list[tuple[int, int, int]]) -> list[tuple[bool, int, int]]:
    """Divide runs of requests of equal code into stretches for a batch (True) and for sessions (False).

    A run that is long enough is a stretch of its own, so that a statement that fails ends a batch as small as possible.
    The shorter runs between them are joined.
    """
    stretches: list[tuple[int, int, int]] = []
    for code, start, end in runs:
        kind = -1 if code < 0 else code if end - start >= BATCH_COUNT_MIN else _SEVERAL
        if kind < 0 and stretches and stretches[-1][0] == kind:
            start = stretches.pop()[1]
        stretches.append((kind, start, end))
    return [(kind != -1 and end - start >= BATCH_COUNT_MIN, start, end) for kind, start, end in stretches]


_SEVERAL: Final = -2
"""In place of a code: plain statements of several kinds."""
