"""Serve JOIN, FETCH_SNAPSHOT and REGISTER: send a snapshot, register the replica, send the log since then.

The requests (docs/spec/replication.md#join) have already been accepted by the rules of
`replication/relay/relay_logic.py`. Every method here may be cancelled at any time, when the replica disconnects.
`node/downstream/relays.py` manages log consumers and subscriptions.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol
from uuid import UUID

import numpy as np

from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.read_view import ReadView
from flowstone.box.engine.space import EngineSpace
from flowstone.box.system import CLUSTER_ID, SEQUENCE_DATA_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors, scan
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row, encode_uint
from flowstone.iproto.slab import Slab
from flowstone.node.info import members
from flowstone.node.instance import Instance
from flowstone.node.synchro.linearizable import linearization_point
from flowstone.node.wal.checkpoint import SLICE
from flowstone.node.wal.commits import client_error
from flowstone.node.wal.log_reader import LogReader, LogsGone
from flowstone.node.wal.log_tail import packets_of
from flowstone.replication.limbo.control_rows import Promote, RaftState
from flowstone.replication.membership.membership import unused_id
from flowstone.replication.messages import encode_marker, encode_row_packet, encode_vclock_reply
from flowstone.replication.raft.election import ElectionMode
from flowstone.replication.relay.relay_logic import RowFilter, xlog_gap
from flowstone.replication.row_stream import stream_packets
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

PIECE_SIZE_MAX: Final = 1024 * 1024
"""Bytes of tuples written at once. The next ones are written when the replica has read most of them."""

_CLUSTER_FIELDS_2: Final = 2
"""Number of fields of `_cluster` in schemas of 2.x: id and UUID. Schemas of 3.x add the name."""

_KEPT_ENGINES: Final = frozenset(("memtx", "vinyl"))
_PACKET_HEAD: Final = struct.Struct(">BI").pack
_CONFIRM, _ROLLBACK = RequestType.RAFT_CONFIRM.value, RequestType.RAFT_ROLLBACK.value
_FIRST_WITH_PLAIN_RAFT: Final = ((2, 11, 6), (3, 2, 2))
"""The first versions of both series that expect RAFT rows on the wire without the local group id."""


class JoinLink(Protocol):
    """The connection of a replica. Tasks that serve its requests are cancelled when it closes."""

    @property
    def peer(self) -> str: ...

    @property
    def user(self) -> int:
        """The user whose access rights apply."""
        ...

    def write(self, data: bytes) -> None:
        """Queue packets; do nothing if the connection is closed."""
        ...

    async def flushed(self) -> None:
        """Wait until most queued bytes are sent, and let other tasks run."""
        ...


def with_confirmed(state: Promote, owner_id: int, lsn: int) -> Promote:
    """Return the state of the queue with the transactions of `owner_id` up to `lsn` confirmed."""
    confirmed = (state.confirmed_vclock or VClock()).merged(VClock({owner_id: lsn}))
    return Promote(state.owner_id, confirmed.get(state.owner_id), state.term, confirmed)


class JoinServer:
    """Serves one request of a replica. All packets have the `sync` of the request."""

    def __init__(self, instance: Instance, wal_dir: str, link: JoinLink, sync: int, version: int = 0) -> None:
        self._instance = instance
        self._wal_dir = wal_dir
        self._link = link
        self._sync = sync
        self._version = version
        self._is_2_6 = instance.box.dialect is Dialect.V2_6

    # --- snapshot ---

    async def send_snapshot(self) -> VClock:
        """Send the vclock and the rows of a snapshot; return the vclock."""
        instance = self._instance
        # View and vclock match, because nothing is submitted between these lines. The states of elections and of the
        # queue are taken later, when all rows submitted so far are written: they may change these states.
        with instance.box.open_view() as view:
            vclock, limbo = instance.journal.vclock, instance.queue.limbo
            newest, confirmed = limbo.newest, limbo.newest_synchronous
            raft, state = await self._synced()
            # A replica takes all rows of a snapshot as committed.
            await instance.queue.decided(newest, instance.queue.timeout)
            if confirmed is not None:
                state = with_confirmed(state, confirmed.origin_id, confirmed.lsn)
            meta = self._meta(raft, state)
            self._link.write(encode_vclock_reply(vclock, self._sync, with_zero=not self._is_2_6) + meta)
            for space in _sent_spaces(view):
                await self._send_space(view, space)
        return vclock

    async def _synced(self) -> tuple[RaftState, Promote]:
        """Wait until all submitted rows are written; return the states of elections and of the queue at that point.

        Raise an error if a write failed: the view then contains rows that were rolled back.
        """
        written: asyncio.Future[tuple[RaftState, Promote]] = asyncio.get_running_loop().create_future()
        instance = self._instance

        def done(error: FlowstoneError | None) -> None:
            if written.cancelled():
                return
            if error is None:
                written.set_result((instance.elections.persisted, instance.queue.checkpoint()))
            else:
                written.set_exception(client_error(error))

        journal = instance.journal
        journal.submit(b"", 0, done)
        journal.flush()
        return await written

    def _meta(self, raft: RaftState, state: Promote) -> bytes:
        """Return JOIN_META with the states of elections and of the queue; empty for a replica that sent no version."""
        if self._is_2_6 or not self._version:
            return b""
        sync = self._sync
        promote = Row(RequestType.RAFT_PROMOTE.value, replica_id=state.owner_id, body=state.encode())
        return b"".join(
            (
                encode_marker(RequestType.JOIN_META, sync),
                encode_row_packet(raft_row(raft, self._version), sync),
                encode_row_packet(promote, sync),
                encode_marker(RequestType.JOIN_SNAPSHOT, sync),
            )
        )

    async def _send_space(self, view: ReadView, space: EngineSpace) -> None:
        assert space.primary is not None
        if space.id == SEQUENCE_DATA_ID:
            # Inserts advance sequences without a row in the log, so the current values come from the view.
            self._link.write(snapshot_packets(space.id, view.sequence_rows, self._sync))
            return
        for tuples in view.slices(space.primary, SLICE):
            for few in _pieces(tuples):
                self._link.write(snapshot_packets(space.id, few, self._sync))
                await self._link.flushed()

    # --- registration ---

    async def register(self, uuid: UUID, name: str | None = None) -> None:
        """Register the instance in `_cluster` if it is not a member yet; with its name if the schema has it (3.x)."""
        instance = self._instance
        if str(uuid) not in dict(members(instance)).values():
            await self._check_leads()
            await self._wait_for_foreign_queue()
        ids = dict(members(instance))
        if str(uuid) in ids.values():
            return
        replica_id = self._new_id(ids, uuid)
        cluster = instance.box.space(CLUSTER_ID)
        named = (name,) if name and len(cluster.definition.fields) > _CLUSTER_FIELDS_2 else ()
        transaction = instance.box.begin()
        try:
            statements.insert(transaction, cluster, pack((replica_id, str(uuid), *named)))
        except BaseException:
            transaction.rollback()
            raise
        await instance.commits.commit(transaction)

    def _new_id(self, taken: Mapping[int, str], uuid: UUID) -> int:
        """Return an id that no member has and, as far as this instance knows, no former member had."""
        instance = self._instance
        used = {number for number, _ in instance.box.former_members} | {number for number, _ in instance.journal.vclock}
        replica_id = unused_id(taken, used)
        if replica_id in used:
            LOG.warning(
                "no unused replica id left: %s gets id %d of a former member; make sure that the former member is "
                "never started again, and that all members follow each other",
                uuid,
                replica_id,
            )
        return replica_id

    async def _check_leads(self) -> None:
        """Fence a leader that has lost its quorum: an asynchronous write now could cause a split brain."""
        instance = self._instance
        if instance.elections.mode is not ElectionMode.OFF:
            await linearization_point(instance, instance.queue.timeout)
            if instance.is_read_only:
                raise instance.box.read_only_error()

    async def _wait_for_foreign_queue(self) -> None:
        """Wait while transactions of another member are pending: until then the queue accepts no row of ours.

        In 2.6 every writable member registers replicas, and a server whose JOIN is rejected exits. After the timeout
        the registration fails with the queue's error.
        """
        queue, own_id = self._instance.queue, self._instance.journal.replica_id
        with suppress(TimeoutError):
            async with asyncio.timeout(queue.timeout):
                while not queue.is_empty and queue.limbo.owner_id != own_id:
                    with suppress(TarantoolError):  # whether they are committed or rolled back does not matter here
                        await queue.settled()

    # --- log ---

    async def send_log(self, start: VClock, stop: VClock) -> None:
        """Send the rows of our log from `start` to `stop`, including rows that the replica itself has written."""
        await self._instance.queue.settled(self._instance.queue.timeout)
        reader = LogReader(self._instance.outside.disk, self._wal_dir, start)
        rows = RowFilter(start)
        try:
            while not stop.without_zero() <= rows.known:
                found = await self._instance.outside.blocking(self._read, reader, rows, stop)
                if found is None:
                    raise LogsGone(rows.known, stop)
                packets, after = found
                self._link.write(packets)
                rows.follow(after)
                await self._link.flushed()
        except LogsGone as gap:
            raise xlog_gap(gap.have, gap.need, is_2_6=self._is_2_6) from gap
        finally:
            reader.close()

    def _read(self, reader: LogReader, rows: RowFilter, stop: VClock) -> tuple[bytes, VClock] | None:
        piece = reader.read(stop)
        if piece is None:
            return None
        if self._is_2_6 and np.isin(piece.slab.cells[scan.TYPE], (_CONFIRM, _ROLLBACK)).any():
            return self._without_verdicts(piece.slab, rows), piece.after
        return packets_of(piece.slab, rows, self._sync), piece.after

    def _without_verdicts(self, slab: Slab, rows: RowFilter) -> bytes:
        """Return the packets with NOPs in place of CONFIRM rows.

        A 2.6 replica aborts a join at any row that is not a statement. It needs no CONFIRM, because it takes all rows
        of a join as committed. A ROLLBACK cannot be replaced; it raises SyncRollback, and the replica retries.
        """
        kept = rows.keep(slab)
        if (kept & (slab.cells[scan.TYPE] == _ROLLBACK)).any():
            raise errors.SyncRollback("A rollback for a synchronous transaction is received")
        numbers = np.arange(len(slab))
        packets: list[bytes] = []
        start = 0
        for confirm in [*np.flatnonzero(slab.cells[scan.TYPE] == _CONFIRM).tolist(), len(slab)]:
            packets.append(stream_packets(slab, kept & (numbers >= start) & (numbers < confirm), sync=self._sync))
            if confirm < len(slab) and kept[confirm]:
                (row,) = slab.rows(np.array([confirm]))
                nop = Row(RequestType.NOP.value, row.replica_id, 0, row.lsn, row.timestamp, row.tsn)
                packets.append(encode_row_packet(nop, self._sync))
            start = confirm + 1
        return b"".join(packets)

    def send_position(self) -> None:
        """Send our vclock, which ends a stage of the join."""
        self._link.write(encode_vclock_reply(self._instance.vclock, self._sync))


def raft_row(state: RaftState, version: int) -> Row:
    """Return a RAFT row for a replica of this version: older ones expect the local group id."""
    number = (version >> 16, version >> 8 & 0xFF, version & 0xFF)
    first_of_2, first_of_3 = _FIRST_WITH_PLAIN_RAFT
    is_plain = number >= first_of_3 or first_of_2 <= number < (3, 0, 0)
    return Row(RequestType.RAFT.value, group_id=0 if is_plain else GROUP_LOCAL, body=state.encode())


def snapshot_packets(space_id: int, tuples: Sequence[bytes], sync: int = 0) -> bytes:
    """Return tuples of one space as rows of a snapshot: without LSN, replica id and timestamp."""
    header = b"\x81\x00\x02" if not sync else b"\x82\x00\x02\x01" + encode_uint(sync)
    # The fixed-width space id is what real servers send.
    fixed = header + b"\x82\x10\xce" + struct.pack(">I", space_id) + b"\x21"
    size = len(fixed)
    parts: list[bytes] = []
    for raw in tuples:
        parts += (_PACKET_HEAD(0xCE, size + len(raw)), fixed, raw)
    return b"".join(parts)


def _pieces(tuples: list[bytes]) -> Iterator[list[bytes]]:
    """Split tuples into lists of about PIECE_SIZE_MAX bytes."""
    if sum(map(len, tuples)) <= PIECE_SIZE_MAX:
        yield tuples
        return
    piece: list[bytes] = []
    size = 0
    for raw in tuples:
        piece.append(raw)
        size += len(raw)
        if size > PIECE_SIZE_MAX:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _sent_spaces(view: ReadView) -> Iterator[EngineSpace]:
    """Yield the spaces to send: neither temporary nor local ones, ordered by id, so that definitions precede data."""
    for _, space in sorted(view.spaces.items()):
        definition = space.definition
        is_own = definition.is_temporary or definition.is_local or definition.engine not in _KEPT_ENGINES
        if space.primary is not None and not is_own:
            yield space
