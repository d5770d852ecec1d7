"""The row scanner: rows equal those of the plain decoder, and the end offset is exact."""

from __future__ import annotations

import struct
import warnings
from typing import Any

import msgpack as reference
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import FlowstoneError
from flowstone.iproto import msgpack, row_scanner, scan
from flowstone.iproto.constants import Key
from flowstone.iproto.limits import ROW_HEADER_SIZE_MAX
from flowstone.iproto.row import Row, RowError, decode_row
from flowstone.iproto.row_batch_kernels import gather_log_rows
from flowstone.iproto.row_batches import rows_bound
from flowstone.iproto.row_scanner import Scan
from flowstone.iproto.scan_kernels import skip_value
from tests.native.twins import twin

LAYOUTS = {1: ">B", 2: ">H", 4: ">I", 8: ">Q"}


def unsigned(value: int) -> list[bytes]:
    """Return every encoding of an unsigned number."""
    forms = [bytes((value,))] if value < 128 else []
    widths = [(0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)]
    return forms + [bytes((m,)) + struct.pack(LAYOUTS[w], value) for m, w in widths if value < 1 << 8 * w]


def in_any_width(values: st.SearchStrategy[int]) -> st.SearchStrategy[bytes]:
    return values.flatmap(lambda value: st.sampled_from(unsigned(value)))


EDGES = st.sampled_from((0, 1, 31, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1))
NUMBERS = in_any_width(EDGES | st.integers(0, 2**63 - 1))
ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=9),
        st.binary(max_size=9),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 9), inner, max_size=3),
    max_leaves=5,
).map(msgpack.pack)
EXTENSIONS = st.builds(
    lambda code, data: bytes((0xC7, len(data), code)) + data, st.integers(0, 127), st.binary(max_size=20)
)
TIMESTAMPS = st.floats(allow_nan=False).map(lambda value: b"\xcb" + struct.pack(">d", value))


def map_of(pairs: list[tuple[bytes, bytes]], wide: bool) -> bytes:
    head = b"\xde" + struct.pack(">H", len(pairs)) if wide or len(pairs) > 15 else bytes((0x80 + len(pairs),))
    return head + b"".join(key + value for key, value in pairs)


@st.composite
def encoded_rows(draw: st.DrawFn) -> bytes:
    """Draw a row with any body and any header keys, in any order and encoding."""
    kind = draw(st.sampled_from((2, 3, 4, 5, 9, 12, 12, 30, 31, 40, 128, 5000)))
    lsn = draw(EDGES | st.integers(0, 2**40))
    pairs: dict[int, bytes] = {Key.REQUEST_TYPE: draw(st.sampled_from(unsigned(kind)))}
    if lsn:
        pairs[Key.LSN] = draw(st.sampled_from(unsigned(lsn)))
    if draw(st.booleans()):
        tsn = draw(st.integers(0, 2**41))  # above the LSN for a local row before its global one: wraps around
        pairs[Key.TSN] = draw(st.sampled_from(unsigned((lsn - tsn) % 2**64)))
    for key in (Key.SYNC, Key.REPLICA_ID, Key.GROUP_ID, Key.FLAGS, Key.SCHEMA_VERSION, Key.STREAM_ID):
        if draw(st.booleans()):
            pairs[key] = draw(NUMBERS)
    if draw(st.booleans()):
        pairs[Key.TIMESTAMP] = draw(TIMESTAMPS)
    for other in draw(st.sets(st.sampled_from((0x06, 0x0B, 0x10, 0x21, 0x7F, 200, 70000)), max_size=2)):
        pairs[other] = draw(st.integers(0, 99).map(msgpack.pack) | st.text(max_size=9).map(msgpack.pack))
    ordered = draw(st.permutations([(draw(st.sampled_from(unsigned(key))), value) for key, value in pairs.items()]))
    header = map_of(ordered, draw(st.booleans()))
    return header if kind == 12 else header + draw(bodies())


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    pairs: dict[int, bytes] = {}
    for key in (Key.SPACE_ID, Key.INDEX_ID, Key.INDEX_BASE):
        if draw(st.booleans()):
            pairs[key] = draw(NUMBERS)
    for other in draw(
        st.sets(st.sampled_from((Key.KEY, Key.TUPLE, Key.OPS, 0x2A, 0, 1, 2, 3, 0x53, 0x26, 300)), max_size=5)
    ):
        pairs[other] = draw(ANYTHING | EXTENSIONS)
    ordered = draw(st.permutations([(draw(st.sampled_from(unsigned(key))), value) for key, value in pairs.items()]))
    return map_of(ordered, draw(st.booleans()))


def scanned(data: bytes, spans: list[tuple[int, int]] | None = None, **how: bool) -> Scan:
    table = np.array(spans if spans is not None else [(0, len(data))], np.int64).reshape(-1, 2)
    return row_scanner.scan(np.frombuffer(data, np.uint8), table, **how)


def row_at(found: Scan, data: bytes, number: int) -> Row:
    """Return the header lines of one column as a row."""
    cells: dict[int, int] = dict(enumerate(found.cells[:, number].tolist()))
    return Row(
        cells[scan.TYPE],
        cells[scan.REPLICA_ID],
        cells[scan.GROUP_ID],
        cells[scan.LSN],
        struct.unpack(">d", struct.pack(">q", cells[scan.TIMESTAMP]))[0],
        cells[scan.TSN] % 2**64,
        cells[scan.FLAGS],
        body=data[cells[scan.BODY_AT] : cells[scan.ROW_END]],
        raw=data[cells[scan.ROW_AT] : cells[scan.ROW_END]],
    )


def plain(data: bytes) -> Row:
    row = decode_row(data)
    row.sync = row.stream_id = 0  # keys that logs do not have
    return row


def pairs_of(body: bytes) -> dict[int, tuple[int, int]]:
    """Return start and end of each value of a body map, computed with the reference decoder only."""
    unpacker = reference.Unpacker(raw=True, strict_map_key=False, ext_hook=lambda code, data: None)
    unpacker.feed(body)
    found = {}
    for _ in range(unpacker.read_map_header() if body else 0):
        marker = body[unpacker.tell()]
        key = unpacker.unpack()
        start = unpacker.tell()
        unpacker.skip()
        # Keys are unsigned; a server ignores any other, including 0x21 encoded as a signed integer.
        if marker < 0x80 or 0xCC <= marker <= 0xCF:
            found[key] = (start, unpacker.tell())
    return found


PARTS = (
    (Key.KEY, scan.KEY_AT, scan.KEY_END),
    (Key.TUPLE, scan.TUPLE_AT, scan.TUPLE_END),
    (Key.OPS, scan.OPS_AT, scan.OPS_END),
)


def check_body(found: Scan, number: int, row: Row) -> None:
    cells = found.cells[:, number].tolist()
    parts = pairs_of(row.body)
    values = {key: row.body[a:b] for key, (a, b) in parts.items()}
    assert cells[scan.SPACE_ID] == (msgpack.unpack(values[0x10]) if 0x10 in values else -1)
    assert cells[scan.INDEX_ID] == (msgpack.unpack(values[0x11]) if 0x11 in values else 0)
    assert cells[scan.INDEX_BASE] == (msgpack.unpack(values[0x15]) if 0x15 in values else 0)
    base = cells[scan.BODY_AT]
    for key, at, end in PARTS:
        expected = (base + parts[key][0], base + parts[key][1]) if key in parts else (-1, -1)
        assert (cells[at], cells[end]) == expected


@given(st.lists(st.lists(encoded_rows(), max_size=3), max_size=3), st.binary(max_size=5))
def test_rows_of_several_spans_equal_those_of_the_plain_decoder(blocks: list[list[bytes]], gap: bytes) -> None:
    data, spans = b"", []
    for block in blocks:
        data += gap
        start = len(data)
        data += b"".join(block)
        spans.append((start, len(data)))
    found = scanned(data, spans)
    expected = [(number, raw) for number, block in enumerate(blocks) for raw in block]
    assert found.wrong == ()
    assert found.cells[scan.SPAN].tolist() == [number for number, _ in expected]
    for number, (_, raw) in enumerate(expected):
        assert row_at(found, data, number) == plain(raw)
        assert found.cells[scan.SINGLE, number] == (0 if Key.TSN in header_of(raw) else 1)
        check_body(found, number, plain(raw))


def header_of(raw: bytes) -> dict[Any, Any]:
    unpacker = reference.Unpacker(raw=True, strict_map_key=False)
    unpacker.feed(raw)
    header: dict[Any, Any] = unpacker.unpack()
    return header


@given(encoded_rows())
def test_every_truncation_of_a_row_is_malformed_at_its_start(raw: bytes) -> None:
    good = Row(12, 1, lsn=1, tsn=1).encode()
    whole_header = len(raw) - len(plain(raw).body)
    for size in range(1, len(raw)):
        if size == whole_header:
            continue  # a row without a body is allowed at the end of a block
        found = scanned(good + raw[:size])
        assert found.wrong == ((0, len(good)),)
        assert len(found) == 1
        with pytest.raises(RowError):
            decode_row(raw[:size])


@given(st.lists(encoded_rows(), min_size=1, max_size=3), st.data())
def test_changed_bytes_yield_the_rows_of_the_plain_decoder_or_none(rows: list[bytes], data: st.DataObject) -> None:
    changed = bytearray(b"".join(rows))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    found = scanned(bytes(changed))
    end = 0
    for number in range(len(found)):
        row = row_at(found, bytes(changed), number)
        assert found.cells[scan.ROW_AT, number] == end
        end = int(found.cells[scan.ROW_END, number])
        try:
            expected = plain(row.raw)
        except FlowstoneError:
            continue  # the plain decoder also rejects deep nesting and arrays as keys
        assert repr(row) == repr(expected)  # by repr, because NaN does not equal itself
        check_body(found, number, row)
    assert found.wrong == (() if end == len(changed) else ((0, end),))


@given(st.binary(max_size=200))
def test_scan_of_any_bytes_yields_rows_up_to_the_reported_offset(data: bytes) -> None:
    found = scanned(data)
    edges = [0, *found.cells[scan.ROW_END].tolist()]
    assert found.cells[scan.ROW_AT].tolist() == edges[:-1]
    assert found.wrong == (() if edges[-1] == len(data) else ((0, edges[-1]),))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (b"\x80\x80", "no type"),
        (b"\x81\x03\x05\x80", "no type"),
        (b"\x81\x00\xff\x80", "negative type"),
        (b"\x81\x00\xa12\x80", "type is a string"),
        (b"\x82\x00\x02\x03\xcf\x80" + bytes(7) + b"\x80", "LSN above 2^63"),
        (b"\x82\x00\x02\x04\xca" + bytes(4) + b"\x80", "time as float32"),
        (b"\x82\x00\x02\xa1x\x01\x80", "key is a string"),
        (b"\x82\x00\x02\xcb" + bytes(8) + b"\x01\x80", "key is a float"),
        (b"\x81\x00\x02\x90", "body is an array"),
        (b"\x81\x00\x02\x81\x10\xa1x", "space id is a string"),
        (b"\x81\x00\x02\x81\x21\xc1", "no value starts with c1"),
        (b"\x81\x00\x02\x81\x21\xdd\xff\xff\xff\xff", "an array that is not there"),
        (b"\x81\x00\x02\x81\x21\xdf\xff\xff\xff\xff\xc0", "a map that is not there"),
        (b"\x81\x00\x02\x81\x21\xdb\xff\xff\xff\xff\xc0", "a string that is not there"),
        (b"\xdf\xff\xff\xff\xff\x00\x02", "a header that is not there"),
        (b"\x81\x00\x02\xdf\xff\xff\xff\xff", "a body that is not there"),
        (b"\x82\x00\x02\x7f\xda\x04\x00" + bytes(1024) + b"\x80", "a header of more than a kibibyte"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_encodings_that_no_server_writes_are_malformed(row: bytes, why: str) -> None:
    assert scanned(b"\x81\x00\x0c" + row).wrong == ((0, 3),)


def test_header_of_the_maximum_size_is_accepted() -> None:
    filler = b"\xda" + struct.pack(">H", ROW_HEADER_SIZE_MAX - 7)
    row = b"\x82\x00\x02\x7f" + filler + bytes(ROW_HEADER_SIZE_MAX - 7)
    assert len(row) == ROW_HEADER_SIZE_MAX
    assert scanned(row + b"\x80").wrong == ()
    assert decode_row(row + b"\x80").type == 2


@given(ANYTHING | EXTENSIONS, st.binary(max_size=5))
def test_skip_value_requires_a_complete_value(value: bytes, tail: bytes) -> None:
    buf = np.frombuffer(value + tail, np.uint8)
    assert skip_value(buf, 0, len(buf)) == len(value)
    for size in range(len(value)):
        assert skip_value(buf, 0, size) == -1


@pytest.mark.parametrize("marker", range(256))
def test_skip_value_agrees_with_the_plain_decoder_for_every_first_byte(marker: int) -> None:
    data = bytes((marker,)) + bytes(600)
    unpacker = reference.Unpacker(raw=True, strict_map_key=False)
    unpacker.feed(data)
    try:
        unpacker.skip()
        expected = unpacker.tell()
    except reference.exceptions.FormatError:
        expected = -1
    assert skip_value(np.frombuffer(data, np.uint8), 0, len(data)) == expected


@pytest.mark.parametrize(
    ("at", "end"), [(-1, 2), (-(2**63), 2), (3, 3), (2, 2**62), (2**62, 2**63 - 1), (1, 0), (0, -1)]
)
def test_no_value_begins_or_ends_outside_of_the_buffer(at: int, end: int) -> None:
    buf = np.frombuffer(b"\x01\x01\xa5xx", np.uint8)
    for skip in (skip_value, twin(skip_value)):
        assert skip(buf[:3], at, end) == -1


@pytest.mark.parametrize("lsn", [0, 1, 2**63 - 1])
@pytest.mark.parametrize("difference", [1, 2**63 - 1, 2**63, 2**64 - 1])
def test_any_difference_of_lsn_and_tsn_is_kept(lsn: int, difference: int) -> None:
    """The difference is modulo 2^64."""
    header = b"\x83\x00\x02\x03\xcf" + lsn.to_bytes(8) + b"\x08\xcf" + difference.to_bytes(8)
    found = scanned(header + b"\x80")
    assert found.cells[scan.TSN].tolist() == [(lsn - difference + 2**63) % 2**64 - 2**63]
    for build in (gather_log_rows, twin(gather_log_rows)):
        out = np.empty(rows_bound(1, 1), np.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # interpreted, an overflow is one
            size = build(found.buf, found.cells, 0, 1, out)
        again = scanned(out[:size].tobytes())
        assert again.cells[[scan.LSN, scan.TSN]].tolist() == found.cells[[scan.LSN, scan.TSN]].tolist()
