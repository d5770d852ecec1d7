"""Log rows as JSON lines, in the shape of `tarantoolctl cat --format=json`, written by kernels.

A line is {"HEADER":{…},"BODY":{…}}. The header has lsn, commit, wait_sync, wait_ack, replica_id, group_id, type, tsn
and timestamp, each if the row has it; `commit` and `tsn` only in transactions of several rows. The body has the keys of
the row by name, in the order of the file, and `space` after `space_id` if the name is known. Unlike the original, a
line names the rows of synchronous replication and elections and the fields of their bodies, and shows row flags and
full timestamps. Relies on the table of `scan` and on `json_text`; values that the kernels do not support are written
in plain Python. Never reads a schema: the caller passes the names of spaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flowstone.iproto import scan
from flowstone.iproto.constants import Flag, Key, RaftKey, RequestType
from flowstone.iproto.limits import NESTING_MAX
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import Bytes, byte, copy, copy32, number, poke, put
from flowstone.text.float_text import write_double
from flowstone.text.integer_text import write_rare, write_short, write_signed
from flowstone.text.json_plain import JsonError, json_double, json_key, json_pairs, json_string
from flowstone.text.json_text import FULL, MALFORMED, OK, ROOM, UNSUPPORTED, Integers, container, grown, write_value

_TYPES = {kind.value: kind.name.removeprefix("RAFT_") for kind in RequestType}
_KEYS = {key.value: key.name.lower() for key in Key} | {Key.OPS.value: "operations"}
_RAFT_KEYS = {key.value: key.name.lower() for key in RaftKey}
_RAFT_STATES = {1: "follower", 2: "candidate", 3: "leader"}

_SLOT = 32
_KEYS_MAX = 128


def _slots(texts: Mapping[int, str], count: int) -> tuple[Bytes, Bytes]:
    """Texts in slots of 32 bytes, and their lengths; length 0 where there is none."""
    table, lengths = np.zeros((count, _SLOT), np.uint8), np.zeros(count, np.uint8)
    for slot, text in texts.items():
        table[slot, : len(text)] = np.frombuffer(text.encode(), np.uint8)
        lengths[slot] = len(text)
    return table.reshape(-1), lengths


_TYPES_MAX = max(_TYPES) + 1
_TYPE_TEXTS, _TYPE_LENGTHS = _slots({n: f'"type":"{name}"' for n, name in _TYPES.items()}, _TYPES_MAX)
_KEY_TEXTS, _KEY_LENGTHS = _slots(
    {n: f'"{name}":' for n, name in _KEYS.items()} | {_KEYS_MAX + n: f'"{name}":' for n, name in _RAFT_KEYS.items()},
    2 * _KEYS_MAX,
)
_RAFT, _STATE, _SPACE_ID = RequestType.RAFT.value, RaftKey.STATE.value, Key.SPACE_ID.value
_COMMIT, _WAIT_SYNC, _WAIT_ACK = Flag.COMMIT.value, Flag.WAIT_SYNC.value, Flag.WAIT_ACK.value


class Lines(NamedTuple):
    """The lines of the scanner's table that a row's text is made of."""

    type: Integers
    replica_id: Integers
    group_id: Integers
    lsn: Integers
    tsn: Integers
    timestamp: Integers
    flags: Integers
    single: Integers
    space_id: Integers
    body_at: Integers
    row_end: Integers


class SpaceNames(NamedTuple):
    """Known spaces: ids in ascending order, and where `,"space":"…"` of each stands in `texts`."""

    space_ids: Integers
    offsets: Integers
    texts: Bytes


@inlined
def _write_header(lines: Lines, row: int, out: Bytes, to: int) -> int:
    """All of the header but the timestamp."""
    to = put(out, to, '{"HEADER":{')
    if lines.lsn[row] != 0:
        to = put(out, to, '"lsn":')
        to = write_signed(lines.lsn[row], out, to)
        to = poke(out, to, 44)
    single, flags = lines.single[row] == 1, lines.flags[row]
    if flags & _COMMIT and not single:
        to = put(out, to, '"commit":true,')
    if flags & _WAIT_SYNC:
        to = put(out, to, '"wait_sync":true,')
    if flags & _WAIT_ACK:
        to = put(out, to, '"wait_ack":true,')
    if lines.replica_id[row] != 0:
        to = put(out, to, '"replica_id":')
        to = write_rare(lines.replica_id[row], out, to)
        to = poke(out, to, 44)
    if lines.group_id[row] != 0:
        to = put(out, to, '"group_id":')
        to = write_rare(lines.group_id[row], out, to)
        to = poke(out, to, 44)
    kind = lines.type[row]
    if 0 <= kind < _TYPES_MAX and _TYPE_LENGTHS[kind] != 0:
        copy32(out, to, _TYPE_TEXTS, kind * _SLOT)
        to += number(_TYPE_LENGTHS[kind])
    else:
        to = put(out, to, '"type":')
        to = write_rare(kind, out, to)
    if not single:
        to = put(out, to, ',"tsn":')
        to = write_rare(lines.tsn[row], out, to)
    return to


@kernel
def _write_space(names: SpaceNames, space_id: int, out: Bytes, to: int) -> int:
    """The space's name, where it is known; -1 where `out` is full."""
    low, high = 0, names.space_ids.size
    while low < high:
        middle = (low + high) >> 1
        if names.space_ids[middle] < space_id:
            low = middle + 1
        else:
            high = middle
    if low == names.space_ids.size or names.space_ids[low] != space_id:
        return to
    start, count = names.offsets[low], names.offsets[low + 1] - names.offsets[low]
    if to + count + ROOM > out.size:
        return -1
    return copy(out, to, names.texts, start, count)


@inlined
def _write_key(key: int, slot: int, out: Bytes, to: int) -> int:
    """A body key by name, or by its number where it has none."""
    if _KEY_LENGTHS[slot] != 0:
        copy32(out, to, _KEY_TEXTS, slot * _SLOT)
        return to + number(_KEY_LENGTHS[slot])
    to = write_short(np.uint64(key), out, poke(out, to, 34))
    return put(out, to, '":')


@kernel
def _write_state(state: int, out: Bytes, to: int) -> int:
    """The name of a Raft state 1, 2 or 3."""
    if state == 1:
        return put(out, to, '"follower"')
    return put(out, to, '"candidate"') if state == 2 else put(out, to, '"leader"')


@inlined
def _write_body(
    buf: Bytes, lines: Lines, row: int, names: SpaceNames, out: Bytes, to: int, stack: Integers
) -> tuple[int, int]:
    """The body map with named keys: (offset after the text, status)."""
    at, end = lines.body_at[row], lines.row_end[row]
    at, items, is_map = container(buf, at, end)
    if at < 0 or not is_map:
        return to, MALFORMED
    raft = lines.type[row] == _RAFT
    to = put(out, to, ',"BODY":{')
    for i in range(items >> 1):
        if to + ROOM > out.size:
            return to, FULL
        if at + 1 >= end:
            return to, MALFORMED
        key = byte(buf, at)
        if key >= _KEYS_MAX:
            return to, UNSUPPORTED
        if i:
            to = poke(out, to, 44)
        to = _write_key(key, key + _KEYS_MAX if raft else key, out, to)
        at += 1
        if raft and key == _STATE and 1 <= byte(buf, at) <= 3:
            to = _write_state(byte(buf, at), out, to)
            at += 1
            continue
        at, to, status = write_value(buf, at, end, out, to, stack)
        if status != OK:
            return to, status
        if key == _SPACE_ID and not raft:
            to = _write_space(names, lines.space_id[row], out, to)
            if to < 0:
                return to, FULL
    return poke(out, to, 125), (OK if at == end else MALFORMED)


@kernel
def write_rows(
    buf: Bytes, lines: Lines, selected: Integers, first: int, names: SpaceNames, out: Bytes, to: int, stack: Integers
) -> tuple[int, int, int]:
    """Lines of the rows selected[first:]: (rows done, offset behind them, status of the next row)."""
    stamp, stamp_at, stamp_size = np.int64(0), 0, 0
    for i in range(first, selected.size):
        if to + 3 * ROOM > out.size:
            return i, to, FULL
        row = selected[i]
        at = _write_header(lines, row, out, to)
        if lines.timestamp[row] != 0:
            at = put(out, at, ',"timestamp":')
            if lines.timestamp[row] == stamp:  # rows that were written together share it
                copy32(out, at, out, stamp_at)
            else:
                stamp, stamp_at = lines.timestamp[row], at
                stamp_size = write_double(np.int64(stamp).view(np.float64), out, at) - at
            at += stamp_size
        at = poke(out, at, 125)
        if lines.body_at[row] < lines.row_end[row]:
            at, status = _write_body(buf, lines, row, names, out, at, stack)
            if status != OK:
                return i, to, status
        if at + ROOM > out.size:
            return i, to, FULL
        to = put(out, at, "}\n")
    return selected.size, to, OK


def plain_row(buf: Bytes, cells: scan.Cells, row: int, names: Mapping[int, str]) -> str:
    """Return the line of one row without its newline, in plain Python: the same text, for any value."""

    def cell(line: int) -> int:
        return int(cells[line, row])

    kind, flags, single = cell(scan.TYPE), cell(scan.FLAGS), cell(scan.SINGLE)
    header = [f'"lsn":{cell(scan.LSN)}'] if cell(scan.LSN) else []
    header += ['"commit":true'] if flags & _COMMIT and not single else []
    header += ['"wait_sync":true'] if flags & _WAIT_SYNC else []
    header += ['"wait_ack":true'] if flags & _WAIT_ACK else []
    header += [f'"replica_id":{cell(scan.REPLICA_ID)}'] if cell(scan.REPLICA_ID) else []
    header += [f'"group_id":{cell(scan.GROUP_ID)}'] if cell(scan.GROUP_ID) else []
    header += [f'"type":"{_TYPES[kind]}"' if kind in _TYPES else f'"type":{kind}']
    header += [f'"tsn":{cell(scan.TSN)}'] if not single else []
    if cell(scan.TIMESTAMP):
        header.append(f'"timestamp":{json_double(cells[scan.TIMESTAMP, row : row + 1].view(np.float64)[0])}')
    body = buf[cell(scan.BODY_AT) : cell(scan.ROW_END)].tobytes()
    space = names.get(cell(scan.SPACE_ID))
    text = f',"BODY":{{{",".join(_plain_fields(body, kind, space))}}}' if body else ""
    return f'{{"HEADER":{{{",".join(header)}}}{text}}}'


def _plain_fields(body: bytes, kind: int, space: str | None) -> list[str]:
    known = _RAFT_KEYS if kind == _RAFT else _KEYS
    fields = []
    for key, value in json_pairs(body):
        code = int(key) if key.isdigit() else -1
        if kind == _RAFT and code == _STATE and value.isdigit():
            value = f'"{_RAFT_STATES[int(value)]}"' if int(value) in _RAFT_STATES else value
        fields.append(f'"{known[code]}":{value}' if code in known else f"{json_key(key)}:{value}")
        if kind != _RAFT and code == _SPACE_ID and space is not None:
            fields.append(f'"space":{json_string(space.encode("utf-8", "surrogateescape"))}')
    return fields


def _names(names: Mapping[int, str]) -> SpaceNames:
    # A row holds its space's id as a signed number; a larger id can be defined, but no row can be of that space.
    ids = sorted(space_id for space_id in names if space_id < 1 << 63)
    texts = [f',"space":{json_string(names[i].encode("utf-8", "surrogateescape"))}'.encode() for i in ids]
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    joined = np.frombuffer(b"".join(texts) or b"\0", np.uint8)
    return SpaceNames(
        np.ascontiguousarray(np.array(ids, np.int64)), np.ascontiguousarray(offsets), np.ascontiguousarray(joined)
    )


LINE_SIZE_GUESS = 160
"""Bytes that header and names add to a row's own text, which is about twice as long as its MessagePack."""


def json_lines(buf: Bytes, cells: scan.Cells, selected: Integers, names: Mapping[int, str]) -> memoryview:
    """The rows `selected` of a scanned buffer as JSON lines. `names` are those of spaces, by id.

    Safe in many threads at once; the kernel lets other threads run. JsonError names the row whose body is broken.
    """
    buf, selected = np.ascontiguousarray(buf), np.ascontiguousarray(selected.astype(np.int64, copy=False))
    lines = Lines(*(np.ascontiguousarray(cells[getattr(scan, field.upper())]) for field in Lines._fields))
    size = int(np.sum(lines.row_end[selected] - cells[scan.ROW_AT][selected])) if selected.size else 0
    out: Bytes = np.empty(2 * size + LINE_SIZE_GUESS * selected.size + 4 * ROOM, np.uint8)
    stack: Integers = np.empty(NESTING_MAX, np.int64)
    known = _names(names)
    done = used = 0
    while True:
        done, used, status = write_rows(buf, lines, selected, done, known, out, used, stack)
        if status == OK:
            return out[:used].data
        if status == FULL:
            out = grown(out, used, 0)
            continue
        row = int(selected[done])
        try:
            text = plain_row(buf, cells, row, names).encode() + b"\n"
        except JsonError as error:
            raise JsonError(f"row at byte {cells[scan.ROW_AT, row]} has no readable body: {error}") from error
        if used + len(text) > out.size:
            out = grown(out, used, len(text))
        out[used : used + len(text)] = np.frombuffer(text, np.uint8)
        done, used = done + 1, used + len(text)
