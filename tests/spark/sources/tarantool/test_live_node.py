"""Live servers through our client: unreachable members, visible spaces, error messages."""

from __future__ import annotations

import pytest

from flowstone.client.connection import ConnectionFailed
from flowstone.iproto import errors
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.uri import parse_uri
from flowstone.replication.vclock import VClockError
from flowstone.spark.sources.tarantool.live_node import (
    CannotUse,
    UnknownSpaceThere,
    definitions,
    explained,
    select_body,
)
from tests.spark.live_servers import PAIRS

URI = parse_uri("u:secret@db1:3301")


def test_spaces_are_found_by_name_and_by_id(address: str) -> None:
    found = definitions([parse_uri("127.0.0.1:1"), parse_uri(address)])
    space = found.space("pairs")
    assert space is found.space(PAIRS)
    assert [field.name for field in space.fields] == ["a", "b", "c"]
    assert space.fields[2].is_nullable
    assert space.primary_key is not None
    assert [part.field for part in space.primary_key.parts] == [0, 1]
    assert len(found.replicaset_uuid) == 36
    with pytest.raises(
        UnknownSpaceThere,
        match=r"no space 'nope' at 127.*user 'guest' lacks the right to see it; visible spaces: orders",
    ):
        found.space("nope")


def test_user_sees_only_permitted_spaces(real_server: str) -> None:
    found = definitions([parse_uri(f"limited:pass@{real_server}")])
    assert found.space("orders").id == 512
    assert not found.replicaset_uuid
    with pytest.raises(UnknownSpaceThere, match=r"no space 'pairs' at .*, or user 'limited' lacks the right to see it"):
        found.space("pairs")


def test_login_and_connection_errors_are_distinguished(address: str) -> None:
    with pytest.raises(CannotUse, match=r"rejects user 'nobody': .*check the user and the password in uri"):
        definitions([parse_uri(f"nobody:x@{address}")])
    with pytest.raises(CannotUse, match=r"cannot connect to 127.0.0.1:1: connection refused"):
        definitions([parse_uri("127.0.0.1:1")])


def test_errors_name_the_server_and_hide_the_password() -> None:
    denied = explained(errors.error_of(42, "Read access to space 'x' is denied"), URI, "read from")
    assert str(denied).startswith(
        "cannot read from db1:3301: Read access to space 'x' is denied (ER_ACCESS_DENIED, 42); grant the right"
    )
    assert "grant('u', …)" in str(denied)
    guest = explained(errors.error_of(42, "Read access to space 'x' is denied"), parse_uri("db1:3301"), "read from")
    assert str(guest).endswith("; no user was given: write user:password@… in the URI")
    lost = explained(ConnectionFailed("db1:3301 closed the connection"), URI, "read")
    assert (type(lost), str(lost)) == (CannotUse, "db1:3301 closed the connection")
    other = VClockError("no vclock")
    assert explained(other, URI, "read") is other
    assert explained(denied, URI, "read") is denied
    assert "secret" not in str(denied)


def test_select_sends_a_raw_key_unchanged() -> None:
    body = unpack_body(select_body(512, raw_key=b"\x91\xcd\x00\x05", iterator=6, limit=7))
    assert body == {0x10: 512, 0x11: 0, 0x12: 7, 0x13: 0, 0x14: 6, 0x20: (5,)}
    assert unpack_body(select_body(512, ("a",)))[0x20] == ("a",)
