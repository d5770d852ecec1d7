"""The choice of the member that a spool or replica follows, also when all members have failed."""

from __future__ import annotations

from flowstone.archive.refusals import RowsMissing, UpstreamLostTail
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import parse_uri
from flowstone.node.upstream.members import LAG_SECONDS, UpstreamMembers
from flowstone.replication.applier.states import ConnectionLost
from flowstone.replication.vclock import VClock

AWAY = ConnectionLost("away")
GONE = RowsMissing("a:1", "collected", VClock({1: 5}), VClock({1: 9}))


def members(count: int) -> UpstreamMembers:
    return UpstreamMembers([parse_uri(f"host{number}:3301") for number in range(count)])


def behind(lsn: int) -> UpstreamLostTail:
    return UpstreamLostTail(f"at{lsn}:1", VClock({1: lsn}), VClock({1: 100}))


def test_members_skip_a_failed_member() -> None:
    found = members(3)
    seen = []
    for _ in range(4):
        seen.append(found.current.host)
        found.failed(AWAY, 0.0, is_final=False)
    assert seen == ["host0", "host1", "host2", "host0"]


def test_unreachable_members_are_retried_forever() -> None:
    found = members(2)
    for now in range(100):
        found.failed(AWAY, float(now), is_final=False)
        assert found.verdict(float(now)) is None


def test_answer_of_the_only_member_is_final() -> None:
    found = members(1)
    found.failed(behind(90), 0.0, is_final=True)
    assert isinstance(found.verdict(0.0), UpstreamLostTail)


def test_missing_rows_count_as_lost_after_a_timeout() -> None:
    found = members(2)
    found.failed(behind(90), 0.0, is_final=True)
    assert found.verdict(LAG_SECONDS * 2) is None  # the other member has not been queried
    found.failed(behind(95), 1.0, is_final=True)
    assert found.verdict(LAG_SECONDS - 0.1) is None
    assert str(found.verdict(LAG_SECONDS)).startswith("at95:1 has lost rows")


def test_unreachable_member_may_have_collected_rows() -> None:
    found = members(2)
    found.failed(GONE, 0.0, is_final=True)
    found.failed(AWAY, 0.0, is_final=False)
    assert found.verdict(LAG_SECONDS - 0.1) is None
    assert found.verdict(LAG_SECONDS) is GONE
    found.accepted()
    assert found.verdict(LAG_SECONDS) is None


def test_verdict_is_the_first_error_when_all_members_reject() -> None:
    found = members(2)
    refusal = FlowstoneError("no")
    found.failed(refusal, 0.0, is_final=True)
    assert not found.have_all_refused
    found.failed(GONE, 0.0, is_final=True)
    assert found.have_all_refused
    assert (found.verdict(0.0), found.errors) == (refusal, [refusal, GONE])
