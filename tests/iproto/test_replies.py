"""Replies against bytes that a real 2.6.0 sent, and against our own client's decoder."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from flowstone.iproto import errors
from flowstone.iproto.extensions import ErrorRecord, ErrorStack
from flowstone.iproto.msgpack import pack, unpack_body
from flowstone.iproto.packet import Response, decode_response, split
from flowstone.iproto.replies import (
    HEADER_SIZE,
    HEADER_SIZE_WIDE,
    encode_data,
    encode_data_parts,
    encode_data_with_position,
    encode_error,
    encode_event,
    encode_ok,
    encode_reply,
)

LEADER = UUID("a17803e0-faac-483b-aa53-495f77b68ca4")


def read(data: bytes) -> Response:
    packets, end = split(data)
    assert end == len(data)
    (packet,) = packets
    return decode_response(packet)


def test_ok_reply_equals_that_of_a_real_server() -> None:
    assert encode_ok(7, 0x50).hex() == "ce000000188300ce0000000001cf000000000000000705ce0000005080"


def test_data_reply_equals_that_of_a_real_server() -> None:
    head = "8300ce0000000001cf000000000000000705ce000000508130dd"
    assert encode_data(7, 0x50, []).hex() == f"ce0000001e{head}00000000"
    assert encode_data(7, 0x50, [b"\x00"]).hex() == f"ce0000001f{head}0000000100"
    assert encode_data_parts(7, 0x50, 2, b"\x01\x02") == encode_data(7, 0x50, [b"\x01", b"\x02"])


def test_error_reply_equals_that_of_a_real_server_except_for_its_source_line() -> None:
    text = "Space '9512' does not exist"
    stack = ErrorStack((ErrorRecord("ClientError", text, "./src/box/schema.h", 84, 0, 36),))
    assert encode_error(7, 0x50, errors.NoSuchSpace(text, stack=stack)).hex() == (
        "ce0000007e8300ce0000802401cf000000000000000705ce000000508231bb53706163652027393531322720646f6573206e6f742065786973"
        "74528100918600ab436c69656e744572726f72025401b22e2f7372632f626f782f736368656d612e6803bb537061636520273935313227"
        "20646f6573206e6f7420657869737404000524"
    )


@pytest.mark.parametrize("wide", [False, True])
def test_every_reply_is_decoded_by_the_client(wide: bool) -> None:
    assert read(encode_ok(2**64 - 1, 9, wide=wide)) == Response(0, 2**64 - 1, 9, b"\x80")
    assert read(encode_data(1, 9, [b"\x91\x05"], wide)).values() == {0x30: ((5,),)}
    assert read(encode_reply(128, 1, 9, b"\x81\x30\x90", wide)) == Response(128, 1, 9, b"\x81\x30\x90")
    paged = read(encode_data_with_position(1, 9, [b"\x91\x05"], b"kQU", wide))
    assert paged.values() == {0x30: ((5,),), 0x35: "kQU"}
    assert len(encode_ok(1, 9, wide=wide)) == (HEADER_SIZE_WIDE if wide else HEADER_SIZE) + 1


def record(error: errors.TarantoolError) -> ErrorRecord:
    """Return the error as decoded by a client."""
    received = read(encode_error(1, 9, error)).error()
    assert (received.code, received.message) == (error.code, error.message)
    assert received.stack is not None
    return received.stack.errors[0]


def test_error_record_has_the_type_and_fields_of_its_class() -> None:
    assert record(errors.NoSuchSpace("x")).type == "ClientError"
    assert record(errors.ProcLua("x")).type == "LuajitError"
    assert record(errors.System("x")).type == "SystemError"
    denied = record(errors.AccessDenied("Read access to space 'a' is denied for user 'b'"))
    assert denied.type == "AccessDeniedError"
    assert denied.fields == {"access_type": "Read", "object_type": "space", "object_name": "a"}
    read_only = record(errors.Readonly("Can't modify data on a read-only instance - box.cfg.read_only is true"))
    assert (read_only.type, read_only.fields) == ("ClientError", {"reason": "config"})
    orphan = record(errors.Readonly("Can't modify data on a read-only instance - it is an orphan"))
    assert orphan.fields == {"reason": "orphan"}


@pytest.mark.parametrize(
    ("why", "fields"),
    [
        ("state is election follower with term 2", {"reason": "election", "state": "follower", "term": 2}),
        (
            f"state is election follower with term 3, leader is 1 ({LEADER})",
            {"reason": "election", "state": "follower", "term": 3, "leader_id": 1, "leader_uuid": LEADER},
        ),
        (
            f"synchro queue with term 2 belongs to 1 ({LEADER})",
            {"reason": "synchro", "queue_owner_id": 1, "term": 2, "queue_owner_uuid": LEADER},
        ),
        (
            "synchro queue with term 2 belongs to 31 and is frozen until promotion",
            {"reason": "synchro", "queue_owner_id": 31, "term": 2},
        ),
    ],
)
def test_readonly_error_has_the_fields_of_the_real_server(why: str, fields: dict[str, Any]) -> None:
    shown = record(errors.Readonly(f"Can't modify data on a read-only instance - {why}")).fields
    assert shown == fields
    assert list(shown) == list(fields), "in the order of the real server"


def test_event_has_no_schema_version_and_an_optional_value() -> None:
    assert encode_event(3, pack("box.id"), None).hex() == "ce0000000e" + "82004c0103" + "8157a6626f782e6964"
    response = read(encode_event(3, pack("box.id"), pack({"id": 1})))
    assert (response.type, response.sync) == (76, 3)
    assert unpack_body(response.body) == {0x57: "box.id", 0x58: {"id": 1}}
