"""Whom an applier feeds, and asks: the node, `follow` and `archive` each have such a sink.

Only the contract is here; `node/applier.py` is who keeps to it on the other side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from uuid import UUID

from flowstone.iproto.row import Row
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import Slab


class Sink(Protocol):
    """What it raises ends the connection, and perhaps the applier, by the tables of `replication/applier.py`."""

    on_written: list[Callable[[], None]]
    """Appliers register here; called, with nothing awaited, when `vclock` has moved."""

    @property
    def instance_uuid(self) -> UUID: ...

    @property
    def replicaset_uuid(self) -> UUID | None:
        """None: there is no data yet. An applier then joins, or fetches a snapshot where `is_anonymous`."""
        ...

    @property
    def replica_id(self) -> int:
        """0: not registered. An applier then registers us before it subscribes, unless `is_anonymous`."""
        ...

    @property
    def is_anonymous(self) -> bool: ...

    @property
    def version_id(self) -> int:
        """Our age in JOIN and SUBSCRIBE; which errors are tried again depends on it, too."""
        ...

    @property
    def vclock(self) -> VClock:
        """What is durable here, and will not be taken back: SUBSCRIBE and ACKs say it."""
        ...

    @property
    def id_filter(self) -> tuple[int, ...]:
        """Originators whose rows are not wanted."""
        ...

    @property
    def term(self) -> int:
        """The highest Raft term seen, 1 at first."""
        ...

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        """JOIN or FETCH_SNAPSHOT was granted: the rows of a snapshot of `vclock` follow."""
        ...

    async def meta(self, row: Row) -> None:
        """RAFT or PROMOTE, from between JOIN_META and JOIN_SNAPSHOT."""
        ...

    async def snapshot_rows(self, slab: Slab) -> None: ...

    async def begin_final(self, stop_vclock: VClock) -> None:
        """The snapshot of a JOIN is complete: rows of the log up to `stop_vclock` follow."""
        ...

    async def final_rows(self, slab: Slab) -> None:
        """Rows of the log that end a JOIN, or that answer a REGISTER."""
        ...

    async def end_join(self, vclock: VClock) -> None:
        """JOIN, FETCH_SNAPSHOT or REGISTER is done. By now `replicaset_uuid` and `replica_id` are what it gave us."""
        ...

    async def apply(self, slab: Slab) -> None:
        """Whole transactions of a subscription, all with LSNs. Returns before they are written, unless much waits."""
        ...

    def raft(self, source_id: int, row: Row) -> None:
        """A RAFT row of the peer `source_id`, from between two transactions."""
        ...
