"""What a master sends to a replica before that follows: the data of one moment, its registration, the log in between.

JOIN, FETCH_SNAPSHOT and REGISTER (reference section 9), once they are not refused: see `replication/relay.py` for that.
Everything here may be cancelled at any time, because the replica is gone. Whose log consumer is whose, and what comes
after, is known to `node/relay.py`.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol
from uuid import UUID

import numpy as np

from flowstone.box import statements
from flowstone.box.dialect import Dialect
from flowstone.box.read_view import ReadView
from flowstone.box.space import Space
from flowstone.box.system import CLUSTER_ID, SEQUENCE_DATA_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors, scan
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row, encode_uint
from flowstone.node.checkpoint import SLICE
from flowstone.node.commits import client_error
from flowstone.node.info import members
from flowstone.node.instance import Instance
from flowstone.node.linearizable import linearization_point
from flowstone.node.log_reader import LogReader, LogsGone
from flowstone.node.tail import packets_of
from flowstone.replication.election import Mode
from flowstone.replication.membership import unused_id
from flowstone.replication.messages import encode_marker, encode_row_packet, encode_vclock_reply
from flowstone.replication.relay import RowFilter, xlog_gap
from flowstone.replication.row_stream import stream_packets
from flowstone.replication.synchro import Promote, RaftState
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import Slab

LOG = logging.getLogger("flowstone.node")

PIECE_SIZE_MAX: Final = 1024 * 1024
"""Bytes of tuples from which on a replica has to read before it gets more."""

_CLUSTER_FIELDS_2: Final = 2
"""Of a tuple of `_cluster` in schemas of 2.x: id and UUID."""

_KEPT_ENGINES: Final = frozenset(("memtx", "vinyl"))
_PACKET_HEAD: Final = struct.Struct(">BI").pack
_CONFIRM, _ROLLBACK = RequestType.RAFT_CONFIRM.value, RequestType.RAFT_ROLLBACK.value
_FIRST_WITH_PLAIN_RAFT: Final = ((2, 11, 6), (3, 2, 2))
"""From here on, in both series, RAFT rows on the wire do not say that they are local."""


class Link(Protocol):
    """The connection of a replica, as who serves it sees it. Tasks that serve a request end with it."""

    @property
    def peer(self) -> str: ...

    @property
    def user(self) -> int:
        """Whose rights it has."""
        ...

    def write(self, data: bytes) -> None:
        """Queues packets; does nothing once the connection is gone."""
        ...

    async def flushed(self) -> None:
        """Returns when little is queued, and others have had their turn."""
        ...


def with_confirmed(state: Promote, owner_id: int, lsn: int) -> Promote:
    """As the queue is where what waited in it then, of `owner_id` and up to `lsn`, has been confirmed."""
    confirmed = (state.confirmed_vclock or VClock()).merged(VClock({owner_id: lsn}))
    return Promote(state.owner_id, confirmed.get(state.owner_id), state.term, confirmed)


class Join:
    """One replica that gets data, by a request with this `sync`."""

    def __init__(self, instance: Instance, wal_dir: str, link: Link, sync: int, version: int = 0) -> None:
        self._instance = instance
        self._wal_dir = wal_dir
        self._link = link
        self._sync = sync
        self._version = version
        self._is_2_6 = instance.box.dialect is Dialect.V2_6

    # --- the snapshot ---

    async def send_snapshot(self) -> VClock:
        """Sends the data of now, behind the position that it has, which is returned."""
        instance = self._instance
        # View and position are of one moment: nothing is submitted between these lines. What rows on their way to the
        # disk say of elections and of the queue is part of it, once they are there.
        with instance.box.open_view() as view:
            vclock, limbo = instance.journal.vclock, instance.queue.limbo
            newest, confirmed = limbo.newest, limbo.newest_synchronous
            raft, state = await self._synced()
            # A snapshot says of all that it holds that it is a fact.
            await instance.queue.decided(newest, instance.queue.timeout)
            if confirmed is not None:
                state = with_confirmed(state, confirmed.origin_id, confirmed.lsn)
            meta = self._meta(raft, state)
            self._link.write(encode_vclock_reply(vclock, self._sync, with_zero=not self._is_2_6) + meta)
            for space in _sent_spaces(view):
                await self._send_space(view, space)
        return vclock

    async def _synced(self) -> tuple[RaftState, Promote]:
        """When all that was submitted is written, what is to be told of elections and of the queue as of then.

        Raises what made a write fail: then the view shows too much.
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
        """The state of elections and of the queue, for those who said their version: they understand it."""
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

    async def _send_space(self, view: ReadView, space: Space) -> None:
        assert space.primary is not None
        if space.id == SEQUENCE_DATA_ID:
            # Numbers that inserts have taken are in no row of the log: this is where they are kept.
            self._link.write(snapshot_packets(space.id, view.sequence_rows, self._sync))
            return
        for tuples in view.slices(space.primary, SLICE):
            for few in _pieces(tuples):
                self._link.write(snapshot_packets(space.id, few, self._sync))
                await self._link.flushed()

    # --- the registration ---

    async def register(self, uuid: UUID, name: str | None = None) -> None:
        """Makes the instance a member, unless it is one; with its name where the schema (of 3.x) has room for it."""
        instance = self._instance
        if str(uuid) not in dict(members(instance)).values():
            await self._check_leads()
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
                "all replica ids were used: %s gets id %d of a former member; make sure that the former member is "
                "stopped for good, and that all members follow each other",
                uuid,
                replica_id,
            )
        return replica_id

    async def _check_leads(self) -> None:
        """A leader whom the others have left without its knowing may not write what nobody waits for: a split brain."""
        instance = self._instance
        if instance.elections.mode is not Mode.OFF:
            await linearization_point(instance, instance.queue.timeout)
            if instance.is_read_only:
                raise instance.box.read_only_error()

    # --- the log ---

    async def send_log(self, start: VClock, stop: VClock) -> None:
        """Sends the rows between two positions of our log; whatever the replica has of its own is not left out."""
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
        """2.6 ends a join at any row that is no statement, and needs no CONFIRM: it takes all rows here as facts."""
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
        """What ends a stage: where the log is."""
        self._link.write(encode_vclock_reply(self._instance.vclock, self._sync))


def raft_row(state: RaftState, version: int) -> Row:
    """A RAFT row for a replica of this version: older ones expect it to be marked as local."""
    number = (version >> 16, version >> 8 & 0xFF, version & 0xFF)
    first_of_2, first_of_3 = _FIRST_WITH_PLAIN_RAFT
    is_plain = number >= first_of_3 or first_of_2 <= number < (3, 0, 0)
    return Row(RequestType.RAFT.value, group_id=0 if is_plain else GROUP_LOCAL, body=state.encode())


def snapshot_packets(space_id: int, tuples: Sequence[bytes], sync: int = 0) -> bytes:
    """Tuples of one space as rows of a snapshot: without LSN, originator and time."""
    header = b"\x81\x00\x02" if not sync else b"\x82\x00\x02\x01" + encode_uint(sync)
    # The fixed-width space id is what real servers send.
    fixed = header + b"\x82\x10\xce" + struct.pack(">I", space_id) + b"\x21"
    size = len(fixed)
    parts: list[bytes] = []
    for raw in tuples:
        parts += (_PACKET_HEAD(0xCE, size + len(raw)), fixed, raw)
    return b"".join(parts)


def _pieces(tuples: list[bytes]) -> Iterator[list[bytes]]:
    """Lists that are not too large to be written at once: tuples may be."""
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


def _sent_spaces(view: ReadView) -> Iterator[Space]:
    """By id, so that definitions come before data; neither what is temporary nor what is local."""
    for _, space in sorted(view.spaces.items()):
        definition = space.definition
        is_own = definition.is_temporary or definition.is_local or definition.engine not in _KEPT_ENGINES
        if space.primary is not None and not is_own:
            yield space
