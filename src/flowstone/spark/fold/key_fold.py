"""Fold changes into states: the last state of each key, or all its states, by applying operations to old tuples.

Pure: tables of changes in (columns of `columns/change_contract.py`, one space, no truncations), tables of states out.
INSERT, REPLACE and DELETE determine the state by themselves: the last one wins, computed on whole columns. Only keys
with a later UPDATE or UPSERT go through the engine's own operations (`box/update/update.py`), which produce the same
bytes as the real server. Rows without a sort key had no effect on the server, and have none here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine.format import TupleFormat
from flowstone.box.update.bulk import scratch, update_bound
from flowstone.box.update.kernels import update_tuples
from flowstone.box.update.update import Operation, UpdateRules, decode_operations, update_raw, upsert_raw
from flowstone.columns.arrow_columns import MOMENT
from flowstone.columns.sort_keys import sort_keys
from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.scan import Bytes, Cells

STATES: Final = pa.schema(
    [
        pa.field("sort_key", pa.binary(), nullable=False),
        pa.field("tuple", pa.binary()),
        pa.field("operation", pa.string(), nullable=False),
        pa.field("commit_version", pa.int64(), nullable=False),
        pa.field("commit_timestamp", MOMENT, nullable=False),
        pa.field("replica_id", pa.int32(), nullable=False),
        pa.field("lsn", pa.int64(), nullable=False),
    ]
)
"""Schema of the result of `fold`. `tuple` is null if the key was deleted; the other columns describe the change
that produced this state."""

OLD: Final = pa.schema([pa.field("sort_key", pa.binary()), pa.field("tuple", pa.binary())])

_OPERATIONS: Final = pa.array(["insert", "replace", "delete", "update", "upsert"])
_INSERT, _DELETE, _UPDATE, _UPSERT = 0, 2, 3, 4
_TOLERANT: Final = UpdateRules(fills_gaps=True, repeats=True)
"""For UPDATE: a logged operation was valid when it was executed."""

BULK_MIN: Final = 16
"""Smallest number of updates for which a compiled pass pays off."""

Place = tuple[int, int]
"""The place of a row: the version of its transaction, and its LSN."""


class CannotFold(FlowstoneError):
    """Operations do not fit their tuple: an earlier row is missing or differs."""


@dataclass(frozen=True)
class FoldDefinitions:
    """The definitions of a space over time: `spaces[i]` holds for rows before `until[i]`, the last one after that."""

    spaces: tuple[SpaceDefinition, ...]
    until: tuple[Place, ...] = ()

    def at(self, place: Place) -> SpaceDefinition:
        return self.spaces[bisect_right(self.until, place)]


def upsert_rules(version: Sequence[int]) -> UpdateRules:
    """Return the UPSERT rules of a server version. A server silently skips operations that it cannot apply."""
    return UpdateRules(fills_gaps=tuple(version) >= (2, 8), repeats=tuple(version) >= (3,))


def keys_needing_old(changes: pa.Table, *, last_only: bool = False) -> pa.Array:
    """Return the keys whose old tuple `fold` needs: their first change is an UPDATE or UPSERT.

    With `last_only`, for callers that do not use `every_state`, keys with a later INSERT, REPLACE or DELETE are left
    out.
    """
    ordered = _Ordered.of(changes)
    is_needing = ordered.last_whole() < ordered.starts if last_only else ordered.codes[ordered.starts] >= _UPDATE
    return ordered.keys.take(pa.array(ordered.starts[is_needing]))


def keys_that_may_exist(changes: pa.Table) -> pa.Array:
    """Return the keys that may have a tuple before the changes: all but those whose first change is an INSERT."""
    ordered = _Ordered.of(changes)
    return ordered.keys.take(pa.array(ordered.starts[ordered.codes[ordered.starts] != _INSERT]))


def tuples_before(states: pa.Table, old: pa.Table | None) -> pa.Array:
    """Return the tuple before each state of `fold` with `every_state`; null if there was none.

    `old` has the tuples of the keys of `keys_that_may_exist`, as far as they exist.
    """
    keys, tuples = _whole(states["sort_key"]), _whole(states["tuple"])
    stored = OLD.empty_table() if old is None else old
    found = _whole(stored["tuple"]).take(pc.index_in(keys, _whole(stored["sort_key"])))
    if len(keys) < 2:
        return found
    is_same = pa.concat_arrays([pa.array([False]), pc.equal(keys[1:], keys[:-1])])
    previous = pa.concat_arrays([pa.nulls(1, pa.binary()), tuples[:-1]])
    return pc.if_else(is_same, previous, found)


def fold(
    space: SpaceDefinition | FoldDefinitions,
    changes: pa.Table,
    old: pa.Table | None = None,
    *,
    every_state: bool = False,
    rules: UpdateRules | None = None,
    is_sorted: bool = False,
) -> pa.Table:
    """Return the last state of each key, or the state after each change with `every_state`, by key and then by time.

    `old` has the tuples (columns of OLD) of the keys of `keys_needing_old`, as far as they exist. Changes that
    certainly have no effect, such as an UPDATE of a missing tuple, are left out. `rules` are the rules of UPSERT, by
    default the rules of 2.11. `is_sorted` states that the changes are already sorted by key, version and LSN.
    """
    ordered = _Ordered.of(changes, is_sorted=is_sorted)
    if not len(ordered.codes):
        return STATES.empty_table()
    definitions = space if isinstance(space, FoldDefinitions) else FoldDefinitions((space,))
    folding = _Folding(definitions, ordered, old, rules or UpdateRules(fills_gaps=True))
    return folding.every_state() if every_state else folding.last_state()


@dataclass(frozen=True)
class _Ordered:
    """Changes sorted by key, version and LSN; `starts` and `stops` bound the rows of each key."""

    table: pa.Table
    keys: pa.Array
    codes: Cells
    starts: Cells
    stops: Cells

    @classmethod
    def of(cls, changes: pa.Table, *, is_sorted: bool = False) -> _Ordered:
        if changes["_sort_key"].null_count:
            changes = changes.filter(changes["_sort_key"].is_valid())
        if not is_sorted:
            order = [("_sort_key", "ascending"), ("_commit_version", "ascending"), ("_lsn", "ascending")]
            changes = changes.take(pc.sort_indices(changes, order))
        keys = _whole(changes["_sort_key"])
        codes = _whole(pc.index_in(changes["_operation"], _OPERATIONS))
        if codes.null_count:
            raise AssertionError("unexpected change: not an operation on a tuple")
        if not len(keys):
            none = np.empty(0, np.int64)
            return cls(changes, keys, none, none, none)
        is_new = pc.not_equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
        edges = np.flatnonzero(is_new) + 1
        starts, stops = np.concatenate(([0], edges)), np.concatenate((edges, [len(keys)]))
        return cls(changes, keys, codes.to_numpy(zero_copy_only=False).astype(np.int64), starts, stops)

    def last_whole(self) -> Cells:
        """Return for each key its last INSERT, REPLACE or DELETE; the row before `starts` if it has none."""
        numbers = np.arange(len(self.codes))
        reached = np.maximum.accumulate(np.where(self.codes < _UPDATE, numbers, -1))
        found: Cells = np.maximum(reached[self.stops - 1], self.starts - 1)
        return found

    def column(self, name: str, rows: Cells) -> list[Any]:
        values: list[Any] = _whole(self.table[name]).take(pa.array(rows)).to_pylist()
        return values


class _Folding:
    """A single call of `fold`."""

    def __init__(
        self, definitions: FoldDefinitions, ordered: _Ordered, old: pa.Table | None, rules: UpdateRules
    ) -> None:
        self._definitions = definitions
        self._ordered = ordered
        self._old = old if old is not None else OLD.empty_table()
        self._rules = rules
        self._engines: dict[int, _Engine] = {}
        fields = {field for space in definitions.spaces for field in _key_fields(space)}
        self._key_fields = np.array(sorted(fields), np.int64)

    def last_state(self) -> pa.Table:
        ordered = self._ordered
        whole, last = ordered.last_whole(), ordered.stops - 1
        is_plain = whole == last
        tuples = self._tuples()
        states = self._rows(last[is_plain], tuples.take(pa.array(last[is_plain])))
        if is_plain.all():
            return states
        firsts = np.maximum(whole, ordered.starts)[~is_plain]
        rows, results = [], []
        for states_of_key in self._states(firsts, ordered.stops[~is_plain]):
            # Take the last change with an effect; a leading DELETE counts, even if there was no tuple.
            if states_of_key:
                row, value = states_of_key[-1]
                rows.append(row)
                results.append(value)
        folded = self._rows(np.array(rows, np.int64), pa.array(results, pa.binary()))
        return _by_key(pa.concat_tables([states, folded]))

    def every_state(self) -> pa.Table:
        ordered = self._ordered
        has_operations = np.add.reduceat((ordered.codes >= _UPDATE).astype(np.int64), ordered.starts) > 0
        count = len(ordered.codes)
        # A DELETE right after another one changes nothing.
        is_kept: NDArray[np.bool_] = np.ones(count, np.bool_)
        is_kept[1:] = (ordered.codes[1:] != _DELETE) | (ordered.codes[:-1] != _DELETE)
        is_kept[ordered.starts] = True
        tuples = self._tuples()
        if not has_operations.any():
            kept = np.flatnonzero(is_kept)
            return self._rows(kept, tuples.take(pa.array(kept)))
        lengths = ordered.stops - ordered.starts
        is_folded = np.repeat(has_operations, lengths)
        kept = np.flatnonzero(is_kept & ~is_folded)
        plain = self._rows(kept, tuples.take(pa.array(kept)))
        rows, results = [], []
        for states in self._states(ordered.starts[has_operations], ordered.stops[has_operations]):
            for row, value in states:
                rows.append(row)
                results.append(value)
        folded = self._rows(np.array(rows, np.int64), pa.array(results, pa.binary()))
        return _by_key(pa.concat_tables([plain, folded]))

    def _tuples(self) -> pa.Array:
        """Return the tuple after each INSERT, REPLACE and DELETE."""
        tuples = _whole(self._ordered.table["_tuple_msgpack"])
        is_delete = self._ordered.codes == _DELETE
        if not is_delete.any():
            return tuples
        return pc.if_else(pa.array(is_delete), pa.scalar(None, pa.binary()), tuples)

    def _rows(self, rows: Cells, tuples: pa.Array) -> pa.Table:
        taken = self._ordered.table.take(pa.array(rows))
        columns = [taken["_sort_key"], tuples, taken["_operation"]]
        columns += [taken[f"_{name}"] for name in STATES.names[3:]]
        return pa.table([column.cast(each.type) for column, each in zip(columns, STATES, strict=True)], schema=STATES)

    def _states(self, firsts: Cells, stops: Cells) -> list[list[tuple[int, bytes | None]]]:
        """Return for each key the rows from `firsts` on that had an effect, with the tuple after each.

        Processes the first changes of all keys together, then the second ones, and so on: most keys have one.
        """
        keys = _Keys(self._old_tuples(firsts))
        order = np.argsort(firsts - stops, kind="stable")  # most changes first
        lengths = (stops - firsts)[order]
        for number in range(int(lengths[0]) if len(lengths) else 0):
            active = order[: int(np.searchsorted(-lengths, -number))]
            self._change(keys, active, firsts[active] + number)
        return keys.states

    def _change(self, keys: _Keys, active: Cells, rows: Cells) -> None:
        """Apply one change to each of the active keys."""
        tuples, codes = self._ordered.column("_tuple_msgpack", rows), self._ordered.codes[rows].tolist()
        left: list[int] = []
        for number, (key, row, code, value) in enumerate(
            zip(active.tolist(), rows.tolist(), codes, tuples, strict=True)
        ):
            now, was_known = keys.now[key], keys.is_known[key]
            keys.is_known[key] = True
            if code >= _UPDATE and now is not None:
                left.append(number)
            elif code == _UPDATE or (code == _DELETE and now is None and was_known):
                continue
            else:
                keys.put(key, row, None if code == _DELETE else value)
        if left:
            places = np.array(left)
            self._operate(keys, active[places], rows[places])

    def _operate(self, keys: _Keys, active: Cells, rows: Cells) -> None:
        """Apply UPDATEs and UPSERTs to existing tuples."""
        ordered = self._ordered
        places = list(zip(ordered.column("_commit_version", rows), ordered.column("_lsn", rows), strict=True))
        operations, bases = ordered.column("_operations_msgpack", rows), ordered.column("_index_base", rows)
        tuples = [keys.now[key] for key in active.tolist()]
        changed = self._in_bulk(tuples, operations, bases)
        is_upsert = (ordered.codes[rows] == _UPSERT).tolist()
        for number, (key, row) in enumerate(zip(active.tolist(), rows.tolist(), strict=True)):
            value, old = changed[number], tuples[number]
            assert old is not None
            if value is None:
                engine = self._engine(places[number])
                if is_upsert[number]:
                    sort_key = ordered.keys[row].as_py()
                    value = engine.upsert(sort_key, old, operations[number], bases[number])
                else:
                    value = engine.update(old, operations[number], bases[number])
            keys.put(key, row, value)

    def _in_bulk(
        self, tuples: Sequence[bytes | None], operations: Sequence[bytes], bases: Sequence[int]
    ) -> list[bytes | None]:
        """Apply compiled updates; None for tuples that they cannot handle, and for all tuples of a small batch."""
        count = len(tuples)
        if count < BULK_MIN:
            return [None] * count
        buf, offsets = _joined(tuples)
        ops, ops_offsets = _joined(operations)
        out = np.empty(update_bound(len(buf), len(ops), count), np.uint8)
        ends, is_done = np.zeros(count + 1, np.int64), np.empty(count, np.uint8)
        numbers = np.array(bases, np.int64)
        update_tuples(buf, offsets, ops, ops_offsets, numbers, self._key_fields, scratch(), out, ends[1:], is_done)
        whole = out[: int(ends[-1])].tobytes()
        edges = ends.tolist()
        return [
            whole[start:end] if done else None
            for start, end, done in zip(edges, edges[1:], is_done.tolist(), strict=False)
        ]

    def _old_tuples(self, firsts: Cells) -> list[bytes | None]:
        places = pc.index_in(self._ordered.keys.take(pa.array(firsts)), _whole(self._old["sort_key"]))
        found: list[bytes | None] = _whole(self._old["tuple"]).take(places).to_pylist()
        return found

    def _engine(self, place: Place) -> _Engine:
        number = bisect_right(self._definitions.until, place)
        engine = self._engines.get(number)
        if engine is None:
            engine = self._engines[number] = _Engine(self._definitions.spaces[number], self._rules)
        return engine


class _Keys:
    """The keys of one call that have operations: the current tuple of each, and the tuple after each change."""

    def __init__(self, old: list[bytes | None]) -> None:
        self.now = old
        # A leading DELETE may have removed a tuple that we do not know.
        self.is_known = [False] * len(old)
        self.states: list[list[tuple[int, bytes | None]]] = [[] for _ in old]

    def put(self, key: int, row: int, value: bytes | None) -> None:
        self.now[key] = value
        self.states[key].append((row, value))


class _Engine:
    """The operations of one definition of a space."""

    def __init__(self, space: SpaceDefinition, rules: UpdateRules) -> None:
        self._space = space
        self._rules = rules
        self._format = TupleFormat(space, Dialect.V2_11)
        self._decoded: dict[tuple[bytes, int], tuple[Operation, ...]] = {}
        self._key_fields = _key_fields(space)

    def update(self, old: bytes, operations: bytes, base: int) -> bytes:
        try:
            return update_raw(old, self._operations(operations, base), self._format, _TOLERANT)
        except TarantoolError as error:
            raise CannotFold(
                f"space {self._space.name!r}: UPDATE in the log does not fit the tuple: {error.message}",
                hint="the tuple differs from the server's; check whether earlier rows are missing",
            ) from error

    def upsert(self, key: bytes, old: bytes, operations: bytes, base: int) -> bytes:
        decoded = self._operations(operations, base)
        new = upsert_raw(old, decoded, self._format, self._rules)
        if self._leaves_key(decoded) or sort_keys(self._space, pa.array([new], pa.binary()))[0].as_py() == key:
            return new
        return old  # the server ignores an upsert that changes the key

    def _operations(self, operations: bytes, base: int) -> tuple[Operation, ...]:
        decoded = self._decoded.get((operations, base))
        if decoded is None:
            if len(self._decoded) >= _DECODED_MAX:
                self._decoded.clear()
            if base >= 1 << 31:
                base -= 1 << 32  # the server reads it as a signed 32-bit number
            decoded = decode_operations(operations, index_base=base, field_names=self._space.field_names)
            self._decoded[operations, base] = decoded
        return decoded

    def _leaves_key(self, operations: Sequence[Operation]) -> bool:
        return all(
            each.code not in "!#" and each.field >= 0 and each.field not in self._key_fields for each in operations
        )


_DECODED_MAX: Final = 10_000
"""Size of the cache of decoded operations: many tuples often get the same update."""


def _key_fields(space: SpaceDefinition) -> frozenset[int]:
    return frozenset(part.field for part in space.primary_key.parts) if space.primary_key is not None else frozenset()


def _joined(values: Sequence[bytes | None]) -> tuple[Bytes, Cells]:
    """Return the values joined into one buffer, and their start and end offsets."""
    sizes = np.fromiter((len(value) for value in values if value is not None), np.int64, len(values))
    offsets: Cells = np.zeros(len(values) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return np.frombuffer(b"".join(value for value in values if value is not None), np.uint8), offsets


def _by_key(states: pa.Table) -> pa.Table:
    order = [("sort_key", "ascending"), ("commit_version", "ascending"), ("lsn", "ascending")]
    return states.take(pc.sort_indices(states, order))


def _whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a chunked column as one array."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
