"""Comparison of the request scanner with the plain decoder, for tests and fuzzing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowstone.box.engine import bulk
from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.packet import PacketError, split
from flowstone.iproto.request_scan_kernels import scan_requests
from flowstone.iproto.requests import Request, decode_request
from flowstone.iproto.scan import Cells
from tests.box.spaces import box_with, definition, on

SIMPLE_TYPES = (RequestType.SELECT, RequestType.INSERT, RequestType.REPLACE, RequestType.DELETE)
LANES = tuple(
    bulk.lane_of(box_with(definition(512, on(f"0:{kind}"))).space(512)) for kind in ("unsigned", "integer", "string")
)


class Found(NamedTuple):
    """The table of requests scanned from the bytes of several connections, and the state of each scan."""

    data: bytes
    cells: Cells
    spans: Cells

    def packet(self, row: int) -> bytes:
        return self.data[self.cells[scan.PACKET_AT, row] : self.cells[scan.PACKET_END, row]]

    def part(self, row: int, first: int, last: int) -> bytes | None:
        at = int(self.cells[first, row])
        return None if at < 0 else self.data[at : self.cells[last, row]]


def scanned(buffers: list[bytes], *, size_max: int = 1 << 20, room: int = 1000) -> Found:
    data = b"".join(buffers)
    spans: Cells = np.zeros((len(buffers), scan.SPAN_COLUMNS), np.int64)
    spans[:, scan.END] = np.cumsum([len(buffer) for buffer in buffers])
    spans[:, scan.START] = spans[:, scan.END] - [len(buffer) for buffer in buffers]
    spans[:, scan.AT] = spans[:, scan.START]
    spans[:, scan.SIZE_MAX] = size_max
    cells: Cells = np.full((scan.LINES, room), -7, np.int64)
    count = scan_requests(np.frombuffer(data, np.uint8), spans, cells)
    return Found(data, cells[:, :count], spans)


def check(found: Found) -> None:
    """Check packets against `split`, and simple requests against the decoder."""
    for number, (start, end, at, size_max, status) in enumerate(found.spans.tolist()):
        rows = np.flatnonzero(found.cells[scan.SPAN] == number).tolist()
        packets = [found.packet(row) for row in rows]
        assert (packets, at - start, status != scan.WAITING) == cut(found.data[start:end], size_max)
        for row in rows:
            if found.cells[scan.CODE, row] >= 0:
                check_simple(found, row)


def cut(data: bytes, size_max: int) -> tuple[list[bytes], int, bool]:
    """Return, by the plain rules, the packets, their end, and whether an invalid one follows."""
    packets: list[bytes] = []
    end = 0
    try:
        packets, end = split(data, size_max=size_max)
        split(data[end:], size_max=size_max)
    except PacketError:
        return packets, end, True
    return packets, end, False


def check_simple(found: Found, row: int) -> None:
    request = decode_request(found.packet(row))
    code, type, space_id = (int(found.cells[line, row]) for line in (scan.CODE, scan.TYPE, scan.SPACE_ID))
    assert type in SIMPLE_TYPES
    assert (code >> scan.TYPE_SHIFT, code & scan.SPACE_ID_MAX) == (type, space_id)
    key, tuple_ = found.part(row, scan.KEY_AT, scan.KEY_END), found.part(row, scan.TUPLE_AT, scan.TUPLE_END)
    if request.error is not None:
        # Key and tuple are checked later, one by one if invalid.
        assert not any(is_taken(found, row, lane) for lane in LANES if lane is not None)
        return
    assert (request.type, request.sync) == (type, int(found.cells[scan.SYNC, row]) % 2**64)
    assert (request.stream_id, request.schema_version) == (0, 0)
    assert request.uint(Key.SPACE_ID) == space_id
    assert (request.fields.get(Key.KEY), request.fields.get(Key.TUPLE)) == (key, tuple_)
    check_nothing_else(request)


def check_nothing_else(request: Request) -> None:
    """Check that further keys of a simple request have no effect."""
    assert [request.uint(key) for key in (Key.INDEX_ID, Key.OFFSET, Key.ITERATOR)] == [0, 0, 0]
    assert request.type != RequestType.SELECT or request.uint(Key.LIMIT) > 0
    known = {Key.SPACE_ID, Key.INDEX_ID, Key.OFFSET, Key.ITERATOR, Key.LIMIT, Key.KEY, Key.TUPLE}
    assert request.fields.keys() <= known
    assert (Key.KEY in request.fields) is (request.type in (RequestType.SELECT, RequestType.DELETE))


def is_taken(found: Found, row: int, lane: bulk.Lane) -> bool:
    """Return True if the kernels would execute the request in a space of this lane."""
    of_key = found.cells[scan.TYPE, row] in (RequestType.SELECT, RequestType.DELETE)
    first, last = (scan.KEY_AT, scan.KEY_END) if of_key else (scan.TUPLE_AT, scan.TUPLE_END)
    keys = bulk.request_keys if of_key else bulk.tuple_keys
    ats, ends = found.cells[first, row : row + 1], found.cells[last, row : row + 1]
    return keys(lane, found.data, np.frombuffer(found.data, np.uint8), ats, ends) is not None
