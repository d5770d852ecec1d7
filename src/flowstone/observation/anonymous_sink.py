"""What those have in common who follow a log only to look at it: anonymous, without data, no part of any election.

They begin with what the server says it has now. `log_section.py` reads a part of a log, `tail_sink.py` all that comes.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from flowstone.box.schema import SchemaTracker
from flowstone.iproto.row import Row
from flowstone.node.archive_definitions import Definitions
from flowstone.node.archive_upstream import UpstreamFacts
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import Slab


class AnonymousSink:
    """Half of a `node.sink.Sink`; where it stands, and what becomes of rows, is for who inherits it."""

    replica_id = 0
    is_anonymous = True
    id_filter = (0,)
    term = 1

    def __init__(self, uuid: UUID) -> None:
        self.on_written: list[Callable[[], None]] = []
        self.instance_uuid = uuid

    def raft(self, source_id: int, row: Row) -> None:
        """Who is anonymous has no part in elections."""

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        raise AssertionError("a position is known, so no snapshot is asked for")

    async def meta(self, row: Row) -> None:
        raise AssertionError("no snapshot is taken")

    async def snapshot_rows(self, slab: Slab) -> None:
        raise AssertionError("no snapshot is taken")

    async def begin_final(self, stop_vclock: VClock) -> None:
        raise AssertionError("who is anonymous does not join")

    async def final_rows(self, slab: Slab) -> None:
        raise AssertionError("who is anonymous does not join")

    async def end_join(self, vclock: VClock) -> None:
        raise AssertionError("no snapshot is taken")


def version_of(facts: UpstreamFacts) -> tuple[int, int, int]:
    major, minor, patch = map(int, facts.version.split("."))
    return major, minor, patch


def schema_of(facts: UpstreamFacts) -> SchemaTracker:
    """What is defined at the server about now."""
    schema, position = SchemaTracker(), facts.ballot.vclock.without_zero().to_mapping()
    Definitions(position, str(facts.instance_uuid), facts.version, facts.definitions).apply_to(schema)
    return schema
