"""A Limestone directory as one side of a comparison: its state at a durable epoch, as tuples of tables or storages.

Write versions are not compared: compaction removes them, and two directories with the same rows may have been compacted
at different times. Directories share no identity, so their UUIDs are not compared either: two directories are compared
at the same epoch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.limestone_fold import state_frame
from flowstone.spark.index.limestone_index import LimestoneIndex
from flowstone.spark.index.limestone_spaces import (
    VERSION_FIELDS,
    epoch_of,
    position_of,
    space_id_of,
    storage_id_of,
)
from flowstone.spark.index.limestone_tables import tables_at
from flowstone.spark.sources.options import AsOf
from flowstone.spark.verification.sides import SideError, SideView

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KIND = "limestone"
NOTE = "write versions are not compared: compaction removes them"


@dataclass
class LimestoneSide:
    """A directory that a master or a replica may be writing."""

    directory: str
    is_raw: bool = False
    index: LimestoneIndex = field(init=False)

    def __post_init__(self) -> None:
        self.index = LimestoneIndex.open(production().disk, self.directory)

    @property
    def kind(self) -> str:
        return KIND

    @property
    def name(self) -> str:
        return self.directory

    @property
    def replicaset_uuid(self) -> str:
        return self.index.instance_uuid

    @property
    def reach(self) -> VClock:
        return position_of(self.index.durable)

    @property
    def has_past(self) -> bool:
        return True

    def refresh(self) -> None:
        self.index.refresh()

    def choose(self, replicaset_uuid: str) -> None:
        """Do nothing: there is only one."""

    def can_show(self, position: VClock) -> bool:
        return self.index.can_show(epoch_of(position))

    def resolve(self, as_of: AsOf) -> VClock:
        epoch = as_of.lsn if as_of.vclock is None else epoch_of(as_of.vclock)
        if epoch is None:
            raise SideError(f"{self.directory}: the log of Limestone has no times", hint="use an epoch, a whole number")
        self.index.check_state(epoch)
        return position_of(epoch)

    def view(self, spark: SparkSession, position: VClock) -> SideView:
        from pyspark.sql import functions as f

        epoch = epoch_of(position)
        tables = tables_at(self.index, epoch, is_raw=self.is_raw)
        spaces = tables.spaces

        def make(wanted: Collection[int]) -> DataFrame:
            chosen = tuple(sorted(map(storage_id_of, spaces.intersection(wanted))))
            frame = state_frame(spark, self.index, epoch, chosen, tables.typed)
            return frame.withColumn("wrong", f.lit(None).cast("string"))

        uncompared: dict[int, tuple[int, ...]] = dict.fromkeys(map(space_id_of, tables.storages), VERSION_FIELDS)
        notes = ((NOTE,) if uncompared else ()) + tables.notes
        return SideView(tables.tracker.schema, spaces, frozenset(), {}, notes, uncompared=uncompared, make=make)

    def close(self) -> None:
        """Do nothing: nothing is open."""
