"""The sink of a node: its identity and vclock, as appliers report them, and the destination of received rows.

While the node has no data, a join fills its box as recovery does from files, and `adopt` takes the result over. After
that, rows are applied to the running node (`node/upstream/row_applier.py`). The meaning of rows is defined there and in
`node/wal/replay.py`; `node/upstream/upstreams.py` decides which upstreams to connect to, and when.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final
from uuid import UUID

from flowstone.box.dialect import Dialect, from_greeting
from flowstone.errors import FlowstoneError
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.node.instance import Instance
from flowstone.node.upstream.row_applier import Applying
from flowstone.node.wal.recovery import RecoveredBox, replica_id_of, replicaset_uuid_of
from flowstone.node.wal.replay import OF_A_PEER, Replay
from flowstone.replication.limbo.control_rows import RaftState, decode_control
from flowstone.replication.membership.membership import expelled
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

UNWRITTEN_MAX: Final = 16 * 1024 * 1024
"""Maximum size, in bytes, of applied rows that are not written yet; above it, `apply` waits for the log."""

NOBODY: Final = UUID(int=0)


class JoinRefused(FlowstoneError):
    """The snapshot from a peer cannot be used: wrong version, no replica set, or this instance is not a member."""


class NodeSink:
    """The `Sink` (node/upstream/sink.py) of a node. `adopt` is called with the result of a join."""

    def __init__(self, instance: Instance, adopt: Callable[[RecoveredBox], Awaitable[None]]) -> None:
        self.on_written: list[Callable[[], None]] = []
        self.is_joining = False
        """True while a join fills the box: its contents are incomplete and must not be used."""
        self.applying: Applying | None = None
        """Applies rows of subscriptions; None until there is data."""
        self._instance = instance
        self._adopt = adopt
        self._replay: Replay | None = None
        self._has_joined = False
        self._told = 0

    def watch_log(self) -> None:
        """Notify appliers when rows of other instances are written. A node without upstreams does not need it."""
        log = self._instance.journal.on_written
        if self._log_has_grown not in log:
            log.append(self._log_has_grown)

    def _log_has_grown(self, rows: bytes, vclock: VClock) -> None:
        """Notify appliers unless only our own rows were written: an ACK for each would cost more than the write.

        ACKs of heartbeats include them.
        """
        # With id 0 (anonymous), component 0 is subtracted once, as that of our own id.
        foreign = vclock.signature - vclock.get(self._instance.id) - (vclock.get(0) if self._instance.id else 0)
        if foreign != self._told:
            self._told = foreign
            for tell in self.on_written:
                tell()

    # --- identity and position ---

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
        """0 if anonymous, otherwise our own id. Our own id is omitted if we may have lost own rows: as an orphan that
        has not just joined."""
        if self.is_anonymous:
            return (0,)
        return () if self._instance.is_orphan and not self._has_joined else (self._instance.id,)

    @property
    def term(self) -> int:
        return self._instance.elections.term

    # --- join ---

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        box = self._instance.box
        dialect = from_greeting(greeting_version)
        if dialect is not box.dialect:
            version = ".".join(map(str, greeting_version))
            hint = f"start with dialect {dialect.value}"
            raise JoinRefused(
                f"peer runs Tarantool {version}, which does not match dialect {box.dialect.value}", hint=hint
            )
        LOG.info("receiving snapshot at vclock %s", vclock)
        if self.is_joining:
            box.clear()  # an earlier attempt failed after its snapshot had begun
        self.is_joining = True
        # The peer has checked and allowed its rows.
        box.is_recovering = True
        self._replay = Replay(box, hint=OF_A_PEER)
        self._start_vclock = vclock.without_zero().merged(self._local_rows())

    def _local_rows(self) -> VClock:
        """Return the LSN of our local rows. The rows are discarded, but the sum of LSNs orders files and must grow."""
        return VClock({0: self._instance.vclock.get(0)})

    async def meta(self, row: Row) -> None:
        assert self._replay is not None
        self._replay.synchro.follow(row, in_snapshot=True)

    async def snapshot_rows(self, slab: Slab) -> None:
        assert self._replay is not None
        self._replay.push_snapshot(slab)

    async def begin_final(self, stop_vclock: VClock) -> None:
        LOG.info("snapshot received: %d rows; receiving log up to vclock %s", self._rows_so_far(), stop_vclock)
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
        if replay is None:  # a registration: its rows were applied as usual
            await self._instance.journal.drain()
            return
        box = self._instance.box
        # FETCH_SNAPSHOT has no final stage, which would have started the logs.
        if self.is_anonymous:
            replay.start_logs(self._start_vclock)
        replay.rewind()  # the subscription brings pending transactions again
        box.is_recovering = False
        # The data is complete only now: until this point a failure leaves the instance without data, and it joins
        # again.
        await self._adopt(self._recovered(replay))
        self.is_joining = False
        self._has_joined = True

    def _recovered(self, replay: Replay) -> RecoveredBox:
        box, uuid = self._instance.box, self._instance.uuid
        replicaset_uuid, replica_id = replicaset_uuid_of(box), replica_id_of(box, uuid)
        if replicaset_uuid is None:
            raise JoinRefused("snapshot from peer has no replica set UUID", hint="join another peer")
        if replica_id == 0 and not self.is_anonymous:
            raise JoinRefused(f"peer has not registered this instance ({uuid}) in _cluster", hint="join another peer")
        return RecoveredBox(
            replay.vclock, uuid, replicaset_uuid, replica_id, replay.synchro, row_count=replay.row_count
        )

    # --- subscription ---

    async def apply(self, slab: Slab) -> None:
        assert self.applying is not None, "no upstream is followed before there is data"
        if self._instance.is_expelled:  # by an earlier row of this batch; the applier is not cancelled yet
            raise expelled(self._instance.expelled_id)
        # Not awaited: rows are applied at once and written in the background, so that the next slab can be decoded.
        self.applying.apply(slab)
        if self.applying.is_holding:
            await self.applying.release()
        # A master sends faster than a slow disk writes; memory must not grow without a limit.
        if self.applying.in_flight_bytes > UNWRITTEN_MAX:
            await self._instance.journal.drain()

    def raft(self, source_id: int, row: Row) -> None:
        """Pass the state of the peer to elections. Dialect 2.6 has none, and ignores the row."""
        if self._instance.box.dialect is Dialect.V2_6:
            return
        told = decode_control(row.type, row.body or b"")
        if isinstance(told, RaftState):
            self._instance.elections.message(source_id, told)
