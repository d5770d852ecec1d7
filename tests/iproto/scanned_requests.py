"""Comparison of the request scanner with the plain decoder, for tests and fuzzing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowstone.box.lane.statement_lane import StatementLane
from flowstone.box.lane.table import table_of
from flowstone.box.lane.writes import Writes
from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.packet import PacketError, split
from flowstone.iproto.request_scan_kernels import scan_requests
from flowstone.iproto.requests import decode_request
from flowstone.iproto.scan import Cells
from tests.box.spaces import box_with, definition, on

SIMPLE_TYPES = (
    RequestType.SELECT,
    RequestType.INSERT,
    RequestType.REPLACE,
    RequestType.UPDATE,
    RequestType.DELETE,
    RequestType.UPSERT,
)
NUMBERS = {
    scan.INDEX_ID: Key.INDEX_ID,
    scan.ITERATOR: Key.ITERATOR,
    scan.OFFSET: Key.OFFSET,
    scan.LIMIT: Key.LIMIT,
    scan.INDEX_BASE: Key.INDEX_BASE,
}
"""The lines of numbers that a simple request may have."""

PARTS = {
    Key.KEY: (scan.KEY_AT, scan.KEY_END),
    Key.TUPLE: (scan.TUPLE_AT, scan.TUPLE_END),
    Key.OPS: (scan.OPS_AT, scan.OPS_END),
}
PARTS_OF = {
    RequestType.SELECT: {Key.KEY},
    RequestType.INSERT: {Key.TUPLE},
    RequestType.REPLACE: {Key.TUPLE},
    RequestType.UPDATE: {Key.KEY, Key.TUPLE},
    RequestType.DELETE: {Key.KEY},
    RequestType.UPSERT: {Key.TUPLE, Key.OPS},
}
NUMBERS_OF = {
    RequestType.SELECT: {Key.INDEX_ID, Key.ITERATOR, Key.OFFSET, Key.LIMIT},
    RequestType.UPDATE: {Key.INDEX_ID, Key.LIMIT, Key.INDEX_BASE},
    RequestType.DELETE: {Key.INDEX_ID, Key.LIMIT},
    RequestType.UPSERT: {Key.LIMIT, Key.INDEX_BASE},
}
"""The numbers that may differ from 0; a limit has no effect but on SELECT."""


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
    if request.error is not None:
        # Parts are checked later, one by one if invalid.
        assert execute(found, row) == 0
        return
    assert (request.type, request.sync) == (type, int(found.cells[scan.SYNC, row]) % 2**64)
    assert (request.stream_id, request.schema_version) == (0, 0)
    assert request.uint(Key.SPACE_ID) == space_id
    assert {key: request.fields.get(key) for key in PARTS} == {key: found.part(row, *at) for key, at in PARTS.items()}
    assert {key for key in PARTS if key in request.fields} == PARTS_OF[RequestType(type)]
    numbers = {key: int(found.cells[line, row]) for line, key in NUMBERS.items()}
    assert numbers == {key: request.uint(key) for key in numbers}
    assert {key for key, value in numbers.items() if value} <= NUMBERS_OF.get(RequestType(type), {Key.LIMIT})
    assert type != RequestType.SELECT or numbers[Key.LIMIT] > 0
    assert request.fields.keys() <= {Key.SPACE_ID, *NUMBERS.values(), *PARTS}


def execute(found: Found, row: int) -> int:
    """Execute the request on an empty space whose tuples may have any fields; return 1 if the lane can."""
    space = box_with(definition(512, on("0:scalar"))).space(512)
    table, code = table_of(space), int(found.cells[scan.CODE, row])
    assert table is not None
    lane = StatementLane(box_with())
    lane.begin(Writes(), 1000)
    return lane.execute(np.frombuffer(found.data, np.uint8), found.cells, row, row + 1, {code: table}, False)
