"""Compiled: tuples, keys and operations of many rows as YAML in flow style, with field names.

Numbers, strings and nested values are written as JSON (`json_text_kernels`), which is valid YAML. Rows with a value
whose JSON is not valid YAML, or means something else there, are left to the caller: bin, extensions, numbers with an
exponent, maps with keys other than short strings, strings that are not UTF-8 or contain characters that YAML forbids or
terminals interpret. Offsets come from the scanner, which has checked that every value is complete.

The `count` names of fields are passed as in `flow_text`: name i is texts[offsets[i]:offsets[i + 1]]. `buf` has `size`
bytes, `out` has `room` bytes.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.constants import Key
    from flowstone.native.msgpack import read_map, value_end
    from flowstone.native.words import (
        Bytes,
        big32,
        big64,
        byte,
        copy,
        float32,
        float64,
        numbers,
        poke,
        put,
        source,
        target,
        word,
    )
    from flowstone.text.flow_shapes import HAS_INDEX_BASE, HAS_INDEX_ID, KEY_SIZE_MAX, STRANGE, Shape
    from flowstone.text.integer_text import write_unsigned
    from flowstone.text.json_limits import FULL, OK, ROOM, UNSUPPORTED
    from flowstone.text.json_text_kernels import Integers, container, read_length, write_value


def mark_body(buf: Bytes, at: int, end: int) -> int:
    """Return the flags of a body: what it has besides space, key, tuple and operations."""
    pairs, at = read_map(buf, at, end)
    if at < 0:
        return STRANGE
    found = 0
    for _ in range(pairs):
        key = byte(buf, at) if at < end else 0
        at = value_end(buf, at + 1, end)
        if at < 0:
            return STRANGE
        if key == Key.INDEX_ID:
            found |= HAS_INDEX_ID
        elif key == Key.INDEX_BASE:
            found |= HAS_INDEX_BASE
        elif key != Key.SPACE_ID and key != Key.KEY and key != Key.TUPLE and key != Key.OPS:
            found |= STRANGE
    return found


def body_marks(buf: Bytes, starts: Integers, ends: Integers, marks: Integers) -> None:
    """Set `marks` to the flags of each body."""
    data = source(buf)
    with cython.nogil:
        for i in range(starts.shape[0]):
            marks[i] = mark_body(data, starts[i], ends[i])


def is_odd_character(buf: Bytes, at: int, end: int) -> bool:
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


def is_double_plain(buf: Bytes, at: int) -> bool:
    """Return True if the float or double at `at` (its marker) has the same text in JSON and YAML: no exponent."""
    double = float32(big32(buf, at + 1)) if byte(buf, at) == 0xCA else float64(big64(buf, at + 1))
    return double == 0 or 1e-4 <= double < 1e16 or -1e16 < double <= -1e-4


def string_bounds(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return start and end of the string at `at`; (-1, -1) if the value is not a string."""
    marker = byte(buf, at)
    if 0xA0 <= marker < 0xC0:
        return at + 1, at + 1 + (marker & 31)
    if not 0xD9 <= marker <= 0xDB:
        return -1, -1
    start, count = read_length(marker - 0xD9, buf, at + 1, end)
    return start, start + count


def are_keys_plain(buf: Bytes, at: int, items: int, end: int) -> bool:
    """Return True if all keys of the map whose items start at `at` are short strings."""
    for _ in range(items >> 1):
        start, after = string_bounds(buf, at, end)
        if start < 0 or after - start > KEY_SIZE_MAX:
            return False
        at = value_end(buf, after, end)
        if at < 0:
            return False
    return True


def is_plain(buf: Bytes, at: int, end: int) -> bool:
    """Return True if the JSON of every value between `at` and `end` is valid YAML with the same value."""
    while at < end:
        marker = byte(buf, at)
        start, after = string_bounds(buf, at, end)
        if start >= 0:
            for i in range(start, after):
                if byte(buf, i) >= 0x7F and is_odd_character(buf, i, after):
                    return False
            at = after
        elif marker == 0xCA or marker == 0xCB:
            if not is_double_plain(buf, at):
                return False
            at += 5 if marker == 0xCA else 9
        elif 0x80 <= marker < 0xA0 or 0xDC <= marker < 0xE0:
            at, items, is_map = container(buf, at, end)
            if is_map and not are_keys_plain(buf, at, items, end):
                return False
        elif 0xC4 <= marker <= 0xC9 or 0xD4 <= marker <= 0xD8:
            return False
        else:
            at = value_end(buf, at, end)
            if at < 0:
                return False
    return True


def write_name(offsets: Integers, count: int, texts: Bytes, field: int, out: Bytes, room: int, to: int) -> int:
    """Write the name of a field, or the number of one without a name; return the end offset, -1 if `out` is full."""
    if field >= count:
        return put(out, write_unsigned(word(field + 1), out, to), b": ")
    start, length = offsets[field], offsets[field + 1] - offsets[field]
    if to + length + ROOM > room:
        return -1
    return copy(out, to, texts, start, length)


def write_items(
    buf: Bytes,
    size: int,
    at: int,
    end: int,
    shape: int,
    offsets: Integers,
    count: int,
    texts: Bytes,
    out: Bytes,
    room: int,
    to: int,
    stack: Integers,
) -> tuple[int, int]:
    """Write the items of the array at `at` in the brackets of `shape`; return (end offset of the text, status)."""
    at, items, is_map = container(buf, at, end)
    if at < 0 or is_map:
        return to, UNSUPPORTED
    if to + ROOM > room:
        return to, FULL
    if shape != Shape.CELLS:
        to = poke(out, to, 123 if shape == Shape.MAP else 91)
    for i in range(items):
        if to + ROOM > room:
            return to, FULL
        if i:
            to = poke(out, to, 0) if shape == Shape.CELLS else put(out, to, b", ")
        if shape == Shape.MAP:
            to = write_name(offsets, count, texts, i, out, room, to)
            if to < 0:
                return to, FULL
        at, to, status = write_value(buf, size, at, end, out, room, to, stack)
        if status != OK:
            return to, status
    if to + ROOM > room:
        return to, FULL
    if shape != Shape.CELLS:
        to = poke(out, to, 125 if shape == Shape.MAP else 93)
    return to, OK


def write_operation(
    buf: Bytes,
    size: int,
    at: int,
    end: int,
    base: int,
    offsets: Integers,
    count: int,
    texts: Bytes,
    out: Bytes,
    room: int,
    to: int,
    stack: Integers,
) -> tuple[int, int, int]:
    """Write one operation, with the name of its field if known; return (its end offset, end of the text, status)."""
    at, items, is_map = container(buf, at, end)
    if at < 0 or is_map:
        return at, to, UNSUPPORTED
    to = poke(out, to, 91)
    for i in range(items):
        if to + ROOM > room:
            return at, to, FULL
        if i:
            to = put(out, to, b", ")
        marker = byte(buf, at)
        if i == 1 and 0xCC <= marker <= 0xCF and count >= 0x80:
            return at, to, UNSUPPORTED  # a field number of more than one byte that may have a name
        field = marker - base if i == 1 and marker < 0x80 else -1
        if 0 <= field < count:
            to = write_name(offsets, count, texts, field, out, room, to)
            if to < 0:
                return at, to, FULL
            at += 1
            continue
        at, to, status = write_value(buf, size, at, end, out, room, to, stack)
        if status != OK:
            return at, to, status
    if to + ROOM > room:
        return at, to, FULL
    return at, poke(out, to, 93), OK


def write_operations(
    buf: Bytes,
    size: int,
    at: int,
    end: int,
    base: int,
    offsets: Integers,
    count: int,
    texts: Bytes,
    out: Bytes,
    room: int,
    to: int,
    stack: Integers,
) -> tuple[int, int]:
    """Write the array of operations at `at`; return (end offset of the text, status)."""
    at, items, is_map = container(buf, at, end)
    if at < 0 or is_map:
        return to, UNSUPPORTED
    if to + ROOM > room:
        return to, FULL
    to = poke(out, to, 91)
    for i in range(items):
        if to + ROOM > room:
            return to, FULL
        if i:
            to = put(out, to, b", ")
        at, to, status = write_operation(buf, size, at, end, base, offsets, count, texts, out, room, to, stack)
        if status != OK:
            return to, status
    if to + ROOM > room:
        return to, FULL
    return poke(out, to, 93), OK


def has_surrogate(out: Bytes, start: int, end: int) -> bool:
    """Return True if the text contains a byte that was not UTF-8, written in JSON as \\udcXX."""
    for i in range(start, end - 3):
        if byte(out, i) == 92 and byte(out, i + 1) == 117 and byte(out, i + 2) == 100:
            return True
    return False


def write_texts(
    buf: Bytes,
    starts: Integers,
    ends: Integers,
    bases: Integers,
    first: int,
    shape: int,
    offsets: Integers,
    texts: Bytes,
    out: Bytes,
    to: int,
    stack: Integers,
) -> tuple[int, int, int]:
    """Write one line per value, starting with number `first`; an empty line leaves the value to the caller.

    Return (number of values done, end offset of the text, OK or FULL).
    """
    data, size, text, room = source(buf), buf.shape[0], target(out), out.shape[0]
    names, places, count, scratch = source(texts), numbers(offsets), offsets.shape[0] - 1, numbers(stack)
    with cython.nogil:
        while first < starts.shape[0]:
            if to + ROOM > room:
                break
            at, end = starts[first], ends[first]
            if at >= 0 and is_plain(data, at, end):
                if shape == Shape.OPERATIONS:
                    after, status = write_operations(
                        data, size, at, end, bases[first], places, count, names, text, room, to, scratch
                    )
                else:
                    after, status = write_items(
                        data, size, at, end, shape, places, count, names, text, room, to, scratch
                    )
                if status == FULL:
                    break
                if status == OK and not has_surrogate(text, to, after):
                    to = after
            to = poke(text, to, 10)
            first += 1
    return first, to, OK if first == starts.shape[0] else FULL
