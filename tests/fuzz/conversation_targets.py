"""Targets that are whole conversations: the messages of a master to an applier, and to a ballot watcher."""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

from flowstone.archive.upstream_query import tuples_of
from flowstone.errors import FlowstoneError
from flowstone.iproto import auth
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.greeting import Greeting, encode_greeting
from flowstone.iproto.msgpack import error_stack, pack, unpack
from flowstone.iproto.packet import encode_request, frame
from flowstone.replication import messages
from flowstone.replication.applier.ballot_watch import BallotWatch
from flowstone.replication.applier.protocol import ApplierProtocol, BallotIsEvent, Entered, HeartbeatHeard, RaftHeard
from flowstone.replication.applier.states import ApplierState
from flowstone.replication.limbo.control_rows import decode_control
from flowstone.replication.messages import FetchSnapshot, Heartbeat, Join, Register, Subscribe, SubscribeReply
from flowstone.replication.vclock import VClock
from tests.fuzz.replication_targets import BALLOT, STREAM, UUIDS

OURS, SET = UUIDS
PIECE = 61


def applier(data: bytes) -> None:
    """Feed an applier: the first byte selects its request; the rest is its input, in one piece and in many.

    The results may differ: bytes before the request are not an answer.
    """
    for pieces in ([data[1:]], [data[at : at + PIECE] for at in range(1, len(data), PIECE)]):
        _converse(data[:1], pieces)


def _converse(wish: bytes, pieces: list[bytes]) -> None:
    protocol = ApplierProtocol("peer", instance_uuid=OURS)
    with suppress(FlowstoneError):
        for piece in pieces:
            protocol.receive(piece)
            _hear(protocol, wish)


def _hear(protocol: ApplierProtocol, wish: bytes) -> None:
    while (event := protocol.next_event()) is not None:
        match event:
            case Entered(ApplierState.CONNECTED):
                protocol.go_on()
            case Entered(ApplierState.READY):
                _ask(protocol, wish)
            case BallotIsEvent():
                protocol.ballot_known(BALLOT)
            case RaftHeard(row):
                decode_control(row.type, row.body)
            case HeartbeatHeard():
                protocol.acknowledge(VClock({1: 9}), 1)
        protocol.data_to_send()


def _ask(protocol: ApplierProtocol, wish: bytes) -> None:
    if protocol.has_joined or protocol.has_registered or wish == b"s":
        protocol.subscribe(Subscribe(SET, OURS, VClock({1: 4}), 5))
    elif wish == b"f":
        protocol.fetch_snapshot(FetchSnapshot(5, OURS))
    elif wish == b"r":
        protocol.register(Register(OURS, VClock({1: 4})))
    else:
        protocol.join(Join(OURS, 5))


def ballot_watch(data: bytes) -> None:
    for pieces in ([data], [data[at : at + PIECE] for at in range(0, len(data), PIECE)]):
        watch = BallotWatch("peer")
        for piece in pieces:
            watch.receive(piece)
            while watch.next_ballot() is not None:
                watch.data_to_send()


def login(data: bytes) -> None:
    """Check that no answer is accepted as authentic without the password."""
    assert not auth.check(data, auth.hash_of_hash("secret"), bytes(32))


def stack_of_errors(data: bytes) -> None:
    error_stack(unpack(data))


def select_reply(data: bytes) -> None:
    """Feed an archive that requests definitions with the answers of a server."""
    for each in tuples_of(data):
        unpack(each)


def _greeting(version: tuple[int, int, int]) -> bytes:
    return encode_greeting(Greeting(version, UUID(int=5), bytes(32)))


OK = frame(pack({Key.REQUEST_TYPE.value: 0, Key.SYNC.value: 0}) + b"\x80")
POSITION = messages.encode_vclock_reply(VClock({1: 9}))
VOTED = frame(pack({0: 0, 1: 0}) + messages.encode_ballot_body(BALLOT, is_2_6=False))
SUBSCRIBED = messages.encode_subscribe_reply(SubscribeReply(1, VClock({1: 9}), SET))
BEAT = messages.encode_heartbeat(Heartbeat(1, 1.5, 7))
RAFT = frame(pack({0: RequestType.RAFT.value, 2: 1}) + pack({0: 3, 2: 1}))
SNAPSHOT = frame(pack({0: RequestType.INSERT.value}) + pack({0x10: 512, 0x21: (1, "text")})) * 2
META = frame(pack({0: RequestType.JOIN_META.value}) + b"\x80") + frame(
    pack({0: RequestType.JOIN_SNAPSHOT.value}) + b"\x80"
)
OLD, NEW = _greeting((2, 6, 0)) + VOTED, _greeting((2, 11, 9)) + OK + VOTED
APPLIERS = (
    b"s" + OLD + SUBSCRIBED + STREAM + BEAT,
    b"s" + NEW + SUBSCRIBED + BEAT + RAFT + STREAM,
    b"j" + NEW + POSITION + META + SNAPSHOT + POSITION + STREAM[:60] + POSITION + SUBSCRIBED + STREAM,
    b"j" + OLD + POSITION + SNAPSHOT + POSITION + POSITION + SUBSCRIBED,
    b"f" + NEW + POSITION + META + SNAPSHOT + POSITION + SUBSCRIBED,
    b"r" + NEW + STREAM[:60] + POSITION + SUBSCRIBED,
)
EVENT = encode_request(
    RequestType.EVENT,
    0,
    pack(
        {
            Key.EVENT_KEY.value: "internal.ballot",
            Key.EVENT_DATA.value: unpack(messages.encode_ballot_body(BALLOT, is_2_6=False)),
        }
    ),
)
WATCHES = (_greeting((2, 11, 9)) + EVENT * 2, _greeting((2, 10, 0)) + encode_request(RequestType.EVENT, 0) + VOTED)
STACKS = (
    pack(
        {0: [{0: "ClientError", 1: "file.c", 2: 5, 3: "text", 4: 0, 5: 7, 6: {"name": "x"}}, {0: "E", 1: "f", 3: "m"}]}
    ),
)
ANSWERS = (auth.scramble("wrong", bytes(32)), bytes(20))
REPLIES = (pack({Key.DATA.value: [(512, 1, "s"), ("cluster", "uuid")]}), b"\x80")
