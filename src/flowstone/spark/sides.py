"""What can be compared: a live node, an archive, a directory of logs. A lake is in `lake_side.py`.

A `Side` knows how far it reaches and which positions it can show; a `View` is a side at one position, as a data frame.
A node is followed, anonymously, into an archive of its own that is gone when the side is closed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

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
from flowstone.node.archive import Archive
from flowstone.node.archive_events import Event
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.archive_index import ArchiveIndex
from flowstone.spark.masks import SpaceMask
from flowstone.spark.options import AsOf
from flowstone.spark.session import is_one_process
from flowstone.spark.slice_bytes import Transport
from flowstone.spark.state import state_frame

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
"""System spaces that are compared unless `spaces` are chosen: what is defined, and where sequences stand.

Of those that tell of spaces only rows of users' spaces: the system's own differ between releases.
"""

ON_REQUEST: Final = (COLLATION_ID, FUNC_ID, USER_ID, PRIV_ID)
"""Functions, users and their privileges. The others are of one instance or of one moment, and never equal by nature:
`_schema`, `_cluster`, `_truncate`, `_session_settings`, `_gc_consumers`, `_vinyl_deferred_delete`."""

ARCHIVE_TIMEOUT: Final = 1.0


class SideError(FlowstoneError):
    """A side is not there, or cannot show what it is asked for."""


@dataclass(frozen=True)
class View:
    """A side at one position.

    `schema` names the spaces and their fields. `spaces` are the users' spaces that it can show, `definitions` the
    system spaces; `left_out` says of others why they are not among them, by id.
    """

    schema: Schema
    spaces: frozenset[int]
    definitions: frozenset[int]
    left_out: dict[int, str]
    notes: tuple[str, ...] = ()
    masks: dict[int, SpaceMask] = field(default_factory=dict)
    """Spaces whose tuples this side has masked only, and how: the other side's are masked in the same way."""
    hidden_fields: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Masked fields, by space, of which nobody here can tell what is behind them: they are compared on neither side."""
    uncompared: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Fields, by space, that are no part of the state: they are compared on neither side."""
    make: Callable[[Collection[int]], DataFrame] = field(kw_only=True)

    def frame(self, spaces: Collection[int]) -> DataFrame:
        """The rows of those spaces, with the columns of `digests.SIDE_COLUMNS`."""
        return self.make(spaces)


class Side(Protocol):
    """One of the two."""

    @property
    def kind(self) -> str:
        """node, archive, log, limestone or lake."""

    @property
    def name(self) -> str:
        """As its user calls it, without what is secret."""

    @property
    def replicaset_uuid(self) -> str:
        """Whose log it is; empty where nobody knows."""

    @property
    def reach(self) -> VClock:
        """The newest settled position that it can show, without local rows."""

    @property
    def has_past(self) -> bool:
        """True if it can show more than the position at `reach`."""

    def refresh(self) -> None:
        """Takes in what came since."""

    def choose(self, replicaset_uuid: str) -> None:
        """Takes that replica set, where the side holds several."""

    def can_show(self, position: VClock) -> bool: ...

    def resolve(self, as_of: AsOf) -> VClock:
        """The position of a moment of the past, or an error that names the nearest ones."""

    def view(self, spark: SparkSession, position: VClock) -> View: ...

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

    def view(self, spark: SparkSession, position: VClock) -> View:
        return log_view(spark, self.index, position, has_vinyl=self.kind == "archive")

    def close(self) -> None:
        """Nothing is held open."""


@dataclass
class NodeSide:
    """A live server. What it has is received into a directory that is gone when the side is closed."""

    uri: Uri
    on_event: Callable[[Event], None] = lambda event: None
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
        assert self.index is not None, "refresh it first"
        return self.index

    def refresh(self) -> None:
        """Everything that the server has at this moment; the first time that begins with a snapshot."""
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

    def view(self, spark: SparkSession, position: VClock) -> View:
        # What is received lies on the driver's machine.
        transport: Transport = "file" if is_one_process(spark.sparkContext.master or "") else "inline"
        return log_view(spark, self._index, position, has_vinyl=True, transport=transport)

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def can_show(index: ArchiveIndex, position: VClock) -> bool:
    """Whether the state at `position`, of which each component ends a transaction, can be made from these files."""
    if not position <= index.settled:
        return False
    try:
        index.snapshot_at(_with_local(index, position))
    except FlowstoneError:
        return False
    return True


def _with_local(index: ArchiveIndex, position: VClock) -> VClock:
    """Positions are compared without local rows; files count theirs, and any number of them will do."""
    return VClock({**position.to_mapping(), 0: index.settled.get(0)})


def log_view(
    spark: SparkSession, index: ArchiveIndex, position: VClock, *, has_vinyl: bool, transport: Transport = "file"
) -> View:
    """The state at a position. Tuples of vinyl are in snapshots that were sent, and in no file `.snap` of a server."""
    from pyspark.sql import functions as f

    at = _with_local(index, position)
    schema = index.schema_at(at).schema
    spaces, left_out = comparable(schema, has_vinyl=has_vinyl)
    known = {space.id for space in schema}

    def make(wanted: Collection[int]) -> DataFrame:
        frame = state_frame(spark, index, at, spaces=sorted(wanted), transport=transport)
        return frame.withColumn("wrong", f.lit(None).cast("string"))

    definitions = frozenset((*DEFINITIONS, *ON_REQUEST)) & known
    return View(schema, frozenset(spaces), definitions, left_out, make=make)


def comparable(schema: Schema, *, has_vinyl: bool) -> tuple[Sequence[int], dict[int, str]]:
    """Ids of the users' spaces whose rows are replicated, and why others are not compared."""
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
        return "it is temporary: its tuples are in no log"
    if space.is_view or space.engine in ("sysview", "blackhole"):
        return "it holds no tuples"
    if space.engine == "vinyl" and not has_vinyl:
        return "it is of vinyl, whose tuples are in files of their own"
    return None
