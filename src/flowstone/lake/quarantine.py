"""The quarantine of a lake: one row for each value that does not fit its column, in a Delta table of its own.

A commit of a table that has misfits is preceded by a commit of the quarantine with the same position. After a crash
between the two, `roll_back` removes the rows whose table did not reach their position: the repeated batch adds them
again. So the quarantine contains each misfit of each table once. `misfits.py` has the columns of a misfit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import CommitProperties

from flowstone.columns.arrow_columns import MOMENT
from flowstone.lake.misfits import MISFIT_SCHEMA, MisfitRows
from flowstone.lake.table import AnotherWriter
from flowstone.lake.table_files import milliseconds_now
from flowstone.lake.table_schema import KEY
from flowstone.replication.vclock import VClock

if TYPE_CHECKING:
    from flowstone.lake.embedded_table import EmbeddedTable

QUARANTINE: Final = "_quarantine"
"""Directory of the quarantine in a lake."""

QUARANTINE_SCHEMA: Final = pa.schema(
    [
        *MISFIT_SCHEMA,
        pa.field("position", pa.string()),
        pa.field("version", pa.int64()),
        pa.field("quarantined_at", MOMENT),
        pa.field("healed_at", MOMENT),
    ]
)
"""A misfit, the position of the table that has null in its place, and the times at which it was found and healed.

`version` is the sum of the position, as in `_commit_version`: it orders positions of one replica set.
"""

_PLAIN: Final = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary(), pa.large_string(): pa.string()}
_IDENTITY: Final = ("_key", "field", "value")


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Misfits of one field that were added to the quarantine. `key` is the primary key of the first one, as JSON."""

    space: str
    field: str
    reason: str
    count: int
    key: str


class Quarantine:
    """The quarantine in the lake at `lake`. One writer at a time.

    `on_added` gets the misfits of each commit, `on_healed` the number of misfits that a commit marks as healed.
    """

    def __init__(
        self,
        lake: str,
        storage_options: Mapping[str, str],
        on_added: Callable[[list[Quarantined]], object] = lambda added: None,
        on_healed: Callable[[int], object] = lambda count: None,
    ) -> None:
        self.path = f"{lake}/{QUARANTINE}"
        self._storage_options = dict(storage_options) or None
        self._on_added = on_added
        self._on_healed = on_healed

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self.path, storage_options=self._storage_options)
        except TableNotFoundError:
            return None

    def rows(self, filters: Any = None, columns: list[str] | None = None) -> pa.Table:
        """Return the rows, by default all of them."""
        table = self._open()
        if table is None:
            return QUARANTINE_SCHEMA.empty_table()
        found = table.to_pyarrow_table(columns=columns, filters=filters)
        kinds = [pa.field(each.name, _PLAIN.get(each.type, each.type)) for each in found.schema]
        return found.cast(pa.schema(kinds))

    def open_rows(self) -> pa.Table:
        """Return the misfits that are not healed."""
        rows = self.rows()
        return rows.filter(pc.is_null(rows.column("healed_at")))

    @property
    def version(self) -> int:
        """The newest version of the table; -1 without a table."""
        table = self._open()
        return -1 if table is None else int(table.version())

    def open_count(self) -> int:
        """Return the number of misfits that are not healed."""
        return int(self.rows(columns=["healed_at"]).column("healed_at").null_count)

    # --- additions ------------------------------------------------------------------------------------------------

    def add(self, misfits: MisfitRows, positions: Mapping[str, VClock], known: Mapping[str, VClock]) -> None:
        """Add the misfits of a commit that moves a table from the positions `known` to `positions`.

        Misfits of rows that the commit only rebuilds get the known position. A misfit that is in the quarantine
        already, with the same key, field and value, and not healed, is not added again.
        """
        parts = [_placed(pa.concat_tables(misfits.new), {**known, **positions})] if misfits.new else []
        if misfits.rebuilt:
            rebuilt = self._unknown(pa.concat_tables(misfits.rebuilt))
            parts.append(_placed(rebuilt, {**positions, **known}))
        rows = pa.concat_tables(parts).combine_chunks() if parts else QUARANTINE_SCHEMA.empty_table()
        if not rows.num_rows:
            return
        self._write(rows, mode="append")
        self._on_added(_summary(rows))

    def _unknown(self, rows: pa.Table) -> pa.Table:
        ids = pc.unique(rows.column("space_id")).to_pylist()
        there = self.rows(filters=[("space_id", "in", ids)])
        there = there.filter(pc.is_null(there.column("healed_at")))
        known = _identities(there)
        return rows.filter(pa.array([each not in known for each in _identity_list(rows)], pa.bool_()))

    def _write(self, rows: pa.Table, **how: Any) -> None:
        try:
            write_deltalake(
                self.path,
                rows,
                storage_options=self._storage_options,
                commit_properties=CommitProperties(max_commit_retries=0),
                **how,
            )
        except CommitFailedError as error:
            raise AnotherWriter(
                f"{self.path} was changed by another writer: {error}", hint="run only one mirror per lake"
            ) from None

    # --- recovery -------------------------------------------------------------------------------------------------

    def roll_back(self, saved: Mapping[str, VClock], tables: Callable[[], Iterable[EmbeddedTable]]) -> None:
        """Remove the rows of commits that did not happen. `saved` is the position that all tables have reached."""
        table = self._open()
        if table is None:
            return
        rows = self.rows(columns=["space_id", "replicaset_uuid", "version"])
        ahead = rows.group_by(["space_id", "replicaset_uuid"]).aggregate([("version", "max")]).to_pylist()
        ahead = [each for each in ahead if each["version_max"] > _signature(saved.get(each["replicaset_uuid"]))]
        if not ahead:
            return
        reached: dict[tuple[int, str], int] = {}
        for each in tables():
            for uuid, position in each.positions.items():
                place = (each.schema.space.id, uuid)
                reached[place] = max(position.signature, reached.get(place, -1))
        for each in ahead:
            space_id, uuid = each["space_id"], each["replicaset_uuid"]
            version = reached.get((space_id, uuid), -1)
            if each["version_max"] > version:
                table.delete(f"space_id = {space_id} AND replicaset_uuid = '{uuid}' AND version > {version}")

    # --- healing --------------------------------------------------------------------------------------------------

    def heal(self, table: EmbeddedTable) -> int:
        """Mark the misfits of a table that fit after a change of its types. Return their number.

        A misfit that was found under the current type of its column needs no check. So a call without a change of
        types costs one look at the open rows, and a call that was interrupted is made up for by the next.
        """
        schema = table.schema
        types = {
            schema.field_of(name): (schema.field_type_of(name), schema.spark_type_of(name))
            for name in schema.column_names
        }
        rows = self.rows(filters=[("space_id", "=", schema.space.id)])
        now = [types.get(each, (None, None)) for each in rows.column("field").to_pylist()]
        was = zip(rows.column("field_type").to_pylist(), rows.column("type").to_pylist(), strict=True)
        has_changed = pa.array([before != after for before, after in zip(was, now, strict=True)], pa.bool_())
        is_due = pc.and_(pc.is_null(rows.column("healed_at")), has_changed)
        if not pc.any(is_due).as_py():
            return 0
        left = _identities(_still_misfits(table, rows.filter(is_due)))
        fits = pa.array([each not in left for each in _identity_list(rows)], pa.bool_())
        is_healed = pc.and_(is_due, fits)
        moment = pa.scalar(milliseconds_now() * 1000, MOMENT)
        is_left = pc.and_(is_due, pc.invert(is_healed))
        columns = {"healed_at": pc.if_else(is_healed, moment, rows.column("healed_at"))}
        for place, name in enumerate(("field_type", "type")):
            values = pa.array([each[place] for each in now], pa.string())
            columns[name] = pc.if_else(is_left, values, rows.column(name))
        for name, column in columns.items():
            rows = rows.set_column(rows.schema.get_field_index(name), QUARANTINE_SCHEMA.field(name), column)
        self._write(rows, mode="overwrite", predicate=f"space_id = {schema.space.id}")
        count = int(pc.sum(is_healed).as_py() or 0)
        self._on_healed(count)
        return count

    # --- files ----------------------------------------------------------------------------------------------------

    def maintain(self, keep_hours: int) -> None:
        """Join small files, and remove files that no version of the last hours needs."""
        table = self._open()
        if table is not None:
            table.optimize.compact()
            table.vacuum(retention_hours=keep_hours, dry_run=False, enforce_retention_duration=False)


def _signature(position: VClock | None) -> int:
    return -1 if position is None else position.signature


def _placed(rows: pa.Table, positions: Mapping[str, VClock]) -> pa.Table:
    """Return misfits with the positions of their replica sets."""
    uuids = rows.column("replicaset_uuid").to_pylist()
    texts = {uuid: json.dumps({str(number): lsn for number, lsn in each}) for uuid, each in positions.items()}
    now = pa.scalar(milliseconds_now() * 1000, MOMENT)
    added = [
        pa.array([texts.get(uuid) for uuid in uuids], pa.string()),
        pa.array([_signature(positions.get(uuid)) for uuid in uuids], pa.int64()),
        pa.repeat(now, len(uuids)),
        pa.nulls(len(uuids), MOMENT),
    ]
    return pa.table([*rows.columns, *added], schema=QUARANTINE_SCHEMA)


def _identity_list(rows: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(rows.column(name).to_pylist() for name in _IDENTITY), strict=True))


def _identities(rows: pa.Table) -> set[tuple[Any, ...]]:
    return set(_identity_list(rows))


def _still_misfits(table: EmbeddedTable, rows: pa.Table) -> pa.Table:
    """Return the misfits that the rows of a table with the keys of `rows` have under its current types."""
    schema, keys = table.schema, pc.unique(rows.column("_key"))
    found = MisfitRows()
    for entry in table.entries:
        there = table.storage.read(entry.path, schema.file_schema)
        there = there.filter(pc.is_in(there.column(KEY.name), value_set=keys))
        if there.num_rows:
            schema.collect_misfits(there.column(KEY.name), there.column("_tuple"), found)
    return pa.concat_tables(found.rebuilt) if found else MISFIT_SCHEMA.empty_table()


def _summary(rows: pa.Table) -> list[Quarantined]:
    grouped = rows.group_by(["space", "field", "reason"], use_threads=False).aggregate(
        [("key", "first"), ("key", "count")]
    )
    return [
        Quarantined(each["space"], each["field"], each["reason"], each["key_count"], each["key_first"] or "")
        for each in grouped.to_pylist()
    ]
