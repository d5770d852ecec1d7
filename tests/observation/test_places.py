"""All spellings of the addresses of one place."""

from __future__ import annotations

import pytest

from flowstone.observation.places import place_of, seen_from


@pytest.mark.parametrize(
    "address",
    ["localhost:3301", "replicator@localhost:3301", "127.0.0.1:3301", "127.0.1.1:3301", "[::1]:3301", "LOCALHOST:3301"],
)
def test_loopback_has_one_spelling(address: str) -> None:
    assert place_of(address) == "127.0.0.1:3301"


def test_place_has_neither_user_nor_parameters() -> None:
    assert place_of("replicator:secret@db1:3301?transport=ssl") == "db1:3301"
    assert place_of("u@[2001:DB8::7]:3301") == "[2001:db8::7]:3301"
    assert place_of("unix/:/run/tarantool/a.sock") == "unix/:/run/tarantool/a.sock"


def test_loopback_address_reported_by_another_machine_means_that_machine() -> None:
    assert seen_from("db1:3301", "replicator@127.0.0.1:3302") == "db1:3302"
    assert seen_from("db1:3301", "replicator@db2:3301") == "db2:3301"
    assert seen_from("localhost:3301", "localhost:3302") == "127.0.0.1:3302"


def test_loopback_address_is_kept_when_queried_through_a_socket() -> None:
    assert seen_from("unix/:/run/a.sock", "localhost:3302") == "127.0.0.1:3302"
    assert seen_from("db1:3301", "unix/:/run/b.sock") == "unix/:/run/b.sock"
