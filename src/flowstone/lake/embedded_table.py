"""The embedded engine: tables of a lake through deltalake, without a JVM.

A merge reads the files that may contain changed keys, rewrites them, and commits all at once. Files are kept sorted and
of about equal size, and their number is as small as the rows allow. A few threads work file by file, which bounds the
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from os import cpu_count
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import (
    AddAction,
    CommitProperties,
    RemoveAction,
    Transaction,
    create_table_with_add_actions,
)

from flowstone.box.definitions import SpaceDefinition
from flowstone.columns.sort_keys import sort_keys
from flowstone.lake.misfits import MisfitRows
from flowstone.lake.row_changes import (
    NO_STATES,
    FileShare,
    RowChanges,
    RowStates,
    ended_at,
    ended_by,
    in_key_order,
    shares,
    without_keys,
)
from flowstone.lake.table import (
    KEEP_HOURS,
    AnotherWriter,
    Merged,
    Moment,
    is_replay,
    position_in,
    transactions_of,
    user_metadata,
)
from flowstone.lake.table_files import (
    FileEntry,
    PinnedTable,
    SortedKeys,
    TableFiles,
    WrittenFile,
    in_order,
    is_current_value,
    milliseconds_now,
)
from flowstone.lake.table_schema import (
    HISTORY_FIELDS,
    IS_CURRENT,
    KEY,
    NOTE,
    SET_PREFIX_SIZE,
    TUPLE,
    LakeError,
    LakeSchema,
    prefixed,
)
from flowstone.replication.vclock import VClock

if TYPE_CHECKING:
    from flowstone.lake.quarantine import Quarantine

CHECKPOINT_INTERVAL: Final = 20
"""Commits between two checkpoints of a table's log."""

ROWS_AT_ONCE: Final = 1 << 18
"""Number of new rows decoded at a time if they need not be merged with the rows of a file."""

COMPACT_SIZE: Final = 12 << 20
"""Neighbouring files with a smaller total size on disk are merged into one."""


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """One file's part in a commit; `former` are states that ended in the file and are not written yet."""

    removed: FileEntry | None
    written: list[WrittenFile]
    former: pa.Table | None = None
    upserts: int = 0
    deletes: int = 0


def _added(files: Sequence[WrittenFile]) -> _Rewritten:
    return _Rewritten(None, list(files), upserts=sum(each.entry.row_count for each in files))


class EmbeddedTable:
    """A `LakeTable`, which documents the methods."""

    def __init__(
        self, path: str, delta: DeltaTable, storage_options: Mapping[str, str], *, threads: int | None = None
    ) -> None:
        self.path = path
        self.storage = TableFiles(path, dict(storage_options))
        self._delta = delta
        self._threads = threads or cpu_count() or 1
        self.quarantine: Quarantine | None = None
        """The quarantine for misfits; without a quarantine, a misfit is an error."""
        self._forget()

    @classmethod
    def open(cls, path: str, storage_options: Mapping[str, str], *, threads: int | None = None) -> Self | None:
        """Open the table at a path; None if there is none. Raises LakeError for a Delta table that was not created by a
        mirror."""
        try:
            delta = DeltaTable(path, storage_options=dict(storage_options) or None)
        except TableNotFoundError:
            return None
        return cls(path, delta, storage_options, threads=threads)

    @classmethod
    def create(
        cls,
        path: str,
        schema: LakeSchema,
        positions: Mapping[str, VClock],
        storage_options: Mapping[str, str],
        *,
        written: Sequence[WrittenFile] = (),
        keep_hours: int = KEEP_HOURS,
        threads: int | None = None,
    ) -> Self:
        """Create a table with these files, in one commit. The files must already exist."""
        keep = f"interval {keep_hours} hours"
        try:
            create_table_with_add_actions(
                path,
                Schema.from_arrow(schema.schema),
                [_add(each) for each in written],
                mode="error",
                partition_by=schema.partition_by,
                name=schema.space.name,
                configuration={
                    "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
                    "delta.deletedFileRetentionDuration": keep,
                    "delta.logRetentionDuration": keep,
                },
                storage_options=dict(storage_options) or None,
                commit_properties=_properties(positions),
            )
        except CommitFailedError as error:
            raise _another_writer(path, error) from None
        made = cls.open(path, storage_options, threads=threads)
        assert made is not None
        return made

    # --- contents -------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Reload the schema and the file list after a move to another version."""
        note = next((each.metadata.get(NOTE) for each in self._delta.schema().fields if each.name == TUPLE.name), None)
        if note is None:
            raise LakeError(
                f"{self.path} is a Delta table that was not written by a mirror", hint="mirror into another directory"
            )
        self.schema = LakeSchema.from_note(note)
        self.entries = _entries(self._delta)
        """The files of `version`."""
        self._positions: dict[str, VClock] | None = None

    @property
    def version(self) -> int:
        return int(self._delta.version())

    @property
    def positions(self) -> dict[str, VClock]:
        if self._positions is None:
            found = {
                uuid: position_in(self._delta.transaction_version, self._delta.history, uuid)
                for uuid in self.schema.sets
            }
            self._positions = {uuid: position for uuid, position in found.items() if position is not None}
        return dict(self._positions)

    @property
    def row_count(self) -> int:
        return sum(each.row_count for each in self.entries)

    def refresh(self) -> None:
        self._delta.update_incremental()
        self._forget()

    def files(self, version: int | None = None) -> list[str]:
        if version is None or version == self.version:
            return [each.path for each in self.entries]
        options = self.storage.storage_options or None
        return [each.path for each in _entries(DeltaTable(self.path, version=version, storage_options=options))]

    def pin(self, uuid: str) -> PinnedTable:
        paths = tuple(each.path for each in self._current)
        return PinnedTable(self.storage, paths, self.schema.prefix(uuid))

    @property
    def _current(self) -> list[FileEntry]:
        return [each for each in self.entries if each.is_current is not False]

    # --- changes of rows ------------------------------------------------------------------------------------------

    def merge(
        self, folded: pa.Table, definition: SpaceDefinition, position: VClock, uuid: str, *, replace: bool = False
    ) -> Merged:
        if self._has(position, uuid):
            return Merged(self.version, is_replay=True)
        self._expect(history=False)
        changes = RowChanges.of(folded, self.schema.prefix(uuid))
        turn = self._turn(definition, uuid, replace)
        work = partial(self._merge_file, turn, changes)
        done = self._file_by_file(turn, work, changes.ordered, changes.ordered)
        return self._commit(done, turn, {uuid: position})

    def _merge_file(self, turn: _Turn, changes: RowChanges, entry: FileEntry | None, share: FileShare) -> _Rewritten:
        upserts = changes.upserts(turn.schema, share.home.start, share.home.stop, turn.misfits)
        touched = changes.keys.slice(share.touched.start, len(share.touched))
        kept = turn.schema.file_schema.empty_table()
        deletes = 0
        if entry is not None:
            if not upserts.num_rows and not turn.is_total and not self._has_any(entry, touched):
                return _Rewritten(None, [])
            # Rows that do not stay are not rebuilt: in the new schema, their values may be misfits.
            stored, gone = without_keys(turn.stored(self.storage, entry), touched)
            deletes = without_keys(gone, upserts.column(KEY.name))[0].num_rows
            if turn.replace:
                stored, ended = turn.of_others(stored)
                deletes += ended.num_rows
                if not (gone.num_rows or ended.num_rows or upserts.num_rows or turn.is_rewrite):
                    return _Rewritten(None, [])
            kept = turn.rebuilt(stored)
        rows = turn.keyed(in_key_order([kept, upserts]))
        return _Rewritten(entry, self.storage.write_split(rows), None, upserts.num_rows, deletes)

    def _has_any(self, entry: FileEntry, keys: pa.Array) -> bool:
        with self.storage.open(entry.path) as file:
            there = file.read(columns=[KEY.name], use_threads=False).column(KEY.name).cast(pa.binary())
        return bool(pc.any(pc.is_in(there, value_set=keys)).as_py())

    def append_history(
        self,
        states: pa.Table,
        definition: SpaceDefinition,
        position: VClock,
        uuid: str,
        *,
        replace: Moment | None = None,
    ) -> Merged:
        if self._has(position, uuid):
            return Merged(self.version, is_replay=True)
        self._expect(history=True)
        turn = self._turn(definition, uuid, replace is not None)
        new = RowStates(states, turn.prefix)
        current = new.current(turn.schema, turn.misfits)
        work = partial(self._end_in_file, turn, current, new.touched, replace)
        done = self._file_by_file(turn, work, *(SortedKeys(_keys(each)) for each in (current, new.touched)))
        former = [each.former for each in done if each.former is not None]
        rows = in_key_order([*former, turn.keyed(new.former(turn.schema, turn.misfits))])
        done.append(_Rewritten(None, self.storage.write_split(rows, False)))
        return self._commit([*done, *self._former_rewritten(turn)], turn, {uuid: position})

    def _end_in_file(
        self,
        turn: _Turn,
        current: pa.Table,
        touched: pa.Table,
        moment: Moment | None,
        entry: FileEntry | None,
        share: FileShare,
    ) -> _Rewritten:
        begun = current.slice(share.home.start, len(share.home))
        kept = former = turn.schema.file_schema.empty_table()
        if entry is not None:
            touched = touched.slice(share.touched.start, len(share.touched))
            kept, ended = without_keys(turn.read(self.storage, entry), _keys(touched))
            former = ended_by(ended, touched)
            if moment is not None:
                kept, rest = turn.of_others(kept)
                former = in_key_order([former, ended_at(rest, moment)])
            if not (former.num_rows or begun.num_rows or turn.is_rewrite):
                return _Rewritten(None, [])
        written = self.storage.write_split(turn.keyed(in_key_order([kept, begun])), True)
        former = turn.keyed(former)
        if moment is not None:
            # All states end here: too many to hold in memory until the other files are done.
            written += self.storage.write_split(former, False)
            return _Rewritten(entry, written, None, begun.num_rows, former.num_rows)
        return _Rewritten(entry, written, former, begun.num_rows, former.num_rows)

    def _former_rewritten(self, turn: _Turn) -> list[_Rewritten]:
        if not turn.is_rewrite:
            return []
        former = [each for each in self.entries if each.is_current is False]
        return self._each(former, partial(turn.rewrite, self.storage))

    def truncate(self, position: VClock, uuid: str, moment: Moment) -> Merged:
        if self.schema.history:
            return self.append_history(NO_STATES, self.schema.space, position, uuid, replace=moment)
        return self.merge(NO_STATES, self.schema.space, position, uuid, replace=True)

    def rewrite(self, definition: SpaceDefinition, position: VClock, uuid: str) -> Merged:
        if self._has(position, uuid):
            return Merged(self.version, is_replay=True)
        turn = self._turn(definition, uuid)
        if not turn.is_rewrite:
            return self._note(turn.schema, {uuid: position})
        done = self._each(self.entries, partial(turn.rewrite, self.storage))
        return self._commit(done, turn, {uuid: position})

    def retype(self, types: tuple[tuple[str, str], ...]) -> Merged:
        """Rebuild the columns from `_tuple` for other declared types, in one commit; no position changes."""
        schema = replace(self.schema, types=types)
        turn = _Turn(self.schema, schema, b"", misfits=self._new_misfits())
        if not turn.is_rewrite:
            return self.mark(schema)
        return self._commit(self._each(self.entries, partial(turn.rewrite, self.storage)), turn, {})

    def drop(self, position: VClock, uuid: str, moment: Moment) -> Merged:
        if self._has(position, uuid):
            return Merged(self.version, is_replay=True)
        if self.schema.history:
            self.mark(replace(self.schema, dropped=(*self.schema.dropped, uuid)))
            return self.truncate(position, uuid, moment)
        return self._note(replace(self.schema, dropped=(*self.schema.dropped, uuid)), {uuid: position})

    def overwrite(self, schema: LakeSchema, written: Sequence[WrittenFile], positions: Mapping[str, VClock]) -> Merged:
        """Replace the whole contents of the table by these files."""
        turn = _Turn(self.schema, schema, b"", is_overwrite=True)
        done = [_added(written), *(_Rewritten(each, []) for each in self.entries)]
        return self._commit(done, turn, positions)

    def take_in(
        self, schema: LakeSchema, written: Sequence[WrittenFile], position: VClock, uuid: str, moment: Moment | None
    ) -> Merged:
        """Replace the rows of one replica set by the rows of `written`; rows of other sets are kept.

        In a history, the former states of the set end at `moment`; without a moment they are removed.
        """
        turn = _Turn(self.schema, schema, schema.prefix(uuid), replace=True, misfits=self._new_misfits())
        if schema.history and moment is not None:
            nothing, current = SortedKeys(pa.array([], pa.binary())), schema.file_schema.empty_table()
            work = partial(self._end_in_file, turn, current, RowStates(NO_STATES, b"").touched, moment)
            done = [*self._file_by_file(turn, work, nothing, nothing), *self._former_rewritten(turn)]
        else:
            done = self._each(self.entries, partial(turn.without_set, self.storage))
        return self._commit([*done, _added(written)], turn, {uuid: position})

    def files_of_set(self, schema: LakeSchema, uuid: str, target: TableFiles) -> list[WrittenFile]:
        """Write the rows of one replica set as files of another table."""
        turn = _Turn(self.schema, schema, schema.prefix(uuid), misfits=self._new_misfits())
        done = self._each(self.entries, partial(turn.only_set, self.storage, target))
        self._quarantine_misfits(turn, {})
        return [file for each in done for file in each.written]

    def mark(self, schema: LakeSchema) -> Merged:
        """Write another note; no position changes."""
        return self._note(schema, {})

    # --- files ----------------------------------------------------------------------------------------------------

    def compact(self) -> Merged:
        turn = _Turn(self.schema, self.schema, b"")
        groups = [
            group
            for kind in (None, True, False)
            for group in _small_neighbours([each for each in self.entries if each.is_current is kind], self.storage)
        ]

        def join(group: list[FileEntry]) -> list[_Rewritten]:
            rows = in_key_order([turn.read(self.storage, each) for each in group])
            written = self.storage.write_split(rows, group[0].is_current)
            return [_Rewritten(group[0], written), *(_Rewritten(each, []) for each in group[1:])]

        with ThreadPoolExecutor(self._threads) as pool:
            done = [each for joined in pool.map(join, groups) for each in joined]
        if not done:
            return Merged(self.version)
        return self._commit(done, turn, {}, data_change=False)

    def vacuum(self, keep_hours: int | None = None) -> list[str]:
        keep = KEEP_HOURS if keep_hours is None else keep_hours
        removed: list[str] = self._delta.vacuum(
            retention_hours=keep, dry_run=False, enforce_retention_duration=False, full=True
        )
        self._delta.create_checkpoint()
        self._delta.cleanup_metadata()
        self.refresh()
        return removed

    # --- internals ------------------------------------------------------------------------------------------------

    def _has(self, position: VClock, uuid: str) -> bool:
        if uuid not in self.schema.sets:
            raise LakeError(
                f"{self.path} has no rows of replica set {uuid}", hint="create the table with Lake.create first"
            )
        return is_replay(self.path, self.positions.get(uuid), position)

    def _expect(self, *, history: bool) -> None:
        if self.schema.history != history:
            is_now, wanted = ("a history", "the state") if self.schema.history else ("the state", "a history")
            raise LakeError(
                f"{self.path} has {is_now} of its space, not {wanted}", hint="mirror into another directory"
            )

    def _turn(self, definition: SpaceDefinition, uuid: str, is_replaced: bool = False) -> _Turn:
        prefix, schema = self.schema.prefix(uuid), self.schema.moved(definition)
        return _Turn(self.schema, schema, prefix, is_replaced, misfits=self._new_misfits())

    def _new_misfits(self) -> MisfitRows | None:
        return None if self.quarantine is None else MisfitRows()

    def _quarantine_misfits(self, turn: _Turn, positions: Mapping[str, VClock]) -> None:
        """Add the misfits of a commit to the quarantine before the commit, so that none is ever missing there."""
        if self.quarantine is not None and turn.misfits:
            self.quarantine.add(turn.misfits, positions, self.positions)

    def _file_by_file(
        self,
        turn: _Turn,
        work: Callable[[FileEntry | None, FileShare], _Rewritten],
        new: SortedKeys,
        touched: SortedKeys,
    ) -> list[_Rewritten]:
        """Run `work` on each file of current rows that may have `touched` keys or receives `new` ones.

        If the turn replaces or rewrites all rows, run it on every file.
        """
        ranged = in_order(self._current, self.storage)
        if not ranged:
            return self._each(_parts(range(len(new))), lambda part: work(None, FileShare(range(0), part)))
        tasks: list[tuple[FileEntry | None, FileShare]] = []
        for (entry, between), share in zip(ranged, shares([each for _, each in ranged], new, touched), strict=True):
            # Many rows after the file's last key, as when keys only grow, become files of their own.
            behind = range(max(share.home.start, between.places(new).stop), share.home.stop)
            if len(behind) > ROWS_AT_ONCE:
                share = FileShare(share.touched, range(share.home.start, behind.start))
                tasks += [(None, FileShare(range(0), part)) for part in _parts(behind)]
            if share or turn.is_total:
                tasks.append((entry, share))
        return self._each(tasks, lambda task: work(*task))

    def _each(self, tasks: Sequence[Any], work: Callable[[Any], _Rewritten]) -> list[_Rewritten]:
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(work, tasks))

    def _commit(
        self, done: Sequence[_Rewritten], turn: _Turn, positions: Mapping[str, VClock], *, data_change: bool = True
    ) -> Merged:
        removed = [each.removed for each in done if each.removed is not None]
        written = [file for each in done for file in each.written]
        is_overwrite = turn.is_overwrite or turn.is_rewrite
        self._quarantine_misfits(turn, positions)
        if not is_overwrite and turn.schema.note != self.schema.note:
            # No column shows this change: if the note is committed and the rows are not, readers still see correct
            # data.
            self._note(turn.schema, {})
        actions: list[AddAction | RemoveAction] = [_add(each, data_change) for each in written]
        if not is_overwrite:
            now = milliseconds_now()
            actions += [
                RemoveAction(each.path, data_change, now, each.size, is_current_value(each)) for each in removed
            ]
        try:
            self._delta.create_write_transaction(
                actions,
                "overwrite" if is_overwrite else "append",
                Schema.from_arrow(turn.schema.schema),
                turn.schema.partition_by,
                commit_properties=_properties(positions),
            )
        except CommitFailedError as error:
            raise _another_writer(self.path, error) from None
        self._moved(positions)
        if self.quarantine is not None and turn.is_rewrite:
            self.quarantine.heal(self)
        upserts, deletes = sum(each.upserts for each in done), sum(each.deletes for each in done)
        return Merged(self.version, upserts, deletes, len(written), len(removed))

    def _note(self, schema: LakeSchema, positions: Mapping[str, VClock]) -> Merged:
        try:
            self._delta.alter.set_column_metadata(
                TUPLE.name, {NOTE: schema.note}, commit_properties=_properties(positions)
            )
        except CommitFailedError as error:
            raise _another_writer(self.path, error) from None
        self._moved(positions)
        return Merged(self.version)

    def _moved(self, positions: Mapping[str, VClock]) -> None:
        known = self.positions
        self._delta.update_incremental()
        self._forget()
        self._positions = {**known, **positions}


@dataclass(frozen=True)
class _Turn:
    """The step from one version of a table to the next: the schemas before and after, and whether rows are replaced."""

    before: LakeSchema
    schema: LakeSchema
    prefix: bytes
    replace: bool = False
    """All rows of the written set are replaced."""
    is_overwrite: bool = False
    misfits: MisfitRows | None = None
    """Collects the misfits of the rows to write; None: a misfit is an error."""

    @cached_property
    def is_rewrite(self) -> bool:
        """True if all rows must be rewritten, because their columns or keys change."""
        return not (self.schema.shows_as(self.before) and self.schema.has_keys_of(self.before))

    @property
    def is_total(self) -> bool:
        """True if every file must be read."""
        return self.is_rewrite or self.replace

    def read(self, storage: TableFiles, entry: FileEntry) -> pa.Table:
        """Return the rows of a file in the new schema, with their old keys."""
        return self.rebuilt(self.stored(storage, entry))

    def stored(self, storage: TableFiles, entry: FileEntry) -> pa.Table:
        """Return the rows of a file in the old schema."""
        return storage.read(entry.path, self.before.file_schema)

    def rebuilt(self, rows: pa.Table) -> pa.Table:
        """Return rows of the old schema in the new schema."""
        if self.schema.shows_as(self.before):
            return rows
        names = [each.name for each in HISTORY_FIELDS] if self.schema.history else []
        states = {name: rows.column(name).combine_chunks() for name in names}
        return self.schema.rows(rows.column(KEY.name), rows.column(TUPLE.name), states, misfits=self.misfits)

    def keyed(self, rows: pa.Table) -> pa.Table:
        """Return the rows with their new keys, in order; key ranges of files may overlap afterwards."""
        if self.schema.has_keys_of(self.before) or not rows.num_rows:
            return rows
        keys = rows.column(KEY.name).combine_chunks()
        prefixes = pc.binary_slice(keys, 0, SET_PREFIX_SIZE if self.schema.several_sets else 0)
        parts = []
        for prefix in pc.unique(prefixes).to_pylist():
            part = rows.filter(pc.equal(prefixes, pa.scalar(prefix, pa.binary())))
            new = prefixed(prefix, sort_keys(self.schema.space, part.column(TUPLE.name).combine_chunks()))
            parts.append(part.set_column(rows.schema.get_field_index(KEY.name), KEY, new))
        joined = pa.concat_tables(parts).combine_chunks()
        return joined.take(pc.sort_indices(joined.column(KEY.name)))

    def of_others(self, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Return the rows of the other replica sets, and the rows of the written set."""
        if not self.prefix:
            return rows.slice(0, 0), rows
        prefixes = pc.binary_slice(rows.column(KEY.name), 0, SET_PREFIX_SIZE)
        is_ours = pc.equal(prefixes, pa.scalar(self.prefix, pa.binary()))
        return rows.filter(pc.invert(is_ours)), rows.filter(is_ours)

    def rewrite(self, storage: TableFiles, entry: FileEntry) -> _Rewritten:
        """Rewrite a file in the new schema."""
        rows = self.keyed(self.read(storage, entry))
        return _Rewritten(entry, storage.write_split(rows, entry.is_current))

    def without_set(self, storage: TableFiles, entry: FileEntry) -> _Rewritten:
        """Rewrite a file without the rows of the written set."""
        stored, gone = self.of_others(self.stored(storage, entry))
        if not gone.num_rows and not self.is_rewrite:
            return _Rewritten(None, [])
        kept = self.keyed(self.rebuilt(stored))
        return _Rewritten(entry, storage.write_split(kept, entry.is_current), deletes=gone.num_rows)

    def only_set(self, storage: TableFiles, target: TableFiles, entry: FileEntry) -> _Rewritten:
        """Write the rows that a file has of the written set as files of another table."""
        rows = self.keyed(self.rebuilt(self.of_others(self.stored(storage, entry))[1]))
        return _Rewritten(None, target.write_split(rows, entry.is_current))


def _entries(delta: DeltaTable) -> list[FileEntry]:
    found = pa.table(delta.get_add_actions(flatten=True))
    currents = [None] * found.num_rows
    if f"partition.{IS_CURRENT.name}" in found.schema.names:
        currents = found.column(f"partition.{IS_CURRENT.name}").to_pylist()
    columns = [found.column(name).to_pylist() for name in ("path", "size_bytes", "num_records")]
    return [
        FileEntry(path, size, rows or 0, current) for path, size, rows, current in zip(*columns, currents, strict=True)
    ]


def _parts(places: range) -> list[range]:
    """Split a range into equal parts of at most ROWS_AT_ONCE."""
    count = -(-len(places) // ROWS_AT_ONCE)
    edges = [places.start + len(places) * number // count for number in range(count + 1)] if count else []
    return [range(start, end) for start, end in pairwise(edges)]


def _small_neighbours(entries: list[FileEntry], storage: TableFiles) -> list[list[FileEntry]]:
    """Return groups of files, adjacent in key order, that are small enough to be merged."""
    groups: list[list[FileEntry]] = []
    size = COMPACT_SIZE
    for entry, _ in in_order(entries, storage):
        size += entry.size
        if size > COMPACT_SIZE:
            groups.append([])
            size = entry.size
        groups[-1].append(entry)
    return [group for group in groups if len(group) > 1]


def _add(file: WrittenFile, data_change: bool = True) -> AddAction:
    entry = file.entry
    return AddAction(entry.path, entry.size, is_current_value(entry), milliseconds_now(), data_change, file.statistics)


def _properties(positions: Mapping[str, VClock]) -> CommitProperties:
    """Return commit properties without retries: a retry would ignore commits after the version that was read."""
    if not positions:
        return CommitProperties(max_commit_retries=0)
    transactions = chain.from_iterable(transactions_of(position, uuid) for uuid, position in positions.items())
    return CommitProperties(
        custom_metadata={"userMetadata": user_metadata(positions)},
        app_transactions=[Transaction(name, version) for name, version in transactions],
        max_commit_retries=0,
    )


def _keys(rows: pa.Table) -> pa.Array:
    column = rows.column(KEY.name).combine_chunks()
    return column if isinstance(column, pa.Array) else pa.concat_arrays(column.chunks)


def _another_writer(path: str, error: CommitFailedError) -> AnotherWriter:
    return AnotherWriter(f"{path} was changed by another writer: {error}", hint="run only one mirror per lake")
