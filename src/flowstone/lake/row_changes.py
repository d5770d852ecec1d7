"""Changes applied to the rows of one file: upserts and deletions, and states of a history that end and begin.

Pure: Arrow in, Arrow out. Input files and results are sorted by `_key`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.columns.arrow_columns import MOMENT
from flowstone.lake.misfits import MisfitRows, Origins
from flowstone.lake.table_files import KeyRange, SortedKeys
from flowstone.lake.table_schema import KEY, LakeSchema, prefixed

if TYPE_CHECKING:
    from flowstone.lake.table import Moment

STATE_COLUMNS: Final = {
    "_valid_from": "commit_timestamp",
    "_from_version": "commit_version",
    "_operation": "operation",
    "_replica_id": "replica_id",
    "_lsn": "lsn",
}
"""Columns of a history, and the columns of `fold` from which they are filled."""

ORIGIN_COLUMNS: Final = {"replica_id": "replica_id", "lsn": "lsn", "time": "commit_timestamp"}
"""Columns of a misfit's origin, and the columns of `fold` from which they are filled."""

NO_STATES: Final = pa.schema(
    [
        pa.field("sort_key", pa.binary()),
        pa.field("tuple", pa.binary()),
        pa.field("operation", pa.string()),
        pa.field("commit_version", pa.int64()),
        pa.field("commit_timestamp", MOMENT),
        pa.field("replica_id", pa.int32()),
        pa.field("lsn", pa.int64()),
    ]
).empty_table()


@dataclass(frozen=True)
class RowChanges:
    """New tuples, ascending by `_key`, each key once; a null tuple is a deletion. `origins` are their changes."""

    keys: pa.Array
    tuples: pa.Array
    origins: Origins = field(default_factory=dict)

    @classmethod
    def of(cls, folded: pa.Table, prefix: bytes) -> RowChanges:
        """Build changes from the result of `fold`, in any order."""
        keys = prefixed(prefix, folded.column("sort_key"))
        order = pc.sort_indices(keys)
        origins = {
            name: _column(folded, given).take(order)
            for name, given in ORIGIN_COLUMNS.items()
            if given in folded.schema.names
        }
        return cls(keys.take(order), folded.column("tuple").combine_chunks().take(order), origins)

    @cached_property
    def ordered(self) -> SortedKeys:
        return SortedKeys(self.keys)

    def upserts(self, schema: LakeSchema, start: int, end: int, misfits: MisfitRows | None = None) -> pa.Table:
        """Return the rows to write for the changes `start` to `end`, without deletions."""
        keys, tuples = self.keys.slice(start, end - start), self.tuples.slice(start, end - start)
        origins = {name: values.slice(start, end - start) for name, values in self.origins.items()}
        if tuples.null_count:
            there = tuples.is_valid()
            keys, tuples = keys.filter(there), tuples.filter(there)
            origins = {name: values.filter(there) for name, values in origins.items()}
        return schema.rows(keys, tuples, misfits=misfits, origins=origins)


@dataclass(frozen=True, slots=True)
class FileShare:
    """A file's share of the changes: keys in `touched` may be in the file, new rows in `home` belong into it."""

    touched: range
    home: range

    def __bool__(self) -> bool:
        return bool(self.touched or self.home)


def shares(ranges: Sequence[KeyRange], new: SortedKeys, touched: SortedKeys) -> list[FileShare]:
    """Return the share of each file, ordered by first key; there is at least one file.

    Every key has one home: the last file that begins at or before it. Ranges may overlap; a key is then removed from
    every file that has it, and written to its home.
    """
    edges = [0, *(new.place(each.first) for each in ranges[1:]), len(new)]
    return [
        FileShare(each.places(touched), range(edges[number], edges[number + 1])) for number, each in enumerate(ranges)
    ]


def without_keys(rows: pa.Table, keys: pa.Array) -> tuple[pa.Table, pa.Table]:
    """Return the rows whose key is not in `keys`, and the rows whose key is."""
    is_touched = pc.is_in(rows.column(KEY.name), value_set=keys)
    if not pc.any(is_touched).as_py():
        return rows, rows.slice(0, 0)
    return rows.filter(pc.invert(is_touched)), rows.filter(is_touched)


def in_key_order(parts: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of several tables as one sorted table."""
    there = [part for part in parts if part.num_rows]
    if not there:
        return parts[0]
    rows = pa.concat_tables(there)
    if len(there) == 1:
        return rows.combine_chunks()
    return rows.combine_chunks().take(pc.sort_indices(rows.column(KEY.name)))


class RowStates:
    """States of keys in a history, in order per key, each ended by the next one."""

    def __init__(self, states: pa.Table, prefix: bytes) -> None:
        keys = prefixed(prefix, states.column("sort_key"))
        table = states.append_column(KEY.name, keys).combine_chunks()
        order = pc.sort_indices(
            table, sort_keys=[(KEY.name, "ascending"), ("commit_version", "ascending"), ("lsn", "ascending")]
        )
        self._states = table.take(order)
        self.keys: pa.Array = self._states.column(KEY.name).combine_chunks()
        count = len(self.keys)
        is_same = np.zeros(count, np.bool_)
        if count > 1:
            is_same[:-1] = pc.equal(self.keys.slice(0, count - 1), self.keys.slice(1)).to_numpy(zero_copy_only=False)
        self._is_ended = is_same
        self._is_first = np.concatenate([[True], ~is_same[:-1]]) if count else is_same
        self._is_there = self._states.column("tuple").is_valid().to_numpy()

    @cached_property
    def touched(self) -> pa.Table:
        """Each key once, ascending, with the moment of its first new state, which ends the former one."""
        firsts = self._states.filter(pa.array(self._is_first))
        return firsts.select([KEY.name, "commit_version", "commit_timestamp"])

    def current(self, schema: LakeSchema, misfits: MisfitRows | None = None) -> pa.Table:
        """Return the last states of keys that still exist."""
        return self._rows(schema, np.flatnonzero(~self._is_ended & self._is_there), misfits)

    def former(self, schema: LakeSchema, misfits: MisfitRows | None = None) -> pa.Table:
        """Return the states that later ones end."""
        return self._rows(schema, np.flatnonzero(self._is_ended & self._is_there), misfits)

    def _rows(self, schema: LakeSchema, places: Any, misfits: MisfitRows | None) -> pa.Table:
        chosen = self._states.take(pa.array(places))
        ended = pa.array(self._is_ended[places])
        ends = self._states.take(pa.array(np.minimum(places + 1, max(len(self.keys) - 1, 0))))
        fields = {each.name: each.type for each in schema.file_schema}
        columns = {name: _column(chosen, given).cast(fields[name]) for name, given in STATE_COLUMNS.items()}
        for name, given in (("_valid_to", "commit_timestamp"), ("_to_version", "commit_version")):
            values = _column(ends, given).cast(fields[name])
            columns[name] = pc.if_else(ended, values, pa.scalar(None, fields[name]))
        origins = {name: _column(chosen, given) for name, given in ORIGIN_COLUMNS.items()}
        return schema.rows(
            _column(chosen, KEY.name), _column(chosen, "tuple"), columns, misfits=misfits, origins=origins
        )


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return column if isinstance(column, pa.Array) else pa.concat_arrays(column.chunks)


def ended_by(rows: pa.Table, touched: pa.Table) -> pa.Table:
    """Return current rows, all with keys in `touched`, as former ones: the first new state of its key ends each."""
    places = pc.index_in(rows.column(KEY.name), value_set=_column(touched, KEY.name))
    ends = touched.take(places)
    return _ended(rows, ends.column("commit_version"), ends.column("commit_timestamp"))


def ended_at(rows: pa.Table, moment: Moment) -> pa.Table:
    """Return current rows as former ones that ended at one moment."""
    version = pa.repeat(pa.scalar(moment.version, pa.int64()), rows.num_rows)
    timestamp = pa.repeat(pa.scalar(moment.timestamp, MOMENT), rows.num_rows)
    return _ended(rows, version, timestamp)


def _ended(rows: pa.Table, version: Any, timestamp: Any) -> pa.Table:
    for name, values in (("_to_version", version), ("_valid_to", timestamp)):
        number = rows.schema.get_field_index(name)
        rows = rows.set_column(number, rows.schema.field(number), values.cast(rows.schema.field(number).type))
    return rows
