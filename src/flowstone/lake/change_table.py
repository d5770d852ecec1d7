"""The change table of a space: one row for each settled change, with the row of the table before and after it.

Rows are only ever appended, in one commit per batch, which carries the position of the replica set as in the commits of
the table itself (`table.py`). The commit of a batch comes before the table's: the rows before a change are looked up in
the table, which must not have the change yet. So after a crash a change table may be ahead of its table, never behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import CommitProperties, Transaction

from flowstone.columns.arrow_columns import MOMENT
from flowstone.lake.misfits import MisfitRows
from flowstone.lake.table import AnotherWriter, is_replay, position_in, transactions_of, user_metadata
from flowstone.lake.table_schema import EXTRA, KEY, TUPLE, LakeSchema, prefixed
from flowstone.replication.vclock import VClock

CHANGES: Final = "_changes"
"""Directory of the change tables in a lake. A space cannot have this name: its directory would be escaped."""

CHECKPOINT_INTERVAL: Final = 20
"""Commits between two checkpoints of a table's log."""

COMPACT_SIZE: Final = 16 << 20
"""Files up to this size are joined: each batch adds a file, and a larger limit would rewrite the last one often."""

_WRITING: Final = WriterProperties(compression="ZSTD", compression_level=1)

LEADING_FIELDS: Final = (
    pa.field("_change_type", pa.string()),
    pa.field("_operation", pa.string()),
    pa.field("_commit_version", pa.int64()),
    pa.field("_commit_timestamp", MOMENT),
    pa.field("_replica_id", pa.int32()),
    pa.field("_lsn", pa.int64()),
    pa.field("_replicaset_uuid", pa.string()),
    pa.field(KEY.name, pa.binary()),
    pa.field("_detail", pa.string()),
)
"""Columns of every row; `before` and `after` follow. A marker has no key and no images."""

BEFORE: Final = "before"
AFTER: Final = "after"


@dataclass(frozen=True, slots=True)
class TableMarker:
    """A change of the whole table: `truncate`, `drop`, `rename` (`detail` is the new name) or `reset`.

    After a `reset` the changes continue from the state that the table has at its position: what led there is not in the
    change table.
    """

    change_type: str
    version: int
    time: datetime | None = None
    replica_id: int | None = None
    lsn: int | None = None
    detail: str | None = None


class ChangeTable:
    """The change table at a path, which may not exist yet. One writer at a time."""

    def __init__(self, path: str, name: str, storage_options: Mapping[str, str], keep_hours: int) -> None:
        self.path = path
        self._name = name
        self._storage_options = dict(storage_options) or None
        self._keep = f"interval {keep_hours} hours"
        self._delta: DeltaTable | None = None
        self._positions: dict[str, VClock | None] = {}
        self._known: pa.StructType | None = None

    @classmethod
    def open(cls, path: str, name: str, storage_options: Mapping[str, str], keep_hours: int) -> Self:
        """Return the table as of its newest version."""
        found = cls(path, name, storage_options, keep_hours)
        found._open()
        return found

    def _open(self) -> None:
        try:
            self._delta = DeltaTable(self.path, storage_options=self._storage_options)
        except TableNotFoundError:
            return
        self._note_columns(self._delta)

    def _note_columns(self, delta: DeltaTable) -> None:
        self._known = pa.schema(delta.schema().to_arrow()).field(AFTER).type

    @property
    def exists(self) -> bool:
        return self._delta is not None

    def position(self, uuid: str) -> VClock | None:
        """Return the position up to which the table has the changes of a replica set; None if it has none of them."""
        if self._delta is None:
            return None
        if uuid not in self._positions:
            self._positions[uuid] = position_in(self._delta.transaction_version, self._delta.history, uuid)
        return self._positions[uuid]

    def append(self, rows: pa.Table, uuid: str, position: VClock) -> bool:
        """Append the rows of a batch that ends at `position`, in one commit. Return False if it was done before."""
        if is_replay(self.path, self.position(uuid), position):
            return False
        transactions = [Transaction(name, version) for name, version in transactions_of(position, uuid)]
        properties = CommitProperties(
            custom_metadata={"userMetadata": user_metadata({uuid: position})},
            app_transactions=transactions,
            max_commit_retries=0,
        )
        try:
            if self._delta is None:
                self._create(rows, properties)
            else:
                write_deltalake(
                    self._delta,
                    rows,
                    mode="append",
                    schema_mode="merge",
                    writer_properties=_WRITING,
                    commit_properties=properties,
                )
                self._note_columns(self._delta)
        except CommitFailedError as error:
            raise AnotherWriter(
                f"{self.path} was changed by another writer: {error}", hint="run only one mirror per lake"
            ) from None
        self._positions[uuid] = position
        return True

    def _create(self, rows: pa.Table, properties: CommitProperties) -> None:
        write_deltalake(
            self.path,
            rows,
            mode="error",
            name=f"changes of {self._name}",
            configuration={
                "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
                "delta.deletedFileRetentionDuration": self._keep,
                "delta.logRetentionDuration": self._keep,
            },
            storage_options=self._storage_options,
            writer_properties=_WRITING,
            commit_properties=properties,
        )
        self._open()

    def mark(self, markers: Sequence[TableMarker], uuid: str, position: VClock) -> bool:
        """Append markers only, as `append` does. A table that does not exist gets none."""
        if self._known is None:
            return False
        return self.append(_marker_rows(markers, uuid, _schema(self._known)), uuid, position)

    # --- rows -----------------------------------------------------------------------------------------------------

    def rows(
        self,
        schema: LakeSchema,
        uuid: str,
        states: pa.Table,
        before: pa.Array,
        *,
        markers: Sequence[TableMarker] = (),
        misfits: MisfitRows | None = None,
    ) -> pa.Table:
        """Return the rows for the result of `fold(every_state=True)`, and for markers.

        `before` has the tuple before each change, null if there was none. Without `misfits`, a value after a change
        that does not fit its column raises LakeError.
        """
        schema = replace(schema, history=False)
        tuples = _whole(states.column("tuple"))
        is_change = pc.or_(before.is_valid(), tuples.is_valid())
        states, before, tuples = states.filter(is_change), before.filter(is_change), tuples.filter(is_change)
        keys = prefixed(schema.prefix(uuid), states.column("sort_key"))
        names = self._names(schema)
        columns: dict[str, Any] = {
            "_change_type": _change_types(before, tuples),
            "_operation": states.column("operation"),
            "_commit_version": states.column("commit_version"),
            "_commit_timestamp": states.column("commit_timestamp"),
            "_replica_id": states.column("replica_id"),
            "_lsn": states.column("lsn"),
            "_replicaset_uuid": pa.repeat(pa.scalar(uuid, pa.string()), len(keys)),
            KEY.name: keys,
            "_detail": pa.nulls(len(keys), pa.string()),
            BEFORE: _images(schema, names, keys, before, MisfitRows()),
            AFTER: _images(schema, names, keys, tuples, misfits),
        }
        whole = _schema(columns[AFTER].type)
        table = pa.table([_whole(columns[each.name]).cast(each.type) for each in whole], schema=whole)
        table = pa.concat_tables([_marker_rows(markers, uuid, whole), table]).combine_chunks()
        # Markers without an LSN precede the changes of their transaction.
        places = pa.table({"version": table.column("_commit_version"), "lsn": pc.fill_null(table.column("_lsn"), -1)})
        return table.take(pc.sort_indices(places, [("version", "ascending"), ("lsn", "ascending")]))

    def _names(self, schema: LakeSchema) -> dict[str, str]:
        """Return the field of the images for each column of the space's table.

        A field of the images never changes its type. A column whose type differs continues in a field with the suffix
        `_2`, or the next free number.
        """
        kinds = {name: schema.schema.field(name).type for name in (*schema.column_names, EXTRA.name)}
        known = {each.name: each.type for each in self._known or ()}
        found: dict[str, str] = {}
        for name, kind in kinds.items():
            field, number = name, 1
            while known.get(field, kind) != kind or (number > 1 and field in kinds):
                number += 1
                field = f"{name}_{number}"
            found[name] = field
        return found

    # --- files ----------------------------------------------------------------------------------------------------

    def compact(self) -> None:
        """Join small files; no row changes."""
        if self._delta is not None:
            self._delta.optimize.compact(
                target_size=COMPACT_SIZE,
                writer_properties=_WRITING,
                commit_properties=CommitProperties(max_commit_retries=0),
            )
            self._delta.update_incremental()

    def vacuum(self, keep_hours: int) -> None:
        """Remove files and log entries that no version of the last hours needs."""
        if self._delta is not None:
            self._delta.vacuum(retention_hours=keep_hours, dry_run=False, enforce_retention_duration=False, full=True)
            self._delta.create_checkpoint()
            self._delta.cleanup_metadata()
            self._delta.update_incremental()


def _schema(image: pa.StructType) -> pa.Schema:
    return pa.schema([*LEADING_FIELDS, pa.field(BEFORE, image), pa.field(AFTER, image)])


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _change_types(before: pa.Array, after: pa.Array) -> pa.Array:
    changed = pc.if_else(before.is_valid(), "update", "insert")
    return pc.if_else(after.is_valid(), changed, "delete")


def _images(
    schema: LakeSchema, names: Mapping[str, str], keys: pa.Array, tuples: pa.Array, misfits: MisfitRows | None
) -> pa.StructArray:
    """Return rows of the space's table as structs; null where there is no tuple."""
    is_there = tuples.is_valid()
    rows = schema.rows(keys.filter(is_there), tuples.filter(is_there), misfits=misfits, origins={})
    numbers = pc.subtract(pc.cumulative_sum(is_there.cast(pa.int64())), 1)
    places = pc.if_else(is_there, numbers, pa.scalar(None, pa.int64()))
    given = [*names, TUPLE.name]
    fields = [pa.field(names.get(name, name), rows.schema.field(name).type) for name in given]
    columns = [_whole(rows.column(name).take(places)) for name in given]
    return pa.StructArray.from_arrays(columns, fields=fields, mask=pc.invert(is_there))


def _marker_rows(markers: Sequence[TableMarker], uuid: str, schema: pa.Schema) -> pa.Table:
    rows = [
        {
            "_change_type": each.change_type,
            "_commit_version": each.version,
            "_commit_timestamp": each.time,
            "_replica_id": each.replica_id,
            "_lsn": each.lsn,
            "_replicaset_uuid": uuid,
            "_detail": each.detail,
        }
        for each in markers
    ]
    return pa.Table.from_pylist(rows, schema=schema)
