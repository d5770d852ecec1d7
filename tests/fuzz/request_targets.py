"""Targets for a server's input: one request at a time, and many at once."""

from __future__ import annotations

import numpy as np

from flowstone.iproto import request_scan as scan
from flowstone.iproto.packet import PacketError, frame, split
from flowstone.iproto.request_scan_kernels import scan_requests
from flowstone.iproto.requests import decode_request, decode_uint
from flowstone.iproto.scan import Cells
from tests.fuzz import requests

SIZE_MAX = 1 << 16
PARTS = {
    0x20: (scan.KEY_AT, scan.KEY_END),
    0x21: (scan.TUPLE_AT, scan.TUPLE_END),
    0x28: (scan.OPS_AT, scan.OPS_END),
}
NUMBERS = {0x11: scan.INDEX_ID, 0x12: scan.LIMIT, 0x13: scan.OFFSET, 0x14: scan.ITERATOR, 0x15: scan.INDEX_BASE}


def one_request(data: bytes) -> None:
    """Check that a malformed request has an error, and that every field of a valid one can be read."""
    for is_2_6 in (False, True):
        request = decode_request(data, is_2_6=is_2_6)
        assert 0 <= request.type <= 0xFFFFFFFFFFFFFFFF
        assert request.error is None or not request.fields
        for key in (0x22, 0x23, 0x27, 0x57):
            if key in request.fields and request.error is None:
                request.text(key)


def many_requests(data: bytes) -> None:
    """Check that the scanner splits packets like `split`, and reads plain statements like `decode_request`."""
    buf = np.frombuffer(data, np.uint8)
    middle = len(data) // 2
    for bounds in ([(0, len(data))], [(0, middle), (middle, len(data))]):
        spans = np.array([[start, end, start, SIZE_MAX, 0] for start, end in bounds], np.int64)
        cells = np.full((scan.LINES, 64), -7, np.int64)
        count = scan_requests(buf, spans, cells)
        _compare_cuts(data, spans, cells[:, :count])
        for column in cells[:, :count].T.tolist():
            if column[scan.CODE] >= 0:
                _compare(data, column)


def _compare_cuts(data: bytes, spans: Cells, cells: Cells) -> None:
    for number, (start, end, at, _, status) in enumerate(spans.tolist()):
        taken = cells[:, cells[scan.SPAN] == number]
        found = [data[a:b] for a, b in zip(taken[scan.PACKET_AT], taken[scan.PACKET_END], strict=True)]
        assert start <= at <= end
        assert split(data[start:at], size_max=SIZE_MAX) == (found, at - start)
        if cells.shape[1] == 64:
            continue
        try:
            assert split(data[start:end], size_max=SIZE_MAX)[1] == at - start
            split(data[at:end], size_max=SIZE_MAX)  # reports an invalid packet only if no valid one precedes
            assert status == scan.WAITING
        except PacketError:
            assert status != scan.WAITING


def _compare(data: bytes, column: list[int]) -> None:
    request = decode_request(data[column[scan.PACKET_AT] : column[scan.PACKET_END]])
    if request.error is not None:
        return  # a value is invalid below its first byte: the lane or a session checks it
    assert (request.type, request.sync) == (column[scan.TYPE], column[scan.SYNC] & 0xFFFFFFFFFFFFFFFF)
    assert decode_uint(request.fields[0x10]) == column[scan.SPACE_ID]
    for key, (at, end) in PARTS.items():
        assert request.fields.get(key, b"") == (data[column[at] : column[end]] if column[at] >= 0 else b"")
    for key, line in NUMBERS.items():
        assert decode_uint(request.fields.get(key, b"\0")) == column[line]


ONE = requests.CORPUS
MANY = (
    b"".join(frame(each) for each in (*requests.CHANGES, *requests.SELECTS)),
    *(frame(each) * 2 for each in (*requests.CHANGES, *requests.SELECTS, *requests.STREAMS)),
)
