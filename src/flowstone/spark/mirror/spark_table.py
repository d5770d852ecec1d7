"""The engine that merges on Spark, for sessions with Delta's jars: `MERGE INTO`, distributed like any query.

Merges and histories run on Spark. Operations that change no rows (notes, positions) or rewrite all of them (another
format, compaction) use the embedded engine, on the same tables. A commit of Spark carries one application transaction,
the signature of the position; the vclock is in the commit's user metadata, where `position_in` finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import DeltaTable

from flowstone.box.definitions import SpaceDefinition
from flowstone.lake.embedded_table import EmbeddedTable
from flowstone.lake.misfits import MisfitRows
from flowstone.lake.row_changes import RowChanges, RowStates
from flowstone.lake.table import AnotherWriter, Merged, Moment, application, user_metadata
from flowstone.lake.table_schema import HISTORY_FIELDS, IS_CURRENT, KEY, TUPLE, LakeSchema
from flowstone.replication.vclock import VClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
PACKAGE: Final = "io.delta:delta-spark_4.2_2.13:4.4.0"
"""The Delta release for Spark 4.2 used in the tests, in the format of `spark.jars.packages`."""

DELTA_CONF: Final = {
    "spark.sql.extensions": EXTENSION,
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
_CONF: Final = "spark.databricks.delta."
_CONFLICTS: Final = (
    "ConcurrentModification",
    "ConcurrentTransaction",
    "ConcurrentAppend",
    "ConcurrentDelete",
    "DELTA_CONCURRENT",
)

_SOURCE_KEY, _END_VERSION, _END_TIME = "_source_key", "_end_version", "_end_timestamp"


def has_delta_jars(spark: SparkSession) -> bool:
    """Return True if the session was started with Delta's extension."""
    return EXTENSION in (spark.conf.get("spark.sql.extensions", "") or "")


class SparkTable(EmbeddedTable):
    """A `LakeTable` that merges on Spark."""

    spark: SparkSession

    @classmethod
    def open_with(cls, spark: SparkSession, path: str, storage_options: Mapping[str, str]) -> SparkTable | None:
        """Open the table at a path; None if there is none."""
        found = cls.open(path, storage_options)
        if found is None:
            return None
        found.spark = spark
        return found

    def merge(
        self, folded: pa.Table, definition: SpaceDefinition, position: VClock, uuid: str, *, replace: bool = False
    ) -> Merged:
        turn = self._turn(definition, uuid, replace)
        if turn.is_rewrite or self.schema.history or not (folded.num_rows or replace):
            return super().merge(folded, definition, position, uuid, replace=replace)
        if self._has(position, uuid):
            return Merged(self.version, is_replay=True)
        changes = RowChanges.of(folded, turn.prefix)
        others = _of_set(turn.schema, uuid)
        clauses = [
            f"WHEN MATCHED AND s.{TUPLE.name} IS NULL THEN DELETE",
            f"WHEN MATCHED THEN UPDATE SET {_settings(turn.schema.schema.names)}",
            f"WHEN NOT MATCHED AND s.{TUPLE.name} IS NOT NULL THEN INSERT {_insertion(turn.schema.schema.names)}",
        ]
        if replace:
            clauses.append(f"WHEN NOT MATCHED BY SOURCE AND {others} THEN DELETE")
        source = state_source(turn.schema, changes, turn.misfits)
        self._quarantine_misfits(turn, {uuid: position})
        return self._merge_on_spark(source, f"t.{KEY.name} = s.{KEY.name}", clauses, turn.schema, position, uuid)

    def append_history(
        self,
        states: pa.Table,
        definition: SpaceDefinition,
        position: VClock,
        uuid: str,
        *,
        replace: Moment | None = None,
    ) -> Merged:
        turn = self._turn(definition, uuid, replace is not None)
        if turn.is_rewrite or not self.schema.history or not (states.num_rows or replace):
            return super().append_history(states, definition, position, uuid, replace=replace)
        if self._has(position, uuid):
            return Merged(self.version, is_replay=True)
        source = history_source(turn.schema, RowStates(states, turn.prefix), turn.misfits)
        self._quarantine_misfits(turn, {uuid: position})
        ended = f"{IS_CURRENT.name} = false, _to_version = {{}}, _valid_to = {{}}"
        clauses = [
            f"WHEN MATCHED THEN UPDATE SET {ended.format(f's.{_END_VERSION}', f's.{_END_TIME}')}",
            f"WHEN NOT MATCHED AND s.{TUPLE.name} IS NOT NULL THEN INSERT {_insertion(turn.schema.schema.names)}",
        ]
        if replace is not None:
            time = f"TIMESTAMP '{replace.timestamp.isoformat()}'"
            ours = f"t.{IS_CURRENT.name} AND {_of_set(turn.schema, uuid)}"
            clauses.append(
                f"WHEN NOT MATCHED BY SOURCE AND {ours} THEN UPDATE SET {ended.format(replace.version, time)}"
            )
        condition = f"t.{KEY.name} = s.{_SOURCE_KEY} AND t.{IS_CURRENT.name}"
        return self._merge_on_spark(source, condition, clauses, turn.schema, position, uuid)

    def _merge_on_spark(
        self, source: pa.Table, condition: str, clauses: list[str], schema: LakeSchema, position: VClock, uuid: str
    ) -> Merged:
        if schema.note != self.schema.note:
            self.mark(schema)
        newest = DeltaTable(self.path, storage_options=self.storage.storage_options or None).version()
        if newest != self.version:
            raise self._another_writer(f"table is at version {newest}, expected {self.version}")
        frame: DataFrame = self.spark.createDataFrame(source)
        view = f"flowstone_{id(source)}"
        frame.createOrReplaceTempView(view)
        before = {each.path for each in self.entries}
        try:
            with _commit_settings(self.spark, position, uuid):
                sql = " ".join([f"MERGE INTO delta.`{self.path}` t USING {view} s ON {condition}", *clauses])
                counts = self.spark.sql(sql).collect()
        except Exception as error:
            if any(name in str(error) for name in _CONFLICTS):
                raise self._another_writer("concurrent commits conflict") from error
            raise
        finally:
            self.spark.catalog.dropTempView(view)
        self._moved({uuid: position})
        if not counts:
            raise self._another_writer(f"position {position} is already committed")
        after = {each.path for each in self.entries}
        deletes, upserts = counts[0]["num_deleted_rows"], counts[0]["num_affected_rows"] - counts[0]["num_deleted_rows"]
        return Merged(self.version, upserts, deletes, len(after - before), len(before - after))

    def _another_writer(self, how: str) -> AnotherWriter:
        return AnotherWriter(f"{self.path} was changed by another writer: {how}", hint="run only one mirror per lake")


def state_source(schema: LakeSchema, changes: RowChanges, misfits: MisfitRows | None = None) -> pa.Table:
    """Return the changes as rows to merge; a deleted key has only its key."""
    upserts = changes.upserts(schema, 0, len(changes.keys), misfits)
    gone = changes.keys.filter(changes.tuples.is_null())
    nullable = pa.schema([each.with_nullable(True) for each in upserts.schema])
    empty = [gone if each.name == KEY.name else pa.nulls(len(gone), each.type) for each in nullable]
    return pa.concat_tables([upserts.cast(nullable), pa.Table.from_arrays(empty, schema=nullable)]).combine_chunks()


def history_source(schema: LakeSchema, states: RowStates, misfits: MisfitRows | None = None) -> pa.Table:
    """Return rows that end current states (by `_source_key`, without a tuple), and new states, which match nothing."""
    current, former = states.current(schema, misfits), states.former(schema, misfits)
    fields = [each.with_nullable(True) for each in schema.schema.remove_metadata()]
    fields = [each.remove_metadata() for each in fields]
    ends = [
        pa.field(_SOURCE_KEY, pa.binary()),
        pa.field(_END_VERSION, pa.int64()),
        pa.field(_END_TIME, HISTORY_FIELDS[0].type),
    ]
    whole = pa.schema([*fields, *ends])

    def filled(rows: pa.Table, given: Mapping[str, pa.Array]) -> pa.Table:
        columns = [
            given[each.name]
            if each.name in given
            else rows.column(each.name)
            if each.name in rows.schema.names
            else pa.nulls(rows.num_rows, each.type)
            for each in whole
        ]
        return pa.Table.from_arrays(columns, schema=whole)

    touched = states.touched
    ending = {
        _SOURCE_KEY: touched.column(KEY.name),
        _END_VERSION: touched.column("commit_version"),
        _END_TIME: touched.column("commit_timestamp"),
        KEY.name: pa.nulls(touched.num_rows, pa.binary()),
    }
    parts = [filled(touched, ending)]
    for rows, value in ((current, True), (former, False)):
        parts.append(filled(rows, {IS_CURRENT.name: pa.repeat(pa.scalar(value), rows.num_rows)}))
    return pa.concat_tables(parts).combine_chunks()


@contextmanager
def _commit_settings(spark: SparkSession, position: VClock, uuid: str) -> Iterator[None]:
    """Set the properties of the next commit: Delta reads them from the session."""
    settings = {
        f"{_CONF}write.txnAppId": application(uuid),
        f"{_CONF}write.txnVersion": str(position.signature),
        f"{_CONF}commitInfo.userMetadata": user_metadata({uuid: position}),
    }
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            spark.conf.unset(name)


def _of_set(schema: LakeSchema, uuid: str) -> str:
    return f"t._replicaset_uuid = '{uuid}'" if schema.several_sets else "true"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _settings(names: list[str]) -> str:
    return ", ".join(f"{_quoted(name)} = s.{_quoted(name)}" for name in names)


def _insertion(names: list[str]) -> str:
    return f"({', '.join(map(_quoted, names))}) VALUES ({', '.join('s.' + _quoted(name) for name in names)})"
