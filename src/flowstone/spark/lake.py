"""A lake: a directory of Delta tables, one per space, and how far each replica set has come in it.

`Lake` finds, makes, loads and renames tables; `Progress` is what a mirror has to know to go on, kept in a small table
of its own (`_flowstone`). Each table knows its position by itself, so a crash between the commits of tables and that of
the progress loses and doubles nothing: whoever goes on leaves out, table by table, what is there already.
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
from flowstone.replication.vclock import VClock
from flowstone.spark.collected import rows_of
from flowstone.spark.lake_files import (
    LOADED_DDL,
    FileEntry,
    LoadTarget,
    RowsToFiles,
    TableFiles,
    WrittenFile,
    statistics_json,
)
from flowstone.spark.lake_rows import Changes, States
from flowstone.spark.lake_schema import LakeError, LakeSchema
from flowstone.spark.lake_table import KEEP_HOURS, AnotherWriter, Merged, Moment, application, is_replay
from flowstone.spark.lake_table_embedded import EmbeddedTable
from flowstone.xlog.columns import ColumnOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Engine = Literal["auto", "deltalake", "spark"]


class ArrowRows(Protocol):
    """A data frame, or rows that are in none yet (`frames.SliceRows`): what `mapInArrow` is called on."""

    def mapInArrow(self, func: Any, schema: Any) -> DataFrame: ...  # noqa: N802  # as frames call it


PROGRESS: Final = "_flowstone"
"""The directory of the progress: readers of a lake pass over names that begin so."""

DIRECTORY_NAME_SIZE: Final = 200
"""Of file systems, most take names of 255 bytes."""

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
class Progress:
    """How far one replica set is mirrored, and what is needed to go on from there.

    Everything up to `position` is in all tables; single tables may be ahead (`LakeTable.positions`). `definitions` are
    rows of `_space` and `_index` in force at `position`, as (space id, MessagePack tuple). `tables`: space id → name of
    the space when its table was last written. `stamp` is the greatest commit time so far in µs. `settings` are what the
    lake was begun with.
    """

    replicaset_uuid: str
    position: VClock
    stamp: int = 0
    definitions: tuple[tuple[int, bytes], ...] = ()
    tables: Mapping[int, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


class Lake:
    """The tables below one path. One writer at a time; readers are any that know Delta."""

    def __init__(
        self,
        path: str,
        *,
        spark: SparkSession | None,
        storage_options: Mapping[str, str],
        several_sets: bool,
        keep_hours: int,
    ) -> None:
        """Who commits merges is decided by `spark`: with a session, Delta's jars in it do."""
        self.path = path
        self.storage_options = dict(storage_options)
        self.several_sets = several_sets
        self.keep_hours = keep_hours
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
        """Local path or URI (s3a://, abfss://, hdfs:// … with `storage_options` as deltalake knows them).

        `auto` takes Spark for merges where the session has Delta's jars. `several_sets`: the lake takes more than one
        replica set, keys are prefixed with the set's UUID; it is fixed when the lake is begun. `keep_hours`: how long
        former versions can be read.
        """
        from flowstone.spark.lake_table_spark import has_delta_jars

        if engine == "spark" and (spark is None or not has_delta_jars(spark)):
            raise LakeError(
                "the Spark session has no Delta jars",
                hint="start it with spark.jars.packages=io.delta:delta-spark…, or choose the engine deltalake",
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
        """Who commits merges."""
        return "deltalake" if self._spark is None else "spark"

    # --- tables ---------------------------------------------------------------------------------------------------

    def tables(self) -> dict[str, EmbeddedTable]:
        """The tables of living spaces by the space's name; neither dropped nor renamed ones."""
        return {each.schema.space.name: each for each in self.all_tables() if is_living(each.schema)}

    def all_tables(self) -> list[EmbeddedTable]:
        """Also those of spaces that were dropped or renamed."""
        found = [self._open(f"{self.path}/{each}") for each in self.directories()]
        return [each for each in found if each is not None]

    def directories(self) -> list[str]:
        """Where tables are, or may be: names of directories below `path`."""
        system, root = TableFiles(self.path, self.storage_options).place
        there = system.get_file_info(pyarrow.fs.FileSelector(root or "/", allow_not_found=True))
        names = sorted(each.base_name for each in there if each.type == pyarrow.fs.FileType.Directory)
        return [name for name in names if not name.startswith(("_", "."))]

    def table(self, name: str) -> EmbeddedTable | None:
        """The table of the space of that name at its newest version, also one that is marked as dropped or renamed."""
        return self._open(self._path_of(name))

    def there(self, name: str) -> EmbeddedTable:
        """The same of a table that must be there: somebody may have deleted it by hand."""
        found = self.table(name)
        if found is None:
            raise LakeError(
                f"{self.path}: there is no table of space {name!r}, which there was",
                hint="bring its directory back, or begin a new lake",
            )
        return found

    def _path_of(self, name: str) -> str:
        return f"{self.path}/{directory_of(name)}"

    def _open(self, path: str) -> EmbeddedTable | None:
        if self._spark is not None:
            from flowstone.spark.lake_table_spark import SparkTable

            found: EmbeddedTable | None = SparkTable.open_with(self._spark, path, self.storage_options)
        else:
            found = EmbeddedTable.open(path, self.storage_options)
        if found is not None and found.schema.several_sets != self.several_sets:
            number = "several replica sets" if found.schema.several_sets else "one replica set"
            raise LakeError(f"{path} is a table for {number}", hint="mirror into another directory")
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
        states: pa.Table | None = None,
    ) -> EmbeddedTable:
        """A table for a new space, in one commit that carries `position`.

        `states` are what `fold` gives of the rows that came in the transaction that makes it; without any it is empty.
        A table of that name that is there is overwritten (its former versions can still be read), but for a replay,
        where it is at `position` or behind it already, for the same space. In a lake of several sets only this set's
        rows go.
        """
        schema = self._schema(definition, uuid, history, columns, options)
        if not self._is_done(schema, uuid, position):
            written = self._written(schema, uuid, states) if states is not None else []
            self._put(schema, written, uuid, position, None)
        return self.there(definition.name)

    def _written(self, schema: LakeSchema, uuid: str, states: pa.Table) -> list[WrittenFile]:
        """Files of a table that has had no other states than these."""
        files = TableFiles(self._path_of(schema.space.name), self.storage_options)
        files.make_directory()
        if schema.history:
            new = States(states, schema.prefix(uuid))
            return [*files.write_split(new.current(schema), True), *files.write_split(new.former(schema), False)]
        return files.write_split(Changes.of(states, schema.prefix(uuid)).upserts(schema, 0, states.num_rows))

    def _schema(
        self,
        definition: SpaceDefinition,
        uuid: str,
        history: bool,
        columns: Sequence[str] | None,
        options: ColumnOptions | None,
    ) -> LakeSchema:
        return LakeSchema(
            definition,
            (uuid,),
            options or ColumnOptions(),
            None if columns is None else tuple(columns),
            several_sets=self.several_sets,
            history=history,
        )

    def _is_done(self, schema: LakeSchema, uuid: str, position: VClock) -> bool:
        """Whether the table is there for this very space, at the position or behind it."""
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
        """The set's rows in the table of this schema are exactly those of the files."""
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
    ) -> dict[int, Merged]:
        """First load of many spaces in one pass: executors write the files, then each table is committed once.

        `frame` has three columns, in this order: space id INT, sort key BINARY, tuple BINARY; rows of spaces that are
        not in `definitions` are left out. Tables that are at `position` already (a load that was killed between
        two commits) are left as they are. Existing ones become exactly these rows. `moment`: from when the states
        of a history are valid. `columns`: by the space's name. Returns what was committed, by space id.
        """
        wanted = columns or {}
        schemas = [self._schema(each, uuid, history, wanted.get(each.name), options) for each in definitions]
        schemas = [each for each in schemas if not self._is_done(each, uuid, position)]
        if history and moment is None:
            raise LakeError("a history begins at a moment", hint="say which")
        states = _states_at(moment) if history and moment is not None else None
        targets = {
            each.space.id: LoadTarget(
                TableFiles(self._path_of(each.space.name), self.storage_options), each, each.prefix(uuid), states
            )
            for each in schemas
        }
        for target in targets.values():
            target.files.make_directory()
        written = _written_by(frame, targets) if targets else {}
        return {
            each.space.id: self._put(each, written.get(each.space.id, []), uuid, position, moment) for each in schemas
        }

    # --- names ----------------------------------------------------------------------------------------------------

    def rename(self, old_name: str, definition: SpaceDefinition, uuid: str, position: VClock) -> EmbeddedTable:
        """The table of `old_name` under the name of `definition`, with all its rows, at `position`.

        The old table stays as it was, at its own position, marked with `renamed_to`. In a lake of several sets each
        renames its space when it does: only the rows of this one are taken along. The old table goes on with those of
        the others, this set is in its `dropped`, and `renamed_to` is there when none is left.
        """
        old = self.there(old_name)
        new = self._moved(old, definition, uuid, position) if self.several_sets else self._copied(old, definition)
        new.rewrite(definition, position, uuid)
        self.leave(old_name, definition, uuid)
        return new

    def leave(self, old_name: str, definition: SpaceDefinition, uuid: str) -> None:
        """Marks the table of `old_name`, whose space goes on under the name of `definition`."""
        old = self.there(old_name)
        marked = _without_set(old.schema, uuid, definition) if self.several_sets else _without(old.schema, definition)
        if marked != old.schema:
            old.mark(marked)

    def _copied(self, old: EmbeddedTable, definition: SpaceDefinition) -> EmbeddedTable:
        """All that `old` holds, at its positions, under another name: its very files, in one commit."""
        name, new = definition.name, self.table(definition.name)
        if new is not None and new.schema.space.id == definition.id and is_living(new.schema):
            return new
        if old.schema.space.id != definition.id:
            raise LakeError(
                f"{old.path} is the table of space {old.schema.space.id}, not of {definition.id}, now called {name!r}",
                hint="begin a new lake",
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
        """The rows that `old` has of one set in the table of another name, whose rows of other sets stay."""
        new = self.table(definition.name)
        base = old.schema if new is None or not is_living(new.schema) else new.schema
        schema = replace(base.moved(definition), sets=(uuid,), dropped=(), renamed_to=None)
        if not self._is_done(schema, uuid, position):
            held = old.positions.get(uuid)
            if held is None:
                raise LakeError(f"{old.path} has no rows of replica set {uuid}", hint="begin a new lake")
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
    def progress(self) -> dict[str, Progress]:
        """By replica set; {} for a new lake. Read anew each time."""
        table = self._progress_table()
        return {} if table is None else _progress_in(table)

    def save(self, progress: Progress) -> None:
        """Replaces what is known of that replica set. A position that is not behind the one there: AnotherWriter."""
        for _ in range(_SAVE_TRIES):
            table = self._progress_table()
            known = {} if table is None else _progress_in(table)
            own = known.get(progress.replicaset_uuid)
            if own is not None and not own.position <= progress.position:
                raise AnotherWriter(
                    f"{self.path} is mirrored up to {own.position}, this mirror only up to {progress.position}",
                    hint="let only one mirror at a time write to a lake",
                )
            try:
                self._write_progress(table, {**known, progress.replicaset_uuid: progress}, progress)
            except CommitFailedError:
                continue  # a mirror of another replica set was faster: its row is taken along in the next try
            return
        raise AnotherWriter(f"{self.path}/{PROGRESS} is changed by others all the time", hint="try again later")

    def _write_progress(self, table: DeltaTable | None, known: Mapping[str, Progress], moved: Progress) -> None:
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
    """The lake's address as deltalake writes it: s3a:// as s3://; a local path, or a file:// one, as absolute path."""
    scheme, separator, rest = path.partition("://")
    if not separator:
        return str(Path(path).absolute())
    if scheme == "file":
        return "/" + rest.lstrip("/").rstrip("/")
    return f"{_DELTA_NAMES.get(scheme, scheme)}://{rest}".rstrip("/")


def directory_of(name: str) -> str:
    """The directory of a space's table: letters, digits, `_`, `-`, `.` as they are, other bytes as `~` and two digits.

    So is a `_` or `.` at the beginning, which readers take for hidden. Very long names are cut, with a digest behind.
    """
    text = "".join(
        chr(byte) if _PLAIN.fullmatch(bytes([byte])) and (place or byte not in b"_.") else f"~{byte:02x}"
        for place, byte in enumerate(name.encode())
    )
    if len(text) <= DIRECTORY_NAME_SIZE:
        return text
    return f"{text[: DIRECTORY_NAME_SIZE - 33]}~{sha256(name.encode()).hexdigest()[:32]}"


def is_living(schema: LakeSchema) -> bool:
    """Whether the space is still there, under this name, in any replica set."""
    return schema.renamed_to is None and set(schema.dropped) < set(schema.sets)


# --- the inside ---------------------------------------------------------------------------------------------------


def _written_by(frame: ArrowRows, targets: dict[int, LoadTarget]) -> dict[int, list[WrittenFile]]:
    """The files that executors made of the rows, by space id."""
    to_files = RowsToFiles(targets)
    is_current = {space_id: None if target.states is None else True for space_id, target in targets.items()}
    written: dict[int, list[WrittenFile]] = {}
    for each in rows_of(frame.mapInArrow(lambda batches: to_files(batches), LOADED_DDL)):  # noqa: PLW0108
        entry = FileEntry(each["path"], each["size"], each["row_count"], is_current[each["space_id"]])
        written.setdefault(each["space_id"], []).append(WrittenFile(entry, each["statistics"]))
    return written


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
    """The note of a table whose space has another name; where the name is another space's by now, it is that one's."""
    return schema if schema.space.id != definition.id else replace(schema, renamed_to=definition.name)


def _without_set(schema: LakeSchema, uuid: str, definition: SpaceDefinition) -> LakeSchema:
    """The note of a table where the space of one of several sets has another name."""
    if uuid in schema.dropped or uuid not in schema.sets:
        return schema
    left = replace(schema, dropped=(*schema.dropped, uuid))
    return left if is_living(left) else replace(left, renamed_to=definition.name)


def _file_copied(source: TableFiles, target: TableFiles, entry: FileEntry) -> WrittenFile:
    source.copy_to(target, entry.path)
    with target.open(entry.path) as file:
        return WrittenFile(entry, statistics_json(file.metadata, file.schema_arrow))


def _progress_in(table: DeltaTable) -> dict[str, Progress]:
    return {row["replicaset_uuid"]: _progress_of(row) for row in table.to_pyarrow_table().to_pylist()}


def _row_of(progress: Progress) -> dict[str, Any]:
    return {
        "replicaset_uuid": progress.replicaset_uuid,
        "position": json.dumps({str(number): lsn for number, lsn in progress.position}),
        "stamp": progress.stamp,
        "definitions": msgspec.msgpack.encode(progress.definitions),
        "tables": json.dumps({str(number): name for number, name in progress.tables.items()}),
        "settings": json.dumps(dict(progress.settings)),
    }


def _progress_of(row: Mapping[str, Any]) -> Progress:
    return Progress(
        row["replicaset_uuid"],
        VClock({int(number): lsn for number, lsn in json.loads(row["position"]).items()}),
        row["stamp"],
        msgspec.msgpack.decode(row["definitions"], type=tuple[tuple[int, bytes], ...]),
        {int(number): name for number, name in json.loads(row["tables"]).items()},
        json.loads(row["settings"]),
    )
