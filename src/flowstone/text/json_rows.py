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
from flowstone.text.json_limits import FULL, OK, ROOM
from flowstone.text.json_plain import JsonError, json_double, json_key, json_pairs, json_string
from flowstone.text.json_row_names import KEYS, RAFT_KEYS, RAFT_STATES, TYPES
from flowstone.text.json_rows_kernels import write_rows
from flowstone.text.json_text import Bytes, Integers, grown

_RAFT, _STATE, _SPACE_ID = RequestType.RAFT.value, RaftKey.STATE.value, Key.SPACE_ID.value
_COMMIT, _WAIT_SYNC, _WAIT_ACK = Flag.COMMIT.value, Flag.WAIT_SYNC.value, Flag.WAIT_ACK.value


class SpaceNames(NamedTuple):
    """Known spaces: ids in ascending order, and where `,"space":"…"` of each stands in `texts`."""

    space_ids: Integers
    offsets: Integers
    texts: Bytes


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
    header += [f'"type":"{TYPES[kind]}"' if kind in TYPES else f'"type":{kind}']
    header += [f'"tsn":{cell(scan.TSN)}'] if not single else []
    if cell(scan.TIMESTAMP):
        header.append(f'"timestamp":{json_double(cells[scan.TIMESTAMP, row : row + 1].view(np.float64)[0])}')
    body = buf[cell(scan.BODY_AT) : cell(scan.ROW_END)].tobytes()
    space = names.get(cell(scan.SPACE_ID))
    text = f',"BODY":{{{",".join(_plain_fields(body, kind, space))}}}' if body else ""
    return f'{{"HEADER":{{{",".join(header)}}}{text}}}'


def _plain_fields(body: bytes, kind: int, space: str | None) -> list[str]:
    known = RAFT_KEYS if kind == _RAFT else KEYS
    fields = []
    for key, value in json_pairs(body):
        code = int(key) if key.isdigit() else -1
        if kind == _RAFT and code == _STATE and value.isdigit():
            value = f'"{RAFT_STATES[int(value)]}"' if int(value) in RAFT_STATES else value
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
    return SpaceNames(np.array(ids, np.int64), offsets, joined)


LINE_SIZE_GUESS = 160
"""Bytes that header and names add to a row's own text, which is about twice as long as its MessagePack."""


def json_lines(buf: Bytes, cells: scan.Cells, selected: Integers, names: Mapping[int, str]) -> memoryview:
    """The rows `selected` of a scanned buffer as JSON lines. `names` are the names of spaces, by id.

    Safe in many threads at once; the kernel lets other threads run. JsonError names the row whose body is broken.
    """
    buf, selected = np.ascontiguousarray(buf), selected.astype(np.int64, copy=False)
    size = int(np.sum(cells[scan.ROW_END][selected] - cells[scan.ROW_AT][selected]))
    out: Bytes = np.empty(2 * size + LINE_SIZE_GUESS * selected.size + 4 * ROOM, np.uint8)
    stack: Integers = np.empty(NESTING_MAX, np.int64)
    known = _names(names)
    done = used = 0
    while True:
        done, used, status = write_rows(buf, cells, selected, done, *known, out, used, stack)
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
