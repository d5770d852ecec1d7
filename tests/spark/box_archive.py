"""An archive of an engine's transactions, with the engine's state after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from flowstone.box.bootstrap import bootstrap_rows
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.row import Row
from flowstone.outside.disk import SystemDisk
from flowstone.replication.vclock import VClock
from tests.box.bootstrapped import bootstrapped
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import whole

Held = dict[int, list[bytes]]
"""The tuples of each space that has any, in primary key order."""


class BoxArchive(WrittenArchive):
    """An archive of a box; `commit` runs steps in a transaction of the box and archives its rows.

    `held` has the state after each transaction.
    """

    def __init__(self, directory: Path) -> None:
        self.box: Box = bootstrapped(Dialect.V2_11)
        super().__init__(SystemDisk(), str(directory))
        self.lsn = 0
        self.held: dict[int, Held] = {0: self.now()}

    def snapshot(self, vclock: VClock, rows: Sequence[tuple[int, Any]], at: float = 1.0) -> None:
        if not vclock.signature:
            born = bootstrap_rows(Dialect.V2_11, UUID(int=1), UUID(int=2))
            rows = [(space_id, unpack(raw)) for space_id, raw in born]
        super().snapshot(vclock, rows, at)

    def checkpoint(self) -> None:
        """Take a snapshot."""
        held = self.held[self.lsn]
        self.snapshot(self.position, [(space_id, unpack(raw)) for space_id in sorted(held) for raw in held[space_id]])

    @property
    def position(self) -> VClock:
        return VClock({1: self.lsn})

    def commit(self, *steps: Callable[[BoxTransaction], object]) -> VClock:
        transaction = self.box.begin()
        for step in steps:
            step(transaction)
        rows = []
        for statement in transaction.statements:
            self.lsn += 1
            kind = RequestType(statement.type)
            rows.append(Row(kind, 1, lsn=self.lsn, timestamp=100.0 + self.lsn, body=statement.body))
        self.write(whole(*rows))
        self.held[self.lsn] = self.now()
        return self.position

    def now(self) -> Held:
        spaces = [space for space in self.box.spaces.values() if space.definition.engine == "memtx"]
        found = {space.id: list(space.tuples()) for space in spaces}
        return {space_id: tuples for space_id, tuples in found.items() if tuples}
