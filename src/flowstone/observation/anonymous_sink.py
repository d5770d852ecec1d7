"""Base of the sinks that only observe a log: anonymous, without data, never part of an election.

`log_section.py` reads a section of a log, `tail_sink.py` follows it. Nothing here joins or keeps a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from flowstone.archive.definitions_file import DefinitionsFile
from flowstone.archive.upstream_query import UpstreamFacts
from flowstone.box.schema import SchemaTracker
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.replication.vclock import VClock


class AnonymousSink:
    """The common half of a `Sink` (node/upstream/sink.py); subclasses define the position and process the rows."""

    replica_id = 0
    is_anonymous = True
    id_filter = (0,)
    term = 1

    def __init__(self, uuid: UUID) -> None:
        self.on_written: list[Callable[[], None]] = []
        self.instance_uuid = uuid

    def raft(self, source_id: int, row: Row) -> None:
        """Ignore the message: an anonymous replica takes no part in elections."""

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        raise AssertionError("unexpected snapshot: the position is known")

    async def meta(self, row: Row) -> None:
        raise AssertionError("unexpected snapshot")

    async def snapshot_rows(self, slab: Slab) -> None:
        raise AssertionError("unexpected snapshot")

    async def begin_final(self, stop_vclock: VClock) -> None:
        raise AssertionError("unexpected join: the replica is anonymous")

    async def final_rows(self, slab: Slab) -> None:
        raise AssertionError("unexpected join: the replica is anonymous")

    async def end_join(self, vclock: VClock) -> None:
        raise AssertionError("unexpected snapshot")


def version_of(facts: UpstreamFacts) -> tuple[int, int, int]:
    major, minor, patch = map(int, facts.version.split("."))
    return major, minor, patch


def schema_of(facts: UpstreamFacts) -> SchemaTracker:
    """Return the server's definitions, as of the position in its ballot."""
    schema, position = SchemaTracker(), facts.ballot.vclock.without_zero().to_mapping()
    DefinitionsFile(position, str(facts.instance_uuid), facts.version, facts.definitions).apply_to(schema)
    return schema
