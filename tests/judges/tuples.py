"""Spaces in memory for the judge: tuples by key, and the effect of statements (docs/spec/files.md#dml-bodies)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.judges.files import Unreadable

INSERT, REPLACE, UPDATE, DELETE, UPSERT = 2, 3, 4, 5, 9
SPACE_ID, INDEX_ID, TRUNCATE_ID = 280, 288, 330
SYSTEM_KEY: dict[int, tuple[int, ...]] = {272: (0,), 280: (0,), 288: (0, 1), 320: (0,), 330: (0,)}
"""Keys of the system spaces that mean something here; others get theirs from the snapshot."""

Tuple = tuple[Any, ...]
Undo = Callable[[], None]


@dataclass
class Space:
    """`indexes` has the fields of each unique index whose fields are plain; those of the primary index are the key.

    `names` has the number of each field named in the format.
    """

    indexes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    tuples: dict[Any, Tuple] = field(default_factory=dict)
    names: dict[bytes, int] = field(default_factory=dict)

    def key(self, values: Tuple, index_id: int = 0) -> Any:
        try:
            return tuple(_comparable(values[number]) for number in self.indexes[index_id])
        except IndexError:
            raise Unreadable("tuple lacks a field of its key") from None

    def find(self, index_id: int, key: Tuple) -> Tuple | None:
        wanted = tuple(map(_comparable, key))
        if index_id == 0:
            return self.tuples.get(wanted)
        return next((each for each in self.tuples.values() if self.key(each, index_id) == wanted), None)

    def check_unique(self, values: Tuple, old: Tuple | None) -> None:
        for index_id in self.indexes:
            if index_id == 0 or any(
                len(values) <= number or values[number] is None for number in self.indexes[index_id]
            ):
                continue
            key = self.key(values, index_id)
            for each in self.tuples.values():
                if each is not old and self.key(each, index_id) == key:
                    raise Unreadable(f"Duplicate key exists in unique index {index_id}")


class Store:
    """All spaces. Every change is added to `undo`, for transactions that are rolled back."""

    def __init__(self) -> None:
        self.spaces = {number: Space({0: key}) for number, key in SYSTEM_KEY.items()}
        self.undo: list[Undo] = []

    def execute(self, kind: int, body: dict[int, Any]) -> None:
        space_id = body.get(0x10)
        space = self.spaces.get(space_id) if isinstance(space_id, int) else None
        if space is None or 0 not in space.indexes:
            raise Unreadable(f"Space '{space_id}' does not exist, or has no index")
        old, new = self._statement(space, kind, body)
        if old is None and new is None:
            return
        if new is not None:
            space.check_unique(new, old)
        self._set(space, old, new)
        assert isinstance(space_id, int)
        self._define(space_id, old, new)

    def _statement(self, space: Space, kind: int, body: dict[int, Any]) -> tuple[Tuple | None, Tuple | None]:
        if kind in (INSERT, REPLACE):
            new = tuple(body[0x21])
            old = space.tuples.get(space.key(new))
            if kind == INSERT and old is not None:
                raise Unreadable("Duplicate key exists in unique index 0")
            return old, new
        if kind == DELETE:
            return space.find(body.get(0x11, 0), tuple(body[0x20])), None
        base = body.get(0x15, 0)
        if kind == UPDATE:
            old = space.find(body.get(0x11, 0), tuple(body[0x20]))
            return old, updated(old, body[0x21], base, space.names) if old is not None else None
        if kind == UPSERT:
            new = tuple(body[0x21])
            old = space.tuples.get(space.key(new))
            return old, new if old is None else updated(old, body[0x28], base, space.names, is_upsert=True)
        raise Unreadable(f"Unknown request type {kind}")

    def _set(self, space: Space, old: Tuple | None, new: Tuple | None) -> None:
        tuples = space.tuples
        before = [(space.key(each), tuples.get(space.key(each))) for each in (old, new) if each is not None]
        if old is not None:
            tuples.pop(space.key(old), None)
        if new is not None:
            tuples[space.key(new)] = new

        def undo() -> None:
            for key, values in before:
                tuples.pop(key, None)
                if values is not None:
                    tuples[key] = values

        self.undo.append(undo)

    def _define(self, space_id: int, old: Tuple | None, new: Tuple | None) -> None:
        """Apply a change of a system space to the definitions of user spaces."""
        values = new if new is not None else old
        assert values is not None
        if space_id == SPACE_ID and values[0] not in SYSTEM_KEY:
            before = self.spaces.get(values[0])
            if new is None:
                self.spaces.pop(values[0], None)
            else:
                self.spaces[values[0]] = replace(before or Space(), names=_names(values))
            self.undo.append(lambda: self._restore(values[0], before))
        elif space_id == INDEX_ID and values[0] not in SYSTEM_KEY:
            self._index(values, is_dropped=new is None)
        elif space_id == TRUNCATE_ID and new is not None and values[0] in self.spaces:
            space = self.spaces[values[0]]
            content, space.tuples = space.tuples, {}
            self.undo.append(lambda: setattr(space, "tuples", content))

    def _index(self, values: Tuple, *, is_dropped: bool) -> None:
        space, before = self.spaces[values[0]], self.spaces[values[0]]
        indexes = {number: key for number, key in before.indexes.items() if number != values[1]}
        fields = _fields(values)
        if not is_dropped and fields is not None:
            indexes[values[1]] = fields
        space = Space(dict(sorted(indexes.items())), names=before.names)
        if 0 in indexes:
            for each in before.tuples.values():
                space.tuples[space.key(each)] = each
        self.spaces[values[0]] = space
        self.undo.append(lambda: self._restore(values[0], before))

    def _restore(self, space_id: int, space: Space | None) -> None:
        if space is None:
            self.spaces.pop(space_id, None)
        else:
            self.spaces[space_id] = space


def _names(values: Tuple) -> dict[bytes, int]:
    """Return the names of fields in a tuple of `_space`, with their numbers."""
    found = ((each.get(b"name"), number) for number, each in enumerate(values[6]) if isinstance(each, dict))
    return {name: number for name, number in found if name is not None}


def _fields(values: Tuple) -> tuple[int, ...] | None:
    """Return the fields of an index in `_index`; None for a secondary index that is ignored."""
    parts: list[int] = []
    is_plain = True
    for part in values[5]:
        if isinstance(part, dict):
            parts.append(part[b"field"])
            is_plain = is_plain and b"path" not in part
        else:
            parts.append(part[0])
    if values[1] == 0:
        assert is_plain, "the judge does not know keys with paths"
        return tuple(parts)
    options = values[4]
    is_unique = options.get(b"unique", True) and not options.get(b"func")
    return tuple(parts) if is_plain and is_unique else None


def _comparable(value: Any) -> Any:
    """Return a key that distinguishes booleans from numbers, which Python considers equal."""
    return (type(value).__name__, value) if isinstance(value, bool) else value


def updated(values: Tuple, operations: Any, base: int, names: dict[bytes, int], *, is_upsert: bool = False) -> Tuple:
    """Return the tuple after the operations of UPDATE or UPSERT; fields are counted from `base`, or found by `names`.

    An operation that cannot be applied fails an UPDATE; UPSERT skips it.
    """
    result: list[Any] = list(values)
    for operation in operations:
        code, place, *arguments = operation
        try:
            if isinstance(place, bytes):
                holder, at = _target(result, place, names)
            else:
                holder, at = result, place - base if place >= 0 else len(result) + place + (code == b"!")
            _operate(holder, code, at, arguments, base)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            if not is_upsert:
                raise Unreadable(f"cannot apply {operation}: {error!r}") from error
    return tuple(result)


def _target(values: list[Any], path: bytes, names: dict[bytes, int]) -> tuple[Any, Any]:
    """Return the array or map at a path such as `[2][1]` or `name.key`, and the position in it, counted from one."""
    if path in names:
        return values, names[path]
    steps = [int(number) - 1 if number else quoted or plain for number, quoted, plain in _STEP.findall(path)]
    if isinstance(steps[0], bytes):
        steps[0] = names[steps[0]]
    holder: Any = values
    for step in steps[:-1]:
        holder[step] = holder[step].copy()
        holder = holder[step]
    return holder, steps[-1]


def _operate(holder: Any, code: bytes, at: Any, arguments: list[Any], base: int) -> None:
    if isinstance(holder, dict) and code in (b"!", b"="):
        holder[at] = arguments[0]
    elif isinstance(holder, dict) and code == b"#":
        holder.pop(at, None)
    elif code == b"!":
        holder.insert(at, arguments[0])
    elif code == b"#":
        del holder[at : at + arguments[0]]
    elif code == b"=":
        holder += [None] * (at + 1 - len(holder))
        holder[at] = arguments[0]
    elif code == b":":
        start, count, text = arguments
        start = start - base if start >= 0 else len(holder[at]) + 1 + start
        holder[at] = holder[at][:start] + text + holder[at][start + count :]
    else:
        holder[at] = _ARITHMETIC[code](holder[at], arguments[0])


_STEP = re.compile(rb"""\[(\d+)\]|\[["']([^"']*)["']\]|\.?(\w+)""")
_ARITHMETIC: dict[bytes, Callable[[Any, Any], Any]] = {
    b"+": lambda one, other: one + other,
    b"-": lambda one, other: one - other,
    b"&": lambda one, other: one & other,
    b"|": lambda one, other: one | other,
    b"^": lambda one, other: one ^ other,
}
