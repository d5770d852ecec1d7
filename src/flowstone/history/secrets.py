"""Hides password hashes in output: rewrites rows of `_user` before they are formatted.

A client of the protocol can log in with the hash alone. Works on pieces, so that it covers every format. For display
only: rows that are replayed or archived are never rewritten. Only harmless data of a user is kept: numbers, its name,
its type, and the key of the request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from flowstone.errors import RemoteProtocolError
from flowstone.history.log_reading import Piece
from flowstone.history.selection import Mask
from flowstone.iproto import row_scanner
from flowstone.iproto import scan as rows_of
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack, unpack, unpack_body
from flowstone.iproto.scan import Bytes
from flowstone.iproto.slab import Slab

USER_SPACES = (304, 305)
"""`_user` and its view `_vuser`."""

HIDDEN = "<hidden>"

SLABS_REMEMBERED = 2
"""Slabs kept in rewritten form. Pieces of a slab are adjacent, but a transaction that is settled late can add a piece
of the previous slab."""

_SHOWN_FIELDS = {2: "name", 3: "type"}
_SHOWN_KEYS = frozenset(("chap-sha1", "pap-sha256"))
"""Names of authentication methods, the keys under which hashes are stored."""


def hide_secrets(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces with `HIDDEN` in place of every hash; row numbers do not change.

    Pieces that share a slab share the rewritten slab, too: transactions are identified by their slab. A slab without
    rows of users is passed through unchanged.
    """
    seen: deque[tuple[Slab, Slab]] = deque(maxlen=SLABS_REMEMBERED)
    for piece in pieces:
        shown = next((shown for slab, shown in seen if slab is piece.slab), None)
        if shown is None:
            shown = without_secrets(piece.slab)
            seen.append((piece.slab, shown))
        yield piece if shown is piece.slab else Piece(piece.meta, shown, piece.rows, piece.schema)


def without_secrets(slab: Slab) -> Slab:
    """Return the slab without hashes; the same object if it has no rows of users."""
    secret: Mask = np.isin(slab.cells[rows_of.SPACE_ID], USER_SPACES)
    return _rewritten(slab, secret) if secret.any() else slab


def _rewritten(slab: Slab, secret: Mask) -> Slab:
    starts, ends = slab.cells[rows_of.ROW_AT], slab.cells[rows_of.ROW_END]
    # Copy runs of other rows as they are; each secret row is a run of its own.
    is_cut = secret[1:] | secret[:-1] | (starts[1:] != ends[:-1])
    cuts = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(slab)]
    parts = []
    for first, end in pairwise(cuts):
        part = slab.payload[int(starts[first]) : int(ends[end - 1])]
        if secret[first]:
            body_at = int(slab.cells[rows_of.BODY_AT, first] - starts[first])
            part = part[:body_at] + hidden_body(part[body_at:], int(slab.cells[rows_of.TYPE, first]))
        parts.append(part)
    payload = b"".join(parts)
    buf: Bytes = np.frombuffer(payload, np.uint8)
    cells = row_scanner.scan(buf, np.array([[0, len(payload)]], np.int64)).cells
    cells[rows_of.SPAN] = slab.cells[rows_of.SPAN]
    return Slab(slab.path, payload, buf, cells, slab.offsets, slab.skipped)


def hidden_tuple(raw: bytes) -> bytes:
    """Return a tuple of `_user`, as MessagePack, without hashes."""
    value = unpack(raw)
    return pack(_hidden_value({Key.TUPLE: value}, Key.TUPLE, RequestType.INSERT))


def hidden_body(body: bytes, kind: int) -> bytes:
    """Return the body of a row of `_user` of type `kind` without hashes."""
    try:
        values = unpack_body(body)
    except RemoteProtocolError:
        # The position of a hash is unknown, so hide the whole body.
        return pack({})
    return pack({key: _hidden_value(values, key, kind) for key in values})


def _hidden_value(values: Mapping[int, Any], key: int, kind: int) -> Any:
    value = values[key]
    if not isinstance(value, tuple):
        return _inside(value)
    if key == Key.KEY:
        return tuple(each if isinstance(each, str) else _inside(each) for each in value)
    if key == (Key.TUPLE if kind == RequestType.UPDATE else Key.OPS):
        return tuple(_hidden_operation(each, values.get(Key.INDEX_BASE, 0)) for each in value)
    return tuple(_hidden_field(each, at in _SHOWN_FIELDS) for at, each in enumerate(value))


def _hidden_field(value: Any, is_shown: bool) -> Any:
    return value if is_shown and isinstance(value, str) else _inside(value)


def _hidden_operation(operation: Any, base: Any) -> Any:
    if not isinstance(operation, tuple) or len(operation) < 2:
        return _inside(operation)
    what, field, *arguments = operation
    is_shown = field in _SHOWN_FIELDS.values() if isinstance(field, str) else _is_shown_number(field, base)
    # The field may be a path such as 'auth.chap-sha1': the location of a hash, not a hash.
    place = _hidden_field(field, is_shown=True)
    return (_hidden_field(what, is_shown=True), place, *(_hidden_field(each, is_shown) for each in arguments))


def _is_shown_number(field: Any, base: Any) -> bool:
    return type(field) is int and type(base) is int and field - base in _SHOWN_FIELDS


def _inside(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, tuple):
        return tuple(map(_inside, value))
    if isinstance(value, dict):
        return {key if key in _SHOWN_KEYS else _inside(key): _inside(item) for key, item in value.items()}
    return HIDDEN
