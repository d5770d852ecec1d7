"""Random values: the distributions that callers rely on."""

from __future__ import annotations

import uuid

import pytest

from flowstone.outside.random import SystemRandom


def test_bytes_have_the_requested_length_and_differ() -> None:
    random = SystemRandom()
    assert random.bytes(0) == b""
    first, second = random.bytes(32), random.bytes(32)
    assert len(first) == len(second) == 32
    assert first != second


def test_uuids_are_of_version_4_and_differ() -> None:
    random = SystemRandom()
    drawn = {random.uuid() for _ in range(100)}
    assert len(drawn) == 100
    assert all(each.version == 4 and each.variant == uuid.RFC_4122 for each in drawn)


def test_uniform_is_within_its_bounds() -> None:
    random = SystemRandom()
    assert all(0.5 <= random.uniform(0.5, 1.5) <= 1.5 for _ in range(1000))


def test_randrange_reaches_every_value_below_its_end_and_no_other() -> None:
    random = SystemRandom()
    assert {random.randrange(4) for _ in range(1000)} == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="empty range"):
        random.randrange(0)
