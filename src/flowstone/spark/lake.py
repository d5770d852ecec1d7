"""A lake: a directory of Delta tables, one per space, and how far each replica set has come in it.

`Lake` finds, makes, loads and renames tables; `Progress` is what a mirror has to know to go on, kept in a small table of
its own (`_flowstone`). Each table knows its position by itself, so a crash between the commits of tables and that of the
progress loses and doubles nothing: whoever goes on leaves out, table by table, what is there already.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal

from flowstone.box.definitions import SpaceDefinition
from flowstone.replication.vclock import VClock
from flowstone.spark.lake_schema import LakeError, LakeSchema
from flowstone.spark.lake_table import LakeTable, Merged, Moment
from flowstone.xlog.columns import ColumnOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Engine = Literal["auto", "deltalake", "spark"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one replica set is mirrored, and what is needed to go on from there.

    Everything up to `position` is in all tables; single tables may be ahead (`LakeTable.positions`). `definitions` are rows of
    `_space` and `_index` in force at `position`, as (space id, MessagePack tuple). `tables`: space id → name of its table.
    `stamp` is the greatest commit time so far in µs. `settings` are what the lake was begun with.
    """

    replicaset_uuid: str
    position: VClock
    stamp: int = 0
    definitions: tuple[tuple[int, bytes], ...] = ()
    tables: Mapping[int, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


class Lake:
    """The tables below one path. One writer at a time; readers are any that know Delta."""

    path: str
    engine: Literal["deltalake", "spark"]

    @classmethod
    def open(
        cls,
        path: str,
        *,
        spark: SparkSession | None = None,
        engine: Engine = "auto",
        storage_options: Mapping[str, str] | None = None,
        several_sets: bool = False,
        keep_hours: int = 168,
    ) -> Lake:
        """Local path or URI (s3a://, abfss://, hdfs:// … with `storage_options` as deltalake knows them).

        `auto` takes Spark for commits where the session has Delta's jars. `several_sets`: the lake takes more than one replica
        set, keys are prefixed with the set's UUID; it is fixed when the lake is begun.
        """
        raise NotImplementedError

    def tables(self) -> dict[str, LakeTable]:
        """The tables of living spaces by the space's name; neither dropped nor renamed ones."""
        raise NotImplementedError

    def table(self, name: str) -> LakeTable | None:
        """The table of the space of that name at its newest version, also one that is marked as dropped or renamed."""
        raise NotImplementedError

    def create(
        self,
        definition: SpaceDefinition,
        uuid: str,
        position: VClock,
        *,
        history: bool = False,
        columns: Sequence[str] | None = None,
        options: ColumnOptions | None = None,
    ) -> LakeTable:
        """An empty table for a new space, in one commit that carries `position`.

        A table of that name that is there is overwritten (its former versions can still be read), but for a replay, where
        it is at `position` or behind it already, for the same space. In a lake of several sets only this set's rows go.
        """
        raise NotImplementedError

    def load(
        self,
        frame: DataFrame,
        definitions: Sequence[SpaceDefinition],
        uuid: str,
        position: VClock,
        *,
        moment: Moment | None = None,
        history: bool = False,
        columns: Mapping[str, Sequence[str]] | None = None,
        options: ColumnOptions | None = None,
    ) -> dict[int, Merged]:
        """First load of many spaces in one pass: executors write the files, then each table is committed once.

        `frame` has three columns, in this order: space id INT, sort key BINARY, tuple BINARY; rows of spaces that are
        not in `definitions` are left out. Tables that are at `position` already (a load that was killed between
        two commits) are left as they are. Existing ones become exactly these rows. `moment`: from when the states
        of a history are valid. `columns`: by the space's name. Returns what was committed, by space id.
        """
        raise NotImplementedError

    def rename(self, old_name: str, definition: SpaceDefinition, uuid: str, position: VClock) -> LakeTable:
        """The table of `old_name` under the name of `definition`, with all its rows, in one commit at `position`.

        The old table stays as it was, at its own position, marked with `renamed_to`.
        """
        raise NotImplementedError

    @property
    def progress(self) -> dict[str, Progress]:
        """By replica set; {} for a new lake. Read anew each time."""
        raise NotImplementedError

    def save(self, progress: Progress) -> None:
        """Replaces what is known of that replica set. A position that is behind the one there: AnotherWriter."""
        raise NotImplementedError


def directory_of(name: str) -> str:
    """The directory of a space's table: letters, digits, `_`, `-`, `.` as they are, all else as `~` and hexadecimal bytes."""
    raise NotImplementedError
