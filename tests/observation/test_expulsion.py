"""Expelling a member: the executing member, the lost rows, and the remaining quorum."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.errors import FlowstoneError
from flowstone.observation.expulsion import Expulsion, NoSuchMember, alone_text, plan
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import Report, Unreachable
from tests.observation.reports import address, downstream, report, upstream, uuid


def planned(wanted: str, *answers: Report | Unreachable, asked: int = 1) -> Expulsion:
    (one,) = replica_sets(answers)
    member = one.member(uuid(asked))
    assert member is not None
    return plan(one, member, wanted)


def led(number: int, vclock: dict[int, int] | None = None, **more: Any) -> Report:
    """Return one member of three, led by the second."""
    election = {"state": "leader" if number == 2 else "follower", "term": 5, "leader": 2, "vote": 2}
    cfg = {"election_mode": "candidate", "replication_synchro_quorum": "N / 2 + 1"}
    peers = {other: {"upstream": upstream(other)} for other in (1, 2, 3) if other != number}
    return report(number, vclock or {1: 9}, peers, election=election, ro=number != 2, cfg=cfg, **more)


def silent(number: int) -> Unreachable:
    return Unreachable(address=address(number), reason="connection refused")


@pytest.mark.parametrize("wanted", ["3", uuid(3), "db3:3301", "storage-c"])
def test_a_member_is_named_by_id_uuid_address_or_name(wanted: str) -> None:
    found = planned(wanted, led(1), led(2), led(3, name="storage-c"))
    assert (found.member.id, found.by.id, list(found.objections())) == (3, 2, [])


@pytest.mark.parametrize("wanted", ["4", "0", "storage", uuid(7)])
def test_expulsion_of_a_non_member_is_rejected(wanted: str) -> None:
    with pytest.raises(NoSuchMember, match=r"not a member of the replica set .*; its members are 1 \(db1:3301\), 2 "):
        planned(wanted, led(1), led(2))


def test_rows_without_another_copy_are_listed() -> None:
    found = planned("3", led(1, {1: 9, 3: 4}), led(2, {1: 8, 3: 5}), led(3, {1: 9, 3: 7}))
    assert found.alone == {3: (6, 7)}
    assert "rows that exist only on this member: 2 rows, 6..7 of replica 3" in list(found.consequences())
    assert list(found.objections()) == ["only db3:3301 has 2 rows, 6..7 of replica 3"]


def test_rows_received_while_the_others_answered_have_other_copies() -> None:
    (one,) = replica_sets((led(1, {1: 9}), led(2, {1: 9}), led(3, {1: 12})))
    asked = one.member(uuid(1))
    assert asked is not None
    assert plan(one, asked, "3").alone == {1: (10, 12)}
    later = plan(one, asked, "3", before={1: 8})
    assert (later.alone, list(later.objections())) == ({}, [])


def test_silent_member_is_described_by_the_other_members() -> None:
    found = planned("3", led(1, {1: 9, 3: 4}), led(2), silent(3))
    first, second, third = found.consequences()
    assert first == "it does not answer; the other members know that it reached at least {3: 4}"
    assert second == "no rows are known to exist only on this member"
    assert third == "2 of 2 other members are alive, 2 are needed: a quorum is left"


def test_members_with_the_expelled_one_in_replication_are_listed() -> None:
    asked = report(1, {1: 9}, {2: {"upstream": upstream(2)}, 3: {"upstream": upstream(3)}})
    other = report(2, {1: 9}, {1: {"upstream": upstream(1)}, 3: {"downstream": downstream({1: 9})}})
    assert planned("3", asked, other, led(3)).afterwards() == (
        "unless a new member gets its address, remove db3:3301 from `replication` of db1:3301; while "
        "`replication` lists an expelled member, a start may wait the whole `replication_connect_timeout` for it"
    )
    assert (
        planned("3", led(1), led(2), silent(3))
        .afterwards()
        .startswith(
            "unless a new member gets its address, remove db3:3301 from `replication` of db1:3301 and db2:3301; "
        )
    )
    assert planned("3", other, report(1, {1: 9}), led(3)).afterwards() == (
        "remove the member from `replication` in the configuration of the other members, if it is listed there"
    )


def test_quorum_is_that_of_the_remaining_members() -> None:
    assert planned("3", led(1), led(2), led(3)).has_quorum
    without = planned("1", led(1), led(2), silent(3))
    assert (without.members_left, without.alive_left, without.quorum_left, without.has_quorum) == (2, 1, 2, False)
    assert list(without.consequences())[-1] == "1 of 2 other members are alive, 2 are needed: NO QUORUM IS LEFT"
    assert list(without.objections())[-1] == (
        "no quorum is left without db1:3301: 1 of 2 other members are alive, 2 are needed"
    )


def test_quorum_is_taken_from_the_executing_member() -> None:
    """An operator who follows the advice for a lost quorum lowers it only there."""
    peers: dict[int, dict[str, Any]] = {other: {} for other in (3, 4, 5)}
    usual, lowered = ({"replication_synchro_quorum": quorum} for quorum in ("N / 2 + 1", 2))
    answers = (report(1, {2: 9}, peers, ro=True, cfg=usual), report(2, {2: 9}, peers, cfg=lowered))
    found = planned("3", *answers, *map(silent, (3, 4, 5)))
    assert (found.alive_left, found.quorum_left, list(found.objections())) == (2, 2, [])


def test_expulsion_counts_a_replicating_member_as_alive_when_it_rejects_queries() -> None:
    denied = Unreachable(address=address(3), reason="access denied", is_denied=True)
    assert planned("1", led(1), led(2), denied).alive_left == 2
    cfg = {"replication_synchro_quorum": "N / 2 + 1"}
    followers = {number: {"downstream": downstream({1: 5})} for number in (2, 3)}
    followers |= {4: {"downstream": downstream({1: 5}, "stopped")}}
    found = planned("2", report(1, {1: 5}, followers, cfg=cfg))
    assert (found.members_left, found.alive_left, found.has_quorum, list(found.objections())) == (3, 2, True, [])


def test_quorum_is_unknown_without_the_options_of_a_member() -> None:
    found = planned("2", report(1, {1: 5}, {2: {"downstream": downstream({1: 5})}}))
    assert (found.quorum_left, found.has_quorum) == (None, None)
    assert list(found.consequences())[-1] == "1 of 1 other members are alive: the quorum is unknown"


def test_expelling_the_leader_or_the_queried_member_needs_force() -> None:
    assert list(planned("1", led(1), led(2), led(3)).objections()) == ["db1:3301 is the member at the given URI itself"]
    with pytest.raises(FlowstoneError, match=r"is writable; promote another member.*delete its own row"):
        planned("2", led(1), led(2), led(3))
    both = planned("2", led(1), led(2), report(3, {1: 9}))
    assert (list(both.objections()), both.by.id) == (["db2:3301 is the leader"], 3)


def test_lower_quorum_is_advised_only_for_a_lost_quorum() -> None:
    config = report(1, {1: 5}, {3: {"downstream": downstream({1: 5})}}, ro=True, ro_reason="config")
    with pytest.raises(FlowstoneError) as caught:
        planned("3", config)
    assert caught.value.hint == "promote a member, or make one writable"

    election = {"state": "follower", "term": 5, "leader": 0, "vote": 2}
    cfg = {"election_mode": "candidate", "replication_synchro_quorum": "N / 2 + 1"}
    alone = report(1, {1: 9}, {2: {"upstream": upstream(2)}}, election=election, ro=True, cfg=cfg)
    with pytest.raises(FlowstoneError, match=r"is writable: db1:3301 has lost its quorum") as caught:
        planned("2", alone, silent(2))
    assert caught.value.hint is not None
    lowered = "`flowstone config db1:3301 replication_synchro_quorum=1`"
    assert f"lower the quorum to the remaining members, on db1:3301: {lowered}" in caught.value.hint
    assert "its own row" not in caught.value.hint


def test_queried_member_expels_without_a_leader_if_it_can() -> None:
    answers = (report(1, {1: 5}, {3: {}}), report(2, {1: 5}))
    assert planned("3", *answers, asked=2).by.id == 2
    assert planned("3", *answers).by.id == 1


def test_spans_of_one_row_and_of_several_members() -> None:
    assert alone_text({3: (5, 5)}) == "1 row, 5 of replica 3"
    assert alone_text({1: (9, 10), 3: (5, 5)}) == "3 rows, 9..10 of replica 1 and 5 of replica 3"
