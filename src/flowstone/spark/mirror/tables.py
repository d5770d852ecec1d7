"""The tables of a mirror: they follow the definitions of their spaces and take the commits of batches.

If masks hide fields, a table of the lake has a twin with the exact tuples in a private lake of the mirror (`exact`):
operations are folded over the exact tuples. The twin is committed last, so after a crash it may lag its table but
never lead it. The missing changes are folded again and skipped in the table that already has them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.update.update import UpdateRules
from flowstone.columns.arrow_columns import ColumnOptions
from flowstone.lake.change_table import CHANGES, TableMarker
from flowstone.lake.masks import Masking, SpaceMask
from flowstone.lake.table import LakeTable, Merged, Moment
from flowstone.lake.table_list import TableList
from flowstone.lake.table_schema import LakeError
from flowstone.replication.vclock import VClock
from flowstone.spark.lake import ArrowRows, Lake, is_living
from flowstone.spark.mirror import progress as events
from flowstone.spark.mirror.batch import FoldedTable, Target, Truncation, at, behind, mask_rows, shown_states
from flowstone.spark.mirror.change_tables import ChangeTables
from flowstone.spark.mirror.choice import MirrorChoice, Spaces
from flowstone.spark.mirror.field_types import FieldTypes
from flowstone.spark.mirror.start_checks import WrongPlace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOADED_DDL = "space_id BIGINT, sort_key BINARY, tuple BINARY"

Pair = tuple[SpaceDefinition, SpaceDefinition]
"""The former and the current definition of a space."""


def check_catalog(spark: SparkSession, schema: str) -> None:
    """Raise WrongPlace unless Spark's catalog has `schema`: tables can only be registered in an existing schema."""
    from pyspark.errors import PySparkException

    try:
        is_there = spark.catalog.databaseExists(schema)
    except PySparkException as error:
        problem = str(error).splitlines()[0]
        raise WrongPlace(f"--catalog {schema}: {problem}", hint="specify a schema in Spark's catalog") from error
    if not is_there:
        raise WrongPlace(
            f"--catalog {schema}: no such schema in Spark's catalog",
            hint=f"create it with CREATE SCHEMA {schema}, or name another",
        )


class MirrorTables:
    """Tables by the names of their spaces, in the lake and, for masked spaces, also in `exact`."""

    def __init__(
        self,
        spark: SparkSession,
        lake: Lake,
        exact: Lake | None,
        masking: Masking,
        choice: MirrorChoice,
        *,
        types: ColumnOptions,
        field_types: FieldTypes | None = None,
        history: bool,
        changes: bool = False,
        catalog: str | None = None,
        on_event: Callable[[events.MirrorEvent], object],
    ) -> None:
        self._spark = spark
        self._lake = lake
        self._exact = exact
        self._masking = masking
        self._choice = choice
        self._types = types
        self._field_types = field_types or FieldTypes()
        self._catalog = catalog
        self._is_history = history
        self._changes = ChangeTables(lake) if changes else None
        self._list = TableList(lake.path, lake.storage_options)
        self._tell = on_event
        self._open: dict[tuple[bool, str], LakeTable] = {}

    def _table(self, name: str, *, exact: bool = False) -> LakeTable:
        """Return an existing table. It is opened once and stays at the last commit of this mirror."""
        found = self._open.get((exact, name))
        if found is None:
            lake = self._exact if exact else self._lake
            assert lake is not None
            found = self._open[exact, name] = lake.there(name)
        return found

    # --- definitions ---

    def drop(self, spaces: Iterable[SpaceDefinition], uuid: str, position: VClock, time_us: int) -> None:
        """Mark the tables of dropped spaces. The tables stay."""
        moment = Moment(position.signature, at(time_us))
        for space in spaces:
            done = self._table(space.name).drop(position, uuid, moment)
            if self._masking.of(space) is not None:
                self._table(space.name, exact=True).drop(position, uuid, moment)
            self._forget(space.name)
            self._unregister(space.name)
            self._mark(space.name, TableMarker("drop", position.signature, moment.timestamp))
            self._note(done, space.name, "dropped")

    def rename(self, pairs: Iterable[Pair], uuid: str, position: VClock, end: Moment) -> None:
        """Rename tables. `position` is the one before the batch, because the rows of the batch follow, up to `end`."""
        for was, now in in_order(pairs):
            if self._masking.of(was) is not None or self._masking.of(now) is not None:
                self._refuse_rename(was, now)
            self._open[False, now.name] = self._lake.rename(was.name, now, uuid, position)
            self._open.pop((False, was.name), None)
            self._unregister(was.name)
            self._register(now.name)
            self._mark(was.name, TableMarker("rename", end.version, end.timestamp, detail=now.name))
            # The table has the rows of before; those of the same transaction have a version that is not lower.
            detail = f"renamed from {was.name}"
            self._mark(now.name, TableMarker("reset", position.signature + 1, end.timestamp, detail=detail))
            self._tell(events.MirrorTable(was.name, "renamed", f"to {now.name}"))

    def _mark(self, name: str, marker: TableMarker) -> None:
        if self._changes is not None:
            self._changes.mark(name, marker)

    def leave(self, pairs: Iterable[Pair], spaces: Spaces, uuid: str, position: VClock, time_us: int) -> None:
        """Mark the tables that a loaded snapshot does not have: `pairs` under their former names, and leftovers.

        Leftovers are tables of an earlier snapshot whose mirror was killed before it saved its progress.
        """
        taken = {space.name for space in spaces.values()}
        moment = Moment(position.signature, at(time_us))
        for was, now in pairs:
            if was.name not in taken:
                self._lake.leave(was.name, now, uuid)
                self._forget(was.name)
                self._unregister(was.name)
                self._mark(was.name, TableMarker("rename", moment.version, moment.timestamp, detail=now.name))
                self._tell(events.MirrorTable(was.name, "renamed", f"to {now.name}"))
        for lake in (self._exact, self._lake):
            for name, table in lake.tables().items() if lake is not None else ():
                if name in taken or uuid not in table.schema.sets or uuid in table.schema.dropped:
                    continue
                if table.drop(position, uuid, moment).is_replay:  # same snapshot, other choice of spaces
                    table.mark(replace(table.schema, dropped=(*table.schema.dropped, uuid)))
                self._forget(name)
                self._unregister(name)
                if lake is self._lake:
                    self._mark(name, TableMarker("drop", moment.version, moment.timestamp))
                    self._tell(events.MirrorTable(name, "dropped"))

    def _refuse_rename(self, was: SpaceDefinition, now: SpaceDefinition) -> None:
        """Raise LakeError: masks refer to names, so the masks for the new name are unknown."""
        raise LakeError(
            f"space {was.name!r} was renamed to {now.name!r}, and --mask names only one of these",
            hint="mirror into a new lake with masks for the new name",
        )

    def create(
        self,
        spaces: Iterable[SpaceDefinition],
        uuid: str,
        position: VClock,
        folded: Mapping[int, FoldedTable],
        truncated: Mapping[int, Truncation],
    ) -> dict[int, int]:
        """Create tables for new spaces, with the rows of the same transaction. Return table versions by space."""
        versions: dict[int, int] = {}
        for space in spaces:
            truncation, mask = truncated.get(space.id), self._masking.of(space)
            found = self._after(truncation, folded.get(space.id))
            table = self._lake.create(
                _shown(space, mask),
                uuid,
                position,
                history=self._is_history,
                columns=self._choice.columns_of(space),
                options=self._types,
                types=self._field_types.of_space(space),
                states=self._shown_states(found, mask),
            )
            self._open[False, space.name] = table
            if self._changes is not None:
                self._changes.append(table.schema, folded.get(space.id), uuid, position, mask, truncation)
            versions[space.id] = table.version
            if mask is not None:
                assert self._exact is not None
                states = last_states(found.states) if found is not None else None
                twin = self._exact.create(space, uuid, position, columns=(), states=states)
                self._open[True, space.name] = twin
            self._register(space.name)
            self._tell(events.MirrorTable(space.name, "created"))
        return versions

    def load(
        self, frame: ArrowRows, spaces: Spaces, uuid: str, position: VClock, time_us: int, *, is_forced: bool = False
    ) -> int:
        """Replace the tables with the rows of a frame (space id, sort key, exact tuple). Return the number of rows.

        Tables that are at `position` already are replaced only with `is_forced`.
        """
        masks = {space.id: mask for space in spaces.values() if (mask := self._masking.of(space)) is not None}
        columns = {space.name: list(names) for space in spaces.values() if (names := self._choice.columns_of(space))}
        shown: ArrowRows = frame.mapInArrow(partial(mask_rows, masks), LOADED_DDL) if masks else frame
        done = self._lake.load(
            shown,
            [_shown(space, self._masking.of(space)) for space in spaces.values()],
            uuid,
            position,
            moment=Moment(position.signature, at(time_us)),
            history=self._is_history,
            columns=columns,
            options=self._types,
            types={space.name: self._field_types.of_space(space) for space in spaces.values()},
            is_forced=is_forced,
        )
        if masks:
            assert self._exact is not None
            hidden = [spaces[space_id] for space_id in masks]
            nothing: dict[str, list[str]] = {space.name: [] for space in hidden}
            self._exact.load(frame, hidden, uuid, position, columns=nothing, is_forced=is_forced)
        for space in spaces.values():
            self._forget(space.name)
            self._register(space.name)
            self._follow_changes(space.name, uuid, "snapshot", at(time_us))
        return sum(each.upserts for each in done.values())

    def _follow_changes(self, name: str, uuid: str, reason: str, time: datetime | None = None) -> None:
        """Let the change table continue from the position of its table, with a reset if it lacks changes."""
        if self._changes is None:
            return
        table = self._table(name)
        if self._changes.follow(table.schema, uuid, table.positions.get(uuid, VClock()), reason, time):
            self._tell(events.MirrorTable(name, "reset", f"its changes continue from the {reason}"))

    def retype(self) -> None:
        """Rewrite the tables whose declared types have changed. A table that was renamed keeps its types."""
        for name, table in self._lake.tables().items():
            types = dict(table.schema.types) | dict(self._field_types.of_space(table.schema.space))
            if types != dict(table.schema.types):
                table.retype(tuple(sorted(types.items())))
                self._tell(events.MirrorTable(name, "retyped"))

    def _forget(self, name: str) -> None:
        self._open.pop((False, name), None)
        self._open.pop((True, name), None)

    def _register(self, name: str) -> None:
        if self._catalog is not None:
            place = self._table(name).path.replace("'", "\\'")
            self._spark.sql(f"CREATE TABLE IF NOT EXISTS {self._catalog_name(name)} USING delta LOCATION '{place}'")

    def _unregister(self, name: str) -> None:
        """Remove the table from the catalog; its files stay, as the table has an explicit location.

        A table that still has rows of another replica set stays in the catalog.
        """
        if self._catalog is None:
            return
        table = self._lake.table(name)
        if table is None or not is_living(table.schema):
            self._spark.sql(f"DROP TABLE IF EXISTS {self._catalog_name(name)}")

    def _catalog_name(self, name: str) -> str:
        return f"{self._catalog}.`{name.replace('`', '``')}`"

    # --- batches ---

    def targets(
        self,
        spaces: Spaces,
        uuid: str,
        truncated: Mapping[int, Truncation],
        rules: UpdateRules,
        *,
        created: Collection[SpaceDefinition] = (),
    ) -> dict[int, Target]:
        """Return what executors need to know about each table."""
        new = {space.id for space in created}
        found: dict[int, Target] = {}
        for space_id, space in spaces.items():
            truncation, mask = truncated.get(space_id), self._masking.of(space)
            target = Target(
                space,
                VClock(),
                VClock(),
                mask=mask,
                every_state=self._is_history,
                truncated=None if truncation is None else (truncation.version, truncation.lsn),
                rules=rules,
                keeps_changes=self._changes is not None,
            )
            if space_id not in new:
                table = self._table(space.name)
                if self._changes is not None and not self._changes.has_markers(space.name):
                    self._follow_changes(space.name, uuid, "current table")
                source = table if mask is None else self._table(space.name, exact=True)
                shown, applied = (each.positions.get(uuid, VClock()) for each in (table, source))
                target = replace(target, applied=applied, shown=shown, old=source.pin(uuid))
            found[space_id] = target
        return found

    def commit(
        self,
        space: SpaceDefinition,
        folded: FoldedTable | None,
        uuid: str,
        position: VClock,
        *,
        truncation: Truncation | None = None,
        is_altered: bool = False,
    ) -> int | None:
        """Apply a batch to one table in one commit. Return the new version, or None if there was nothing to commit."""
        has_changes = truncation is not None or is_altered or (folded is not None and folded.states.num_rows)
        table, mask = self._table(space.name), self._masking.of(space)
        if self._changes is not None and (has_changes or self._changes.has_markers(space.name)):
            schema = table.schema.moved(_shown(space, mask))
            if truncation is None and not schema.has_keys_of(table.schema):
                self._mark(space.name, TableMarker("reset", position.signature, detail="another primary key"))
            self._changes.append(schema, folded, uuid, position, mask, truncation)
        if not has_changes:
            return None
        folded = self._after(truncation, folded)
        states = self._shown_states(folded, mask)
        shown = table.positions.get(uuid, VClock())
        states = states.filter(behind(shown, states["replica_id"], states["lsn"]))
        done = self._apply(table, _shown(space, mask), states, uuid, position, truncation, is_altered)
        if truncation is not None:
            self._note(done, space.name, "truncated")
        if is_altered:
            self._note(done, space.name, "altered")
        if mask is not None:
            twin = self._table(space.name, exact=True)
            exact = last_states(folded.states) if folded is not None else EMPTY
            self._apply(twin, space, exact, uuid, position, truncation, is_altered, is_history=False)
        return table.version

    def _apply(
        self,
        table: LakeTable,
        definition: SpaceDefinition,
        states: pa.Table,
        uuid: str,
        position: VClock,
        truncation: Truncation | None,
        is_altered: bool,
        *,
        is_history: bool | None = None,
    ) -> Merged:
        if self._is_history if is_history is None else is_history:
            emptied = None if truncation is None else Moment(truncation.version, at(truncation.time))
            if states.num_rows or truncation is not None:
                return table.append_history(states, definition, position, uuid, replace=emptied)
            return table.rewrite(definition, position, uuid)
        if is_altered and not states.num_rows and truncation is None:
            return table.rewrite(definition, position, uuid)
        return table.merge(states, definition, position, uuid, replace=truncation is not None)

    def _after(self, truncation: Truncation | None, folded: FoldedTable | None) -> FoldedTable | None:
        """Return what a truncation leaves. With changes, executors also return the states that it discards."""
        if self._changes is None or truncation is None or folded is None:
            return folded
        is_later = truncation.is_before(folded.states)
        return replace(
            folded, states=folded.states.filter(is_later), masked=folded.masked.filter(is_later), before=None
        )

    def _shown_states(self, folded: FoldedTable | None, mask: SpaceMask | None) -> pa.Table:
        """Return the states for the table in the lake, masked if the space has masks."""
        if folded is None:
            return EMPTY
        states = shown_states(folded, mask)
        # With changes, executors return every state.
        return states if self._is_history or self._changes is None else last_states(states)

    def finish(self, uuid: str, position: VClock) -> None:
        """End a batch at `position`: drops and renames reach the change tables of spaces that are gone."""
        if self._changes is not None:
            self._changes.finish(uuid, position)

    def list_tables(self, time_us: int) -> None:
        """Write the list of tables if a table was created, dropped or renamed at this time."""
        self._list.update(self._lake.all_tables(), at(time_us), None if self._changes is None else CHANGES)

    def _note(self, done: Merged, name: str, what: str) -> None:
        if not done.is_replay:
            self._tell(events.MirrorTable(name, what))

    # --- house-keeping ---

    def compact(self, names: Sequence[str]) -> None:
        for table in self._tables_of(names):
            table.compact()
        if self._changes is not None:
            self._changes.compact(names)

    def vacuum(self, keep_hours: int) -> None:
        """Vacuum all tables, including tables of dropped and renamed spaces, and the quarantine."""
        opened = {table.path: table for table in self._open.values()}
        for lake in (self._lake, self._exact):
            for table in lake.all_tables() if lake is not None else ():
                opened.get(table.path, table).vacuum(keep_hours)
        if self._lake.quarantine is not None:
            self._lake.quarantine.maintain(keep_hours)
        if self._changes is not None:
            self._changes.vacuum(keep_hours)

    def _tables_of(self, names: Sequence[str]) -> list[LakeTable]:
        return [table for (_, name), table in sorted(self._open.items(), key=lambda item: item[0]) if name in names]


EMPTY = pa.table(
    {
        "sort_key": pa.array([], pa.binary()),
        "tuple": pa.array([], pa.binary()),
        "operation": pa.array([], pa.string()),
        "commit_version": pa.array([], pa.int64()),
        "commit_timestamp": pa.array([], pa.timestamp("us", tz="UTC")),
        "replica_id": pa.array([], pa.int32()),
        "lsn": pa.array([], pa.int64()),
    }
)


def in_order(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the renames in an order in which each new name is free. Raise LakeError if names are swapped."""
    ordered: list[Pair] = []
    waiting = list(pairs)
    while waiting:
        taken = {was.name for was, _ in waiting}
        free = [pair for pair in waiting if pair[1].name not in taken]
        if not free:
            names = ", ".join(f"{was.name!r} to {now.name!r}" for was, now in waiting)
            raise LakeError(
                f"one transaction swaps the names of spaces {names}, which tables do not support",
                hint="mirror into a new lake; next time, swap names in three transactions, with a temporary name",
            )
        ordered += free
        waiting = [pair for pair in waiting if pair not in free]
    return ordered


def last_states(states: pa.Table) -> pa.Table:
    """Return the last state of each key. The states of a key are adjacent and in order of time."""
    if not states.num_rows:
        return states
    codes = pc.dictionary_encode(states["sort_key"].combine_chunks()).indices.to_numpy()
    return states.filter(pa.array(np.append(codes[1:] != codes[:-1], True)))


def _shown(space: SpaceDefinition, mask: SpaceMask | None) -> SpaceDefinition:
    """Return the definition of the table in the lake, with masks applied."""
    return space if mask is None else mask.definition(space)
