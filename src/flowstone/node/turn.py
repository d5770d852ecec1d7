"""Turns: everything that arrived since the last one, executed as one batch, written with one write, answered at once.

The cost of serving is per message and per system call, not per byte. So a turn takes the bytes of all connections that
have some, finds the packets in one pass, and executes stretches of equal plain statements in bulk (`box/bulk.py`);
what is not plain goes to its session, one by one, and few requests all do. Replies to writes leave when the log has
them; a write that fails turns its replies into errors.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from flowstone.box import bulk
from flowstone.box.box import Box
from flowstone.box.bulk import BulkWrite, Lane
from flowstone.box.transaction import ADMIN, Transaction
from flowstone.errors import FlowstoneError
from flowstone.iproto import batches
from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import Key as BodyKey
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.packet import PacketError, split
from flowstone.iproto.replies import encode_error
from flowstone.iproto.scan import Bytes, Cells
from flowstone.node.commits import Commits, wal_error
from flowstone.node.journal import Journal
from flowstone.outside import Clock

BULK_COUNT_MIN: Final = 12
"""A kernel costs some 20 µs to call and a bulk run calls four: fewer requests are done sooner one by one."""

BULK_SIZE_MIN: Final = 400
"""Bytes below which a turn cannot hold enough requests to be worth a scan."""

TURN_REQUESTS_MAX: Final = 16384
"""Requests per scan. What a turn has beyond that waits for the next, so that others get their turn, too."""

SELECT, INSERT, REPLACE = RequestType.SELECT.value, RequestType.INSERT.value, RequestType.REPLACE.value
DELETE = RequestType.DELETE.value
_READ, _WRITE = 1, 2  # of box.access.Privilege
_TUPLE, _KEY = BodyKey.TUPLE.value, BodyKey.KEY.value


class Reply(NamedTuple):
    """What a session answers. `transaction` has taken effect and must be in the log before the packet leaves."""

    packet: bytes
    sync: int = 0
    transaction: Transaction | None = None


class Peer(Protocol):
    """A connection, as a turn sees it. `unread` holds the bytes that no turn has taken yet."""

    unread: bytearray
    packet_size_max: int

    @property
    def user(self) -> int:
        """Whose rights its statements have."""
        ...

    def handle(self, packet: bytes) -> Reply | Coroutine[Any, Any, Reply]:
        """Executes one request. Every error that it may cause is in the reply."""
        ...

    def start(self, reply: Coroutine[Any, Any, Reply]) -> None:
        """Runs what takes time, and sends its reply when there is one."""
        ...

    def send(self, packets: Sequence[bytes]) -> None:
        """Sends replies. A connection that is gone sends nothing."""
        ...

    def refuse(self, reason: str) -> None:
        """Ends the connection, because what it sent is no packet."""
        ...


class _Outbox:
    """The replies of a turn, by connection and in order, until nothing of the turn waits for the log any more."""

    def __init__(self) -> None:
        self._replies: dict[Peer, list[bytes]] = {}
        self._waiting = 1  # the turn itself

    def add(self, peer: Peer, packet: bytes) -> Callable[[bytes], None]:
        """Queues `packet`; the result replaces it by another one."""
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
    """Executes what arrives. `wide` says how replies tell the schema version, see `iproto/replies.py`."""

    def __init__(self, box: Box, journal: Journal, commits: Commits, clock: Clock, *, wide: bool) -> None:
        self._box = box
        self._journal = journal
        self._commits = commits
        self._clock = clock
        self._wide = wide
        self._table: Cells = np.empty((scan.LINES, TURN_REQUESTS_MAX), np.int64)
        self.request_count = 0

    def run(self, peers: Sequence[Peer]) -> list[Peer]:
        """One turn for all connections with unread bytes; those that still hold whole packets, for the next."""
        outbox = _Outbox()
        size = sum(len(peer.unread) for peer in peers)
        rest = self._run_plain(peers, outbox) if size < BULK_SIZE_MIN else self._run_scanned(peers, outbox)
        self._journal.flush()
        outbox.release()
        return rest

    def _run_plain(self, peers: Sequence[Peer], outbox: _Outbox) -> list[Peer]:
        for peer in peers:
            try:
                packets, end = split(peer.unread, size_max=peer.packet_size_max)
            except PacketError as error:
                peer.refuse(str(error))
                continue
            del peer.unread[:end]
            for packet in packets:
                self._handle(peer, packet, outbox)
        return []

    def _run_scanned(self, peers: Sequence[Peer], outbox: _Outbox) -> list[Peer]:
        data = b"".join([peer.unread for peer in peers])
        buf: Bytes = np.frombuffer(data, np.uint8)
        spans: Cells = np.zeros((len(peers), scan.SPAN_COLUMNS), np.int64)
        ends = np.cumsum([len(peer.unread) for peer in peers])
        spans[:, scan.END] = ends
        spans[1:, scan.START] = ends[:-1]
        spans[:, scan.AT] = spans[:, scan.START]
        spans[:, scan.SIZE_MAX] = [peer.packet_size_max for peer in peers]
        count = scan.scan_requests(buf, spans, self._table)
        cells = self._table[:, :count]
        for code, start, end in scan.runs(cells[scan.CODE]):
            if (
                code < 0
                or end - start < BULK_COUNT_MIN
                or not self._run_bulk(_Run(code, start, end, data, buf, cells, peers), outbox)
            ):
                for i in range(start, end):
                    packet = data[cells[scan.PACKET_AT, i] : cells[scan.PACKET_END, i]]
                    self._handle(peers[cells[scan.SPAN, i]], packet, outbox)
        self.request_count += count
        return self._leave(peers, spans, is_full=count == TURN_REQUESTS_MAX)

    def _leave(self, peers: Sequence[Peer], spans: Cells, *, is_full: bool) -> list[Peer]:
        """Takes from each connection what was executed; those that may have more for a next turn."""
        waiting: list[Peer] = []
        for peer, (start, end, at, _, status) in zip(peers, spans.tolist(), strict=True):
            if status == scan.WRONG_LENGTH:
                peer.refuse("a packet does not begin with its length")
            elif status == scan.TOO_LARGE:
                peer.refuse(f"a packet is empty, or larger than the {peer.packet_size_max} bytes that are accepted")
            else:
                del peer.unread[: at - start]
                if is_full and at < end:
                    waiting.append(peer)
        return waiting

    def _handle(self, peer: Peer, packet: bytes, outbox: _Outbox) -> None:
        reply = peer.handle(packet)
        if isinstance(reply, Reply):
            self._answer(peer, reply, outbox)
        else:
            peer.start(reply)

    def _answer(self, peer: Peer, reply: Reply, outbox: _Outbox) -> None:
        if reply.transaction is None:
            if reply.packet:
                outbox.add(peer, reply.packet)
            return
        replace = outbox.add(peer, reply.packet)

        def done(error: FlowstoneError | None) -> None:
            if error is not None:
                replace(self._error(reply.sync, wal_error(error)))
            outbox.release()

        outbox.hold()
        try:
            self._commits.submit(reply.transaction, done)
        except TarantoolError as error:
            replace(self._error(reply.sync, error))
            outbox.release()

    def _error(self, sync: int, error: TarantoolError) -> bytes:
        return encode_error(sync, self._box.schema_version, error, self._wide)

    def _run_bulk(self, run: _Run, outbox: _Outbox) -> bool:
        """Executes the run, all of it; False, with nothing done, if it has to go one by one."""
        box = self._box
        space = box.spaces.get(run.space_id)
        lane = bulk.lane_of(space) if space is not None else None
        if lane is None or not self._may(run, _READ if run.type == SELECT else _WRITE):
            return False
        if run.type == SELECT:
            return self._select(run, lane, outbox)
        definition = lane.space.definition
        if (
            len(lane.space.served) > 1
            or lane.space.sequence is not None
            or definition.is_temporary
            or definition.is_local
            or definition.is_sync
            or box.is_read_only
            or self._commits.on_commit
            or self._commits.on_rollback
        ):
            return False
        return self._delete(run, lane, outbox) if run.type == DELETE else self._put(run, lane, outbox)

    def _may(self, run: _Run, privilege: int) -> bool:
        users = {peer.user for peer in run.peers_of()} - {ADMIN}
        allows = self._box.access.allows
        return all(allows(user, run.space_id) & privilege for user in sorted(users))

    def _select(self, run: _Run, lane: Lane, outbox: _Outbox) -> bool:
        keys = bulk.request_keys(lane, run.data, run.buf, run.line(scan.KEY_AT), run.line(scan.KEY_END))
        if keys is None:
            return False
        found = list(map(lane.primary.map.get, keys))
        self._reply_tuples(run, found, outbox)
        return True

    def _reply_tuples(self, run: _Run, tuples: list[bytes | None], outbox: _Outbox) -> list[Callable[[bytes], None]]:
        sizes = np.array([-1 if raw is None else len(raw) for raw in tuples], np.int64)
        source = b"".join([raw for raw in tuples if raw is not None])
        ats = np.cumsum(np.maximum(sizes, 0)) - np.maximum(sizes, 0)
        return self._reply(run, np.frombuffer(source, np.uint8), ats, sizes, outbox)

    def _put(self, run: _Run, lane: Lane, outbox: _Outbox) -> bool:
        ats, ends = run.line(scan.TUPLE_AT), run.line(scan.TUPLE_END)
        sizes = ends - ats
        if int(sizes.max()) > self._box.tuple_size_max:
            return False
        keys = bulk.tuple_keys(lane, run.data, run.buf, ats, ends)
        if keys is None:
            return False
        tuples = bulk.slices(run.data, ats, ends)
        put = bulk.insert_many if run.type == INSERT else bulk.replace_many
        written = put(lane, keys, tuples)
        if written is None:
            return False
        replace = self._reply(run, run.buf, ats, sizes, outbox)
        self._log(run, written, _TUPLE, replace, outbox)
        return True

    def _delete(self, run: _Run, lane: Lane, outbox: _Outbox) -> bool:
        keys = bulk.request_keys(lane, run.data, run.buf, run.line(scan.KEY_AT), run.line(scan.KEY_END))
        if keys is None:
            return False
        written = bulk.delete_many(lane, keys)
        replace = self._reply_tuples(run, list(written.olds), outbox)
        self._log(run, written, _KEY, replace, outbox)
        return True

    def _reply(
        self, run: _Run, source: Bytes, ats: Cells, sizes: Cells, outbox: _Outbox
    ) -> list[Callable[[bytes], None]]:
        """Queues a reply to each request of the run; one replacer per connection."""
        count = run.end - run.start
        out: Bytes = np.empty(batches.replies_bound(count, int(np.maximum(sizes, 0).sum())), np.uint8)
        edges: Cells = np.empty(count + 1, np.int64)
        end = batches.build_replies(
            source, ats, sizes, run.cells, run.start, run.end, out, self._box.schema_version, int(self._wide), edges
        )
        replies = memoryview(out.data)[:end]
        return [outbox.add(peer, bytes(replies[edges[first] : edges[behind]])) for peer, first, behind in run.by_peer()]

    def _log(
        self, run: _Run, written: BulkWrite, part: int, replace: list[Callable[[bytes], None]], outbox: _Outbox
    ) -> None:
        journal = self._journal
        first, last = (scan.KEY_AT, scan.KEY_END) if part == _KEY else (scan.TUPLE_AT, scan.TUPLE_END)
        count = run.end - run.start
        content = int((run.line(last) - run.line(first)).sum())
        out: Bytes = np.empty(batches.rows_bound(count, content), np.uint8)
        size = batches.build_rows(
            run.buf,
            run.cells,
            run.start,
            run.end,
            out,
            run.type,
            journal.replica_id,
            journal.next_lsn(journal.replica_id),
            batches.float_bits(self._clock.wall()),
            run.space_id,
            part,
        )

        def done(error: FlowstoneError | None) -> None:
            self._commits.settle(written, error)
            if error is not None:
                self._refuse(run, replace, wal_error(error))
            outbox.release()

        outbox.hold()
        self._box.in_flight.append(written)
        journal.submit(out[:size].tobytes(), count, done)

    def _refuse(self, run: _Run, replace: list[Callable[[bytes], None]], error: TarantoolError) -> None:
        syncs = run.line(scan.SYNC).astype(np.uint64).tolist()
        for instead, (_, first, behind) in zip(replace, run.by_peer(), strict=True):
            instead(b"".join(self._error(sync, error) for sync in syncs[first:behind]))


class _Run(NamedTuple):
    """A stretch of requests of one type on one space: columns `start` to `end` of the table."""

    code: int
    start: int
    end: int
    data: bytes
    buf: Bytes
    cells: Cells
    peers: Sequence[Peer]

    @property
    def type(self) -> int:
        return self.code >> scan.TYPE_SHIFT

    @property
    def space_id(self) -> int:
        return self.code & 0xFFFFFFFF

    def line(self, number: int) -> Cells:
        return self.cells[number, self.start : self.end]

    def by_peer(self) -> list[tuple[Peer, int, int]]:
        """The connections, and which of the run's requests are theirs, counted from its start."""
        return [(self.peers[span], first, behind) for span, first, behind in scan.runs(self.line(scan.SPAN))]

    def peers_of(self) -> list[Peer]:
        return [peer for peer, _, _ in self.by_peer()]
