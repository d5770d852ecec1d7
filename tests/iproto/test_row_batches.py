"""Packets decoded in bulk yield the encoded rows, however fragmented; errors of packets are distinguished."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto import row_batches, scan
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame
from flowstone.iproto.row import Row
from flowstone.iproto.scan import Cells
from flowstone.iproto.scan_kernels import scan_packets


class Scanner:
    """The kernel with the state of one connection."""

    def __init__(self, *, packet_size_max: int = 1000, transaction_size_max: int = 10_000) -> None:
        self.cells: Cells = np.empty((scan.LINES, 64), np.int64)
        self.progress: Cells = np.zeros(row_batches.PROGRESS_SIZE, np.int64)
        self.limits = packet_size_max, transaction_size_max

    def scan(self, data: bytes, room: int = 64) -> int:
        return scan_packets(np.frombuffer(data, np.uint8), self.cells, room, *self.limits, self.progress)

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
def test_packet_length_may_have_any_width(prefix: str) -> None:
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
    assert scanner.scan(data, 2) == scan.FULL
    assert scanner.value(row_batches.WHOLE_ROWS) == 0
    assert scanner.scan(data, 3) == scan.FULL
    assert scanner.scan(data, 4) == row_batches.NEED
    assert scanner.value(row_batches.WHOLE_ROWS) == 3
