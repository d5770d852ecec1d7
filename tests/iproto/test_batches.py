"""Rows and replies encoded in bulk equal, byte for byte, those encoded one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto import batches
from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.packet import encode_request
from flowstone.iproto.replies import encode_data
from flowstone.iproto.requests import decode_request
from flowstone.iproto.row import Row, decode_row, encode_header, encode_uint
from tests.iproto.scanned_requests import Found, scanned

EDGES = (0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1)
SYNCS = st.sampled_from((*EDGES, 2**63, 2**64 - 1))
SPACE_IDS = st.sampled_from([edge for edge in EDGES if edge < 2**32])
TUPLES = st.sampled_from([pack(value) for value in ((1,), ("x" * 300, None), (2**64 - 1, {"a": b"b"}), ())])


PART_KEYS = {1: (0x20,), 2: (0x21,), 3: (0x21,), 4: (0x20, 0x21), 5: (0x20,), 9: (0x28, 0x21)}
"""The parts of each type, in the order of a row."""


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(sorted(PART_KEYS)))
    body: dict[int, Any] = {0x10: draw(SPACE_IDS), 0x12: 1}
    if kind in (4, 5):
        body[0x11] = draw(st.sampled_from((0, 1, 300)))
    if kind in (4, 9):
        body[0x15] = draw(st.sampled_from((0, 1, 300)))
    body |= {key: unpack(draw(TUPLES)) for key in draw(st.permutations(PART_KEYS[kind]))}
    return encode_request(kind, draw(SYNCS), pack(body))


def plain_row(
    found: Found, row: int, key: bytes | None, replica_id: int, lsn: int, timestamp: float, flags: int
) -> bytes:
    request = decode_request(found.packet(row))
    fields = dict(request.fields)
    if key is not None and Key.KEY in fields:
        fields |= {Key.KEY.value: key, Key.INDEX_ID.value: b"\0"}
    pairs = [(Key.SPACE_ID, encode_uint(request.uint(Key.SPACE_ID)))]
    pairs += [(each, fields[each]) for each in (Key.INDEX_ID, Key.INDEX_BASE) if fields.get(each, b"\0") != b"\0"]
    pairs += [(Key(each), fields[each]) for each in PART_KEYS[request.type]]
    made = Row(request.type, replica_id, 0, lsn, timestamp, lsn, flags | Flag.COMMIT.value)
    return encode_header(made) + bytes([0x80 + len(pairs)]) + b"".join(bytes([each]) + raw for each, raw in pairs)


@given(
    st.lists(st.tuples(requests(), st.none() | TUPLES), max_size=6),
    st.sampled_from((1, 2, 31, 127, 2**32 - 1)),
    st.sampled_from([edge for edge in EDGES if 0 < edge < 2**63 - 8]),
    st.sampled_from((1.7e9, 1e-300, 123456.789)),
    st.integers(0, 3),
    st.sampled_from((0, 2, 6)),
)
def test_bulk_rows_equal_those_of_the_plain_encoder(
    asked: list[tuple[bytes, bytes | None]], replica_id: int, lsn: int, timestamp: float, start: int, flags: int
) -> None:
    found = scanned([b"".join(packet for packet, _ in asked)])
    start = min(start, len(asked))
    logged = [key for _, key in asked[start:]]
    out = np.full(batches.rows_bound(len(found.data), logged), 0xC1, np.uint8)
    buf = np.frombuffer(found.data, np.uint8)
    size, count = batches.build_rows(buf, found.cells, start, logged, out, replica_id, lsn, timestamp, flags)
    writes = [row for row in range(start, len(asked)) if found.cells[scan.TYPE, row] != RequestType.SELECT]
    wanted = [
        plain_row(found, row, asked[row][1], replica_id, lsn + number, timestamp, flags)
        for number, row in enumerate(writes)
    ]
    assert out[:size].tobytes() == b"".join(wanted)
    assert count == len(wanted)
    assert (out[size:] == 0xC1).all()
    for raw in wanted:
        assert decode_row(raw).timestamp == timestamp


@given(
    st.lists(st.tuples(requests(), st.none() | TUPLES | st.lists(TUPLES, max_size=3)), max_size=6),
    st.sampled_from((1, 80, 2**16, 2**32 - 1, 2**32 + 5)),
    st.booleans(),
    st.integers(0, 3),
)
def test_bulk_replies_equal_those_of_the_plain_encoder(
    answered: list[tuple[bytes, bytes | list[bytes] | None]], schema_version: int, wide: bool, start: int
) -> None:
    found = scanned([b"".join(packet for packet, _ in answered)])
    end = len(answered)
    start = min(start, end)
    results = [answer for _, answer in answered[start:]]
    out = np.full(batches.replies_bound(results), 0xC1, np.uint8)
    edges = np.zeros(end - start + 1, np.int64)
    size = batches.build_replies(results, found.cells, start, out, schema_version, int(wide), edges)
    syncs = [int(sync) % 2**64 for sync in found.cells[scan.SYNC, start:end]]
    wanted = [
        encode_data(
            sync, schema_version, [] if result is None else result if isinstance(result, list) else [result], wide
        )
        for sync, result in zip(syncs, results, strict=True)
    ]
    assert out[:size].tobytes() == b"".join(wanted)
    assert edges.tolist() == [0, *np.cumsum([len(reply) for reply in wanted]).tolist()]
    assert (out[size:] == 0xC1).all()


@pytest.mark.parametrize("timestamp", [0.0, -0.0, 1.5, -1e300, float("inf"), 1699999999.123456])
def test_row_timestamp_has_the_bits_of_the_float(timestamp: float) -> None:
    found = scanned([encode_request(RequestType.REPLACE.value, 1, pack({0x10: 512, 0x21: (1,)}))])
    out = np.zeros(batches.rows_bound(len(found.data), [None]), np.uint8)
    size, _ = batches.build_rows(np.frombuffer(found.data, np.uint8), found.cells, 0, [None], out, 1, 5, timestamp, 0)
    assert out[:size].tobytes() == plain_row(found, 0, None, 1, 5, timestamp, 0)
