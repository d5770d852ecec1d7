"""The tail of the log in memory: bounded chunks for all relays, and lookups of a position."""

from __future__ import annotations

from flowstone.iproto.constants import RequestType
from flowstone.iproto.packet import split
from flowstone.iproto.row import Row, decode_row
from flowstone.node.wal.log_tail import LogTail, TailChunk, packets_of, promoted_term
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.relay.relay_logic import RowFilter
from flowstone.replication.row_stream import slab_of_rows
from flowstone.replication.vclock import VClock


def rows(*pairs: tuple[int, int]) -> bytes:
    """Return one transaction each; id 0 is a local row."""
    made = (Row(RequestType.NOP.value, number, 0 if number else 1, lsn, 1.0, lsn) for number, lsn in pairs)
    return b"".join(row.encode() for row in made)


def lsns(packets: bytes) -> list[tuple[int, int]]:
    return [(row.replica_id, row.lsn) for row in map(decode_row, split(packets)[0])]


def tail_of(count: int, **options: int) -> LogTail:
    """Return a tail that started at LSN 10, with this number of chunks of one row."""
    tail = LogTail(VClock({1: 10}), lambda: None, **options)
    for lsn in range(11, 11 + count):
        tail.append(rows((1, lsn)), VClock({1: lsn}))
        tail.seal()
    return tail


def test_log_tail_seals_gathered_rows_as_one_chunk_and_notifies_once() -> None:
    told: list[None] = []
    tail = LogTail(VClock({1: 10}), lambda: told.append(None))
    tail.append(rows((1, 11)), VClock({1: 11}))
    tail.append(rows((1, 12)), VClock({1: 12}))
    assert (len(told), tail.end) == (1, 0)
    tail.seal()
    chunk = tail.chunk(0)
    assert chunk is not None
    assert (chunk.before, chunk.after, tail.end) == (VClock({1: 10}), VClock({1: 12}), 1)
    assert lsns(chunk.packets) == [(1, 11), (1, 12)]
    tail.seal()
    assert tail.end == 1, "no row has been collected"


def test_log_tail_shares_packets_between_relays_that_take_all_rows() -> None:
    chunk = TailChunk(0, rows((1, 11), (1, 12)), VClock({1: 10}), VClock({1: 12}))
    first, second = RowFilter(VClock({1: 10})), RowFilter(VClock({1: 3}), left_out=(2,))
    assert chunk.packets_for(first, 0) is chunk.packets_for(second, 0)


def test_log_tail_sends_the_remaining_rows_to_a_relay_that_skips_some() -> None:
    chunk = TailChunk(0, rows((1, 11), (2, 1), (1, 12)), VClock({1: 10}), VClock({1: 12, 2: 1}))
    assert lsns(chunk.packets_for(RowFilter(VClock({1: 11})), 0)) == [(2, 1), (1, 12)]
    assert lsns(chunk.packets_for(RowFilter(VClock({1: 10}), left_out=(2,)), 0)) == [(1, 11), (1, 12)]
    assert lsns(chunk.packets_for(RowFilter(VClock({1: 10, 2: 9})), 0)) == [(1, 11), (1, 12)]
    assert chunk.packets_for(RowFilter(VClock({1: 12, 2: 1})), 0) == b""


def test_every_packet_has_the_sync_of_the_request() -> None:
    chunk = TailChunk(0, rows((1, 11), (1, 12)), VClock({1: 10}), VClock({1: 12}))
    packets, _ = split(chunk.packets_for(RowFilter(VClock({1: 10})), 7))
    assert [decode_row(packet).sync for packet in packets] == [7, 7]


def test_local_rows_are_not_sent() -> None:
    chunk = TailChunk(0, rows((0, 5), (1, 11)), VClock({0: 4, 1: 10}), VClock({0: 5, 1: 11}))
    assert lsns(chunk.packets) == [(1, 11)]
    assert lsns(packets_of(slab_of_rows(rows((0, 5)), "test"))) == []


def test_place_is_found_by_vclock() -> None:
    tail = tail_of(3)
    assert tail.find(VClock({1: 9})) is None, "row 10 was before the first chunk"
    assert tail.find(VClock({1: 10})) == 0
    assert tail.find(VClock({1: 12})) == 2
    assert tail.find(VClock({1: 13})) == tail.end
    assert tail.find(VClock({1: 999, 2: 5})) == tail.end, "position is after our log"
    assert tail.find(VClock({2: 5})) is None


def test_lookup_of_a_place_ignores_local_rows() -> None:
    tail = LogTail(VClock({0: 3, 1: 10}), lambda: None)
    tail.append(rows((0, 4)), VClock({0: 4, 1: 10}))
    tail.seal()
    assert tail.find(VClock({1: 10})) == tail.end


def test_chunks_that_all_relays_have_are_dropped() -> None:
    tail = tail_of(3)
    tail.trim(2)
    assert [tail.chunk(number) is None for number in range(4)] == [True, True, False, True]
    assert tail.find(VClock({1: 11})) is None
    assert tail.find(VClock({1: 12})) == 2


def test_oldest_chunks_are_dropped_beyond_the_size_limit() -> None:
    size = 2 * len(rows((1, 11)))
    tail = tail_of(5, size_max=2 * size)
    tail.trim(0)
    assert [tail.chunk(number) is None for number in range(5)] == [True, True, True, False, False]
    assert tail.size == 2 * size
    tail.trim(tail.end)
    assert tail.size == 0


def test_single_row_is_framed_unchanged() -> None:
    raw = rows((1, 11))
    chunk = TailChunk(0, raw, VClock({1: 10}), VClock({1: 11}))
    assert chunk.packets == b"\xce" + len(raw).to_bytes(4, "big") + raw == packets_of(slab_of_rows(raw, "test"))
    local = TailChunk(0, rows((0, 4)), VClock({0: 3, 1: 10}), VClock({0: 4, 1: 10}))
    assert local.packets == b""


def test_chunk_has_the_term_of_the_last_promote() -> None:
    promote = Row(RequestType.RAFT_PROMOTE.value, 1, 0, 11, 1.0, 11, body=Promote(0, 0, 4).encode())
    chunk = TailChunk(0, rows((1, 10)) + promote.encode(), VClock({1: 9}), VClock({1: 11}))
    assert chunk.packets
    assert chunk.promoted_term == 4
    assert promoted_term(slab_of_rows(rows((1, 10)), "test")) == 0
    lone = TailChunk(0, promote.encode(), VClock({1: 10}), VClock({1: 11}))
    assert lone.packets
    assert lone.promoted_term == 4
