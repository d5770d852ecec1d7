"""Rows and slabs from raw MessagePack, for tests of their readers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowstone.iproto.row import Row
from flowstone.iproto.row_scanner import scan
from flowstone.iproto.slab import Slab


def body(pairs: dict[int, bytes]) -> bytes:
    """Return a body map of raw values."""
    return bytes((0x80 + len(pairs),)) + b"".join(bytes((key,)) + value for key, value in pairs.items())


def array(values: Sequence[bytes]) -> bytes:
    return b"\xdc" + len(values).to_bytes(2, "big") + b"".join(values)


def insert(values: Sequence[bytes], lsn: int = 1, tsn: int = 1) -> bytes:
    """Return an INSERT of raw field values into space 512."""
    pairs = {0x10: b"\xcd\x02\x00", 0x21: array(values)}
    return Row(2, replica_id=1, lsn=lsn, tsn=tsn, body=body(pairs)).encode()


def slab_of(rows: Sequence[bytes], path: str = "some.xlog") -> Slab:
    """Return the rows in one block of a file of that name."""
    payload = b"".join(rows)
    buf = np.frombuffer(payload, np.uint8)
    found = scan(buf, np.array([[0, len(payload)]], np.int64))
    assert not found.wrong, found.wrong
    assert len(found) == len(rows)
    return Slab(path, payload, buf, found.cells, np.array([100], np.int64))
