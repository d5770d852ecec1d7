"""Watching a ballot: requested again after each event, or by VOTE if there is no such event."""

from __future__ import annotations

from uuid import UUID

import pytest

from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.greeting import Greeting, encode_greeting
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import decode_response, frame, split
from flowstone.iproto.replies import encode_error, encode_event
from flowstone.iproto.row import Row, encode_header
from flowstone.replication.applier.ballot_watch import BallotWatch
from flowstone.replication.messages import Ballot, encode_ballot_body
from flowstone.replication.vclock import VClock

GREETING = encode_greeting(Greeting((2, 11, 9), UUID(int=7), b"s" * 32))
KEY = pack("internal.ballot")


def event(ballot: Ballot | None) -> bytes:
    return encode_event(0, KEY, None if ballot is None else encode_ballot_body(ballot, is_2_6=False))


def sent(watch: BallotWatch) -> list[RequestType]:
    packets, _ = split(watch.data_to_send())
    return [RequestType(decode_response(packet).type) for packet in packets]


@pytest.mark.parametrize("size", [1, 10, 10_000])
def test_each_event_delivers_a_ballot_and_requests_the_next(size: int) -> None:
    watch = BallotWatch("upstream")
    who = UUID(int=7)
    ballots = [
        Ballot(VClock({1: lsn}), bootstrap_leader_uuid=who, is_ro=lsn == 1, is_booted=lsn > 1) for lsn in (1, 2, 3)
    ]
    data = GREETING + b"".join(map(event, ballots))
    found, asked = [], []
    for at in range(0, len(data), size):
        watch.receive(data[at : at + size])
        while (ballot := watch.next_ballot()) is not None:
            found.append(ballot)
        asked += sent(watch)
    assert found == ballots
    assert asked == [RequestType.WATCH] * 4


def test_empty_ballot_is_skipped() -> None:
    watch = BallotWatch("upstream")
    unsure = event(Ballot(VClock({1: 5}), is_booted=False))
    watch.receive(GREETING + encode_event(0, KEY, b"\x81\x29\x80") + unsure)
    assert watch.next_ballot() is None
    assert sent(watch) == [RequestType.WATCH] * 3
    watch.receive(encode_event(0, KEY, b"\x81\x29\x81\x04\xc3"))
    ballot = watch.next_ballot()
    assert ballot is not None
    assert (ballot.vclock, ballot.is_ro, ballot.is_booted) == (VClock({1: 5}), True, False)


def test_ballot_is_requested_by_vote_without_the_event() -> None:
    watch = BallotWatch("upstream")
    watch.receive(GREETING + event(None))
    assert watch.next_ballot() is None
    assert sent(watch) == [RequestType.WATCH, RequestType.VOTE]
    watch.receive(frame(encode_header(Row(0)) + encode_ballot_body(Ballot(VClock({1: 5})), is_2_6=False)))
    ballot = watch.next_ballot()
    assert ballot is not None
    assert ballot.vclock == VClock({1: 5})


def test_error_reply_is_raised() -> None:
    watch = BallotWatch("upstream")
    watch.receive(GREETING + encode_error(0, 0, errors.Loading("not yet")))
    with pytest.raises(errors.Loading):
        watch.next_ballot()


def test_reply_of_another_type_is_an_error() -> None:
    watch = BallotWatch("upstream")
    watch.receive(GREETING + frame(encode_header(Row(RequestType.NOP.value))))
    with pytest.raises(errors.UnknownRequestType):
        watch.next_ballot()


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x90", b"\x81\x58", b"\x80\x00", b"\x81\x58\x81\x29\x81\x02\xc1"])
def test_undecodable_event_is_an_error_of_the_peer(body: bytes) -> None:
    watch = BallotWatch("upstream")
    watch.receive(GREETING + frame(encode_header(Row(RequestType.EVENT.value)) + body))
    with pytest.raises(FlowstoneError):
        watch.next_ballot()


def test_packet_larger_than_a_ballot_is_not_buffered() -> None:
    watch = BallotWatch("upstream")
    watch.receive(GREETING + b"\xce" + (2 << 20).to_bytes(4, "big"))
    with pytest.raises(RemoteProtocolError, match="packet claims 2097152 bytes"):
        watch.next_ballot()
