"""Greetings: recorded, generated and malformed."""

from __future__ import annotations

import contextlib
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError
from flowstone.iproto.greeting import Greeting, GreetingError, decode_greeting, encode_greeting, version_id
from tests.places import VECTORS

WIRE = VECTORS / "wire"


@pytest.mark.parametrize(("age", "version"), [("2.6", (2, 6, 0)), ("3.8", (3, 8, 0))])
def test_recorded_greeting_round_trips(age: str, version: tuple[int, int, int]) -> None:
    data = (WIRE / f"{age}-ping-vote-id.s2c.bin").read_bytes()[:128]
    greeting = decode_greeting(data)
    assert greeting.version == version
    assert greeting.version_id == version_id(*version)
    assert greeting.uuid == uuid.UUID("11111111-0000-4000-8000-000000000001")
    assert len(greeting.salt) == 32
    assert encode_greeting(greeting) == data


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99)),
    st.uuids(),
    st.binary(min_size=20, max_size=45),
)
def test_greeting_round_trips(version: tuple[int, int, int], instance: uuid.UUID, salt: bytes) -> None:
    greeting = Greeting(version, instance, salt)
    assert decode_greeting(encode_greeting(greeting)) == greeting


def _with(first: bytes, salt: bytes = b"A" * 44) -> bytes:
    return first.ljust(63) + b"\n" + salt.ljust(63) + b"\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(128),
        _with(b"Tarantool 2.6.0 (Lua console)"),
        _with(b"Tarantool 2.6 (Binary)"),
        _with(b"Tarantool 2.6.0 (Binary) 11111111-0000-4000-8000-00000000000-"),
        _with(b"Tarantool 2.6.0 (Binary)", b"####"),
        _with(b"Tarantool 2.6.0 (Binary)", b"AAAA"),
    ],
)
def test_invalid_greeting_is_rejected(data: bytes) -> None:
    with pytest.raises(GreetingError):
        decode_greeting(data)


def test_greeting_of_a_development_build_is_read() -> None:
    assert decode_greeting(_with(b"Tarantool 3.9.0-entrypoint-84 (Binary)")).version == (3, 9, 0)


def test_encode_greeting_rejects_a_short_salt() -> None:
    with pytest.raises(LocalProtocolError):
        encode_greeting(Greeting((2, 11, 9), uuid.UUID(int=1), b"short"))


@given(st.binary(min_size=128, max_size=128), st.integers(0, 127))
def test_random_and_damaged_greetings_raise_only_greeting_errors(noise: bytes, at: int) -> None:
    good = bytearray(_with(b"Tarantool 2.6.0 (Binary) 11111111-0000-4000-8000-000000000001"))
    good[at] = noise[0]
    for data in (noise, bytes(good), bytes(good[:at])):
        with contextlib.suppress(GreetingError):
            decode_greeting(data)
