"""Rows encoded in bulk equal, byte for byte, those encoded one by one; packets decoded in bulk have the same rows."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto import row_batches, scan
from flowstone.iproto.batches import float_bits
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame
from flowstone.iproto.row import Row, decode_row, encode_header
from flowstone.iproto.scan import Bytes, Cells

EDGES = (0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1)
TIMES = st.sampled_from((0.0, -0.0, 1.7e9, 1e-300, -5.5))
BODIES = st.sampled_from([b"", *(pack(body) for body in ({0x10: 512, 0x21: (1, "x" * 300)}, {0x5A: 1}, {}))])


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Any header that a table can hold, in a transaction or not."""
    lsn = draw(st.sampled_from(EDGES))
    return Row(
        draw(st.sampled_from((0, 2, 30, 127, 128, 32767))),
        draw(st.sampled_from((0, 1, 31, 127, 128, 2**32 - 1))),
        draw(st.sampled_from((0, 0, 1, 300))),
        lsn,
        draw(TIMES),
        draw(st.sampled_from((lsn, lsn, *EDGES))),
        draw(st.sampled_from((0, 1, 2, 3, 6, 7, 255))),
        draw(st.sampled_from((0, 0, *EDGES))),
        body=draw(BODIES),
    )


def table(data: bytes) -> tuple[Bytes, Cells]:
    buf = np.frombuffer(data, np.uint8)
    found = scan.scan(buf, np.array([[0, len(data)]], np.int64))
    assert not found.wrong
    return buf, found.cells


def built(kernel_size: int, out: Bytes) -> bytes:
    assert kernel_size >= 0
    return out[:kernel_size].tobytes()


@given(st.lists(rows().filter(lambda row: row.body), min_size=1, max_size=5), TIMES, st.data())
def test_rows_for_a_log_are_those_of_the_plain_encoder(many: list[Row], timestamp: float, data: st.DataObject) -> None:
    encoded = [row.encode() for row in many]
    buf, cells = table(b"".join(encoded))
    first = data.draw(st.integers(0, len(many)))
    stop = data.draw(st.integers(first, len(many)))
    content = sum(map(len, encoded))
    out = np.empty(row_batches.rows_bound(len(many), content), np.uint8)
    size = row_batches.build_log_rows(buf, cells, first, stop, float_bits(timestamp), out)
    expected = [
        encode_header(msgspec.structs.replace(decode_row(raw), timestamp=timestamp, sync=0)) + row.body
        for raw, row in zip(encoded[first:stop], many[first:stop], strict=True)
    ]
    assert built(size, out) == b"".join(expected)


def test_no_byte_is_written_after_the_end_of_a_small_output() -> None:
    buf, cells = table(b"".join(Row(2, 1, lsn=lsn, tsn=lsn, body=pack({0x10: 512})).encode() for lsn in (1, 2)))
    whole = np.full(400, 0xAA, np.uint8)
    assert row_batches.build_log_rows(buf, cells, 0, 2, 5, whole[:100]) == row_batches.NO_ROOM
    assert row_batches.build_packets(buf, cells, row_batches.ALL, 0, whole[:100]) == row_batches.NO_ROOM
    assert (whole[100:] == 0xAA).all()


class Scanner:
    """The kernel, with the state of a connection."""

    def __init__(self, *, packet_size_max: int = 1000, transaction_size_max: int = 10_000) -> None:
        self.cells: Cells = np.empty((scan.LINES, 64), np.int64)
        self.progress: Cells = np.zeros(row_batches.PROGRESS_SIZE, np.int64)
        self.limits = packet_size_max, transaction_size_max

    def scan(self, data: bytes, room: int = 64) -> int:
        return row_batches.scan_packets(np.frombuffer(data, np.uint8), self.cells, room, *self.limits, self.progress)

    def value(self, place: int) -> int:
        return int(self.progress[place])


def transaction(lsn: int, count: int) -> list[Row]:
    last = lsn + count - 1
    return [
        Row(2, 1, 0, number, 1.5, lsn, int(number == last), body=pack({0x10: 512, 0x21: (number,)}))
        for number in range(lsn, lsn + count)
    ]


@given(st.lists(st.integers(1, 5), max_size=8), st.lists(st.integers(0, 600), max_size=5))
def test_scan_does_not_depend_on_packet_fragmentation(counts: list[int], cuts: list[int]) -> None:
    many = [row for number, count in enumerate(counts) for row in transaction(10 * number + 1, count)]
    packets = [frame(row.encode()) for row in many]
    data = b"".join(packets)
    scanner = Scanner()
    for end in (*sorted(min(cut, len(data)) for cut in cuts), len(data)):
        assert scanner.scan(data[:end]) == row_batches.NEED
        assert scanner.value(row_batches.NEEDED) > end
        whole = scanner.value(row_batches.WHOLE_ROWS)
        assert whole == max((i + 1 for i in range(scanner.value(row_batches.ROWS)) if many[i].is_commit), default=0)
        assert scanner.value(row_batches.WHOLE_AT) == sum(map(len, packets[:whole]))
    assert scanner.value(row_batches.ROWS) == len(many)
    assert scanner.value(row_batches.AT) == len(data)
    at = 0
    for number, (row, packet) in enumerate(zip(many, packets, strict=True)):
        column = scanner.cells[:, number]
        assert (column[scan.ROW_AT], column[scan.ROW_END]) == (at + 5, at + len(packet))
        assert (column[scan.LSN], column[scan.TSN], column[scan.FLAGS] & 1) == (row.lsn, row.tsn, row.flags)
        assert data[column[scan.BODY_AT] : column[scan.ROW_END]] == row.body
        at += len(packet)


@pytest.mark.parametrize("prefix", ["cc", "cd", "ce", "cf"])
def test_a_length_may_have_any_width(prefix: str) -> None:
    payload = Row(0, 1, timestamp=1.5).encode()
    width = {"cc": 1, "cd": 2, "ce": 4, "cf": 8}[prefix]
    data = bytes.fromhex(prefix) + len(payload).to_bytes(width, "big") + payload
    for end in range(len(data)):
        assert Scanner().scan(data[:end]) == row_batches.NEED
    scanner = Scanner()
    assert scanner.scan(data + bytes((len(payload),)) + payload) == row_batches.NEED
    assert scanner.value(row_batches.WHOLE_ROWS) == 2


GOOD = frame(Row(2, 1, lsn=1, tsn=1, body=b"\x80").encode())


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"\x00", row_batches.BAD_LENGTH),
        (b"\x80", row_batches.BAD_LENGTH),
        (b"\xd0\x05", row_batches.BAD_LENGTH),
        (b"\xcf" + b"\xff" * 8, row_batches.BAD_LENGTH),
        (b"\xcd\x03\xe9", row_batches.BAD_LENGTH),  # above packet_size_max
        (frame(b"\x80"), row_batches.BAD_ROW),  # no type
        (frame(b"\x81\x00\x02\x90"), row_batches.BAD_ROW),
        (frame(b"\x81\x00\x02\x80\x80"), row_batches.BAD_ROW),
        (frame(b"\x81\x00\x02\x81"), row_batches.BAD_ROW),
        (frame(b"\x81\x00\x0c\x80"), row_batches.BAD_ROW),  # a NOP with a body
        (frame(Row(2, 32, lsn=1, tsn=1).encode()), row_batches.BAD_REPLICA_ID),
        (frame(Row(2, 1, lsn=5, tsn=4).encode()), row_batches.BAD_TSN),
        (frame(b"\x81\x00\xcd\x80\x14\x81\x31\xa1x"), row_batches.ERROR_PACKET),
    ],
)
def test_packet_errors_are_distinguished(packet: bytes, why: int) -> None:
    scanner = Scanner()
    assert scanner.scan(GOOD + packet + GOOD) == why
    assert scanner.value(row_batches.ROWS) == scanner.value(row_batches.WHOLE_ROWS) == 1
    assert scanner.value(row_batches.AT) == len(GOOD)


def test_row_of_another_transaction_inside_a_transaction_is_reported() -> None:
    scanner = Scanner()
    first, second, _ = transaction(5, 3)
    assert scanner.scan(b"".join(frame(row.encode()) for row in (first, second))) == row_batches.NEED
    data = b"".join(frame(row.encode()) for row in (first, second, *transaction(9, 1)))
    assert scanner.scan(data) == row_batches.INTERLEAVED
    assert scanner.value(row_batches.ROWS) == 2


def test_oversized_transaction_is_reported_before_its_bytes_arrive() -> None:
    first, second, _ = (frame(row.encode()) for row in transaction(5, 3))
    limit = len(first) + len(second) - 1
    assert Scanner(transaction_size_max=limit).scan(first + second[:5]) == row_batches.TOO_LARGE
    assert Scanner(transaction_size_max=limit + 1).scan(first + second) == row_batches.NEED


def test_scan_resumes_after_a_full_table() -> None:
    data = b"".join(frame(row.encode()) for row in transaction(5, 3))
    scanner = Scanner()
    assert scanner.scan(data, 2) == row_batches.FULL
    assert scanner.value(row_batches.WHOLE_ROWS) == 0
    assert scanner.scan(data, 3) == row_batches.FULL
    assert scanner.scan(data, 4) == row_batches.NEED
    assert scanner.value(row_batches.WHOLE_ROWS) == 3


# --- Packets for a replica ---


def relayed(kept: list[Row], flags: int, sync: int) -> list[bytes]:
    """Return the rest of one transaction, by the plain encoder."""
    packets = []
    for row in kept:
        is_local = row.group_id == 1
        sent = Row(
            12 if is_local else row.type,
            row.replica_id,
            0 if is_local else row.group_id,
            row.lsn,
            row.timestamp,
            kept[0].lsn,
            flags if row is kept[-1] else 0,
            sync,
        )
        packets.append(frame(encode_header(sent) + (b"" if is_local else row.body)))
    return packets


@st.composite
def transactions(draw: st.DrawFn) -> list[list[Row]]:
    """Some of mixed rows: global ones, local ones, and local ones as logs before 2.4.1 have them."""
    found, lsn, local = [], draw(st.sampled_from((1, 120, 65530, 2**32 - 3))), 0
    for count in draw(st.lists(st.integers(1, 4), max_size=5)):
        kinds = draw(st.lists(st.sampled_from(("global", "global", "local", "old")), min_size=count, max_size=count))
        flags = draw(st.sampled_from((1, 3, 7)))
        numbers = []
        for kind in kinds:
            local, lsn = (local + 1, lsn) if kind == "local" else (local, lsn + 1)
            numbers.append(local if kind == "local" else lsn)
        globals_ = [number for kind, number in zip(kinds, numbers, strict=True) if kind != "local"]
        tsn = globals_[0] if globals_ else numbers[0]
        found.append(
            [
                Row(
                    2,
                    0 if kind == "local" else 3,
                    0 if kind == "global" else 1,
                    number,
                    1.5,
                    tsn,
                    flags if place == count - 1 else 0,
                    body=pack({0x10: 512, 0x21: (place,)}),
                )
                for place, (kind, number) in enumerate(zip(kinds, numbers, strict=True))
            ]
        )
    return found


@given(transactions(), st.sampled_from((0, 3, 300, 2**40)), st.data())
def test_remaining_rows_are_complete_transactions(many: list[list[Row]], sync: int, data: st.DataObject) -> None:
    count = sum(map(len, many))
    chosen = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    keep = row_batches.ALL if all(chosen) and data.draw(st.booleans()) else np.array(chosen, np.uint8)
    encoded = b"".join(row.encode() for rows in many for row in rows)
    buf, cells = table(encoded)
    out = np.empty(row_batches.rows_bound(count, len(encoded)), np.uint8)
    packets = built(row_batches.build_packets(buf, cells, keep, sync, out), out)
    choices = iter(chosen)
    expected = []
    for rows in many:
        kept = [row for row in rows if next(choices) and (row.group_id != 1 or row.replica_id)]
        expected += relayed(kept, rows[-1].flags, sync)
    assert packets == b"".join(expected)
    scanner = Scanner()
    assert scanner.scan(packets) == row_batches.NEED
    assert scanner.value(row_batches.WHOLE_ROWS) == scanner.value(row_batches.ROWS) == len(expected)
