"""The interface between an applier and its receiver: the node, `follow` and `archive` each implement a sink.

This module has only the protocol class; `node/upstream/applier.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from uuid import UUID

from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.replication.vclock import VClock


class Sink(Protocol):
    """Receives the data of an applier and has its settings.

    An exception of a method ends the connection; the tables of `replication/applier/states.py` decide whether the
    applier retries.
    """

    on_written: list[Callable[[], None]]
    """Callbacks of appliers, called synchronously after `vclock` has moved."""

    @property
    def instance_uuid(self) -> UUID: ...

    @property
    def replicaset_uuid(self) -> UUID | None:
        """None if there is no data yet: then the applier joins or, if `is_anonymous`, fetches a snapshot."""
        ...

    @property
    def replica_id(self) -> int:
        """0 if not registered: then the applier registers before it subscribes, unless `is_anonymous`."""
        ...

    @property
    def is_anonymous(self) -> bool: ...

    @property
    def version_id(self) -> int:
        """Our version in JOIN and SUBSCRIBE. It also decides which errors are retried."""
        ...

    @property
    def vclock(self) -> VClock:
        """The durable position that is never rolled back; sent in SUBSCRIBE and ACKs."""
        ...

    @property
    def id_filter(self) -> tuple[int, ...]:
        """Replica ids whose rows the upstream must not send."""
        ...

    @property
    def term(self) -> int:
        """The highest Raft term seen; initially 1."""
        ...

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        """Start a snapshot at `vclock`: JOIN or FETCH_SNAPSHOT was granted, and the rows follow."""
        ...

    async def meta(self, row: Row) -> None:
        """Take a RAFT or PROMOTE row, sent between JOIN_META and JOIN_SNAPSHOT."""
        ...

    async def snapshot_rows(self, slab: Slab) -> None:
        """Take the next rows of the snapshot."""
        ...

    async def begin_final(self, stop_vclock: VClock) -> None:
        """End the snapshot of a JOIN: rows of the log up to `stop_vclock` follow."""
        ...

    async def final_rows(self, slab: Slab) -> None:
        """Take rows of the log at the end of a JOIN or REGISTER."""
        ...

    async def end_join(self, vclock: VClock) -> None:
        """End a JOIN, FETCH_SNAPSHOT or REGISTER. On return, `replicaset_uuid` and `replica_id` have the received
        values."""
        ...

    async def apply(self, slab: Slab) -> None:
        """Take whole transactions of a subscription. Return before they are written, unless the queue is full."""
        ...

    def raft(self, source_id: int, row: Row) -> None:
        """Take a RAFT row of the peer `source_id`, sent between two transactions."""
        ...
