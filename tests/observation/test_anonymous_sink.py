"""A tail takes no snapshot and does not join; it starts with the definitions returned by a server."""

from __future__ import annotations

from uuid import UUID

import pytest

from flowstone.archive.upstream_query import UpstreamFacts
from flowstone.iproto.row import Row
from flowstone.observation.anonymous_sink import AnonymousSink, schema_of, version_of
from flowstone.replication.messages import Ballot
from flowstone.replication.vclock import VClock

NOBODY = UUID(int=1)
FACTS = UpstreamFacts(UUID(int=2), "2.11.9", str(UUID(int=3)), Ballot(vclock=VClock({0: 3, 1: 7})), ())


async def test_anonymous_sink_requests_neither_a_snapshot_nor_a_join() -> None:
    sink = AnonymousSink(NOBODY)
    for taken in (sink.begin_snapshot(VClock(), (2, 6, 0)), sink.begin_final(VClock()), sink.end_join(VClock())):
        with pytest.raises(AssertionError):
            await taken


def test_anonymous_sink_has_no_identity_and_no_vote() -> None:
    sink = AnonymousSink(NOBODY)
    sink.raft(1, Row(type=30, body=b""))
    assert (sink.instance_uuid, sink.replica_id, sink.is_anonymous, sink.term) == (NOBODY, 0, True, 1)


def test_server_returns_its_version_and_definitions() -> None:
    assert version_of(FACTS) == (2, 11, 9)
    assert schema_of(FACTS).schema.get(280) is not None
