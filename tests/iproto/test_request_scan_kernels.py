"""The request scanner: packets equal those of `split`, and simple requests those of the decoder."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto import request_scan as scan
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import encode_request, frame
from tests.iproto.scanned_requests import check, scanned
from tests.iproto.test_scan_kernels import ANYTHING, EXTENSIONS, map_of, unsigned

SELECT, INSERT, REPLACE, UPDATE, DELETE, UPSERT = (
    RequestType.SELECT.value,
    RequestType.INSERT.value,
    RequestType.REPLACE.value,
    RequestType.UPDATE.value,
    RequestType.DELETE.value,
    RequestType.UPSERT.value,
)


def request(type: int, sync: int = 1, **body: Any) -> bytes:
    return encode_request(type, sync, pack({Key[name].value: value for name, value in body.items()}))


def statement(type: int, sync: int, space_id: int, values: tuple[Any, ...]) -> bytes:
    """Return a statement in the encoding of real clients."""
    if type == SELECT:
        more = {"INDEX_ID": 0, "LIMIT": 1, "OFFSET": 0, "ITERATOR": 0}
        return request(type, sync, SPACE_ID=space_id, **more, KEY=values)
    if type == DELETE:
        return request(type, sync, SPACE_ID=space_id, INDEX_ID=0, KEY=values)
    if type == UPDATE:
        return request(type, sync, SPACE_ID=space_id, INDEX_ID=1, INDEX_BASE=1, KEY=values, TUPLE=(("=", 1, 2),))
    if type == UPSERT:
        return request(type, sync, SPACE_ID=space_id, INDEX_BASE=1, OPS=(("=", 1, 2),), TUPLE=values)
    return request(type, sync, SPACE_ID=space_id, TUPLE=values)


STATEMENTS = st.builds(
    statement,
    st.sampled_from((SELECT, INSERT, REPLACE, UPDATE, DELETE, UPSERT)),
    st.sampled_from((0, 1, 127, 255, 2**32, 2**63, 2**64 - 1)),
    st.sampled_from((0, 127, 512, 2**31, 2**32 - 1)),
    st.tuples(st.integers(0, 9) | st.text(max_size=9)),
)
NUMBERS = st.sampled_from((0, 0, 0, 1, 127, 512, 2**32 - 1, 2**32, 2**32 + 512, 2**63, 2**64 - 1))
SMALL: tuple[Any, ...] = ((), (1,), ("x",), (-1,), (1, "x", None, {}))
ARRAYS = st.sampled_from([pack(value) for value in SMALL])


@st.composite
def odd_requests(draw: st.DrawFn) -> bytes:
    """Draw requests whose headers and bodies have any keys, in any order and width."""
    header = {Key.REQUEST_TYPE.value: draw(st.sampled_from((1, 2, 3, 4, 5, 9, 64, 2**31 + 1)))}
    for key in (Key.SYNC, Key.SCHEMA_VERSION, Key.STREAM_ID, Key.REPLICA_ID):
        if draw(st.integers(0, 5 if key != Key.SYNC else 1)) == 0:
            header[key.value] = draw(NUMBERS)
    body: dict[int, bytes] = {}
    for key in (Key.SPACE_ID, Key.INDEX_ID, Key.LIMIT, Key.OFFSET, Key.ITERATOR, Key.INDEX_BASE):
        if draw(st.integers(0, 2)):
            body[key.value] = draw(NUMBERS.flatmap(lambda value: st.sampled_from(unsigned(value))))
    for key in (Key.KEY, Key.TUPLE, Key.OPS):
        if draw(st.booleans()):
            body[key.value] = draw(ARRAYS | ANYTHING | EXTENSIONS)
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.sampled_from((0, 0x2A, 0x5E, 300)))] = draw(ANYTHING)
    pairs = [
        [(draw(st.sampled_from(unsigned(key))), value) for key, value in part.items()]
        for part in ({key: draw(st.sampled_from(unsigned(value))) for key, value in header.items()}, body)
    ]
    head, tail = (map_of(draw(st.permutations(part)), draw(st.booleans())) for part in pairs)
    return framed(head + tail + draw(st.sampled_from((b"", b"", b"\xc0"))), draw(st.integers(0, 4)))


def framed(payload: bytes, width: int) -> bytes:
    """Return the packet, with its length in a valid encoding."""
    forms = unsigned(len(payload))
    return forms[width % len(forms)] + payload


@given(st.lists(st.lists(STATEMENTS, max_size=5), min_size=1, max_size=3))
def test_statements_of_real_clients_are_simple(connections: list[list[bytes]]) -> None:
    found = scanned([b"".join(packets) for packets in connections])
    assert found.cells.shape[1] == sum(map(len, connections))
    assert (found.cells[scan.CODE] >= 0).all()
    check(found)


@given(st.lists(st.lists(STATEMENTS | odd_requests(), max_size=4).map(b"".join), min_size=1, max_size=3))
def test_scan_of_any_requests_equals_the_plain_decoder(buffers: list[bytes]) -> None:
    check(scanned(buffers))


@given(st.lists(STATEMENTS | odd_requests(), min_size=1, max_size=3), st.data())
def test_scan_of_changed_bytes_equals_the_plain_decoder(packets: list[bytes], data: st.DataObject) -> None:
    changed = bytearray(b"".join(packets))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    check(scanned([bytes(changed), b"".join(packets)]))


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=3))
def test_scan_splits_any_bytes_like_split(buffers: list[bytes]) -> None:
    check(scanned(buffers, size_max=50))


@given(st.lists(STATEMENTS, min_size=1, max_size=3), st.data())
def test_scan_stops_at_the_first_byte_of_an_incomplete_packet(packets: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(packets)
    cut = data.draw(st.integers(0, len(whole)))
    found = scanned([whole[:cut]])
    end = int(found.spans[0, scan.AT])
    assert found.spans[0, scan.STATUS] == scan.WAITING
    assert end <= cut
    assert scanned([whole[end:]]).cells.shape[1] + found.cells.shape[1] == len(packets)


@pytest.mark.parametrize(
    ("tail", "status"),
    [
        (b"", scan.WAITING),
        (b"\xce\x00\x00", scan.WAITING),
        (b"\xcf\x00\x00\x00\x00\x00\x00\x00", scan.WAITING),
        (b"\x03\x80", scan.WAITING),
        (b"\x00", scan.TOO_LARGE),
        (b"\xcd\x04\x01", scan.TOO_LARGE),
        (b"\xcf\x7f" + bytes(7), scan.TOO_LARGE),
        (b"\xcf\x80" + bytes(7), scan.WRONG_LENGTH),
        (b"\x80", scan.WRONG_LENGTH),
        (b"\xd0\x05", scan.WRONG_LENGTH),
        (b"\xff", scan.WRONG_LENGTH),
        (b"\xa3abc", scan.WRONG_LENGTH),
    ],
)
def test_scan_reports_its_stop_reason_after_the_last_complete_packet(tail: bytes, status: int) -> None:
    good = statement(REPLACE, 1, 512, (1,))
    found = scanned([good + tail, good], size_max=1024)
    assert found.spans[:, scan.STATUS].tolist() == [status, scan.WAITING]
    assert found.spans[:, scan.AT].tolist() == [len(good), 2 * len(good) + len(tail)]
    assert found.cells[scan.SPAN].tolist() == [0, 1]


def test_scan_stops_at_a_full_table() -> None:
    packets = [statement(SELECT, sync, 512, (sync,)) for sync in range(10)]
    found = scanned([b"".join(packets[:4]), b"".join(packets[4:])], room=7)
    assert found.cells[scan.SYNC].tolist() == list(range(7))
    rest = [found.data[at:end] for at, end in found.spans[:, [scan.AT, scan.END]].tolist()]
    assert rest == [b"", b"".join(packets[7:])]


@pytest.mark.parametrize(
    "packet",
    [
        request(SELECT, SPACE_ID=512, KEY=(1,)),
        request(SELECT, SPACE_ID=512, KEY=(1,), LIMIT=0),
        request(SELECT, SPACE_ID=512, KEY=1, LIMIT=1),
        request(SELECT, SPACE_ID=512, KEY=(1,), LIMIT=1, INDEX_BASE=1),
        request(DELETE, SPACE_ID=512, KEY=(1,), ITERATOR=1),
        request(DELETE, SPACE_ID=512, KEY=(1,), OFFSET=1),
        request(DELETE, SPACE_ID=512),
        request(REPLACE, SPACE_ID=512),
        request(REPLACE, TUPLE=(1,)),
        request(REPLACE, SPACE_ID=512, TUPLE=(1,), KEY=(1,)),
        request(REPLACE, SPACE_ID=512, TUPLE=(1,), INDEX_BASE=1),
        request(INSERT, SPACE_ID=2**32 + 512, TUPLE=(1,)),
        request(INSERT, SPACE_ID=-1, TUPLE=(1,)),
        request(INSERT, SPACE_NAME="s", TUPLE=(1,)),
        request(REPLACE, SPACE_ID=512, TUPLE=(1,), INDEX_ID=1),
        request(REPLACE, SPACE_ID=512, TUPLE={}),
        request(UPDATE, SPACE_ID=512, KEY=(1,)),
        request(UPDATE, SPACE_ID=512, KEY=(1,), OPS=()),
        request(UPSERT, SPACE_ID=512, TUPLE=(1,)),
        request(UPSERT, SPACE_ID=512, TUPLE=(1,), OPS=(), KEY=(1,)),
        request(UPSERT, SPACE_ID=512, TUPLE=(1,), OPS=(), INDEX_ID=1),
        request(UPSERT, SPACE_ID=512, TUPLE=(1,), OPS="+"),
        request(RequestType.PING),
        encode_request(REPLACE, 1, pack({0x10: 512, 0x21: (1,)}), stream_id=1),
        frame(pack({0: REPLACE, 1: 1, 5: 7}) + pack({0x10: 512, 0x21: (1,)})),
        frame(pack({0: REPLACE, 1: 1}) + pack({0x10: 512, 0x21: (1,)}) + b"\xc0"),
        frame(pack({0: REPLACE, 1: 1})),
        frame(pack({1: 1}) + pack({0x10: 512, 0x21: (1,)})),
        frame(b"\xc1"),
    ],
)
def test_unsupported_requests_are_not_simple(packet: bytes) -> None:
    """Neighbouring requests remain simple."""
    good = statement(REPLACE, 9, 512, (1,))
    found = scanned([good + packet + good])
    assert (found.cells[scan.CODE] >= 0).tolist() == [True, False, True]
    check(found)


def test_sync_of_64_bits_is_preserved() -> None:
    found = scanned([statement(SELECT, 2**64 - 2, 512, (1,))])
    assert found.cells[scan.SYNC].tolist() == [-2]


def test_runs_are_ranges_of_equal_codes() -> None:
    assert scan.runs(np.array([], np.int64)) == []
    assert scan.runs(np.array([5])) == [(5, 0, 1)]
    assert scan.runs(np.array([5, 5, -1, 5, 7, 7])) == [(5, 0, 2), (-1, 2, 3), (5, 3, 4), (7, 4, 6)]


def test_forged_counts_are_not_trusted() -> None:
    for payload in (b"\xdf\xff\xff\xff\xff\x00\x03", b"\x82\x00\x03\x01\x01\x82\x10\x05\x21\xdd\xff\xff\xff\xff"):
        check(scanned([struct.pack(">BI", 0xCE, len(payload)) + payload]))
