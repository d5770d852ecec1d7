"""The node as its appliers see it: who it is, where it stands, and what becomes of the rows that they bring.

Before the node has data, a join fills its box as recovery would from files; when that is complete, `adopt` makes it the
node's own. From then on rows are applied live (`node/applying.py`). What a row means is decided there and in
`node/replay.py`, when to connect to whom in `node/replication.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final
from uuid import UUID

from flowstone.box.dialect import Dialect, from_greeting
from flowstone.errors import FlowstoneError
from flowstone.iproto.row import Row
from flowstone.node.applying import Applying
from flowstone.node.instance import Instance
from flowstone.node.recovery import Recovered, replica_id_of, replicaset_uuid_of, sort_indexes
from flowstone.node.replay import OF_A_PEER, Replay
from flowstone.replication.membership import expelled
from flowstone.replication.synchro import RaftState, decode_control
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import Slab

LOG = logging.getLogger("flowstone.node")

UNWRITTEN_MAX: Final = 16 * 1024 * 1024
"""Bytes of applied rows that may wait for the log before the next are taken from a peer."""

NOBODY: Final = UUID(int=0)


class JoinRefused(FlowstoneError):
    """What a peer sent in answer to JOIN is not the data of a replica set that we are in."""


class Member:
    """A node: `node.sink.Sink`. `adopt` is called with what a join has brought."""

    def __init__(self, instance: Instance, adopt: Callable[[Recovered], Awaitable[None]]) -> None:
        self.on_written: list[Callable[[], None]] = []
        self.is_joining = False
        """Rows of a snapshot have arrived: what the box holds is not yet anything."""
        self.applying: Applying | None = None
        """Set once there is data that rows can change."""
        self._instance = instance
        self._adopt = adopt
        self._replay: Replay | None = None
        self._has_joined = False
        self._told = 0

    def watch_log(self) -> None:
        """Tells appliers from now on when rows of others are written; who follows nobody is spared that."""
        log = self._instance.journal.on_written
        if self._log_has_grown not in log:
            log.append(self._log_has_grown)

    def _log_has_grown(self, rows: bytes, vclock: VClock) -> None:
        """Of our own rows peers hear when they ask: an ACK for each would cost more than the write."""
        foreign = vclock.signature - vclock.get(self._instance.id) - (vclock.get(0) if self._instance.id else 0)
        if foreign != self._told:
            self._told = foreign
            for tell in self.on_written:
                tell()

    # --- who it is ---

    @property
    def instance_uuid(self) -> UUID:
        return self._instance.uuid

    @property
    def replicaset_uuid(self) -> UUID | None:
        uuid = self._instance.replicaset_uuid
        return None if uuid == NOBODY else uuid

    @property
    def replica_id(self) -> int:
        return self._instance.id

    @property
    def is_anonymous(self) -> bool:
        return self._instance.configuration.replication_anon

    @property
    def version_id(self) -> int:
        return self._instance.box.dialect.version_id

    @property
    def vclock(self) -> VClock:
        return self._instance.vclock

    @property
    def id_filter(self) -> tuple[int, ...]:
        """Our own rows are wanted back only while we may have lost some: as an orphan that has not just joined."""
        if self.is_anonymous:
            return (0,)
        return () if self._instance.is_orphan and not self._has_joined else (self._instance.id,)

    @property
    def term(self) -> int:
        return self._instance.elections.term

    # --- the first data ---

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        box = self._instance.box
        dialect = from_greeting(greeting_version)
        if dialect is not box.dialect:
            version = ".".join(map(str, greeting_version))
            hint = f"start with dialect {dialect.value}"
            raise JoinRefused(
                f"the peer is a Tarantool {version}, and this node was told to be older or newer", hint=hint
            )
        LOG.info("receiving a snapshot of %s", vclock)
        if self.is_joining:
            box.clear()  # an earlier one came with an error behind it, and a request to try again
        self.is_joining = True
        box.is_recovering = True
        self._replay = Replay(box, hint=OF_A_PEER)
        self._start_vclock = vclock.without_zero().merged(self._local_rows())

    def _local_rows(self) -> VClock:
        """What we counted of our own local rows. They are gone with the data, but files are ordered by sums of LSNs."""
        return VClock({0: self._instance.vclock.get(0)})

    async def meta(self, row: Row) -> None:
        assert self._replay is not None
        self._replay.synchro.follow(row, in_snapshot=True)

    async def snapshot_rows(self, slab: Slab) -> None:
        assert self._replay is not None
        self._replay.push_snapshot(slab)

    async def begin_final(self, stop_vclock: VClock) -> None:
        LOG.info("snapshot received, %d rows; now the log up to %s", self._rows_so_far(), stop_vclock)
        self._start_logs()

    def _rows_so_far(self) -> int:
        return self._replay.row_count if self._replay is not None else 0

    def _start_logs(self) -> None:
        if self._replay is not None:
            self._replay.start_logs(self._start_vclock)
            has_flags = self._instance.box.dialect.has_id
            self._replay.start_log("the final join", self._start_vclock, has_flags=has_flags)

    async def final_rows(self, slab: Slab) -> None:
        if self._replay is not None:
            self._replay.push_log(slab)
        else:
            await self.apply(slab)

    async def end_join(self, vclock: VClock) -> None:
        replay, self._replay = self._replay, None
        if replay is None:  # a registration
            await self._instance.journal.drain()
            return
        box = self._instance.box
        if self.is_anonymous:
            replay.start_logs(self._start_vclock)
        replay.rewind()  # what is undecided comes again, with what is new
        box.is_recovering = False
        sort_indexes(box)
        await self._adopt(self._recovered(replay))
        self.is_joining = False
        self._has_joined = True

    def _recovered(self, replay: Replay) -> Recovered:
        box, uuid = self._instance.box, self._instance.uuid
        replicaset_uuid, replica_id = replicaset_uuid_of(box), replica_id_of(box, uuid)
        if replicaset_uuid is None:
            raise JoinRefused("the data that the peer sent names no replica set", hint="ask another peer")
        if replica_id == 0 and not self.is_anonymous:
            raise JoinRefused(f"the peer has not registered us, {uuid}, in _cluster", hint="ask another peer")
        return Recovered(replay.vclock, uuid, replicaset_uuid, replica_id, replay.synchro, row_count=replay.row_count)

    # --- the stream ---

    async def apply(self, slab: Slab) -> None:
        assert self.applying is not None, "nobody is followed before there is data"
        if self._instance.is_expelled:  # by a row of this batch: the applier is not cancelled yet
            raise expelled(self._instance.expelled_id)
        self.applying.apply(slab)
        if self.applying.is_holding:
            await self.applying.release()
        if self.applying.in_flight_bytes > UNWRITTEN_MAX:
            await self._instance.journal.drain()

    def raft(self, source_id: int, row: Row) -> None:
        """In 2.6, which has no elections, it is a sign of life and nothing more."""
        if self._instance.box.dialect is Dialect.V2_6:
            return
        told = decode_control(row.type, row.body or b"")
        if isinstance(told, RaftState):
            self._instance.elections.message(source_id, told)
