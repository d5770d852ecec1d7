"""The rows in a tail: all are counted, few are decoded, and pending ones are followed to their verdict."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import pytest

from flowstone.box.schema import SchemaTracker
from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.observation.live_transaction import LiveTransaction, TransactionStatus
from flowstone.observation.tail_sink import DECODED_PER_SECOND, KEPT_MAX, PENDING_MAX, TailSink, TooMuchWaits
from flowstone.replication.applier.states import ConnectionLost
from flowstone.replication.limbo.control_rows import Confirm, Promote
from flowstone.replication.row_stream import RowStream
from flowstone.replication.vclock import VClock
from tests.standing_clock import StandingClock

SPACE = 600
SYNCHRONOUS = (Flag.COMMIT | Flag.WAIT_SYNC | Flag.WAIT_ACK).value
BEHIND = (Flag.COMMIT | Flag.WAIT_SYNC).value


def insert(lsn: int, *, replica_id: int = 1, flags: int = 1) -> Row:
    body = pack({Key.SPACE_ID.value: SPACE, Key.TUPLE.value: (lsn,)})
    return Row(RequestType.INSERT.value, replica_id, lsn=lsn, tsn=lsn, timestamp=999.0, flags=flags, body=body)


def control(kind: RequestType, lsn: int, body: bytes, *, replica_id: int = 1) -> Row:
    return Row(kind.value, replica_id, lsn=lsn, tsn=lsn, timestamp=999.0, flags=1, body=body)


def slab(rows: Iterable[Row]) -> Slab:
    stream = RowStream("test")
    for row in rows:
        stream.feed(frame(row.encode()))
    found = stream.take()
    assert found is not None
    return found


def sink_at(vclock: dict[int, int], clock: StandingClock, told: list[LiveTransaction] | None = None) -> TailSink:
    sink = TailSink(clock, UUID(int=1), on_shown=(told if told is not None else []).append)
    sink.meet(UUID(int=2), (2, 11, 0), SchemaTracker())
    sink.start_at(VClock(vclock))
    return sink


async def test_all_rows_are_counted_and_only_a_sample_is_decoded() -> None:
    clock = StandingClock()
    sink = sink_at({1: 10}, clock)
    await sink.apply(slab(insert(lsn) for lsn in range(11, 1011)))
    assert (sink.rows_seen, sink.transactions_seen) == (1000, 1000)
    assert len(sink.ring) == DECODED_PER_SECOND
    assert sink.skipped == 1000 - DECODED_PER_SECOND
    assert sink.ring[-1].lsn == 1010
    clock.now += 0.1
    await sink.apply(slab(insert(lsn) for lsn in range(1011, 1111)))
    assert len(sink.ring) == DECODED_PER_SECOND + DECODED_PER_SECOND // 10


async def test_ring_has_a_limited_size() -> None:
    clock = StandingClock()
    sink = sink_at({}, clock)
    for first in range(1, KEPT_MAX + 1000, 100):
        await sink.apply(slab(insert(lsn) for lsn in range(first, first + 100)))
        clock.now += 1
    assert len(sink.ring) == KEPT_MAX
    assert sink.skipped == 0


async def test_only_settled_rows_are_acknowledged() -> None:
    sink = sink_at({1: 10}, StandingClock())
    await sink.apply(slab([insert(11), insert(12, flags=SYNCHRONOUS), insert(13, flags=BEHIND)]))
    assert sink.vclock == VClock({1: 11})
    assert [each.lsn for each in sink.waiting()] == [12, 13]
    assert sink.waiting()[0].age == 1.0
    await sink.apply(slab([control(RequestType.RAFT_CONFIRM, 14, Confirm(1, 12).encode())]))
    assert sink.vclock == VClock({1: 14})
    assert {each.lsn: each.status for each in sink.ring} == dict.fromkeys((11, 12, 13, 14), TransactionStatus.SETTLED)


async def test_tail_shows_and_counts_repeated_transactions_once() -> None:
    told: list[LiveTransaction] = []
    sink = sink_at({1: 10}, StandingClock(), told)
    await sink.apply(slab([insert(11, flags=SYNCHRONOUS)]))
    sink.meet(UUID(int=2), (2, 11, 0), SchemaTracker())
    await sink.apply(
        slab([insert(11, flags=SYNCHRONOUS), control(RequestType.RAFT_CONFIRM, 12, Confirm(1, 11).encode())])
    )
    assert [each.lsn for each in sink.ring] == [11, 12]
    assert sink.rows_seen == 2
    assert sink.ring[0].status is TransactionStatus.SETTLED


async def test_tail_rolls_back_transactions_that_a_new_leader_lacks() -> None:
    leaders: list[tuple[int, int]] = []
    sink = sink_at({1: 10}, StandingClock())
    sink._on_leader = lambda term, replica_id, at: leaders.append((term, replica_id))
    await sink.apply(slab([insert(11, flags=SYNCHRONOUS)]))
    sink.meet(UUID(int=2), (2, 11, 0), SchemaTracker())
    await sink.apply(slab([control(RequestType.RAFT_PROMOTE, 1, Promote(1, 10, 7).encode(), replica_id=2)]))
    assert sink.ring[0].status is TransactionStatus.ROLLED_BACK
    assert leaders == [(7, 2)]


async def test_only_the_position_of_a_snapshot_is_used() -> None:
    sink = TailSink(StandingClock(), UUID(int=1))
    sink.meet(UUID(int=2), (2, 6, 0), SchemaTracker())
    assert sink.replicaset_uuid is None
    with pytest.raises(ConnectionLost):
        await sink.begin_snapshot(VClock({0: 3, 1: 10}), (2, 6, 0))
    assert sink.replicaset_uuid == UUID(int=2)
    assert sink.vclock == VClock({1: 10})


async def test_tail_shows_earlier_rows_without_counting_them_for_the_rate() -> None:
    sink = sink_at({}, StandingClock())
    sink.start_at(VClock({1: 10}), live_from=VClock({1: 500}))
    await sink.apply(slab(insert(lsn) for lsn in range(11, 502)))
    assert (sink.rows_seen, sink.transactions_seen, sink.skipped) == (1, 491, 0)
    assert len(sink.ring) == DECODED_PER_SECOND


async def test_tail_limits_the_pending_transactions_in_memory() -> None:
    sink = sink_at({}, StandingClock())
    await sink.apply(slab([insert(1, flags=SYNCHRONOUS)]))
    with pytest.raises(TooMuchWaits, match="too many pending transactions"):
        await sink.apply(slab(insert(lsn, flags=BEHIND) for lsn in range(2, PENDING_MAX + 2)))


async def test_tail_resumes_after_a_gap() -> None:
    sink = sink_at({}, StandingClock())
    sink.start_at(VClock({1: 10}), live_from=VClock({1: 500}))
    sink.pass_gap()
    assert sink.vclock == VClock({1: 500})
    sink.pass_gap()
    assert not sink.has_position
