"""A kernel that formats tuples, keys and operations of many rows as YAML in flow style, with field names.

Numbers, strings and nested values are written as JSON (`iproto.json_text`), which is valid YAML. Rows with a value
whose JSON is not valid YAML, or means something else there, are left to the caller: bin, extensions, numbers with an
exponent, maps with keys other than short strings, strings that are not UTF-8 or contain characters that YAML forbids or
terminals interpret. Offsets come from the scanner, which has checked that every value is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from flowstone.iproto.constants import Key
from flowstone.iproto.limits import NESTING_MAX
from flowstone.iproto.scan import skip_value
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import Bytes, big32, big64, byte, copy, poke, put, word
from flowstone.text.integer_text import write_unsigned
from flowstone.text.json_text import FULL, OK, ROOM, UNSUPPORTED, Integers, container, grown, read_length, write_value

KEY_SIZE_MAX = 160
"""Maximum length of a map key in bytes. Escapes can make it six times as long, and YAML parsers look at most 1024
characters ahead for the colon."""

DOUBLE_MIN, DOUBLE_MAX = 1e-4, 1e16
"""Range in which a double is written without an exponent."""


class Shape(IntEnum):
    """The output format of an array of values."""

    MAP = 0  # {name: value, 3: value}; fields without a name by number, starting at 1 as in Lua
    LIST = 1  # [value, value]
    OPERATIONS = 2  # [["=", "name", value]]
    CELLS = 3  # the values only, with SEPARATOR between them


SEPARATOR = "\0"
"""Separates cells; the text of a value never contains a control character."""

_MAP, _LIST, _OPERATIONS, _CELLS = (shape.value for shape in Shape)
_SPACE_ID, _INDEX_ID, _INDEX_BASE = Key.SPACE_ID.value, Key.INDEX_ID.value, Key.INDEX_BASE.value
_KEY, _TUPLE, _OPS = Key.KEY.value, Key.TUPLE.value, Key.OPS.value

HAS_INDEX_ID, HAS_INDEX_BASE, STRANGE = 1, 2, 4
"""Flags set by `body_marks`. STRANGE: the body is malformed or has keys that a data change does not have."""


class FieldNames(NamedTuple):
    """Name i is texts[offsets[i]:offsets[i + 1]]."""

    offsets: Integers
    texts: Bytes


@kernel
def body_marks(buf: Bytes, starts: Integers, ends: Integers, marks: Integers) -> None:
    """Set `marks` to the flags of each body: what it has besides space, key, tuple and operations."""
    for i in range(starts.size):
        end = ends[i]
        at, items, is_map = container(buf, starts[i], end) if starts[i] < end else (-1, 0, 0)
        found = 0 if at >= 0 and is_map else STRANGE
        for _ in range(items >> 1):
            key = byte(buf, at) if at < end else 0
            at = skip_value(buf, at + 1, end)
            if at < 0:
                found = STRANGE
                break
            if key == _INDEX_ID:
                found |= HAS_INDEX_ID
            elif key == _INDEX_BASE:
                found |= HAS_INDEX_BASE
            elif key not in (_SPACE_ID, _KEY, _TUPLE, _OPS):
                found |= STRANGE
        marks[i] = found


@inlined
def _is_odd_character(buf: Bytes, at: int, end: int) -> bool:
    """Return True for a control character, line separator, directional mark, byte order mark or noncharacter."""
    lead = byte(buf, at)
    if lead == 0x7F:
        return True
    if lead < 0xC2 or at + 2 > end:
        return False
    second = byte(buf, at + 1)
    if lead == 0xC2:
        return second < 0xA0
    if lead != 0xE2 and lead != 0xEF:
        return False
    if at + 3 > end:
        return False
    third = byte(buf, at + 2)
    if lead == 0xEF:
        return (second == 0xBB or second == 0xBF) and third >= 0xBE
    return second == 0x81 or (second == 0x80 and (0x8B <= third <= 0x8F or 0xA8 <= third <= 0xAF))


@inlined
def _is_double_plain(buf: Bytes, at: int) -> bool:
    """Return True if the float or double at `at` (its marker) has the same text in JSON and YAML."""
    if byte(buf, at) == 0xCA:
        size = abs(np.float64(np.uint32(big32(buf, at + 1)).view(np.float32)))
    else:
        size = abs(np.uint64(big64(buf, at + 1)).view(np.float64))
    return bool(size == 0 or DOUBLE_MIN <= size < DOUBLE_MAX)


@inlined
def _string(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return start and end of the string at `at`; (-1, -1) if the value is not a string."""
    marker = byte(buf, at)
    if 0xA0 <= marker < 0xC0:
        return at + 1, at + 1 + (marker & 31)
    if not 0xD9 <= marker <= 0xDB:
        return -1, -1
    start, count = read_length(marker - 0xD9, buf, at + 1, end)
    return start, start + count


@kernel
def _are_keys_plain(buf: Bytes, at: int, items: int, end: int) -> bool:
    """Return True if all keys of the map whose items start at `at` are short strings."""
    for _ in range(items >> 1):
        start, after = _string(buf, at, end)
        if start < 0 or after - start > KEY_SIZE_MAX:
            return False
        at = skip_value(buf, after, end)
        if at < 0:
            return False
    return True


@inlined
def _is_plain(buf: Bytes, at: int, end: int) -> bool:
    """Return True if the JSON of every value between `at` and `end` is valid YAML with the same value."""
    while at < end:
        marker = byte(buf, at)
        start, after = _string(buf, at, end)
        if start >= 0:
            for i in range(start, after):
                if byte(buf, i) >= 0x7F and _is_odd_character(buf, i, after):
                    return False
            at = after
        elif marker == 0xCA or marker == 0xCB:
            if not _is_double_plain(buf, at):
                return False
            at += 5 if marker == 0xCA else 9
        elif 0x80 <= marker < 0xA0 or 0xDC <= marker < 0xE0:
            at, items, is_map = container(buf, at, end)
            if is_map and not _are_keys_plain(buf, at, items, end):
                return False
        elif 0xC4 <= marker <= 0xC9 or 0xD4 <= marker <= 0xD8:
            return False
        else:
            at = skip_value(buf, at, end)
            if at < 0:
                return False
    return True


@kernel
def _write_value(buf: Bytes, at: int, end: int, out: Bytes, to: int, stack: Integers) -> tuple[int, int, int]:
    """Call `write_value`. Not inlined: it is large, and each inlined copy takes seconds to compile."""
    return write_value(buf, at, end, out, to, stack)


@inlined
def _write_name(names: FieldNames, at: int, out: Bytes, to: int) -> int:
    """Write name number `at`, or the number of a field without a name; return the end offset, -1 if `out` is full."""
    if at + 1 >= names.offsets.size:
        return put(out, write_unsigned(word(at + 1), out, to), ": ")
    start, count = names.offsets[at], names.offsets[at + 1] - names.offsets[at]
    if to + count + ROOM > out.size:
        return -1
    return copy(out, to, names.texts, start, count)


@inlined
def _write_items(
    buf: Bytes, at: int, end: int, shape: int, names: FieldNames, out: Bytes, to: int, stack: Integers
) -> tuple[int, int]:
    """Write the items of the array at `at` in the brackets of `shape`; return (end offset of the text, status)."""
    at, items, is_map = container(buf, at, end)
    if at < 0 or is_map or to + ROOM > out.size:
        return to, FULL if at >= 0 and not is_map else UNSUPPORTED
    if shape != _CELLS:
        to = poke(out, to, 123 if shape == _MAP else 91)
    for i in range(items):
        if to + ROOM > out.size:
            return to, FULL
        if i:
            to = poke(out, to, 0) if shape == _CELLS else put(out, to, ", ")
        if shape == _MAP:
            to = _write_name(names, i, out, to)
            if to < 0:
                return to, FULL
        at, to, status = _write_value(buf, at, end, out, to, stack)
        if status != OK:
            return to, status
    if to + ROOM > out.size:
        return to, FULL
    return to if shape == _CELLS else poke(out, to, 125 if shape == _MAP else 93), OK


@kernel
def _write_operation(
    buf: Bytes, at: int, end: int, base: int, names: FieldNames, out: Bytes, to: int, stack: Integers
) -> tuple[int, int, int]:
    """Write one operation, with the name of its field if known; return (its end offset, end of the text, status)."""
    at, items, is_map = container(buf, at, end)
    if at < 0 or is_map:
        return at, to, UNSUPPORTED
    to = poke(out, to, 91)
    for i in range(items):
        if to + ROOM > out.size:
            return at, to, FULL
        if i:
            to = put(out, to, ", ")
        marker = byte(buf, at)
        if i == 1 and 0xCC <= marker <= 0xCF and names.offsets.size > 0x80:
            return at, to, UNSUPPORTED  # a field number of more than one byte that may have a name
        field = marker - base if i == 1 and marker < 0x80 else -1
        if 0 <= field < names.offsets.size - 1:
            to = _write_name(names, field, out, to)
            if to < 0:
                return at, to, FULL
            at += 1
            continue
        at, to, status = _write_value(buf, at, end, out, to, stack)
        if status != OK:
            return at, to, status
    if to + ROOM > out.size:
        return at, to, FULL
    return at, poke(out, to, 93), OK


@inlined
def _write_operations(
    buf: Bytes, at: int, end: int, base: int, names: FieldNames, out: Bytes, to: int, stack: Integers
) -> tuple[int, int]:
    at, items, is_map = container(buf, at, end)
    if at < 0 or is_map:
        return to, UNSUPPORTED
    if to + ROOM > out.size:
        return to, FULL
    to = poke(out, to, 91)
    for i in range(items):
        if to + ROOM > out.size:
            return to, FULL
        if i:
            to = put(out, to, ", ")
        at, to, status = _write_operation(buf, at, end, base, names, out, to, stack)
        if status != OK:
            return to, status
    if to + ROOM > out.size:
        return to, FULL
    return poke(out, to, 93), OK


@inlined
def _has_surrogate(out: Bytes, start: int, end: int) -> bool:
    """Return True if the text contains a byte that was not UTF-8, written in JSON as \\udcXX."""
    for i in range(start, end - 3):
        if byte(out, i) == 92 and byte(out, i + 1) == 117 and byte(out, i + 2) == 100:
            return True
    return False


@kernel
def _write_texts(
    buf: Bytes,
    starts: Integers,
    ends: Integers,
    bases: Integers,
    first: int,
    shape: int,
    names: FieldNames,
    out: Bytes,
    to: int,
    stack: Integers,
) -> tuple[int, int, int]:
    """Write one line per value, starting with number `first`; an empty line leaves the value to the caller.

    Return (number of values done, end offset of the text, OK or FULL).
    """
    for i in range(first, starts.size):
        if to + ROOM > out.size:
            return i, to, FULL
        if starts[i] >= 0 and _is_plain(buf, starts[i], ends[i]):
            if shape == _OPERATIONS:
                after, status = _write_operations(buf, starts[i], ends[i], bases[i], names, out, to, stack)
            else:
                after, status = _write_items(buf, starts[i], ends[i], shape, names, out, to, stack)
            if status == FULL:
                return i, to, FULL
            if status == OK and not _has_surrogate(out, to, after):
                to = after
        to = poke(out, to, 10)
    return starts.size, to, OK


def flow_texts(
    buf: Bytes, starts: Integers, ends: Integers, shape: Shape, names: Sequence[str] = (), bases: Integers | None = None
) -> list[str]:
    """Return the text of each row's array; "" if the kernel leaves it to the caller, or if `starts` is negative.

    `names` are written as they are: pass them with a colon for a MAP, and quoted for OPERATIONS. `bases` has the number
    of the first field for the operations of each row.
    """
    starts, ends = np.ascontiguousarray(starts), np.ascontiguousarray(ends)
    bases = np.zeros(starts.size, np.int64) if bases is None else np.ascontiguousarray(bases)
    encoded = [name.encode() for name in names]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    offsets[1:] = np.cumsum([len(name) for name in encoded])
    known = FieldNames(offsets, np.frombuffer(b"".join(encoded) or b"\0", np.uint8))
    size = int(np.sum(ends - starts))
    out: Bytes = np.empty(2 * size + (int(offsets[-1]) + 8) * starts.size + 2 * ROOM, np.uint8)
    stack: Integers = np.empty(NESTING_MAX, np.int64)
    done = used = 0
    while True:
        done, used, status = _write_texts(buf, starts, ends, bases, done, shape.value, known, out, used, stack)
        if status == OK:
            return str(out[:used].data, "utf-8").split("\n")[:-1]
        out = grown(out, used, 0)
