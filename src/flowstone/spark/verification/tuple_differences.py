"""Find and describe the differences between two tuples.

Pure; works on raw MessagePack. Numbers and lengths in a longer encoding than necessary are equal values. An integer
differs from a double of the same value, nil differs from an absent field, and the order of map keys matters, because
clients can see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from struct import unpack_from
from typing import Final

import pyarrow as pa

from flowstone.box.system import USER_ID
from flowstone.columns.log_batches import json_of_messagepack
from flowstone.errors import RemoteProtocolError
from flowstone.history.secrets import HIDDEN

ABSENT: Final = "absent"
PATHS_MAX: Final = 8
"""Limit on the differing places that are listed per tuple. The report has both tuples in full."""

DEPTH_MAX: Final = 32
"""Depth to which a difference is traced; below it the whole value is shown."""

_SHOWN_USER_FIELDS: Final = 4
"""Leading fields of `_user` that are shown: ids, name and type. Later fields can hold a password hash."""

_NIL, _BOOLEAN, _INTEGER, _FLOAT, _DOUBLE = "null", "boolean", "integer", "float", "double"
_STRING, _BINARY, _EXTENSION, _ARRAY, _MAP = "string", "binary", "extension", "array", "map"
_CONTAINERS: Final = (_ARRAY, _MAP)


class BrokenTuple(RemoteProtocolError):
    """The bytes of a tuple are not valid MessagePack."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A place in two tuples and the value of each there, as JSON or `absent`."""

    path: str
    a: str
    b: str


def normal_form(data: bytes) -> bytes:
    """Return bytes that are equal for equal values, however numbers and lengths are encoded. Not valid MessagePack."""
    out = bytearray()
    at = 0
    while at < len(data):
        kind, number, body = _head(data, at)
        end = body + number if kind in (_STRING, _BINARY, _EXTENSION) else body
        if end > len(data):
            raise BrokenTuple(f"MessagePack of {len(data)} bytes ends inside a value")
        out += _normal_head(kind, number, data[at:body])
        out += data[body:end]
        at = end
    return bytes(out)


def same_values(a: bytes, b: bytes) -> bool:
    """Return True if two tuples differ at most in the encoding of numbers and lengths."""
    if a == b:
        return True
    try:
        return normal_form(a) == normal_form(b)
    except BrokenTuple:
        return False


def field_differences(
    a: bytes, b: bytes, names: Sequence[str] = (), space_id: int | None = None
) -> list[FieldDifference]:
    """Return the first `PATHS_MAX` places where two tuples differ. Fields have `names`, or numbers from 1.

    The values of `_user` are hidden.
    """
    try:
        for each in (a, b):
            check_whole(each)
        found = list(islice(_differences(a, b, names), PATHS_MAX))
        if space_id == USER_ID:
            return [FieldDifference(each.path, HIDDEN, HIDDEN) for each in found]
        return found
    except BrokenTuple:
        return [FieldDifference("", _hexadecimal(a), _hexadecimal(b))]


def shown_tuple(data: bytes | None, space_id: int) -> str | None:
    """Return the tuple as JSON; a tuple of `_user` without the fields that can hold a password hash."""
    if data is None:
        return None
    try:
        check_whole(data)
        return _json(_without_secrets(data) if space_id == USER_ID else data)
    except BrokenTuple:
        return _hexadecimal(data)


def check_whole(data: bytes) -> None:
    """Raise BrokenTuple unless the data is exactly one value."""
    if _end(data, 0) != len(data):
        raise BrokenTuple(f"{len(data) - _end(data, 0)} bytes follow the tuple")


def _hexadecimal(data: bytes) -> str:
    return f"broken: {data[:64].hex()}{'…' if len(data) > 64 else ''}"


def _json(data: bytes) -> str:
    text = json_of_messagepack(pa.array([data], pa.binary())).to_pylist()[0]
    return text if text is not None else "null"


def _without_secrets(data: bytes) -> bytes:
    spans = list(_elements(data))
    if len(spans) <= _SHOWN_USER_FIELDS:
        return data
    kept = b"".join(spans[:_SHOWN_USER_FIELDS])
    return bytes([0x90 + _SHOWN_USER_FIELDS + 1]) + kept + bytes([0xA0 + len(HIDDEN)]) + HIDDEN.encode()


# --- where they differ ---


def _differences(a: bytes, b: bytes, names: Sequence[str]) -> Iterator[FieldDifference]:
    if _head(a, 0)[0] != _ARRAY or _head(b, 0)[0] != _ARRAY:
        yield FieldDifference("", _described(a), _described(b))
        return
    ours, theirs = list(_elements(a)), list(_elements(b))
    for number in range(max(len(ours), len(theirs))):
        path = names[number] if number < len(names) else f"[{number + 1}]"
        yield from _of_values(path, _at(ours, number), _at(theirs, number))


def _of_values(path: str, a: bytes | None, b: bytes | None, depth: int = 0) -> Iterator[FieldDifference]:
    if a is None or b is None:
        if a is not b:
            yield FieldDifference(path, _described(a), _described(b))
        return
    if normal_form(a) == normal_form(b):
        return
    kind = _head(a, 0)[0]
    if kind != _head(b, 0)[0] or kind not in _CONTAINERS or depth == DEPTH_MAX:
        yield FieldDifference(path, *_both(a, b))
    elif kind == _ARRAY:
        ours, theirs = list(_elements(a)), list(_elements(b))
        for number in range(max(len(ours), len(theirs))):
            yield from _of_values(f"{path}[{number + 1}]", _at(ours, number), _at(theirs, number), depth + 1)
    else:
        yield from _of_maps(path, a, b, depth)


def _of_maps(path: str, a: bytes, b: bytes, depth: int) -> Iterator[FieldDifference]:
    ours, theirs = list(_entries(a)), list(_entries(b))
    keys = [normal_form(key) for key, _ in ours]
    other_keys = [normal_form(key) for key, _ in theirs]
    if sorted(keys) == sorted(other_keys) and (keys != other_keys or len(set(keys)) < len(keys)):
        yield FieldDifference(path, *_both(a, b))  # the keys differ in their order, or some key is repeated
        return
    left, right = dict(zip(keys, ours, strict=True)), dict(zip(other_keys, theirs, strict=True))
    for key, (name, _) in {**right, **left}.items():
        value, other = left.get(key), right.get(key)
        where = f"{path}.{_json(name).strip(chr(34))}"
        yield from _of_values(where, value and value[1], other and other[1], depth + 1)


def _at(values: Sequence[bytes], number: int) -> bytes | None:
    return values[number] if number < len(values) else None


def _both(a: bytes, b: bytes) -> tuple[str, str]:
    """Return both values as JSON, with their types or bytes if the texts are equal."""
    ours, theirs = _described(a), _described(b)
    if ours != theirs:
        return ours, theirs
    kinds = _kind(a), _kind(b)
    if kinds[0] != kinds[1]:
        return f"{ours} ({kinds[0]})", f"{theirs} ({kinds[1]})"
    return f"{ours} (bytes {a.hex()})", f"{theirs} (bytes {b.hex()})"


def _described(value: bytes | None) -> str:
    return ABSENT if value is None else _json(value)


def _kind(value: bytes) -> str:
    return _head(value, 0)[0]


def _elements(data: bytes) -> Iterator[bytes]:
    """Yield the bytes of each element of an array."""
    _, count, at = _head(data, 0)
    for _ in range(count):
        end = _end(data, at)
        yield data[at:end]
        at = end


def _entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the bytes of the key and the value of each entry of a map."""
    _, count, at = _head(data, 0)
    for _ in range(count):
        middle = _end(data, at)
        end = _end(data, middle)
        yield data[at:middle], data[middle:end]
        at = end


# --- MessagePack ---


def _end(data: bytes, at: int) -> int:
    """Return the end offset of the value that begins at `at`."""
    left = 1
    while left:
        kind, number, at = _head(data, at)
        left -= 1
        if kind == _ARRAY:
            left += number
        elif kind == _MAP:
            left += 2 * number
        elif kind in (_STRING, _BINARY, _EXTENSION):
            at += number
    if at > len(data):
        raise BrokenTuple(f"MessagePack of {len(data)} bytes ends inside a value")
    return at


_SIZED: Final[dict[int, tuple[str, str]]] = {
    0xC4: (_BINARY, ">B"), 0xC5: (_BINARY, ">H"), 0xC6: (_BINARY, ">I"),
    0xC7: (_EXTENSION, ">B"), 0xC8: (_EXTENSION, ">H"), 0xC9: (_EXTENSION, ">I"),
    0xCC: (_INTEGER, ">B"), 0xCD: (_INTEGER, ">H"), 0xCE: (_INTEGER, ">I"), 0xCF: (_INTEGER, ">Q"),
    0xD0: (_INTEGER, ">b"), 0xD1: (_INTEGER, ">h"), 0xD2: (_INTEGER, ">i"), 0xD3: (_INTEGER, ">q"),
    0xD9: (_STRING, ">B"), 0xDA: (_STRING, ">H"), 0xDB: (_STRING, ">I"),
    0xDC: (_ARRAY, ">H"), 0xDD: (_ARRAY, ">I"), 0xDE: (_MAP, ">H"), 0xDF: (_MAP, ">I"),
}  # fmt: skip
_WIDTHS: Final = {"B": 1, "H": 2, "I": 4, "Q": 8, "b": 1, "h": 2, "i": 4, "q": 8}
_FIXED_EXTENSIONS: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def _head(data: bytes, at: int) -> tuple[str, int, int]:
    """Return the kind of a value, its number (an integer's value, otherwise a length), and the end of its head.

    The head includes the type of an extension.
    """
    if at >= len(data):
        raise BrokenTuple(f"MessagePack of {len(data)} bytes ends before a value")
    first = data[at]
    if first < 0x80:
        return _INTEGER, first, at + 1
    if first >= 0xE0:
        return _INTEGER, first - 256, at + 1
    if first < 0xC0:
        return _of_nibble(first, at)
    if first in _SIZED:
        kind, form = _SIZED[first]
        end = at + 1 + _WIDTHS[form[1]] + (kind == _EXTENSION)
        _check_end(data, end)
        return kind, unpack_from(form, data, at + 1)[0], end
    if first in _FIXED_EXTENSIONS:
        _check_end(data, at + 2)
        return _EXTENSION, _FIXED_EXTENSIONS[first], at + 2
    if first in (0xCA, 0xCB):
        end = at + (5 if first == 0xCA else 9)
        _check_end(data, end)
        return (_FLOAT if first == 0xCA else _DOUBLE), 0, end
    if first == 0xC1:
        raise BrokenTuple("MessagePack has no value that begins with 0xc1")
    return (_NIL if first == 0xC0 else _BOOLEAN), 0, at + 1


def _of_nibble(first: int, at: int) -> tuple[str, int, int]:
    if first < 0x90:
        return _MAP, first - 0x80, at + 1
    if first < 0xA0:
        return _ARRAY, first - 0x90, at + 1
    return _STRING, first - 0xA0, at + 1


def _check_end(data: bytes, end: int) -> None:
    if end > len(data):
        raise BrokenTuple(f"MessagePack of {len(data)} bytes ends inside a value")


def _normal_head(kind: str, number: int, head: bytes) -> bytes:
    """Return the same head for every encoding of a value.

    The letters never collide with the first bytes of the heads that are returned unchanged.
    """
    match kind:
        case "integer":
            return b"i" + number.to_bytes(9, "big", signed=True)
        case "string" | "binary" | "array" | "map":
            return kind[:1].encode() + number.to_bytes(4, "big")
        case "extension":
            return b"e" + number.to_bytes(4, "big") + head[-1:]
    return head
