"""Packets of recorded conversations, split anywhere, and damaged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError, RemoteProtocolError
from flowstone.iproto import packet
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import AccessDenied, CredsMismatch, ReplicasetUuidMismatch, UnknownRequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import PacketError, Response, decode_response, encode_request, frame, split
from tests.places import VECTORS

WIRE = VECTORS / "wire"


def recorded(name: str) -> bytes:
    """Return the bytes that a real server sent after its greeting."""
    return (WIRE / f"{name}.s2c.bin").read_bytes()[128:]


def responses(data: bytes) -> list[Response]:
    packets, end = split(data)
    assert end == len(data)
    return [decode_response(packet) for packet in packets]


def test_recorded_conversation_of_a_newer_server_is_read() -> None:
    answers = responses(recorded("3.8-ping-vote-id"))
    assert [answer.sync for answer in answers] == [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18]
    assert all(answer.schema_version == 87 for answer in answers if answer.type != RequestType.EVENT)
    assert answers[0].values() == {}
    assert answers[3].values()[Key.FEATURES][:2] == (0, 1)
    assert answers[9].values() == {Key.DATA: ({"version": 87},)}
    with pytest.raises(UnknownRequestType, match="Unknown request type 99"):
        answers[10].values()


def test_encoded_requests_equal_those_of_a_recorded_client() -> None:
    sent = (WIRE / "3.8-ping-vote-id.c2s.bin").read_bytes()
    assert encode_request(RequestType.PING, 7, b"") == sent[:10]
    assert encode_request(RequestType.ID, 10, pack({0x54: 1, 0x55: [0, 1]})) == sent[30:47]


def test_stream_id_is_in_the_header() -> None:
    assert encode_request(RequestType.BEGIN, 1, b"", stream_id=5).hex() == "ce0000000783000e01010a05"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("2.6-wrong-password", CredsMismatch),
        ("2.6-access-denied", AccessDenied),
        ("3.8-access-denied", AccessDenied),
        ("3.8-replicaset-mismatch", ReplicasetUuidMismatch),
    ],
)
def test_recorded_refusal_raises_the_error_of_its_code(name: str, kind: type[Exception]) -> None:
    error = responses(recorded(name))[-1].error()
    assert type(error) is kind
    assert error.stack is not None
    assert error.stack.errors[0].message == error.message
    assert error.stack.errors[0].code == error.code


def test_error_with_an_unreadable_stack_keeps_code_and_message() -> None:
    body = pack({0x31: "no", 0x52: {0: [{0: "ClientError"}]}})
    error = Response(0x8000 + 7, 1, 0, body).error()
    assert (error.code, error.message, error.stack) == (7, "no", None)


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=6), st.integers(0, 2000))
def test_buffer_split_anywhere_yields_complete_packets_and_the_rest(payloads: list[bytes], cut: int) -> None:
    stream = b"".join(map(frame, payloads))
    first, end = split(bytearray(stream[:cut]))
    rest, done = split(stream[end:])
    assert first + rest == payloads
    assert end + done == len(stream)


@pytest.mark.parametrize(("length", "size"), [("05", 5), ("cc05", 5), ("cd0005", 5), ("cf0000000000000005", 5)])
def test_packet_length_may_have_any_unsigned_encoding(length: str, size: int) -> None:
    assert split(bytes.fromhex(length) + b"x" * size) == ([b"x" * size], len(length) // 2 + size)


def test_oversized_packet_is_rejected_before_it_arrives() -> None:
    with pytest.raises(PacketError, match="claims 1000 bytes"):
        split(b"\xcd\x03\xe8", size_max=999)
    for data in (b"\xc0", b"\x00", b"\xa1x"):
        with pytest.raises(PacketError):
            split(data)


def test_frame_rejects_an_oversized_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packet, "PACKET_SIZE_MAX", 10)
    with pytest.raises(LocalProtocolError):
        frame(b"x" * 11)


@given(st.binary(max_size=100), st.integers(0, 1110), st.integers(0, 255))
def test_random_and_damaged_packets_raise_only_protocol_errors(noise: bytes, at: int, byte: int) -> None:
    damaged = bytearray(recorded("3.8-ping-vote-id"))
    damaged[at % len(damaged)] = byte
    for data in (noise, bytes(damaged), frame(noise or b"\0")):
        try:
            for one in split(data, size_max=10_000)[0]:
                decode_response(one).error()
        except RemoteProtocolError:
            pass


def test_packets_before_an_invalid_one_are_returned_first() -> None:
    data = frame(b"\x80") + b"\xc1"
    assert split(data) == ([b"\x80"], 6)
    with pytest.raises(PacketError, match="not a length"):
        split(data[6:])
    with pytest.raises(PacketError, match="claims"):
        split(b"\xce" + (1000).to_bytes(4, "big"), size_max=10)
    assert split(data[:6] + b"\xce" + (1000).to_bytes(4, "big"), size_max=10) == ([b"\x80"], 6)
