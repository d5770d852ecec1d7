"""Frames between our master and our replica: read in any fragmentation, rejected if invalid; secrets stay hidden."""

from __future__ import annotations

import json
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import BadMessage
from flowstone.limestone.format import messages
from flowstone.limestone.format.messages import CommonAck, Error, GroupCommit, Message, SessionBegin, SessionBeginAck
from flowstone.limestone.format.wire_extensions import (
    FRAME_SIZE_MAX,
    NONCE_SIZE,
    Action,
    ControlParser,
    Frame,
    FrameType,
    Hello,
    HelloAck,
    Prepare,
    encode,
    is_proven,
    master_proof,
    offer,
    offered_nonce,
    replica_proof,
)
from tests.conftest import FULL
from tests.limestone import recorded

SEED = 20261116
UUID = "0e1f2a3b-0000-4000-8000-00000000000a"
NONCE = bytes(range(NONCE_SIZE))
PROOF = b"\x5a" * 32
HELLO = Hello(UUID, 7, 3, NONCE, PROOF)
HELLO_ACK = HelloAck(UUID, None, 7, b"\x7e" * 32, PROOF)
PREPARE = Prepare(Action.RESUME, 7)

uuids = st.uuids().map(str)
keys = st.binary(min_size=32, max_size=32)
frames = st.one_of(
    st.builds(Hello, uuids, recorded.ids, recorded.ids, keys, st.none() | keys, st.lists(uuids, max_size=4).map(tuple)),
    st.builds(HelloAck, uuids, st.none() | uuids, recorded.ids, keys, st.none() | keys),
    st.builds(Prepare, st.sampled_from(Action), recorded.ids),
)
control_messages = st.sampled_from([SessionBegin(), SessionBeginAck(), GroupCommit(9), CommonAck(), Error(200, "no")])


def encoded(message: Message | Frame) -> bytes:
    return encode(message) if isinstance(message, Frame) else messages.encode(message)


def parsed(*pieces: bytes, extended: bool = True) -> list[Message | Frame]:
    parser = ControlParser(extended=extended)
    found = []
    for piece in pieces:
        parser.feed(piece)
        while (message := parser.next_message()) is not None:
            found.append(message)
    return found


def framed(kind: int, fields: object) -> bytes:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack(">BI", kind, len(body)) + body


@given(st.lists(frames | control_messages, max_size=5), st.data())
def test_frames_and_messages_are_read_in_order_for_any_fragmentation(
    sent: list[Message | Frame], choice: st.DataObject
) -> None:
    data = b"".join(map(encoded, sent))
    cuts = sorted(choice.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    assert parsed(*(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))) == sent


def test_frame_bytes_match_the_specification() -> None:
    body = b'{"action":"resume","epoch":7}'
    assert encode(PREPARE) == b"\x42\x00\x00\x00\x1d" + body
    assert json.loads(encode(HELLO)[5:]) == {
        "instance": UUID,
        "durable_epoch": 7,
        "horizon": 3,
        "nonce": NONCE.hex(),
        "proof": PROOF.hex(),
    }
    assert offer(NONCE) == b"flowstone/1 " + NONCE.hex().encode()


def test_unknown_field_is_ignored() -> None:
    assert parsed(framed(0x42, {"action": "seed", "epoch": 2, "later": [1]})) == [Prepare(Action.SEED, 2)]


def test_frame_before_the_offer_is_an_unknown_message() -> None:
    with pytest.raises(BadMessage, match="unknown message type 0x40"):
        parsed(encode(HELLO), extended=False)


GOOD_HELLO = json.loads(encode(HELLO)[5:])
GOOD_ACK = json.loads(encode(HELLO_ACK)[5:])


@pytest.mark.parametrize(
    "data",
    [
        framed(0x43, {}),
        framed(0xFF, {}),
        framed(0x42, b"\xff"),
        framed(0x42, b"{"),
        framed(0x42, b"[" * 60_000),
        framed(0x42, b"1" * 5000),
        framed(0x42, []),
        framed(0x42, {}),
        framed(0x42, {"action": "format", "epoch": 1}),
        framed(0x42, {"action": ["seed"], "epoch": 1}),
        framed(0x42, {"action": "seed", "epoch": True}),
        framed(0x42, {"action": "seed", "epoch": -1}),
        framed(0x42, {"action": "seed", "epoch": 1 << 64}),
        framed(0x42, {"action": "seed", "epoch": 1.0}),
        framed(0x40, GOOD_HELLO | {"nonce": "00"}),
        framed(0x40, GOOD_HELLO | {"nonce": None}),
        framed(0x40, GOOD_HELLO | {"proof": "zz" * 32}),
        framed(0x40, GOOD_HELLO | {"instance": "me"}),
        framed(0x40, GOOD_HELLO | {"horizon": None}),
        framed(0x40, GOOD_HELLO | {"formerly": UUID}),
        framed(0x40, GOOD_HELLO | {"formerly": [UUID, "me"]}),
        framed(0x40, GOOD_HELLO | {"formerly": [UUID] * 33}),
        framed(0x41, GOOD_ACK | {"follows": 3}),
        framed(0x41, GOOD_ACK | {"token": ""}),
        struct.pack(">BI", 0x40, FRAME_SIZE_MAX + 1),
        struct.pack(">BI", 0x42, (1 << 32) - 1),
    ],
)
def test_invalid_frame_is_rejected(data: bytes) -> None:
    with pytest.raises(BadMessage):
        parsed(data)


def test_error_about_a_secret_does_not_show_it() -> None:
    with pytest.raises(BadMessage) as refused:
        parsed(framed(0x40, GOOD_HELLO | {"proof": PROOF.hex() + "00"}))
    assert PROOF.hex() not in str(refused.value)


def test_entries_on_a_control_channel_are_rejected_before_their_bytes_arrive() -> None:
    with pytest.raises(BadMessage, match="LOG_ENTRIES on a control channel"):
        parsed(b"\x11")


def test_mutated_streams_are_read_or_rejected() -> None:
    chance = random.Random(SEED)
    conversation: list[Message | Frame] = [SessionBegin(), HELLO, PREPARE, GroupCommit(8)]
    streams = [b"".join(map(encoded, conversation)), encoded(HELLO_ACK) * 2]
    for _ in range(50_000 if FULL else 5_000):
        data = bytearray(chance.choice(streams))
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            for message in parsed(bytes(data[: chance.randint(1, len(data))])):
                assert parsed(encoded(message)) == [message]
        except BadMessage:
            pass


def test_real_replica_offers_no_extension() -> None:
    assert offered_nonce(SessionBeginAck().session_secret) is None
    assert offered_nonce(b"") is None


def test_offer_contains_the_nonce() -> None:
    assert offered_nonce(offer(NONCE)) == NONCE


@pytest.mark.parametrize("secret", [b"flowstone/1", b"flowstone/1 00", offer(NONCE) + b"0", offer(NONCE)[:-1] + b"g"])
def test_offer_without_a_nonce_is_rejected(secret: bytes) -> None:
    with pytest.raises(BadMessage):
        offered_nonce(secret)


def test_proofs_depend_on_secret_role_and_conversation() -> None:
    other = bytes(NONCE_SIZE)
    proofs = [
        proof(secret, *nonces)
        for proof in (master_proof, replica_proof)
        for secret in (b"a", b"b")
        for nonces in ((NONCE, other), (other, NONCE), (NONCE, NONCE))
    ]
    assert len(set(proofs)) == len(proofs)
    assert is_proven(proofs[0], master_proof(b"a", NONCE, other))
    assert not is_proven(proofs[0], proofs[1])
    assert not is_proven(proofs[0], proofs[0][:-1])
    assert not is_proven(proofs[0], None)


def test_secrets_are_not_shown() -> None:
    for frame in (HELLO, HELLO_ACK):
        assert "5a5a" not in repr(frame)
        assert "ZZ" not in repr(frame)
        assert "~~" not in repr(frame)


@pytest.mark.parametrize("frame", [Hello(UUID, 1, 0, b""), HelloAck(UUID, None, 1, b"")])
def test_short_secret_is_not_sent(frame: Frame) -> None:
    with pytest.raises(LocalProtocolError):
        encode(frame)


def test_frame_types_are_above_the_message_types_of_the_original() -> None:
    assert min(FrameType) > max(messages.MessageType)
