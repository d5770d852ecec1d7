"""The common position of two sides: waiting for the other side, fixed positions, and lagging sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flowstone.replication.vclock import VClock
from flowstone.spark.sources.options import AsOf
from flowstone.spark.verification.common_position import COMMON, Meeting, meet
from flowstone.spark.verification.sides import SideError

UUID = "aaaaaaaa-0000-4000-8000-000000000000"


class Moving:
    """A side that advances by one position per refresh; `since` is its oldest snapshot."""

    def __init__(
        self,
        name: str,
        *reaches: dict[int, int],
        since: dict[int, int] | None = None,
        past: bool = True,
        uuid: str = UUID,
    ) -> None:
        self.name, self.kind = name, "archive" if past else "lake"
        self.replicaset_uuid = uuid
        self.has_past = past
        self._reaches: Sequence[VClock] = [VClock(reach) for reach in reaches]
        self._number = -1
        self._since = VClock(since or {})

    @property
    def reach(self) -> VClock:
        return self._reaches[self._number]

    def refresh(self) -> None:
        self._number = min(self._number + 1, len(self._reaches) - 1)

    def choose(self, replicaset_uuid: str) -> None: ...

    def can_show(self, position: VClock) -> bool:
        return self._since <= position <= self.reach if self.has_past else position == self.reach

    def resolve(self, as_of: AsOf) -> VClock:
        assert as_of.vclock is not None
        return as_of.vclock

    def view(self, spark: Any, position: VClock) -> Any:
        raise NotImplementedError

    def close(self) -> None: ...


def met(a: Moving, b: Moving, at: Any = None, wait: float = 5.0) -> Meeting:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return meet(a, b, at=at, wait=wait, sleep=sleep, monotonic=lambda: now[0])


def test_sides_at_one_position_meet_there() -> None:
    meeting = met(Moving("a", {1: 10}), Moving("b", {1: 10}))
    assert (meeting.a, meeting.b, meeting.is_same_position) == (VClock({1: 10}), VClock({1: 10}), True)
    assert (meeting.lacks_a, meeting.lacks_b) == ((), ())


def test_nodes_under_writes_meet_at_the_union_of_their_first_positions() -> None:
    """The position is a prefix of neither log: with several originators, each node received the other's rows later."""
    a = Moving("a", {1: 10, 2: 3}, {1: 12, 2: 5}, {1: 14, 2: 7}, since={1: 10, 2: 3})
    b = Moving("b", {1: 8, 2: 6}, {1: 9, 2: 8}, {1: 11, 2: 9}, since={1: 8, 2: 6})
    assert met(a, b).a == VClock({1: 10, 2: 6})


def test_lagging_lake_is_waited_for_and_the_node_follows_to_its_position() -> None:
    node = Moving("node", {1: 100}, {1: 130}, {1: 160}, since={1: 100})
    lake = Moving("lake", {1: 70}, {1: 90}, {1: 140}, {1: 150}, past=False)
    meeting = met(node, lake)
    assert (meeting.a, meeting.b, meeting.lacks_b) == (VClock({1: 140}), VClock({1: 140}), ())


def test_missing_lsn_is_named_and_the_common_prefix_compared() -> None:
    meeting = met(Moving("a", {1: 10}), Moving("b", {1: 9}))
    assert (meeting.a, meeting.b) == (VClock({1: 9}), VClock({1: 9}))
    assert (meeting.lacks_a, meeting.lacks_b) == ((), ((1, 10, 10),))


def test_sides_without_a_common_position_are_compared_where_they_are() -> None:
    meeting = met(Moving("node", {1: 10}, since={1: 10}), Moving("lake", {1: 9}, past=False))
    assert (meeting.a, meeting.b, meeting.lacks_b) == (VClock({1: 10}), VClock({1: 9}), ((1, 10, 10),))
    assert not meeting.is_same_position


def test_archive_lacks_rows_of_a_lake_that_is_ahead() -> None:
    meeting = met(Moving("archive", {1: 9}), Moving("lake", {1: 10}, past=False))
    assert (meeting.lacks_a, meeting.lacks_b) == (((1, 10, 10),), ())


def test_wait_ends_at_its_timeout() -> None:
    slow = Moving("b", *({1: number} for number in range(1, 100)))
    assert met(Moving("a", {1: 50}), slow, wait=0.0).lacks_b == ((1, 2, 50),)
    assert met(Moving("a", {1: 50}), Moving("b", *({1: n} for n in range(1, 100))), wait=60.0).lacks_b == ()


def test_common_position_ignores_later_rows() -> None:
    meeting = met(Moving("a", {1: 10, 2: 1}), Moving("b", {1: 9, 2: 4}), COMMON)
    assert (meeting.a, meeting.lacks_a, meeting.lacks_b) == (VClock({1: 9, 2: 1}), (), ())
    with pytest.raises(SideError, match=r"a cannot show {1: 9}: it has no snapshot"):
        met(Moving("a", {1: 10}, since={1: 10}), Moving("b", {1: 9}), COMMON)


def test_given_position_must_be_available_on_both_sides() -> None:
    at = AsOf(vclock=VClock({1: 5}))
    assert met(Moving("a", {1: 10}), Moving("b", {1: 9}), at).b == VClock({1: 5})
    with pytest.raises(SideError, match=r"b cannot show {1: 5}: it lacks LSN 5 of replica 1; its newest position is"):
        met(Moving("a", {1: 10}), Moving("b", {1: 4}), at)


def test_different_replica_sets_are_compared_where_they_are() -> None:
    other = Moving("b", {1: 900}, uuid="bbbbbbbb-0000-4000-8000-000000000000")
    meeting = met(Moving("a", {1: 10}), other)
    assert (meeting.a, meeting.b, meeting.is_one_set, meeting.is_same_position) == (
        VClock({1: 10}), VClock({1: 900}), False, False
    )  # fmt: skip
    with pytest.raises(SideError, match="different replica sets"):
        met(Moving("a", {1: 10}), other, COMMON)


def test_position_that_one_side_cannot_show_is_refused() -> None:
    """An example is an archive with a gap."""
    with pytest.raises(SideError, match=r"a cannot show {1: 12}: it has no snapshot or version that is old enough"):
        met(Moving("a", {1: 12}, since={1: 13}), Moving("b", {1: 12}, past=False), wait=0.0)
