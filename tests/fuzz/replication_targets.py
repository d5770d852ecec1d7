"""Targets for the messages between members of a replica set: a stream of rows, and the messages around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import UUID

import numpy as np

from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame
from flowstone.iproto.row import U64, Row, RowError, decode_row
from flowstone.iproto.slab import Slab
from flowstone.replication import messages
from flowstone.replication.row_stream import RowStream, journal_rows, slab_of_rows, stream_packets
from flowstone.replication.vclock import VClock

PEER = "peer"
LIMITS = {"packet_size_max": 1 << 16, "transaction_size_max": 1 << 16, "transaction_rows_max": 100}


def row_stream(data: bytes) -> None:
    """Check that the result does not depend on fragmentation, and that its encoding can be decoded."""
    whole = list(_taken([data]))
    pieces = list(_taken([data[at : at + 7] for at in range(0, len(data), 7)]))
    assert [raw for slab in whole for raw in _raws(slab)] == [raw for slab in pieces for raw in _raws(slab)]
    for slab in whole:
        _compare(slab)
        _send_on(slab)
    stream = RowStream(PEER, **LIMITS)
    stream.feed(data)
    while stream.take_packet():
        pass


def _taken(pieces: list[bytes]) -> Iterator[Slab]:
    """Return the slabs before the first error."""
    stream = RowStream(PEER, **LIMITS)
    for piece in pieces:
        stream.feed(piece)
        try:
            while (slab := stream.take(rows_max=4)) is not None:
                assert slab.cells[scan.FLAGS, -1] & 1
                yield slab
        except FlowstoneError:
            return


def _raws(slab: Slab) -> list[bytes]:
    return [row.raw for row in slab.rows()]


def _compare(slab: Slab) -> None:
    """Check that the table agrees with the plain decoder on each row."""
    for row in slab.rows():
        try:
            expected = decode_row(row.raw)
        except RowError:
            continue
        assert (row.type, row.replica_id, row.group_id) == (expected.type, expected.replica_id, expected.group_id)
        assert (row.lsn, row.tsn % U64, row.flags) == (expected.lsn, expected.tsn, expected.flags)
        assert row.body == expected.body


def _send_on(slab: Slab) -> None:
    count = len(slab)
    written = journal_rows(slab, 0, count, 1.5)
    keep = np.arange(count) % 3 != 1
    sent = [stream_packets(slab, sync=5), stream_packets(slab, keep)]
    cells = slab.cells
    if (cells[scan.LSN] == 0).any():
        return  # not a row of a transaction; logs never have it
    for packets in sent:
        stream = RowStream(PEER)
        stream.feed(packets)
        assert sum(map(len, iter(stream.take, None))) <= count
        assert stream.unread_size == 0
    has_body = (cells[scan.BODY_AT] < cells[scan.ROW_END]) | (cells[scan.TYPE] == RequestType.NOP)
    if has_body.all():
        assert (slab_of_rows(written, PEER).cells[scan.LSN] == cells[scan.LSN]).all()


REQUESTS = (
    messages.decode_join,
    messages.decode_fetch_snapshot,
    messages.decode_register,
    messages.decode_subscribe,
    messages.decode_ballot,
)
BODIES: list[Callable[[bytes], Any]] = [
    *(partial(decode, is_2_6=is_2_6) for decode in REQUESTS for is_2_6 in (False, True)),
    partial(messages.decode_ballot_event, previous=messages.Ballot()),
    messages.decode_vclock_reply,
]
ROWS: list[Callable[[Row], Any]] = [messages.decode_ack, messages.decode_heartbeat, messages.decode_subscribe_reply]


def any_message(data: bytes) -> None:
    """Decode the bytes as the body of every request, and as a whole packet of every kind."""
    for decode in BODIES:
        try:
            decode(data)
        except FlowstoneError:
            continue
    for row in (Row(0, body=data), decode_row(data)):
        for read in ROWS:
            try:
                read(row)
            except FlowstoneError:
                continue


UUIDS = UUID("11111111-0000-4000-8000-000000000031"), UUID("aaaaaaaa-0000-4000-8000-000000000011")
BODY = pack({0x10: 512, 0x21: (1, "text")})
STREAM = b"".join(
    frame(row.encode())
    for row in (
        Row(2, 1, 0, 5, 1.5, 5, body=BODY),
        Row(3, 1, 0, 6, 1.5, 6, 0, body=BODY),
        Row(12, 1, 0, 7, 1.5, 6, 0),
        Row(5, 0, 1, 2, 1.5, 6, 7, body=pack({0x10: 513, 0x20: (1,)})),
        Row(0, 1, timestamp=1.5, body=pack({0x5A: 3})),
        Row(4, 2, 0, 300, 1.5, 300, 6, 9, body=pack({0x10: 512, 0x20: (1,), 0x21: (("=", 1, 2),)})),
        Row(2, 3, 1, 8, 1.5, 8, body=BODY),
    )
)
STREAMS = (STREAM, STREAM[:120], STREAM + frame(pack({0: 0x8000 + 116, 1: 3}) + pack({0x31: "text"})))
BALLOT = messages.Ballot(VClock({1: 5}), bootstrap_leader_uuid=UUIDS[0], registered_uuids=UUIDS)
MESSAGES = (
    messages.encode_ack(messages.Ack(VClock({1: 9, 2: 300}), 1, 4, 1.5))[5:],
    messages.encode_heartbeat(messages.Heartbeat(1, 1.5, 7))[5:],
    messages.encode_subscribe_reply(messages.SubscribeReply(1, VClock({1: 9}), UUIDS[1]))[5:],
    messages.encode_join(messages.Join(UUIDS[0], 5, "name"))[8:],
    messages.encode_subscribe(messages.Subscribe(*UUIDS, VClock({1: 9}), 5, True, (0, 3)))[8:],
    messages.encode_ballot_body(BALLOT, is_2_6=False),
    messages.encode_ballot_body(BALLOT, is_2_6=True),
)
