"""Properties of the two dialects."""

from __future__ import annotations

import pytest

from flowstone.box.dialect import Dialect, from_greeting
from flowstone.iproto.constants import RequestType


@pytest.mark.parametrize(
    ("version", "dialect"),
    [
        ((1, 10, 15), Dialect.V2_6),
        ((2, 6, 0), Dialect.V2_6),
        ((2, 6, 1), Dialect.V2_11),
        ((2, 11, 9), Dialect.V2_11),
        ((3, 8, 0), Dialect.V2_11),
    ],
)
def test_joining_node_takes_its_dialect_from_the_greeting(version: tuple[int, int, int], dialect: Dialect) -> None:
    assert from_greeting(version) is dialect


def test_greeting_version_of_each_dialect_maps_back_to_the_dialect() -> None:
    assert [from_greeting(dialect.greeting_version) for dialect in Dialect] == list(Dialect)
    assert [dialect.version_id for dialect in Dialect] == [132608, 133897]
    assert all(dialect.version_text.startswith("{}.{}.{}-".format(*dialect.greeting_version)) for dialect in Dialect)


def test_only_dialect_2_11_has_id_requests_and_snapshot_states() -> None:
    old, new = Dialect.V2_6, Dialect.V2_11
    assert (old.has_id, old.features, old.snapshot_states) == (False, (), ())
    assert (new.has_id, new.protocol_version, new.features) == (True, 6, (0, 1, 2, 3, 4, 5, 6))
    assert new.snapshot_states == (RequestType.RAFT, RequestType.RAFT_PROMOTE)
    assert Dialect("2.11") is new
