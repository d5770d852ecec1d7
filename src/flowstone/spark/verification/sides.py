"""The sides of a comparison: a live node, an archive, a log directory. `lake_side.py` has the lake.

A `Side` knows its newest position and which positions it can show; a `SideView` is a side at one position, as a data
frame. A node is followed as an anonymous replica into a temporary archive, which is removed when the side is closed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from flowstone.archive.archive import Archive
from flowstone.archive.events import ArchiveEvent
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import Schema
from flowstone.box.system import (
    CK_CONSTRAINT_ID,
    COLLATION_ID,
    FIRST_USER_SPACE_ID,
    FK_CONSTRAINT_ID,
    FUNC_ID,
    FUNC_INDEX_ID,
    INDEX_ID,
    PRIV_ID,
    SEQUENCE_DATA_ID,
    SEQUENCE_ID,
    SPACE_ID,
    SPACE_SEQUENCE_ID,
    TRIGGER_ID,
    USER_ID,
)
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri
from flowstone.lake.masks import SpaceMask
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.state_frames import state_frame
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.index.slice_bytes import Transport
from flowstone.spark.sources.options import AsOf
from flowstone.spark.spark_session import is_one_process

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFINITIONS: Final = (
    SPACE_ID,
    SEQUENCE_ID,
    SEQUENCE_DATA_ID,
    INDEX_ID,
    TRIGGER_ID,
    SPACE_SEQUENCE_ID,
    FK_CONSTRAINT_ID,
    CK_CONSTRAINT_ID,
    FUNC_INDEX_ID,
)
"""System spaces that are compared unless `spaces` are chosen: definitions and the values of sequences.

Among rows that describe spaces, only rows about user spaces are compared, because the others differ between releases.
"""

ON_REQUEST: Final = (COLLATION_ID, FUNC_ID, USER_ID, PRIV_ID)
"""System spaces that are compared on request: collations, functions, users and privileges.

The others belong to one instance or one moment and are never equal: `_schema`, `_cluster`, `_truncate`,
`_session_settings`, `_gc_consumers`, `_vinyl_deferred_delete`.
"""

ARCHIVE_TIMEOUT: Final = 1.0


class SideError(FlowstoneError):
    """A side does not exist, or cannot show the requested position."""


@dataclass(frozen=True)
class SideView:
    """A side at one position.

    `schema` names the spaces and their fields. `spaces` are the ids of the user spaces that the view can show,
    `definitions` the ids of the system spaces. `left_out` has the reason, by id, why a space is not shown.
    """

    schema: Schema
    spaces: frozenset[int]
    definitions: frozenset[int]
    left_out: dict[int, str]
    notes: tuple[str, ...] = ()
    masks: dict[int, SpaceMask] = field(default_factory=dict)
    """Masks of the spaces whose tuples this side has only masked. The other side is masked in the same way."""
    hidden_fields: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Masked fields, by space, whose mask cannot be repeated on the other side. They are not compared."""
    uncompared: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Fields, by space, that are not part of the state. They are not compared."""
    make: Callable[[Collection[int]], DataFrame] = field(kw_only=True)

    def frame(self, spaces: Collection[int]) -> DataFrame:
        """Return the rows of the spaces, with the columns of `digests.SIDE_COLUMNS`."""
        return self.make(spaces)


class Side(Protocol):
    """One of the two sides of a comparison."""

    @property
    def kind(self) -> str:
        """node, archive, log, limestone or lake."""

    @property
    def name(self) -> str:
        """The name that the user gave, without secrets."""

    @property
    def replicaset_uuid(self) -> str:
        """The UUID of the replica set; empty if unknown."""

    @property
    def reach(self) -> VClock:
        """The newest settled position that the side can show, without local rows."""

    @property
    def has_past(self) -> bool:
        """True if the side can show positions other than `reach`."""

    def refresh(self) -> None:
        """Read the rows that arrived since the last call."""

    def choose(self, replicaset_uuid: str) -> None:
        """Select a replica set if the side holds several."""

    def can_show(self, position: VClock) -> bool: ...

    def resolve(self, as_of: AsOf) -> VClock:
        """Return the position of a moment in the past, or raise an error that names the nearest positions."""

    def view(self, spark: SparkSession, position: VClock) -> SideView: ...

    def close(self) -> None: ...


@dataclass
class LogSide:
    """An archive, or a directory of logs."""

    directory: str
    kind: str = field(init=False, default="log")
    index: ArchiveIndex = field(init=False)

    def __post_init__(self) -> None:
        self.index = ArchiveIndex.open(production().disk, self.directory)
        if os.path.exists(os.path.join(self.directory, "manifest.json")):
            self.kind = "archive"

    @property
    def name(self) -> str:
        return self.directory

    @property
    def replicaset_uuid(self) -> str:
        return self.index.replicaset_uuid

    @property
    def reach(self) -> VClock:
        return self.index.settled.without_zero()

    @property
    def has_past(self) -> bool:
        return True

    def refresh(self) -> None:
        self.index.refresh()

    def choose(self, replicaset_uuid: str) -> None:
        """There is one only."""

    def can_show(self, position: VClock) -> bool:
        return can_show(self.index, position)

    def resolve(self, as_of: AsOf) -> VClock:
        return self.index.resolve(as_of)

    def view(self, spark: SparkSession, position: VClock) -> SideView:
        return log_view(spark, self.index, position, has_vinyl=self.kind == "archive")

    def close(self) -> None:
        """Nothing is held open."""


@dataclass
class NodeSide:
    """A live server. Its rows are received into a temporary directory, which is removed when the side is closed."""

    uri: Uri
    on_event: Callable[[ArchiveEvent], None] = lambda event: None
    directory: str = field(init=False)
    index: ArchiveIndex | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="flowstone-verify-")

    @property
    def kind(self) -> str:
        return "node"

    @property
    def name(self) -> str:
        return self.uri.address

    @property
    def replicaset_uuid(self) -> str:
        return self._index.replicaset_uuid

    @property
    def reach(self) -> VClock:
        return self._index.settled.without_zero()

    @property
    def has_past(self) -> bool:
        return True

    @property
    def _index(self) -> ArchiveIndex:
        assert self.index is not None, "refresh the side first"
        return self.index

    def refresh(self) -> None:
        """Receive all rows that the server has now. The first call starts with a snapshot."""
        receiver = Archive(
            self.uri, self.directory, snapshot_interval=0, on_event=self.on_event, replication_timeout=ARCHIVE_TIMEOUT
        )
        asyncio.run(receiver.run(once=True))
        if self.index is None:
            self.index = ArchiveIndex.open(production().disk, self.directory)
        else:
            self.index.refresh()

    def choose(self, replicaset_uuid: str) -> None:
        """There is one only."""

    def can_show(self, position: VClock) -> bool:
        return can_show(self._index, position)

    def resolve(self, as_of: AsOf) -> VClock:
        return self._index.resolve(as_of)

    def view(self, spark: SparkSession, position: VClock) -> SideView:
        # The received files are on the driver's machine.
        transport: Transport = "file" if is_one_process(spark.sparkContext.master or "") else "inline"
        return log_view(spark, self._index, position, has_vinyl=True, transport=transport)

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def can_show(index: ArchiveIndex, position: VClock) -> bool:
    """Return True if these files can rebuild the state at `position`, whose components all end a transaction."""
    if not position <= index.settled:
        return False
    try:
        index.snapshot_at(_with_local(index, position))
    except FlowstoneError:
        return False
    return True


def _with_local(index: ArchiveIndex, position: VClock) -> VClock:
    """Return `position` with the component of local rows.

    Positions are compared without local rows, but files count them. Any number of local rows will do.
    """
    return VClock({**position.to_mapping(), 0: index.settled.get(0)})


def log_view(
    spark: SparkSession, index: ArchiveIndex, position: VClock, *, has_vinyl: bool, transport: Transport = "file"
) -> SideView:
    """Return the state at a position.

    `has_vinyl` is True for snapshots received over the network: a server's own `.snap` files have no vinyl tuples.
    """
    from pyspark.sql import functions as f

    at = _with_local(index, position)
    schema = index.schema_at(at).schema
    spaces, left_out = comparable(schema, has_vinyl=has_vinyl)
    known = {space.id for space in schema}

    def make(wanted: Collection[int]) -> DataFrame:
        frame = state_frame(spark, index, at, spaces=sorted(wanted), transport=transport)
        return frame.withColumn("wrong", f.lit(None).cast("string"))

    definitions = frozenset((*DEFINITIONS, *ON_REQUEST)) & known
    return SideView(schema, frozenset(spaces), definitions, left_out, make=make)


def comparable(schema: Schema, *, has_vinyl: bool) -> tuple[Sequence[int], dict[int, str]]:
    """Return the ids of the user spaces whose rows are replicated, and by id why others are not compared."""
    found: list[int] = []
    left_out: dict[int, str] = {}
    for space in schema:
        if space.id < FIRST_USER_SPACE_ID:
            continue
        why = _why_not(space, has_vinyl)
        if why is None:
            found.append(space.id)
        else:
            left_out[space.id] = why
    return found, left_out


def _why_not(space: SpaceDefinition, has_vinyl: bool) -> str | None:
    if space.is_local:
        return "it is local to each instance"
    if space.is_temporary:
        return "it is temporary and not in the log"
    if space.is_view or space.engine in ("sysview", "blackhole"):
        return "it has no tuples"
    if space.engine == "vinyl" and not has_vinyl:
        return "its engine is vinyl, whose tuples are in separate files"
    return None
