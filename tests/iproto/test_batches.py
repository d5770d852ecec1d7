"""Rows and replies encoded in bulk equal, byte for byte, those encoded one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto import batches
from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.packet import encode_request
from flowstone.iproto.replies import encode_data
from flowstone.iproto.row import Row, decode_row, encode_header, encode_uint
from tests.iproto.scanned_requests import Found, scanned

EDGES = (0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1)
SYNCS = st.sampled_from((*EDGES, 2**63, 2**64 - 1))
SPACE_IDS = st.sampled_from([edge for edge in EDGES if edge < 2**32])
TUPLES = st.sampled_from([pack(value) for value in ((1,), ("x" * 300, None), (2**64 - 1, {"a": b"b"}), ())])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from((RequestType.SELECT, RequestType.INSERT, RequestType.REPLACE, RequestType.DELETE)))
    of_key = kind in (RequestType.SELECT, RequestType.DELETE)
    body: dict[int, Any] = {0x10: draw(SPACE_IDS), 0x12: 1, (0x20 if of_key else 0x21): unpack(draw(TUPLES))}
    return encode_request(kind.value, draw(SYNCS), pack(body))


def parts(found: Found, row: int) -> tuple[int, int, bytes]:
    kind = int(found.cells[scan.TYPE, row])
    of_key = kind in (RequestType.SELECT, RequestType.DELETE)
    part = found.part(row, *((scan.KEY_AT, scan.KEY_END) if of_key else (scan.TUPLE_AT, scan.TUPLE_END)))
    assert part is not None
    return kind, int(found.cells[scan.SPACE_ID, row]), part


def plain_row(found: Found, row: int, replica_id: int, lsn: int, timestamp: float, flags: int) -> bytes:
    kind, space_id, part = parts(found, row)
    head = b"\x82\x10" + encode_uint(space_id) + (b"\x20" if kind == RequestType.DELETE else b"\x21")
    made = Row(kind, replica_id, 0, lsn, timestamp, lsn, flags | Flag.COMMIT.value)
    return encode_header(made) + head + part


@given(
    st.lists(requests(), max_size=6),
    st.sampled_from((1, 2, 31, 127, 2**32 - 1)),
    st.sampled_from([edge for edge in EDGES if 0 < edge < 2**63 - 8]),
    st.sampled_from((1.7e9, 1e-300, 123456.789)),
    st.integers(0, 3),
    st.sampled_from((0, 2, 6)),
)
def test_bulk_rows_equal_those_of_the_plain_encoder(
    packets: list[bytes], replica_id: int, lsn: int, timestamp: float, start: int, flags: int
) -> None:
    found = scanned([b"".join(packets)])
    end = len(packets)
    start = min(start, end)
    out = np.full(batches.rows_bound(end - start, len(found.data)), 0xC1, np.uint8)
    buf = np.frombuffer(found.data, np.uint8)
    size, count = batches.build_rows(buf, found.cells, start, end, out, replica_id, lsn, timestamp, flags)
    writes = [row for row in range(start, end) if found.cells[scan.TYPE, row] != RequestType.SELECT]
    wanted = [plain_row(found, row, replica_id, lsn + number, timestamp, flags) for number, row in enumerate(writes)]
    assert out[:size].tobytes() == b"".join(wanted)
    assert count == len(wanted)
    assert (out[size:] == 0xC1).all()
    for raw in wanted:
        assert decode_row(raw).timestamp == timestamp


@given(
    st.lists(st.tuples(requests(), st.none() | TUPLES), max_size=6),
    st.sampled_from((1, 80, 2**16, 2**32 - 1, 2**32 + 5)),
    st.booleans(),
    st.integers(0, 3),
)
def test_bulk_replies_equal_those_of_the_plain_encoder(
    answered: list[tuple[bytes, bytes | None]], schema_version: int, wide: bool, start: int
) -> None:
    found = scanned([b"".join(packet for packet, _ in answered)])
    end = len(answered)
    start = min(start, end)
    tuples = [answer for _, answer in answered[start:]]
    source = b"\xc1" + b"\xc1".join(raw for raw in tuples if raw is not None)
    sizes = np.array([-1 if raw is None else len(raw) for raw in tuples], np.int64)
    ats = np.cumsum(np.maximum(sizes + 1, 0)) - np.maximum(sizes, 0)
    out = np.full(batches.replies_bound(end - start, len(source)), 0xC1, np.uint8)
    edges = np.zeros(end - start + 1, np.int64)
    buf = np.frombuffer(source, np.uint8)
    size = batches.build_replies(buf, ats, sizes, found.cells, start, end, out, schema_version, int(wide), edges)
    syncs = [int(sync) % 2**64 for sync in found.cells[scan.SYNC, start:end]]
    wanted = [
        encode_data(sync, schema_version, [] if raw is None else [raw], wide)
        for sync, raw in zip(syncs, tuples, strict=True)
    ]
    assert out[:size].tobytes() == b"".join(wanted)
    assert edges.tolist() == [0, *np.cumsum([len(reply) for reply in wanted]).tolist()]
    assert (out[size:] == 0xC1).all()


@pytest.mark.parametrize("timestamp", [0.0, -0.0, 1.5, -1e300, float("inf"), 1699999999.123456])
def test_row_timestamp_has_the_bits_of_the_float(timestamp: float) -> None:
    found = scanned([encode_request(RequestType.REPLACE.value, 1, pack({0x10: 512, 0x21: (1,)}))])
    out = np.zeros(batches.rows_bound(1, len(found.data)), np.uint8)
    size, _ = batches.build_rows(np.frombuffer(found.data, np.uint8), found.cells, 0, 1, out, 1, 5, timestamp, 0)
    assert out[:size].tobytes() == plain_row(found, 0, 1, 5, timestamp, 0)
