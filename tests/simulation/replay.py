"""The effect of rows on spaces, computed as simply as possible: dicts of decoded tuples, independent of the system.

Supports inserts, replaces, deletes, truncation, and UPDATE with the operators below, of fields and of array elements by
number. Runs write no UPSERT; any other row raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.row import Row
from tests.simulation.logs import CONTROL, NOP, SPACE, NodeLog, unpacked

INDEX: Final = 288
TRUNCATE: Final = 330

Tuple = list[Any]
Contents = dict[int, dict[tuple[Any, ...], Tuple]]


class Change(NamedTuple):
    """A tuple before a row, and after it."""

    space_id: int
    old: Tuple | None
    new: Tuple | None


class Replay:
    """Spaces by id, and their tuples by primary key."""

    def __init__(self) -> None:
        self.spaces: Contents = {}
        self._keys: dict[int, list[int]] = {SPACE: [0], INDEX: [0, 1]}
        """The fields of each primary key."""

    def apply(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.change(row)

    def change(self, row: Row) -> Change | None:
        """Apply a row; return None if it had no effect."""
        match row.type:
            case RequestType.INSERT | RequestType.REPLACE:
                body = unpacked(row.body)
                return self._put(body[Key.SPACE_ID], body[Key.TUPLE])
            case RequestType.DELETE:
                body = unpacked(row.body)
                old = self.spaces.get(body[Key.SPACE_ID], {}).pop(tuple(body[Key.KEY]), None)
                return None if old is None else Change(body[Key.SPACE_ID], old, None)
            case RequestType.UPDATE:
                return self._update(unpacked(row.body))
            case kind if kind == NOP or kind in CONTROL:
                return None
            case _:
                raise NotImplementedError(f"unsupported row type in a run: {row.type}")

    def _put(self, space_id: int, fields: Tuple) -> Change:
        tuples = self.spaces.setdefault(space_id, {})
        key = tuple(fields[number] for number in self._keys.get(space_id, [0]))
        old, tuples[key] = tuples.get(key), fields
        if space_id == INDEX and fields[1] == 0:
            self._keys[fields[0]] = [_field_of(part) for part in fields[5]]
        elif space_id == TRUNCATE:
            self.spaces.pop(fields[0], None)
        return Change(space_id, old, fields)

    def _update(self, body: dict[int, Any]) -> Change | None:
        old = self.spaces.get(body[Key.SPACE_ID], {}).get(tuple(body[Key.KEY]))
        if old is None:
            return None
        return self._put(body[Key.SPACE_ID], _updated(old, body[Key.TUPLE], body.get(Key.INDEX_BASE, 0)))


def _field_of(part: Any) -> int:
    number = part["field"] if isinstance(part, dict) else part[0]
    assert isinstance(number, int)
    return number


def _updated(fields: Tuple, operations: list[Any], base: int) -> Tuple:
    fields = list(fields)
    for operator, field, argument in operations:
        array, number = _place(fields, field, base)
        match operator:
            case "=":
                array[number : number + 1] = [argument]
            case "!":
                array.insert(number, argument)
            case "#":
                del array[number : number + argument]
            case "+":
                array[number] += argument
            case "-":
                array[number] -= argument
            case _:
                raise NotImplementedError(f"unsupported update operator in a run: {operator!r}")
    return fields


def _place(fields: Tuple, field: int | str, base: int) -> tuple[Tuple, int]:
    """Return a copy of the array that contains `field`, and the index in it. `[2][1]` is a path."""
    if isinstance(field, int):
        return fields, field - base if field >= 0 else len(fields) + field
    *way, last = (int(step) - base for step in re.findall(r"\[(\d+)]", field))
    array = fields
    for number in way:
        inner = list(array[number])
        array[number] = inner
        array = inner
    return array, last


def replayed(log: NodeLog) -> Contents:
    """Return the newest snapshot and all later rows that were not rolled back."""
    replay = Replay()
    replay.apply(log.snapshot)
    have = log.snapshot_vclock
    for record in log.records:
        if record.is_kept is not False and record.rows[-1].lsn > have.get(record.rows[-1].replica_id, 0):
            replay.apply(record.rows)
    return replay.spaces
