"""A lake: a directory of Delta tables, one per space, and the mirrored position of each replica set.

`Lake` finds, creates, loads and renames tables. `LakeProgress` is the state that a mirror needs to resume, kept in a
small table of its own (`_flowstone`). Each table stores its own position, so a crash between the commits of the tables
and of the progress neither loses nor duplicates rows: a resumed mirror skips, table by table, the rows that are already
there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec
import pyarrow as pa
import pyarrow.fs
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import CommitProperties, Transaction

from flowstone.box.definitions import SpaceDefinition
from flowstone.columns.arrow_columns import MOMENT, ColumnOptions
from flowstone.lake.embedded_table import EmbeddedTable
from flowstone.lake.misfits import MisfitRows
from flowstone.lake.quarantine import Quarantine
from flowstone.lake.row_changes import RowChanges, RowStates
from flowstone.lake.table import KEEP_HOURS, AnotherWriter, Merged, Moment, application, is_replay
from flowstone.lake.table_files import (
    FileEntry,
    TableFiles,
    WrittenFile,
    statistics_json,
)
from flowstone.lake.table_schema import LakeError, LakeSchema
from flowstone.replication.vclock import VClock
from flowstone.spark.collect import rows_of
from flowstone.spark.mirror.first_load import LOADED_DDL, LoadTarget, RowsToFiles, misfits_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Types = Sequence[tuple[str, str]]
"""Declared types of columns: field name and type."""

Engine = Literal["auto", "deltalake", "spark"]


class ArrowRows(Protocol):
    """A data frame, or rows before they enter one (`frames.SliceRows`): the receiver of `mapInArrow`."""

    def mapInArrow(self, func: Any, schema: Any) -> DataFrame: ...  # noqa: N802  # named as in DataFrame


PROGRESS: Final = "_flowstone"
"""Directory of the progress table. Readers of a lake skip names that begin with an underscore."""

DIRECTORY_NAME_SIZE: Final = 200
"""Limit of a directory name, in bytes: most file systems allow 255."""

SAVES_BETWEEN_VACUUMS: Final = 100
_SAVE_TRIES: Final = 5
_PLAIN: Final = re.compile(rb"[A-Za-z0-9_.-]")
_DELTA_NAMES: Final = {"s3a": "s3", "s3n": "s3"}
_PROGRESS_SCHEMA: Final = pa.schema(
    [
        pa.field("replicaset_uuid", pa.string(), nullable=False),
        pa.field("position", pa.string()),
        pa.field("stamp", pa.int64()),
        pa.field("definitions", pa.binary()),
        pa.field("tables", pa.string()),
        pa.field("settings", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class LakeProgress:
    """The mirrored position of one replica set, and what is needed to resume from there.

    All tables contain everything up to `position`; single tables may be ahead (`LakeTable.positions`). `definitions`
    are the rows of `_space` and `_index` in force at `position`, as (space id, MessagePack tuple). `tables` maps a
    space id to the name of the space when its table was last written. `stamp` is the greatest commit time so far, in
    µs. `settings` are the settings with which the lake was created.
    """

    replicaset_uuid: str
    position: VClock
    stamp: int = 0
    definitions: tuple[tuple[int, bytes], ...] = ()
    tables: Mapping[int, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


class Lake:
    """The tables below one path. Supports one writer at a time, and any reader of Delta tables."""

    def __init__(
        self,
        path: str,
        *,
        spark: SparkSession | None,
        storage_options: Mapping[str, str],
        several_sets: bool,
        keep_hours: int,
    ) -> None:
        """Open the lake; with a `spark` session, the session's Delta jars commit merges."""
        self.path = path
        self.storage_options = dict(storage_options)
        self.several_sets = several_sets
        self.keep_hours = keep_hours
        self.quarantine: Quarantine | None = None
        """The quarantine for misfits of all tables; without a quarantine, a misfit is an error."""
        self._spark = spark

    @classmethod
    def open(
        cls,
        path: str,
        *,
        spark: SparkSession | None = None,
        engine: Engine = "auto",
        storage_options: Mapping[str, str] | None = None,
        several_sets: bool = False,
        keep_hours: int = KEEP_HOURS,
    ) -> Lake:
        """Open a lake by local path or URI (s3a://, abfss://, hdfs:// …, with the `storage_options` of deltalake).

        `auto` merges on Spark if the session has Delta's jars. With `several_sets`, the lake accepts more than one
        replica set and prefixes keys with the UUID of the set; this is fixed when the lake is created. `keep_hours` is
        how long former versions stay readable.
        """
        from flowstone.spark.mirror.spark_table import has_delta_jars

        if engine == "spark" and (spark is None or not has_delta_jars(spark)):
            raise LakeError(
                "the Spark session has no Delta jars",
                hint="start the session with spark.jars.packages=io.delta:delta-spark…, or use engine deltalake",
            )
        on_spark = engine != "deltalake" and spark is not None and has_delta_jars(spark)
        return cls(
            lake_uri(path),
            spark=spark if on_spark else None,
            storage_options=storage_options or {},
            several_sets=several_sets,
            keep_hours=keep_hours,
        )

    @property
    def engine(self) -> Literal["deltalake", "spark"]:
        """The engine that commits merges."""
        return "deltalake" if self._spark is None else "spark"

    # --- tables ---------------------------------------------------------------------------------------------------

    def tables(self) -> dict[str, EmbeddedTable]:
        """Return the tables of existing spaces by space name, without tables of dropped or renamed spaces."""
        return {each.schema.space.name: each for each in self.all_tables() if is_living(each.schema)}

    def all_tables(self) -> list[EmbeddedTable]:
        """Return all tables, including tables of dropped or renamed spaces."""
        found = [self._open(f"{self.path}/{each}") for each in self.directories()]
        return [each for each in found if each is not None]

    def directories(self) -> list[str]:
        """Return the names of the directories below `path` that may hold tables."""
        system, root = TableFiles(self.path, self.storage_options).place
        there = system.get_file_info(pyarrow.fs.FileSelector(root or "/", allow_not_found=True))
        names = sorted(each.base_name for each in there if each.type == pyarrow.fs.FileType.Directory)
        return [name for name in names if not name.startswith(("_", "."))]

    def table(self, name: str) -> EmbeddedTable | None:
        """Return the newest version of the table of a space, even if it is marked as dropped or renamed."""
        return self._open(self._path_of(name))

    def there(self, name: str) -> EmbeddedTable:
        """Return the table of a space, or raise LakeError if it is missing, for instance if it was deleted by hand."""
        found = self.table(name)
        if found is None:
            raise LakeError(
                f"{self.path}: the table of space {name!r} is missing",
                hint="restore its directory, or mirror into a new lake",
            )
        return found

    def _path_of(self, name: str) -> str:
        return f"{self.path}/{directory_of(name)}"

    def _open(self, path: str) -> EmbeddedTable | None:
        if self._spark is not None:
            from flowstone.spark.mirror.spark_table import SparkTable

            found: EmbeddedTable | None = SparkTable.open_with(self._spark, path, self.storage_options)
        else:
            found = EmbeddedTable.open(path, self.storage_options)
        if found is not None and found.schema.several_sets != self.several_sets:
            number = "several replica sets" if found.schema.several_sets else "one replica set"
            raise LakeError(f"{path} is a table for {number}", hint="mirror into another directory")
        if found is not None:
            found.quarantine = self.quarantine
        return found

    def create(
        self,
        definition: SpaceDefinition,
        uuid: str,
        position: VClock,
        *,
        history: bool = False,
        columns: Sequence[str] | None = None,
        options: ColumnOptions | None = None,
        types: Types = (),
        states: pa.Table | None = None,
    ) -> EmbeddedTable:
        """Create the table of a new space, in one commit that carries `position`.

        `states` is the result of `fold` for rows of the transaction that creates the space; without it the table is
        empty. An existing table of that name is overwritten (its former versions stay readable), unless the call is a
        replay: the table is for the same space, and already at or after `position`. In a lake of several sets, only the
        rows of this set are replaced.
        """
        schema = self._schema(definition, uuid, history, columns, options, types)
        if not self._is_done(schema, uuid, position):
            written = self._written(schema, uuid, states, position) if states is not None else []
            self._put(schema, written, uuid, position, None)
        return self.there(definition.name)

    def _written(self, schema: LakeSchema, uuid: str, states: pa.Table, position: VClock) -> list[WrittenFile]:
        """Write the files of a table that has no states other than these."""
        files = TableFiles(self._path_of(schema.space.name), self.storage_options)
        files.make_directory()
        misfits = None if self.quarantine is None else MisfitRows()
        if schema.history:
            new = RowStates(states, schema.prefix(uuid))
            written = files.write_split(new.current(schema, misfits), True)
            written += files.write_split(new.former(schema, misfits), False)
        else:
            changes = RowChanges.of(states, schema.prefix(uuid))
            written = files.write_split(changes.upserts(schema, 0, states.num_rows, misfits))
        if self.quarantine is not None and misfits:
            self.quarantine.add(misfits, {uuid: position}, {})
        return written

    def _schema(
        self,
        definition: SpaceDefinition,
        uuid: str,
        history: bool,
        columns: Sequence[str] | None,
        options: ColumnOptions | None,
        types: Types,
    ) -> LakeSchema:
        return LakeSchema(
            definition,
            (uuid,),
            options or ColumnOptions(),
            None if columns is None else tuple(columns),
            several_sets=self.several_sets,
            history=history,
            types=tuple(types),
        )

    def _is_done(self, schema: LakeSchema, uuid: str, position: VClock) -> bool:
        """Return True if the table exists for this very space, at or after the position."""
        there = self.table(schema.space.name)
        if there is None or not is_living(there.schema) or uuid not in there.schema.sets:
            return False
        is_same = there.schema.space.id == schema.space.id or self.several_sets
        return (
            is_same and uuid not in there.schema.dropped and is_replay(there.path, there.positions.get(uuid), position)
        )

    def _put(
        self, schema: LakeSchema, written: Sequence[WrittenFile], uuid: str, position: VClock, moment: Moment | None
    ) -> Merged:
        """Replace the set's rows in the table of this schema by the rows of the files."""
        there = self.table(schema.space.name)
        if there is None:
            path = self._path_of(schema.space.name)
            made = EmbeddedTable.create(
                path, schema, {uuid: position}, self.storage_options, written=written, keep_hours=self.keep_hours
            )
            return Merged(made.version, sum(each.entry.row_count for each in written), 0, len(written))
        if not self.several_sets or not is_living(there.schema):
            return there.overwrite(schema, written, {uuid: position})
        sets = (*(each for each in there.schema.sets if each != uuid), uuid)
        dropped = tuple(each for each in there.schema.dropped if each != uuid)
        return there.take_in(replace(schema, sets=sets, dropped=dropped), written, position, uuid, moment)

    # --- first load -----------------------------------------------------------------------------------------------

    def load(
        self,
        frame: ArrowRows,
        definitions: Sequence[SpaceDefinition],
        uuid: str,
        position: VClock,
        *,
        moment: Moment | None = None,
        history: bool = False,
        columns: Mapping[str, Sequence[str]] | None = None,
        options: ColumnOptions | None = None,
        types: Mapping[str, Types] | None = None,
        is_forced: bool = False,
    ) -> dict[int, Merged]:
        """Load many spaces for the first time in one pass: executors write the files, then each table is committed.

        `frame` has three columns, in this order: space id INT, sort key BINARY, tuple BINARY. Rows of spaces
        that are         not in `definitions` are skipped. Tables already at `position` (from a load that was
        killed between two commits)         are left alone, unless `is_forced`. In all other existing tables,
        the rows of this set are replaced. `moment` is the beginning of         the states of a history.
        `columns` and `types` are given by space name. Returns the commits by space id.
        """
        wanted = columns or {}
        declared = types or {}
        schemas = [
            self._schema(each, uuid, history, wanted.get(each.name), options, declared.get(each.name, ()))
            for each in definitions
        ]
        schemas = [each for each in schemas if is_forced or not self._is_done(each, uuid, position)]
        if history and moment is None:
            raise LakeError("history needs a start time", hint="pass moment")
        states = _states_at(moment) if history and moment is not None else None
        targets = {
            each.space.id: LoadTarget(
                TableFiles(self._path_of(each.space.name), self.storage_options),
                each,
                each.prefix(uuid),
                states,
                keeps_misfits=self.quarantine is not None,
            )
            for each in schemas
        }
        for target in targets.values():
            target.files.make_directory()
        written, misfits = _written_by(frame, targets) if targets else ({}, MisfitRows())
        if self.quarantine is not None and misfits:
            if moment is not None:
                misfits.set_times(pa.scalar(moment.timestamp, MOMENT))
            self.quarantine.add(misfits, {uuid: position}, {})
        return {
            each.space.id: self._put(each, written.get(each.space.id, []), uuid, position, moment) for each in schemas
        }

    # --- names ----------------------------------------------------------------------------------------------------

    def rename(self, old_name: str, definition: SpaceDefinition, uuid: str, position: VClock) -> EmbeddedTable:
        """Return the table of `old_name` under the name of `definition`, with all its rows, at `position`.

        The old table keeps its rows and its position, and is marked with `renamed_to`. In a lake of several sets, each
        set renames its space at its own time: only the rows of this set are moved. The old table continues with the
        rows of the other sets and lists this set in `dropped`; `renamed_to` is set when no set is left.
        """
        old = self.there(old_name)
        new = self._moved(old, definition, uuid, position) if self.several_sets else self._copied(old, definition)
        new.rewrite(definition, position, uuid)
        self.leave(old_name, definition, uuid)
        return new

    def leave(self, old_name: str, definition: SpaceDefinition, uuid: str) -> None:
        """Mark the table of `old_name`, whose space continues under the name of `definition`."""
        old = self.there(old_name)
        marked = _without_set(old.schema, uuid, definition) if self.several_sets else _without(old.schema, definition)
        if marked != old.schema:
            old.mark(marked)

    def _copied(self, old: EmbeddedTable, definition: SpaceDefinition) -> EmbeddedTable:
        """Copy the files of `old`, at its positions, into a table of another name, in one commit."""
        name, new = definition.name, self.table(definition.name)
        if new is not None and new.schema.space.id == definition.id and is_living(new.schema):
            return new
        if old.schema.space.id != definition.id:
            raise LakeError(
                f"{old.path} belongs to space {old.schema.space.id}, but {name!r} is now space {definition.id}",
                hint="mirror into a new lake",
            )
        schema = replace(old.schema, space=msgspec.structs.replace(old.schema.space, name=name), renamed_to=None)
        files = TableFiles(self._path_of(name), self.storage_options)
        files.make_directory()
        written = [_file_copied(old.storage, files, each) for each in old.entries]
        if new is None:
            options, keep_hours = self.storage_options, self.keep_hours
            EmbeddedTable.create(files.path, schema, old.positions, options, written=written, keep_hours=keep_hours)
        else:
            new.overwrite(schema, written, old.positions)
        return self.there(name)

    def _moved(self, old: EmbeddedTable, definition: SpaceDefinition, uuid: str, position: VClock) -> EmbeddedTable:
        """Move the rows of one set from `old` to the table of another name, which keeps its rows of other sets."""
        new = self.table(definition.name)
        base = old.schema if new is None or not is_living(new.schema) else new.schema
        schema = replace(base.moved(definition), sets=(uuid,), dropped=(), renamed_to=None)
        if not self._is_done(schema, uuid, position):
            held = old.positions.get(uuid)
            if held is None:
                raise LakeError(f"{old.path} has no rows of replica set {uuid}", hint="mirror into a new lake")
            files = TableFiles(self._path_of(definition.name), self.storage_options)
            files.make_directory()
            written = old.files_of_set(schema, uuid, files)
            self._put(schema, written, uuid, held if is_replay(old.path, held, position) else position, None)
        return self.there(definition.name)

    # --- progress -------------------------------------------------------------------------------------------------

    def _progress_table(self) -> DeltaTable | None:
        try:
            return DeltaTable(f"{self.path}/{PROGRESS}", storage_options=self.storage_options or None)
        except TableNotFoundError:
            return None

    @property
    def progress(self) -> dict[str, LakeProgress]:
        """The progress by replica set; {} for a new lake. Read again on each access."""
        table = self._progress_table()
        return {} if table is None else _progress_in(table)

    def save(self, progress: LakeProgress) -> None:
        """Replace the progress of the replica set.

        Raises AnotherWriter if the stored position is not at or before the new one.
        """
        for _ in range(_SAVE_TRIES):
            table = self._progress_table()
            known = {} if table is None else _progress_in(table)
            own = known.get(progress.replicaset_uuid)
            if own is not None and not own.position <= progress.position:
                raise AnotherWriter(
                    f"{self.path} is already at {own.position}, but this mirror is at {progress.position}",
                    hint="run only one mirror per lake",
                )
            try:
                self._write_progress(table, {**known, progress.replicaset_uuid: progress}, progress)
            except CommitFailedError:
                continue  # a mirror of another replica set committed first: the retry keeps its row
            return
        raise AnotherWriter(f"{self.path}/{PROGRESS} keeps changing: other writers are active", hint="try again later")

    def _write_progress(self, table: DeltaTable | None, known: Mapping[str, LakeProgress], moved: LakeProgress) -> None:
        signature = Transaction(application(moved.replicaset_uuid), moved.position.signature)
        write_deltalake(
            table or f"{self.path}/{PROGRESS}",
            pa.Table.from_pylist([_row_of(each) for each in known.values()], schema=_PROGRESS_SCHEMA),
            mode="error" if table is None else "overwrite",
            storage_options=self.storage_options or None if table is None else None,
            commit_properties=CommitProperties(app_transactions=[signature], max_commit_retries=0),
        )
        if table is not None and table.version() % SAVES_BETWEEN_VACUUMS == 0:
            table.update_incremental()
            table.vacuum(retention_hours=1, dry_run=False, enforce_retention_duration=False)


# --- names and addresses ------------------------------------------------------------------------------------------


def lake_uri(path: str) -> str:
    """Return the address of a lake as deltalake writes it: s3a:// as s3://, a local path or file:// URI as path."""
    scheme, separator, rest = path.partition("://")
    if not separator:
        return str(Path(path).absolute())
    if scheme == "file":
        return "/" + rest.lstrip("/").rstrip("/")
    return f"{_DELTA_NAMES.get(scheme, scheme)}://{rest}".rstrip("/")


def directory_of(name: str) -> str:
    """Return the directory name of a space's table.

    Letters, digits, `_`, `-` and `.` stay; other bytes become `~` and two hexadecimal digits. A leading `_` or `.`,
    which readers take for hidden, is escaped as well. Very long names are cut and end in a digest.
    """
    text = "".join(
        chr(byte) if _PLAIN.fullmatch(bytes([byte])) and (place or byte not in b"_.") else f"~{byte:02x}"
        for place, byte in enumerate(name.encode())
    )
    if len(text) <= DIRECTORY_NAME_SIZE:
        return text
    return f"{text[: DIRECTORY_NAME_SIZE - 33]}~{sha256(name.encode()).hexdigest()[:32]}"


def is_living(schema: LakeSchema) -> bool:
    """Return True if the space still exists under this name in any replica set."""
    return schema.renamed_to is None and set(schema.dropped) < set(schema.sets)


# --- internals ----------------------------------------------------------------------------------------------------


def _written_by(frame: ArrowRows, targets: dict[int, LoadTarget]) -> tuple[dict[int, list[WrittenFile]], MisfitRows]:
    """Return the files that executors wrote, by space id, and the misfits."""
    misfits = MisfitRows()
    to_files = RowsToFiles(targets)
    is_current = {space_id: None if target.states is None else True for space_id, target in targets.items()}
    written: dict[int, list[WrittenFile]] = {}
    for each in rows_of(frame.mapInArrow(lambda batches: to_files(batches), LOADED_DDL)):  # noqa: PLW0108
        if each["misfits"] is not None:
            misfits.new.append(misfits_of(each["misfits"]))
            continue
        entry = FileEntry(each["path"], each["size"], each["row_count"], is_current[each["space_id"]])
        written.setdefault(each["space_id"], []).append(WrittenFile(entry, each["statistics"]))
    return written, misfits


def _states_at(moment: Moment) -> dict[str, Any]:
    return {
        "_valid_from": moment.timestamp,
        "_valid_to": None,
        "_from_version": moment.version,
        "_to_version": None,
        "_operation": "insert",
        "_replica_id": None,
        "_lsn": None,
    }


def _without(schema: LakeSchema, definition: SpaceDefinition) -> LakeSchema:
    """Return the note of a table whose space was renamed; unchanged if the name already belongs to another space."""
    return schema if schema.space.id != definition.id else replace(schema, renamed_to=definition.name)


def _without_set(schema: LakeSchema, uuid: str, definition: SpaceDefinition) -> LakeSchema:
    """Return the note of a table whose space was renamed in one of several sets."""
    if uuid in schema.dropped or uuid not in schema.sets:
        return schema
    left = replace(schema, dropped=(*schema.dropped, uuid))
    return left if is_living(left) else replace(left, renamed_to=definition.name)


def _file_copied(source: TableFiles, target: TableFiles, entry: FileEntry) -> WrittenFile:
    source.copy_to(target, entry.path)
    with target.open(entry.path) as file:
        return WrittenFile(entry, statistics_json(file.metadata, file.schema_arrow))


def _progress_in(table: DeltaTable) -> dict[str, LakeProgress]:
    return {row["replicaset_uuid"]: _progress_of(row) for row in table.to_pyarrow_table().to_pylist()}


def _row_of(progress: LakeProgress) -> dict[str, Any]:
    return {
        "replicaset_uuid": progress.replicaset_uuid,
        "position": json.dumps({str(number): lsn for number, lsn in progress.position}),
        "stamp": progress.stamp,
        "definitions": msgspec.msgpack.encode(progress.definitions),
        "tables": json.dumps({str(number): name for number, name in progress.tables.items()}),
        "settings": json.dumps(dict(progress.settings)),
    }


def _progress_of(row: Mapping[str, Any]) -> LakeProgress:
    return LakeProgress(
        row["replicaset_uuid"],
        VClock({int(number): lsn for number, lsn in json.loads(row["position"]).items()}),
        row["stamp"],
        msgspec.msgpack.decode(row["definitions"], type=tuple[tuple[int, bytes], ...]),
        {int(number): name for number, name in json.loads(row["tables"]).items()},
        json.loads(row["settings"]),
    )
