"""Keeps password hashes out of what is shown: rows of `_user` are rewritten before any format sees them.

A hash is as good as the password to whoever speaks the protocol. Works on pieces, so that no format can forget it. It
is for showing only: what is replayed or archived is never rewritten.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowstone.errors import RemoteProtocolError
from flowstone.history.reading import Piece
from flowstone.iproto import scan as rows_of
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack, unpack_body
from flowstone.iproto.scan import Bytes, Cells
from flowstone.xlog.reader import Slab

USER_SPACES = (304, 305)
"""`_user`, and `_vuser`, its view."""

HIDDEN = "<hidden>"


def hide_secrets(piece: Piece) -> Piece:
    """The piece with `HIDDEN` in place of every hash; row numbers stay. Without such rows, the piece itself."""
    space_ids = piece.slab.cells[rows_of.SPACE_ID]
    secret = np.isin(space_ids, USER_SPACES)
    if not secret[piece.rows].any():
        return piece
    return Piece(piece.meta, _rewritten(piece.slab, np.flatnonzero(secret)), piece.rows, piece.schema)


def _rewritten(slab: Slab, secret: Cells) -> Slab:
    starts, ends = slab.cells[rows_of.ROW_AT].tolist(), slab.cells[rows_of.ROW_END].tolist()
    parts = [slab.payload[start:end] for start, end in zip(starts, ends, strict=True)]
    for number in secret.tolist():
        body_at = int(slab.cells[rows_of.BODY_AT, number]) - starts[number]
        head, body = parts[number][:body_at], parts[number][body_at:]
        parts[number] = head + _hidden_body(body, int(slab.cells[rows_of.TYPE, number]))
    payload = b"".join(parts)
    buf: Bytes = np.frombuffer(payload, np.uint8)
    cells = rows_of.scan(buf, np.array([[0, len(payload)]], np.int64)).cells
    cells[rows_of.SPAN] = slab.cells[rows_of.SPAN]
    return Slab(slab.path, payload, buf, cells, slab.offsets, slab.skipped)


def _hidden_body(body: bytes, kind: int) -> bytes:
    try:
        values = unpack_body(body)
    except RemoteProtocolError:
        # It cannot be told where a hash would be, so nothing of it is shown.
        return pack({})
    operations = Key.TUPLE if kind == RequestType.UPDATE else Key.OPS
    for key in (Key.TUPLE, Key.OPS):
        if isinstance(values.get(key), tuple):
            hide = _hidden_operation if key == operations else _hidden_field
            values[key] = tuple(map(hide, values[key]))
    return pack(values)


def _hidden_field(value: Any) -> Any:
    """A field of a user: its name is a string of its own, hashes are inside of maps and arrays."""
    return _inside(value) if isinstance(value, dict | tuple) else value


def _hidden_operation(operation: Any) -> Any:
    if not isinstance(operation, tuple) or len(operation) < 2:
        return _inside(operation)
    what, field, *arguments = operation
    # A path, as 'auth.chap-sha1', leads inside of a field.
    is_path = isinstance(field, str) and any(mark in field for mark in ".[")
    return (what, field, *(_inside(each) if is_path else _hidden_field(each) for each in arguments))


def _inside(value: Any) -> Any:
    if isinstance(value, str | bytes):
        return HIDDEN
    if isinstance(value, tuple):
        return tuple(map(_inside, value))
    if isinstance(value, dict):
        return {key: _inside(item) for key, item in value.items()}
    return value
