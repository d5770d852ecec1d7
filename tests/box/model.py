"""A simple model of the box: tuples in a list, its own comparison rules, lookup by scan.

Shares only the definitions of spaces and MessagePack with `flowstone.box`. A state is immutable: statements return the
next one, so snapshots, rollbacks and serial replays are free.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cache, cmp_to_key
from typing import Any, NamedTuple

from flowstone.box.definitions import IndexDefinition, IndexPart, SpaceDefinition
from flowstone.iproto.msgpack import pack, unpack

EQ, REQ, ALL, LT, LE, GE, GT = range(7)
TUPLE_FOUND, KEY_PART_TYPE, EXACT_MATCH, FIELD_TYPE, UPDATE_ARG_TYPE = 3, 18, 19, 23, 26
KEY_PART_COUNT, NO_SUCH_FIELD, FIELD_MISSING, MORE_THAN_ONE_TUPLE, CANT_UPDATE_PRIMARY_KEY = 31, 37, 39, 41, 94

State = dict[int, tuple[bytes, ...]]
"""The raw tuples of each space, by its id, in no order."""

Values = tuple[Any, ...]


class Refused(Exception):
    """The statement fails with this code and has no effect."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Entry(NamedTuple):
    """A place in an index: the key, and the primary key of the tuple."""

    key: Values
    primary: Values
    raw: bytes


class Read(NamedTuple):
    """The read set of a statement: the entries of an index for which `covers` is true."""

    space: int
    index_id: int
    covers: Callable[[Entry], bool]


# --- the order of values --------------------------------------------------------------------------


def rank(value: Any) -> int:
    """Return the class of a scalar value, in index order: nil, booleans, numbers, strings, varbinary."""
    classes: tuple[Any, ...] = (type(None), bool, (int, float, Decimal), str, bytes)
    return next(number for number, kind in enumerate(classes) if isinstance(value, kind))


def compare(a: Any, b: Any) -> int:
    """Return a number below, at or above 0 if `a` is below, equal to or above `b`."""
    if rank(a) != rank(b):
        return rank(a) - rank(b)
    if a is None:
        return 0
    if isinstance(a, str):
        a, b = a.encode("utf-8", "surrogateescape"), b.encode("utf-8", "surrogateescape")
    elif not isinstance(a, bytes | bool) and all(abs(value) != float("inf") for value in (a, b)):
        a, b = Fraction(a), Fraction(b)
    return int(a > b) - int(a < b)


def compare_keys(a: Values, b: Values) -> int:
    """Compare two keys up to the length of the shorter one."""
    return next((order for x, y in zip(a, b, strict=False) if (order := compare(x, y))), 0)


# --- tuples and their keys ------------------------------------------------------------------------

decoded = cache(unpack)

_TYPES: dict[str, tuple[Any, ...]] = {
    "unsigned": (int,),
    "integer": (int,),
    "string": (str,),
    "number": (int, float, Decimal),
    "scalar": (bool, int, float, Decimal, str, bytes),
    "array": (tuple,),
    "any": (object,),
}


def fits(type_: str, value: Any) -> bool:
    if isinstance(value, bool) and type_ not in ("scalar", "any"):
        return False
    return isinstance(value, _TYPES[type_]) and not (type_ == "unsigned" and value < 0)


def check_format(space: SpaceDefinition, values: Values) -> None:
    """Check field count and types; the format is sufficient, because it declares every indexed field."""
    for field, value in zip(space.fields, values, strict=False):
        if value is None and (field.is_nullable or field.type == "any"):
            continue
        if not fits(field.type, value):
            raise Refused(FIELD_TYPE)
        for part in multikey_parts(space):
            if space.fields[part.field] is field and not all(fits(part.type, element) for element in value):
                raise Refused(FIELD_TYPE)
    arrays = [part.field for part in multikey_parts(space)]  # optional, as on real servers
    for number, field in enumerate(space.fields[len(values) :], len(values)):
        if not field.is_nullable and number not in arrays:
            raise Refused(FIELD_MISSING)


def multikey_parts(space: SpaceDefinition) -> list[IndexPart]:
    return [part for index in space.indexes for part in index.parts if part.path == "[*]"]


def keys_of(index: IndexDefinition, values: Values) -> list[Values]:
    """Return the keys of a tuple; several only in a multikey index, whose parts are `[*]` of one field."""
    padded = values + (None,) * 8
    if index.parts[0].path == "[*]":
        return [(element,) for element in padded[index.parts[0].field] or ()]
    return [tuple(padded[part.field] for part in index.parts)]


def entries(space: SpaceDefinition, index_id: int, tuples: tuple[bytes, ...]) -> list[Entry]:
    """Return all entries of an index, in order."""
    found: list[Entry] = []
    for raw in tuples:
        (primary,) = keys_of(space.indexes[0], decoded(raw))
        for key in keys_of(space.indexes[index_id], decoded(raw)):
            entry = Entry(key, primary, raw)
            if not any(order(entry, other) == 0 for other in found):
                found.append(entry)
    return sorted(found, key=cmp_to_key(order))


def order(a: Entry, b: Entry) -> int:
    return compare_keys(a.key, b.key) or compare_keys(a.primary, b.primary)


# --- statements -----------------------------------------------------------------------------------


class Statement(NamedTuple):
    """A request. Fields unused by its type keep their defaults."""

    type: str
    space: int
    index_id: int = 0
    values: Values = ()
    """The tuple, or the key."""
    operations: Values = ()
    iterator: int = EQ
    offset: int = 0
    limit: int = 100


class Outcome(NamedTuple):
    """Result of a statement: tuples or an error code, the next state, and the read set."""

    result: list[bytes] | int
    state: State
    reads: list[Read]


def execute(spaces: dict[int, SpaceDefinition], state: State, statement: Statement) -> Outcome:
    space = spaces[statement.space]
    reads: list[Read] = []
    try:
        result, tuples = _EXECUTE[statement.type](space, state[space.id], statement, reads)
    except Refused as refused:
        return Outcome(refused.code, state, reads)
    return Outcome(result, {**state, space.id: tuples}, reads)


Tuples = tuple[bytes, ...]
Result = tuple[list[bytes], Tuples]


def _select(space: SpaceDefinition, tuples: Tuples, statement: Statement, reads: list[Read]) -> Result:
    index, key, iterator = space.indexes[statement.index_id], statement.values, statement.iterator
    if len(key) > len(index.parts):
        raise Refused(KEY_PART_COUNT)
    for part, value in zip(index.parts, key, strict=False):
        if not fits(part.type, value) and not (value is None and part.is_nullable):
            raise Refused(KEY_PART_TYPE)
    accepted = {EQ: (0,), REQ: (0,), ALL: (0, 1), GE: (0, 1), GT: (1,), LE: (0, -1), LT: (-1,)}[iterator]

    def matches(entry: Entry) -> bool:
        sign = compare_keys(entry.key, key)
        return not key or (sign > 0) - (sign < 0) in accepted

    found = [entry for entry in entries(space, index.id, tuples) if matches(entry)]
    if iterator in (REQ, LE, LT):
        found.reverse()
    is_point = iterator in (EQ, REQ) and index.unique and len(key) == len(index.parts) and None not in key
    if not statement.limit and not is_point:
        return [], tuples
    last = statement.offset + statement.limit
    is_cut = len(found) >= last and index.type == "tree" and not is_point
    direction = -1 if iterator in (REQ, LE, LT) else 1

    def covers(entry: Entry) -> bool:
        return matches(entry) and not (is_cut and order(entry, found[last - 1]) * direction > 0)

    reads.append(Read(space.id, index.id, covers))
    return [entry.raw for entry in found[statement.offset : last]], tuples


def _find(space: SpaceDefinition, tuples: Tuples, index_id: int, key: Values, reads: list[Read]) -> bytes | None:
    reads.append(Read(space.id, index_id, lambda entry: compare_keys(entry.key, key) == 0))
    found = [entry.raw for entry in entries(space, index_id, tuples) if compare_keys(entry.key, key) == 0]
    return found[0] if found else None


def _exact(space: SpaceDefinition, tuples: Tuples, statement: Statement, reads: list[Read]) -> bytes | None:
    """Return the tuple that a DELETE or UPDATE addresses."""
    index = space.indexes[statement.index_id]
    if not index.unique:
        raise Refused(MORE_THAN_ONE_TUPLE)
    if len(statement.values) != len(index.parts):
        raise Refused(EXACT_MATCH)
    if not all(fits(part.type, value) for part, value in zip(index.parts, statement.values, strict=True)):
        raise Refused(KEY_PART_TYPE)
    return _find(space, tuples, index.id, statement.values, reads)


def _put(space: SpaceDefinition, tuples: Tuples, old: bytes | None, new: Values, reads: list[Read]) -> Result:
    """Replace `old` by `new`; keys of unique indexes must be free."""
    others = tuple(raw for raw in tuples if raw != old)
    for index in space.indexes[1:]:
        # In index order: the first returned entry is the last one scanned.
        for key in sorted(keys_of(index, new), key=cmp_to_key(compare_keys)):
            if index.unique and None not in key and _find(space, others, index.id, key, reads) is not None:
                raise Refused(TUPLE_FOUND)
    raw = pack(new)
    return [raw], (*others, raw)


def _insert(space: SpaceDefinition, tuples: Tuples, statement: Statement, reads: list[Read]) -> Result:
    check_format(space, statement.values)
    (key,) = keys_of(space.indexes[0], statement.values)
    if _find(space, tuples, 0, key, reads) is not None:
        raise Refused(TUPLE_FOUND)
    return _put(space, tuples, None, statement.values, reads)


def _replace(space: SpaceDefinition, tuples: Tuples, statement: Statement, reads: list[Read]) -> Result:
    check_format(space, statement.values)
    (key,) = keys_of(space.indexes[0], statement.values)
    looked_at: list[Read] = []
    old = _find(space, tuples, 0, key, looked_at)
    if len(space.indexes) > 1:  # otherwise no part of the old tuple matters
        reads += looked_at
    return _put(space, tuples, old, statement.values, reads)


def _delete(space: SpaceDefinition, tuples: Tuples, statement: Statement, reads: list[Read]) -> Result:
    old = _exact(space, tuples, statement, reads)
    return [] if old is None else [old], tuple(raw for raw in tuples if raw != old)


def _update(space: SpaceDefinition, tuples: Tuples, statement: Statement, reads: list[Read]) -> Result:
    old = _exact(space, tuples, statement, reads)
    if old is None:
        return [], tuples
    new = decoded(old)
    for operation in statement.operations:
        new = _changed(new, operation)
    check_format(space, new)
    before, after = (keys_of(space.indexes[0], values)[0] for values in (decoded(old), new))
    if compare_keys(before, after):
        is_taken = _find(space, tuples, 0, after, reads) is not None
        raise Refused(TUPLE_FOUND if is_taken else CANT_UPDATE_PRIMARY_KEY)
    return _put(space, tuples, old, new, reads)


def _upsert(space: SpaceDefinition, tuples: Tuples, statement: Statement, reads: list[Read]) -> Result:
    check_format(space, statement.values)
    (key,) = keys_of(space.indexes[0], statement.values)
    old = _find(space, tuples, 0, key, reads)
    if old is None:
        return [], _put(space, tuples, None, statement.values, reads)[1]
    new = decoded(old)
    for operation in statement.operations:
        try:
            new = _changed(new, operation)
        except Refused:
            continue
    check_format(space, new)
    if compare_keys(key, keys_of(space.indexes[0], new)[0]):
        return [], tuples
    return [], _put(space, tuples, old, new, reads)[1]


def _changed(values: Values, operation: tuple[str, int, Any]) -> Values:
    """Apply an operation: `=` assigns or appends a field, `+` adds, `!` inserts before a field, `#` deletes fields."""
    sign, field, argument = operation
    if field >= len(values) + (sign in "=!"):
        raise Refused(NO_SUCH_FIELD)
    head, tail = values[:field], values[field:]
    if sign == "+":
        argument = _sum(tail[0], argument)
    if sign == "#":
        return head + tail[argument:]
    return (*head, argument, *tail[int(sign != "!") :])


def _sum(value: Any, number: int) -> int:
    if type(value) is not int:
        raise Refused(UPDATE_ARG_TYPE)
    return value + number


_EXECUTE: dict[str, Callable[[SpaceDefinition, Tuples, Statement, list[Read]], Result]] = {
    "select": _select,
    "insert": _insert,
    "replace": _replace,
    "delete": _delete,
    "update": _update,
    "upsert": _upsert,
}


def looked_at(spaces: dict[int, SpaceDefinition], state: State, read: Read) -> list[bytes]:
    """Return the result of a read in another state."""
    found = entries(spaces[read.space], read.index_id, state[read.space])
    return [entry.raw for entry in found if read.covers(entry)]
