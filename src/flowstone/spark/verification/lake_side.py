"""A lake as one side of a comparison: its tables at the position of its progress, each row checked against its tuple.

Tables may be ahead of the progress, after a crash or while a mirror runs; if so, an earlier version is read. Reads
Delta's log in the driver and Parquet files in executors; Spark needs no Delta jars.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import DeltaTable

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import SchemaTracker
from flowstone.box.system import SCHEMA_SPACE_IDS
from flowstone.columns.sort_keys import sort_keys
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.lake.embedded_table import EmbeddedTable
from flowstone.lake.masks import Masking
from flowstone.lake.table import position_in
from flowstone.lake.table_files import TableFiles
from flowstone.lake.table_schema import IS_CURRENT, KEY, NOTE, TUPLE, LakeError, LakeSchema, unprefixed
from flowstone.replication.vclock import VClock
from flowstone.spark.lake import Lake, LakeProgress, directory_of
from flowstone.spark.sources.options import AsOf
from flowstone.spark.verification.digests import SIDE_COLUMNS
from flowstone.spark.verification.lake_check import checked_rows
from flowstone.spark.verification.sides import SideError, SideView, comparable
from flowstone.spark.worker_errors import clear_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MASKS: Final = "masks"
FINGERPRINT: Final = "mask_fingerprint"
"""Settings of a lake: its masks, and the fingerprint that verifies their salt."""

TASKS_PER_CORE: Final = 4
"""Several tasks per core keep a core busy that finishes early."""

DELETION_VECTORS: Final = "deletionVectors"


@dataclass(frozen=True)
class PinnedRows:
    """The files of one table at one version: current rows, and the former states of a history. Picklable."""

    schema: LakeSchema
    files: TableFiles
    current: tuple[str, ...]
    former: tuple[str, ...] = ()


@dataclass
class LakeSide:
    """The lake at `path`, or one of the replica sets in it."""

    path: str
    storage_options: Mapping[str, str] = field(default_factory=dict)
    salt: str | None = None
    """The salt of its masks; needed to compare masked values."""
    lake: Lake = field(init=False)
    _all: dict[str, LakeProgress] = field(init=False, default_factory=dict)
    _uuid: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.lake = Lake.open(self.path, engine="deltalake", storage_options=self.storage_options)

    @property
    def kind(self) -> str:
        return "lake"

    @property
    def name(self) -> str:
        return self.path

    @property
    def replicaset_uuid(self) -> str:
        return self._progress.replicaset_uuid

    @property
    def reach(self) -> VClock:
        return self._progress.position.without_zero()

    @property
    def has_past(self) -> bool:
        return False

    @property
    def _progress(self) -> LakeProgress:
        if self._uuid:
            return self._all[self._uuid]
        if len(self._all) > 1:
            raise SideError(
                f"{self.path} has several replica sets: {', '.join(sorted(self._all))}",
                hint="compare the lake with the log of one of them",
            )
        return next(iter(self._all.values()))

    def refresh(self) -> None:
        self._all = self.lake.progress
        if not self._all:
            raise SideError(f"{self.path}: not a lake written by a mirror", hint="specify another directory")

    def choose(self, replicaset_uuid: str) -> None:
        """Select the replica set, if the lake holds several."""
        if replicaset_uuid in self._all:
            self._uuid = replicaset_uuid

    def can_show(self, position: VClock) -> bool:
        return position == self.reach

    def resolve(self, as_of: AsOf) -> VClock:
        raise SideError(f"{self.path} is a lake and has only its newest position", hint="omit --at")

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def view(self, spark: SparkSession, position: VClock) -> SideView:
        progress = self._progress
        tracker = SchemaTracker()
        for space_id, row in progress.definitions:
            tracker.apply(RequestType.REPLACE, pack({Key.SPACE_ID.value: space_id, Key.TUPLE.value: unpack(row)}))
        schema = tracker.schema
        spaces, left_out = comparable(schema, has_vinyl=True)
        for space_id in spaces:
            if space_id not in progress.tables:
                left_out[space_id] = f"{self.path} does not mirror it"
        notes: list[str] = []
        tables = {
            space_id: self.pinned(name, progress) for space_id, name in progress.tables.items() if space_id in spaces
        }
        for space_id, table in tables.items():
            if table is None:
                notes.append(f"{self.path} no longer has a table of space {progress.tables[space_id]!r}")
            else:
                notes += _other_columns(schema.get(space_id), table.schema)
        found = {space_id: table for space_id, table in tables.items() if table is not None}

        masking = Masking.parse([text for text in progress.settings.get(MASKS, "").split(",") if text], self.salt)
        can_mask = masking.fingerprint == progress.settings.get(FINGERPRINT, "")
        masks = {space.id: mask for space in schema if space.id in found and (mask := masking.of(space)) is not None}

        def make(wanted: Collection[int]) -> DataFrame:
            return _frame(spark, progress, found, wanted)

        return SideView(
            schema,
            frozenset(tables),
            frozenset(SCHEMA_SPACE_IDS),
            left_out,
            tuple(notes),
            masks if can_mask else {},
            {}
            if can_mask
            else {space_id: tuple(number for number, _ in mask.fields) for space_id, mask in masks.items()},
            make=make,
        )

    def pinned(self, name: str, progress: LakeProgress) -> PinnedRows | None:
        """Return the table at the lake's position, or None if the table no longer exists."""
        options = dict(self.storage_options)
        # The table itself records whether it holds one replica set or several.
        newest = EmbeddedTable.open(f"{self.lake.path}/{directory_of(name)}", options)
        if newest is None:
            return None
        for version in range(newest.version, -1, -1):
            table = DeltaTable(newest.path, version=version, storage_options=options)
            position = position_in(table.transaction_version, table.history, progress.replicaset_uuid)
            if position is None or position.without_zero() <= progress.position:
                return _rows_of(table, newest.path, options)
        raise LakeError(
            f"{newest.path}: no version at or before {progress.position}, the position of the lake",
            hint="resume the mirror, which brings all tables to one position",
        )


def _rows_of(table: DeltaTable, path: str, storage_options: dict[str, str]) -> PinnedRows:
    if DELETION_VECTORS in (table.protocol().reader_features or ()):
        raise LakeError(
            f"{path}: deletion vectors are not supported",
            hint="set delta.enableDeletionVectors=false and rewrite the table with REORG TABLE … APPLY (PURGE)",
        )
    notes = [each.metadata.get(NOTE) for each in table.schema().fields if each.name == TUPLE.name]
    if not notes or not isinstance(notes[0], str):
        raise LakeError(f"{path}: cannot tell which space the table belongs to", hint="it was not written by a mirror")
    schema = LakeSchema.from_note(notes[0])
    current: list[str] = []
    former: list[str] = []
    actions = pa.table(table.get_add_actions(flatten=True))
    partition = f"partition.{IS_CURRENT.name}"
    for action in actions.to_pylist():
        is_current = not schema.history or str(action.get(partition)).lower() == "true"
        (current if is_current else former).append(action["path"])
    return PinnedRows(schema, TableFiles(path, storage_options), tuple(sorted(current)), tuple(sorted(former)))


def _other_columns(space: SpaceDefinition | None, schema: LakeSchema) -> Iterator[str]:
    if space is not None and [each.name for each in space.fields] != [each.name for each in schema.space.fields]:
        yield f"table of space {space.name!r} has the columns of another definition"


def _frame(
    spark: SparkSession, progress: LakeProgress, tables: Mapping[int, PinnedRows], wanted: Collection[int]
) -> DataFrame:
    """Return the rows of tables and of definitions, and, for histories, the keys whose states overlap."""
    chosen = {space_id: table for space_id, table in tables.items() if space_id in wanted}
    work = [(space_id, path) for space_id, table in chosen.items() for path in table.current]
    frame = spark.createDataFrame(_definition_rows(progress, wanted), SIDE_COLUMNS)
    if work:
        files = spark.createDataFrame(work, "space_id LONG, path STRING").repartition(_tasks(spark, len(work)))
        read = partial(read_files, chosen, progress.replicaset_uuid)
        frame = frame.unionByName(files.mapInArrow(read, SIDE_COLUMNS))
    for space_id, table in chosen.items():
        if table.schema.history:
            frame = frame.unionByName(_broken_chains(spark, space_id, table, progress.replicaset_uuid))
    return frame


def _tasks(spark: SparkSession, file_count: int) -> int:
    """Return the number of tasks for `file_count` files."""
    return min(file_count, TASKS_PER_CORE * int(spark.sparkContext.defaultParallelism))


def _definition_rows(progress: LakeProgress, wanted: Collection[int]) -> list[tuple[int, bytearray, bytearray, None]]:
    system = SchemaTracker().schema
    found = []
    for space_id, row in progress.definitions:
        if space_id in wanted:
            (key,) = sort_keys(system.space(space_id), pa.array([row], pa.binary())).to_pylist()
            found.append((space_id, bytearray(key), bytearray(row), None))
    return found


def read_files(
    tables: Mapping[int, PinnedRows], replicaset_uuid: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """In executors: yield the checked rows of files."""
    with clear_errors():
        for batch in batches:
            for space_id, path in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                table = tables[space_id]
                with table.files.open(path) as file:
                    for rows in file.iter_batches(use_threads=False):
                        checked = checked_rows(table.schema, replicaset_uuid, rows)
                        # The table has the space id of one of its sets; other sets may use another id.
                        space_ids = pa.repeat(pa.scalar(space_id, pa.int64()), len(checked))
                        yield checked.set_column(0, checked.schema.field(0), space_ids)


# --- histories ---

_STATE_COLUMNS: Final = "space_id LONG, sort_key BINARY, is_current BOOLEAN, from_version LONG, to_version LONG"


def _broken_chains(spark: SparkSession, space_id: int, table: PinnedRows, replicaset_uuid: str) -> DataFrame:
    """Return the keys with inconsistent states: overlapping states, two current states, or a state that ends before it
    begins.

    The rows have no tuple: they are not part of the state, and only report a contradiction.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    work = [(path, path in table.current) for path in (*table.current, *table.former)]
    if not work:
        return spark.createDataFrame([], SIDE_COLUMNS)
    files = spark.createDataFrame(work, "path STRING, is_current BOOLEAN").repartition(_tasks(spark, len(work)))
    states = files.mapInArrow(partial(_read_states, space_id, table, replicaset_uuid), _STATE_COLUMNS)
    in_order = Window.partitionBy("sort_key").orderBy("from_version", f.col("to_version").asc_nulls_last())
    following = states.withColumn("next", f.lead("from_version").over(in_order))
    to_version = f.col("to_version")
    wrong = (
        f.when(
            f.col("is_current") != to_version.isNull(),
            f.lit("a state without an end is not current, or the current state has an end"),
        )
        .when(to_version < f.col("from_version"), f.lit("a state ends before it starts"))
        .when(f.col("next").isNotNull() & (to_version.isNull() | (f.col("next") < to_version)), f.lit("states overlap"))
    )
    broken = following.withColumn("what", wrong).where(f.col("what").isNotNull())
    return broken.select(
        "space_id",
        "sort_key",
        f.lit(None).cast("binary").alias("tuple"),
        f.format_string("history: %s (version %s to %s)", "what", "from_version", "to_version").alias("wrong"),
    )


def _read_states(
    space_id: int, table: PinnedRows, replicaset_uuid: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """In executors: yield the version range in which each state of a history was current."""
    import pyarrow.compute as pc

    prefix = table.schema.prefix(replicaset_uuid)
    columns = [KEY.name, "_from_version", "_to_version"]
    with clear_errors():
        for batch in batches:
            for path, is_current in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                with table.files.open(path) as file:
                    for rows in file.iter_batches(columns=columns, use_threads=False):
                        rows = rows.set_column(0, KEY.name, rows.column(KEY.name).cast(pa.binary()))
                        if prefix:
                            rows = rows.filter(pc.equal(pc.binary_slice(rows.column(KEY.name), 0, len(prefix)), prefix))
                        yield _state_batch(space_id, is_current, len(prefix), rows)


def _state_batch(space_id: int, is_current: bool, prefix_size: int, rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(space_id, pa.int64()), len(rows)),
            unprefixed(prefix_size, rows.column(KEY.name)),
            pa.repeat(pa.scalar(is_current), len(rows)),
            rows.column("_from_version"),
            rows.column("_to_version"),
        ],
        names=["space_id", "sort_key", "is_current", "from_version", "to_version"],
    )
