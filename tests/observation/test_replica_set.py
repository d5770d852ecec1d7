"""Reports of a set combined: members, missing answers, links, and true lag."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowstone.observation.replica_set import Link, ReplicaSet, document, missing_row_count, replica_sets
from flowstone.observation.report import Report, Unreachable, report_of
from tests.observation.reports import SET, address, downstream, pair, report, upstream, uuid


def only(*answers: Report | Unreachable) -> ReplicaSet:
    (found,) = replica_sets(answers)
    return found


def silent(number: int) -> Unreachable:
    return Unreachable(address=address(number), reason="connection refused")


def link(one: ReplicaSet, follower: int, master: int) -> Link:
    (found,) = [each for each in one.links if (each.follower, each.master) == (uuid(follower), uuid(master))]
    return found


def labels(one: ReplicaSet) -> list[tuple[int, str, str]]:
    return [(member.id, member.label, member.mode) for member in one.members]


# --- members ---


def test_members_are_ordered_by_id_with_anonymous_ones_last() -> None:
    anonymous = {uuid(7): {"id": 0, "uuid": uuid(7), "downstream": downstream({1: 5})}}
    info = {"id": 2, "uuid": uuid(2), "cluster": {"uuid": SET}, "ro": True, "status": "running", "vclock": {1: 5}}
    second = report_of(address(2), info, anonymous=anonymous)
    one = only(second, report(1, {1: 5}))
    assert labels(one) == [(1, "db1:3301", "rw"), (2, "db2:3301", "read"), (0, "anonymous 00000007", "unknown")]
    assert (one.uuid, one.master, one.failover) == (SET, "single", "off")
    assert [one.role(member) for member in one.members] == ["master", "replica", "unknown"]


def test_unreachable_member_is_identified_by_the_address_that_others_follow() -> None:
    one = only(report(1, {1: 5}, {2: {"upstream": upstream(2, "disconnected")}}), silent(2))
    assert labels(one) == [(1, "db1:3301", "rw"), (2, "db2:3301", "unknown")]
    assert one.members[1].unreachable == silent(2)


def test_unreachable_member_is_identified_by_a_loopback_address_of_its_machine() -> None:
    told = upstream(2) | {"peer": "replicator@localhost:3302"}
    lost = Unreachable(address="db1:3302", reason="connection refused")
    one = only(report(1, {1: 5}, {2: {"upstream": told}}), lost)
    assert [(member.id, member.unreachable) for member in one.members] == [(1, None), (2, lost)]


def test_single_silent_member_is_matched_with_the_single_silent_address() -> None:
    one = only(report(1, {1: 5}, {2: {"downstream": {"status": "stopped"}}}), silent(2))
    assert labels(one) == [(1, "db1:3301", "rw"), (2, "db2:3301", "unknown")]


def test_two_silent_members_are_not_matched_with_addresses() -> None:
    one = only(report(1, {1: 5}, {2: {}, 3: {}}), silent(2))
    assert labels(one) == [
        (1, "db1:3301", "rw"),
        (2, "replica 2", "unknown"),
        (3, "replica 3", "unknown"),
        (0, "db2:3301", "unknown"),
    ]


def test_anonymous_follower_is_not_matched_with_a_silent_address() -> None:
    info = {"id": 1, "uuid": uuid(1), "cluster": {"uuid": SET}, "status": "running", "vclock": {1: 5}}
    anonymous = {uuid(7): {"id": 0, "uuid": uuid(7), "downstream": downstream({1: 5})}}
    one = only(report_of(address(1), info, anonymous=anonymous), silent(2))
    assert {member.uuid for member in one.members} == {uuid(1), uuid(7), address(2)}


def test_server_queried_by_two_names_is_listed_once() -> None:
    first, second = pair({1: 5}, {1: 5}, {})
    again = Report(**{name: getattr(second, name) for name in second.__struct_fields__} | {"address": "10.0.0.2:3301"})
    one = only(first, second, again)
    assert labels(one) == [(1, "db1:3301", "rw"), (2, "db2:3301", "read")]
    assert len(one.links) == 1


def test_silent_member_is_described_by_the_links_of_others() -> None:
    gc = {"consumers": ({"name": f"replica {uuid(2)}", "vclock": {1: 3}, "signature": 3},)}
    peers = {2: {"downstream": {"status": "stopped"}}}
    one = only(report(1, {1: 9, 2: 4}, peers, gc=gc), report(3, {1: 9, 2: 4}, {2: {"downstream": downstream({1: 6})}}))
    member = one.member(uuid(2))
    assert member is not None
    assert member.vclock == {1: 6, 2: 4}


def test_members_of_3_have_names_even_if_silent() -> None:
    peers = {2: {"name": "storage-b", "upstream": upstream(2, "disconnected")}}
    info = {"name": "storage-a", "cluster": {"name": "shop"}, "replicaset": {"uuid": SET, "name": "storage"}}
    one = only(report(1, {1: 5}, peers, **info), silent(2))
    assert (one.label, one.uuid) == ("storage", SET)
    assert [member.label for member in one.members] == ["storage-a", "storage-b"]


# --- several sets ---


def test_two_sets_are_separated_and_a_silent_server_belongs_to_its_upstream() -> None:
    other = {"cluster": {"uuid": "other"}}
    answers: list[Report | Unreachable] = [
        report(1, {1: 5}),
        silent(4),
        report(3, {3: 7}, {4: {"upstream": upstream(4, "disconnected")}}, **other),
        silent(5),
    ]
    shop, second, unknown = replica_sets(answers)
    assert [member.label for member in shop.members] == ["db1:3301"]
    assert labels(second) == [(3, "db3:3301", "rw"), (4, "db4:3301", "unknown")]
    assert (unknown.uuid, labels(unknown)) == (None, [(0, "db5:3301", "unknown")])


def test_set_without_answers_is_empty() -> None:
    one = only(silent(1), silent(2))
    assert (one.uuid, one.label, one.master, one.failover) == (None, "unknown", "no", "unknown")
    assert len(one.members) == 2


# --- elections and the queue ---


def elected(number: int, leader: int, term: int, **more: Any) -> Report:
    state = "leader" if number == leader else "follower"
    election = {"state": state, "term": term, "leader": leader, "vote": leader}
    return report(number, {1: 5}, election=election, ro=number != leader, ro_reason="election", **more)


def test_leader_is_that_of_the_newest_term() -> None:
    one = only(elected(1, 1, 2), elected(2, 2, 3), elected(3, 2, 3))
    assert (one.term, one.leader, one.failover) == (3, 2, "election")
    assert [member.is_leader for member in one.members] == [False, True, False]
    assert one.master == "multi"  # the first leader does not know yet that it was replaced


def test_new_term_without_a_leader_has_none() -> None:
    one = only(elected(1, 0, 4), elected(2, 1, 3), elected(3, 0, 4))
    assert (one.term, one.leader) == (4, 0)


def test_elections_are_detected_by_the_mode_of_members() -> None:
    election = {"state": "follower", "term": 1, "leader": 0, "vote": 0}
    off, voter = {"election_mode": "off"}, {"election_mode": "voter"}
    assert only(report(1, {}, election=election, cfg=off), report(2, {}, cfg=voter)).failover == "election"
    assert only(report(1, {}, election=election, cfg=off)).failover == "off"
    assert only(report(1, {}, election=election)).failover == "unknown"


def test_queue_is_shown_as_reported_by_its_owner() -> None:
    def waiting(length: int, **queue: Any) -> dict[str, Any]:
        return {"synchro": {"quorum": 2, "queue": {"len": length, "owner": 2, "term": 4} | queue}}

    one = only(report(1, {}, **waiting(5)), report(2, {}, **waiting(3, age=1.5)), report(3, {}, **waiting(4)))
    assert one.queue is not None
    assert (one.queue.len, one.queue.age) == (3, 1.5)


# --- links ---


def test_lag_is_zero_when_no_row_is_missing() -> None:
    one = only(*pair({1: 5}, {1: 5}, {"lag": 30.0, "idle": 0.4}))
    assert link(one, 2, 1) == Link(
        follower=uuid(2), master=uuid(1), status="follow", downstream="follow", lag=0.0, lag_lsn=0, idle=0.4
    )


def test_lag_is_at_least_the_idle_time_when_rows_are_missing() -> None:
    one = only(*pair({1: 9}, {1: 5}, {"status": "disconnected", "lag": 0.0001, "idle": 12.0}))
    assert (link(one, 2, 1).lag, link(one, 2, 1).lag_lsn) == (12.0, 4)


def test_lag_after_a_silent_master_is_unknown() -> None:
    told = upstream(1, "disconnected", message="connect, called on fd 15", system_message="Connection refused")
    one = only(report(2, {1: 5}, {1: {"upstream": told}}), silent(1))
    found = link(one, 2, 1)
    assert (found.lag, found.lag_lsn, found.idle) == (None, None, 0.1)
    assert found.message == "connect, called on fd 15; Connection refused"


def test_unreachable_follower_is_known_from_its_master() -> None:
    one = only(report(1, {1: 9}, {2: {"downstream": downstream({1: 6}, idle=0.5, lag=0.25)}}))
    assert link(one, 2, 1) == Link(
        follower=uuid(2), master=uuid(1), status="follow", downstream="follow", lag=0.5, lag_lsn=3, idle=0.5
    )


def test_link_has_the_reports_of_both_ends() -> None:
    first = report(1, {1: 9}, {2: {"downstream": {"status": "stopped", "message": "log gap"}}})
    second = report(2, {1: 5}, {1: {"upstream": upstream(1)}})
    found = link(only(first, second), 2, 1)
    assert (found.status, found.downstream, found.is_following) == ("follow", "stopped", True)


def test_member_that_does_not_follow_is_not_reported_as_stopped() -> None:
    gone = {"status": "stopped", "message": "unexpected EOF when reading from socket"}
    one = only(report(1, {1: 9}, {2: {"downstream": gone}}), report(2, {1: 5}, {}))
    assert one.links == ()


def test_rows_may_arrive_through_other_members() -> None:
    chain = only(
        report(1, {1: 5}),
        report(2, {1: 5}, {1: {"upstream": upstream(1)}}),
        report(3, {1: 5}, {2: {"upstream": upstream(2, "stopped")}}),
    )
    assert chain.gets_rows_of(uuid(3), uuid(1))
    assert not chain.gets_rows_of(uuid(1), uuid(3))


@pytest.mark.parametrize(
    ("ahead", "behind", "count"),
    [({1: 5, 2: 3}, {1: 5, 2: 3}, 0), ({1: 5, 2: 3}, {1: 2}, 6), ({1: 2}, {1: 5, 2: 9}, 0), ({}, {1: 1}, 0)],
)
def test_missing_rows_are_counted_by_component(ahead: dict[int, int], behind: dict[int, int], count: int) -> None:
    assert missing_row_count(ahead, behind) == count


# --- leaders ---


def test_leader_without_followers_no_longer_leads() -> None:
    """Without a quorum, the remaining member starts no new term, and still reports the old leader."""
    election = {"state": "follower", "term": 3, "leader": 1, "vote": 1}
    for status, leader in (("follow", 1), ("disconnected", 0)):
        one = only(silent(1), report(2, {1: 5}, {1: {"upstream": upstream(1, status)}}, election=election))
        assert (one.leader, one.term, one.failover) == (leader, 3, "election")
        assert [member.is_leader for member in one.members] == [bool(leader), False]
    stranger = report(2, {1: 5}, {3: {}}, election=election)
    assert only(stranger).leader == 0


# --- JSON ---


def test_document_contains_conclusions_and_no_secret() -> None:
    one = only(*pair({1: 5}, {1: 5}, {"peer": "replicator@db1:3301"}))
    text = json.dumps(document(one))
    shown = json.loads(text)
    assert (shown["label"], shown["failover"], shown["master"]) == (SET, "off", "single")
    assert [(one["label"], one["mode"], one["role"]) for one in shown["members"]] == [
        ("db1:3301", "rw", "master"),
        ("db2:3301", "read", "replica"),
    ]
    assert shown["members"][0]["vclock"] == {"1": 5}
    assert shown["members"][1]["why_read_only"] == "unknown"


def test_silent_server_is_matched_with_the_member_by_its_last_uuid() -> None:
    one = report(1, {1: 5}, {2: {}, 3: {}})
    lost = [Unreachable(address=address(number), reason="connection refused", uuid=uuid(number)) for number in (2, 3)]
    (found,) = replica_sets([one, *lost])
    assert [(member.uuid, member.address) for member in found.members[1:]] == [(uuid(n), address(n)) for n in (2, 3)]


def test_member_that_answers_elsewhere_loses_its_address() -> None:
    one, two = report(1, {1: 5}, {2: {}}), report(2, {1: 5}, {1: {"upstream": upstream(1)}})
    (found,) = replica_sets([one, two, Unreachable(address="db9:3301", reason="connection refused", uuid=uuid(2))])
    assert [(member.uuid, member.unreachable is None) for member in found.members] == [
        (uuid(1), True),
        (uuid(2), True),
        ("db9:3301", False),
    ]


def test_address_of_another_instance_is_not_matched_with_the_last_unmatched_member() -> None:
    one = report(1, {1: 5}, {2: {}})
    for known, is_member in ((None, True), (uuid(2), True), (uuid(7), False)):
        lost = Unreachable(address=address(2), reason="connection refused", uuid=known)
        member = replica_sets([one, lost])[0].member(uuid(2))
        assert member is not None
        assert (member.unreachable is not None) is is_member
