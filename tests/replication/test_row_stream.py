"""Rows of a peer: whole transactions in any fragmentation, error messages, and re-encoding."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import RemoteProtocolError
from flowstone.iproto import scan
from flowstone.iproto.constants import TYPE_ERROR, RequestType
from flowstone.iproto.errors import Loading
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame, split
from flowstone.iproto.row import Row, decode_row, encode_header
from flowstone.iproto.slab import Slab
from flowstone.replication.row_stream import (
    RowStream,
    StreamError,
    journal_rows,
    replaces_control,
    slab_of_rows,
    stream_packets,
)
from flowstone.xlog.transactions import make_transaction
from tests.vectors import recorded

PEER = "127.0.0.1:3301"


def transaction(lsn: int, count: int, replica_id: int = 1, size: int = 3, flags: int = 1) -> list[Row]:
    last = lsn + count - 1
    body = pack({0x10: 512, 0x21: (lsn, "x" * size)})
    return [
        Row(2, replica_id, 0, number, 1.5, lsn, flags if number == last else 0, body=body)
        for number in range(lsn, lsn + count)
    ]


def framed(rows: list[Row]) -> bytes:
    return b"".join(frame(row.encode()) for row in rows)


def fed(data: bytes, **limits: int) -> RowStream:
    stream = RowStream(PEER, **limits)
    stream.feed(data)
    return stream


def taken(stream: RowStream) -> list[Slab]:
    return list(iter(stream.take, None))


def plain(rows: list[Row]) -> list[tuple[int, int, int, int, bytes]]:
    return [(row.replica_id, row.lsn, row.tsn, row.flags, row.body) for row in rows]


# --- a recorded stream ---


def recorded_stream(version: str) -> bytes:
    """Return what a real master sent to a joining replica, without the greeting."""
    path = recorded.HERE / f"tarantool-{version}" / "01-join-subscribe" / "join-01.s2c.bin"
    return path.read_bytes()[128:]


VERSIONS = pytest.mark.parametrize("version", ["2.6", "2.11", "3.8"])


@VERSIONS
def test_every_recorded_packet_becomes_a_row_of_a_slab(version: str) -> None:
    data = recorded_stream(version)
    expected = [decode_row(packet) for packet in split(data)[0]]
    found = [row for slab in taken(fed(data)) for row in slab.rows()]
    assert [row.raw for row in found] == [row.raw for row in expected]
    assert plain(found) == plain(expected)
    assert any(row.tsn != row.lsn for row in found)


@VERSIONS
def test_recorded_stream_is_reencoded_to_the_same_bytes(version: str) -> None:
    data = recorded_stream(version)
    rows = [decode_row(packet) for packet in split(data)[0]]
    start = next(number for number, row in enumerate(rows) if row.lsn)
    rows = [row for row in rows[start:] if row.lsn]
    assert stream_packets(slab_of_rows(b"".join(row.raw for row in rows), "log")) == framed(rows)


@VERSIONS
def test_log_of_a_recorded_replica_is_reencoded_to_the_same_rows(version: str) -> None:
    """The timestamps differ: a replica writes its own."""
    rows = [row for slab in taken(fed(recorded_stream(version))) for row in slab.rows() if row.lsn]
    data = framed(rows)
    (slab,) = taken(fed(data))
    written = journal_rows(slab, 0, len(slab), 1.5)
    stamp = b"\x04\xcb\x3f\xf8" + bytes(6)
    assert written == b"".join(encode_header(msgspec.structs.replace(row, timestamp=1.5)) + row.body for row in rows)
    assert written.count(stamp) == len(rows)


@given(st.lists(st.integers(0, 46_000), max_size=20))
def test_rows_do_not_depend_on_fragmentation(cuts: list[int]) -> None:
    data = recorded_stream("2.6")
    stream, found = RowStream(PEER), []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        stream.feed(data[start:end])
        for slab in taken(stream):
            assert slab.cells[scan.FLAGS, -1] & 1
            found += [row.raw for row in slab.rows()]
    assert found == split(data)[0]
    assert stream.unread_size == 0


# --- whole transactions ---


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 70)), min_size=1, max_size=12),
    st.lists(st.integers(0, 3000), max_size=8),
    st.sampled_from((1, 2, 5, 16384)),
)
def test_slabs_contain_whole_transactions_up_to_the_requested_rows(
    shapes: list[tuple[int, int]], cuts: list[int], rows_max: int
) -> None:
    rows: list[Row] = []
    for count, size in shapes:
        rows += transaction(len(rows) + 1, count, 1 + len(rows) % 3, size)
    data = framed(rows)
    stream, found = RowStream(PEER), []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        stream.feed(data[start:end])
        while (slab := stream.take(rows_max=rows_max)) is not None:
            assert slab.cells[scan.FLAGS, -1] & 1
            assert len(slab) <= max(rows_max, 2 * max(count for count, _ in shapes))
            assert slab.path == PEER
            assert slab.payload == slab.buf.tobytes()
            found += list(slab.rows())
    assert plain(found) == plain(rows)
    assert [row.raw for row in found] == [row.encode() for row in rows]


def test_transaction_larger_than_the_table_is_not_split() -> None:
    rows = transaction(1, 1000) + transaction(1001, 1)
    data = framed(rows)
    stream = RowStream(PEER)
    for start in range(0, len(data) - 100, 4096):
        stream.feed(data[start : min(start + 4096, len(data) - 100)])
        assert stream.take(rows_max=64) is None
    stream.feed(data[-100:])
    assert plain([row for slab in taken(stream) for row in slab.rows()]) == plain(rows)


def test_offsets_of_a_kept_transaction_follow_its_bytes() -> None:
    """The second transaction is partly scanned while the first is taken; its key, tuple and operations move along."""
    update = pack({0x10: 512, 0x20: (7,), 0x21: (("=", 1, "y"),)})
    upsert = pack({0x10: 512, 0x21: (8, "q"), 0x28: (("+", 1, 2),)})
    rows = [
        *transaction(1, 2),
        Row(4, 1, 0, 3, 1.5, 3, 0, body=update),
        Row(9, 1, 0, 4, 1.5, 3, 0, body=upsert),
        Row(12, 1, 0, 5, 1.5, 3, 1),
    ]
    data = framed(rows)
    stream = fed(data[:-1])
    assert len(taken(stream)[0]) == 2
    stream.feed(data[-1:])
    (slab,) = taken(stream)
    cells = slab.cells

    def part(line: int, row: int) -> bytes:
        return slab.payload[cells[line, row] : cells[line + 1, row]]

    assert part(scan.KEY_AT, 0) == pack((7,))
    assert part(scan.TUPLE_AT, 0) == pack((("=", 1, "y"),))
    assert part(scan.TUPLE_AT, 1) == pack((8, "q"))
    assert part(scan.OPS_AT, 1) == pack((("+", 1, 2),))
    assert (cells[scan.KEY_AT, 1], cells[scan.OPS_AT, 0], cells[scan.TUPLE_AT, 2]) == (-1, -1, -1)
    assert cells[scan.BODY_AT, 2] == cells[scan.ROW_END, 2] == len(slab.payload)


def test_replies_are_read_packet_by_packet_before_the_rows() -> None:
    rows = transaction(1, 2)
    stream = fed(b"\xce\x00\x00")
    assert stream.take_packet() is None
    stream.feed(b"\x00\x03\x81\x00\x00" + b"\x03\x81\x00\x47" + framed(rows))
    assert stream.take_packet() == b"\x81\x00\x00"
    assert stream.take_packet() == b"\x81\x00\x47"
    (slab,) = taken(stream)
    assert plain(list(slab.rows())) == plain(rows)
    assert stream.take_packet() is None


def test_packet_may_be_read_from_a_transaction_that_is_partly_scanned() -> None:
    rows = transaction(1, 3)
    data = framed(rows)
    stream = fed(data[:-1])
    assert stream.take() is None
    assert stream.take_packet() == rows[0].encode()
    stream.feed(data[-1:])
    with pytest.raises(StreamError, match="Transaction id must be equal to LSN"):
        stream.take()


# --- errors ---


def test_rows_before_an_error_are_returned_and_then_the_error_is_repeated() -> None:
    stream = fed(framed(transaction(1, 1)) + b"\xc1" + framed(transaction(2, 1)))
    assert len(stream.take() or ()) == 1
    for _ in range(2):
        with pytest.raises(StreamError, match="sent an invalid packet: packet begins with byte 0xc1") as told:
            stream.take()
        assert told.value.peer == PEER


def test_error_packet_is_raised_even_inside_a_transaction() -> None:
    error = frame(pack({0: TYPE_ERROR + Loading.code, 1: 3}) + pack({0x31: "Instance bootstrap hasn't finished yet"}))
    stream = fed(framed(transaction(1, 1) + transaction(2, 3)[:2]) + error)
    assert len(stream.take() or ()) == 1
    with pytest.raises(Loading, match="hasn't finished"):
        stream.take()


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([Row(2, 32, lsn=1, tsn=1)], "row 1 of replica 32: invalid replica id"),
        ([Row(2, 1, lsn=7, tsn=6)], "row 7 of replica 1: Transaction id must be equal to LSN of the first row"),
        ([*transaction(1, 2)[:1], *transaction(3, 1)], "row 3 of replica 1: .* interleaving transactions"),
        ([*transaction(1, 2)[:1], Row(0, 1, timestamp=1.5)], "row 0 of replica 1: .* interleaving transactions"),
        ([Row(2, 1, lsn=1, tsn=1, body=b"\x90")], "a packet that is not a row"),
    ],
)
def test_invalid_transaction_has_the_error_of_a_real_receiver(rows: list[Row], what: str) -> None:
    with pytest.raises(StreamError, match=what):
        fed(framed(rows)).take()


@pytest.mark.parametrize("data", [b"\x00", b"\xcf" + b"\xff" * 8, b"\xce\x00\x10\x00\x01"])
def test_excessive_length_is_rejected_before_its_bytes_arrive(data: bytes) -> None:
    for call in (RowStream.take, RowStream.take_packet):
        with pytest.raises(StreamError, match="sizes from 1 to 1048576 are accepted"):
            call(fed(data, packet_size_max=1 << 20))


def test_transaction_of_too_many_bytes_is_rejected_before_they_arrive() -> None:
    packets = [frame(row.encode()) for row in transaction(1, 1000)]
    stream = RowStream(PEER, transaction_size_max=10 * len(packets[0]) + 5)
    for packet in packets[:10]:
        stream.feed(packet)
        assert stream.take() is None
    stream.feed(packets[10][:5])
    with pytest.raises(StreamError, match="a transaction of more than"):
        stream.take()


def test_transaction_of_too_many_rows_is_rejected() -> None:
    stream = fed(framed(transaction(1, 200)), transaction_rows_max=100)
    with pytest.raises(StreamError, match="a transaction of more than 100 rows"):
        stream.take(rows_max=16)
    assert len(fed(framed(transaction(1, 100)), transaction_rows_max=100).take(rows_max=16) or ()) == 100


def test_invalid_bytes_make_no_slab() -> None:
    with pytest.raises(RemoteProtocolError, match="the log: invalid row at byte 3"):
        slab_of_rows(b"\x81\x00\x0c\xc1", "the log")


# --- sending and writing rows ---


def test_journal_row_has_our_timestamp_and_no_sync() -> None:
    packet = frame(pack({0: 2, 1: 3, 5: 77, 2: 1, 3: 9, 4: 1.25, 11: 4}) + pack({0x10: 512, 0x21: (1,)}))
    (slab,) = taken(fed(packet))
    written = decode_row(journal_rows(slab, 0, 1, 2.5))
    assert written.raw == Row(2, 1, lsn=9, tsn=9, timestamp=2.5, body=pack({0x10: 512, 0x21: (1,)})).encode()


def test_parts_of_a_slab_are_written_one_by_one() -> None:
    rows = transaction(1, 3) + transaction(4, 1, 2) + transaction(5, 2, 2, flags=7)
    (slab,) = taken(fed(framed(rows)))
    whole = b"".join(row.encode() for row in rows)
    assert journal_rows(slab, 0, 6, 1.5) == whole
    assert b"".join(journal_rows(slab, *edges, 1.5) for edges in ((0, 3), (3, 4), (4, 4), (4, 6))) == whole


def test_part_of_a_slab_is_a_slab() -> None:
    rows = transaction(1, 3) + transaction(4, 2)
    (slab,) = taken(fed(framed(rows)))
    part = Slab(slab.path, slab.payload, slab.buf, slab.cells[:, 3:], slab.offsets)
    assert stream_packets(part) == framed(rows[3:])
    assert journal_rows(part, 0, 2, 1.5) == b"".join(row.encode() for row in rows[3:])


@pytest.mark.parametrize("sync", [0, 1, 300, 2**63 - 1, 2**63, 2**64 - 1])
def test_packets_carry_the_sync_of_the_request(sync: int) -> None:
    (row,) = transaction(1, 1)
    packets = stream_packets(slab_of_rows(row.encode(), "log"), sync=sync)
    assert packets == frame(encode_header(msgspec.structs.replace(row, sync=sync)) + row.body)


def test_transaction_with_a_local_last_row_ends_with_the_last_sent_row() -> None:
    first, second, last = transaction(5, 3, flags=7)
    last = msgspec.structs.replace(last, replica_id=0, group_id=1, lsn=2)
    slab = slab_of_rows(b"".join(row.encode() for row in (first, second, last)), "log")
    sent = [decode_row(packet) for packet in split(stream_packets(slab))[0]]
    assert [(row.lsn, row.tsn, row.flags) for row in sent] == [(5, 5, 0), (6, 5, 7)]
    (alone,) = (decode_row(packet) for packet in split(stream_packets(slab, np.array([True, False, True])))[0])
    assert alone.raw == Row(2, 1, 0, 5, 1.5, 5, 7, body=first.body).encode()


def test_empty_slab_is_sent_and_written_as_no_bytes() -> None:
    slab = slab_of_rows(b"", "log")
    assert (len(slab), stream_packets(slab), journal_rows(slab, 0, 0, 1.5)) == (0, b"", b"")
    assert stream_packets(slab_of_rows(transaction(1, 1)[0].encode(), "log"), np.array([False])) == b""


@pytest.mark.parametrize("flags", [2, 4, 6])
def test_nops_are_sent_without_limbo_flags(flags: int) -> None:
    """Logs of earlier releases have them, and a real server would write them to its own."""
    alone = make_transaction([Row(RequestType.NOP, 1, lsn=5, timestamp=1.0)], flags).rows
    three = make_transaction([Row(RequestType.NOP, 1, lsn=lsn, timestamp=1.0) for lsn in (6, 7, 8)], flags).rows
    mixed = make_transaction([*transaction(9, 1), Row(RequestType.NOP, 1, lsn=10, timestamp=1.0)], flags).rows
    slab = slab_of_rows(b"".join(each.encode() for each in (*alone, *three, *mixed)), "log")
    sent = [decode_row(packet) for packet in split(stream_packets(slab))[0]]
    assert [(each.lsn, each.tsn, each.flags) for each in sent] == [
        (5, 5, 1),
        (6, 6, 0),
        (7, 6, 0),
        (8, 6, 1),
        (9, 9, 0),
        (10, 9, 1 | flags),
    ]


def test_nop_in_place_of_a_control_row_is_distinguished_from_a_void_transaction() -> None:
    marked = encode_header(Row(RequestType.NOP, 1, lsn=5, timestamp=1.0, tsn=5, flags=1), is_explicit=True)
    plain = Row(RequestType.NOP, 1, lsn=6, timestamp=1.0, tsn=6, flags=1).encode()
    many = make_transaction([Row(RequestType.NOP, 1, lsn=lsn, timestamp=1.0) for lsn in (7, 8)]).rows
    logged = slab_of_rows(marked + plain + b"".join(each.encode() for each in many), "log")
    stream = RowStream("peer")
    stream.feed(stream_packets(logged))
    received = stream.take()
    assert received is not None
    again = slab_of_rows(journal_rows(received, 0, len(received), 2.0), "log")
    for slab in (logged, received, again):
        assert [replaces_control(slab, number) for number in range(4)] == [True, False, False, False]
