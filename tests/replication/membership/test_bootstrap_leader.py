"""The choice of a bootstrap leader: each rule, its ties, and its independence of the order of candidates."""

from __future__ import annotations

from itertools import permutations
from uuid import UUID

import pytest

from flowstone.iproto import errors
from flowstone.replication.membership.bootstrap_leader import (
    Candidate,
    Rule,
    configured_rule,
    dissenter,
    followable,
    leader_text,
    named_leader,
    oldest_rule,
    rejoin_source,
    score_rule,
    supervised_rule,
    unlisted_members,
)
from flowstone.replication.messages import Ballot
from flowstone.replication.vclock import VClock


def uuid(number: int) -> UUID:
    return UUID(int=number)


def peer(number: int, lsns: dict[int, int] | None = None, **ballot: object) -> Candidate:
    return Candidate(uuid(number), Ballot(vclock=VClock(lsns or {}), **ballot), f"127.0.0.1:{3300 + number}")  # type: ignore[arg-type]


def chosen(rule: Rule, *candidates: Candidate) -> int:
    """Return the number of the chosen candidate, for every order of the candidates."""
    winners = {winner.uuid.int for order in permutations(candidates) if (winner := rule(order)) is not None}
    assert len(winners) == 1
    return winners.pop()


@pytest.mark.parametrize("rule", [oldest_rule, score_rule])
class TestBothRules:
    def test_no_leader_is_chosen_without_candidates(self, rule: Rule) -> None:
        assert rule([]) is None

    def test_the_smallest_uuid_leads_among_equals(self, rule: Rule) -> None:
        assert chosen(rule, peer(3), peer(1), peer(2)) == 1

    def test_the_larger_vclock_leads(self, rule: Rule) -> None:
        assert chosen(rule, peer(1, {1: 5}), peer(2, {1: 6}), peer(3, {1: 4})) == 2

    def test_local_rows_are_ignored(self, rule: Rule) -> None:
        assert chosen(rule, peer(1, {1: 5}), peer(2, {0: 9, 1: 5})) == 1

    def test_an_incomparable_vclock_counts_as_larger(self, rule: Rule) -> None:
        assert chosen(rule, peer(1, {1: 5}), peer(2, {2: 1})) == 2

    def test_read_only_member_leads_only_if_all_are_read_only(self, rule: Rule) -> None:
        assert chosen(rule, peer(1, is_ro_cfg=True), peer(2)) == 2
        assert chosen(rule, peer(1, is_ro_cfg=True), peer(2, is_ro_cfg=True)) == 1


def test_member_with_data_leads_before_a_loading_one_before_2_10() -> None:
    assert chosen(oldest_rule, peer(1, is_loading=True), peer(2, {1: 3})) == 2
    assert chosen(oldest_rule, peer(1), peer(2, is_loading=True)) == 1


def test_bootstrapped_peer_leads_even_if_read_only_since_2_10() -> None:
    assert chosen(score_rule, peer(1, is_booted=False), peer(2, is_ro_cfg=True, is_ro=True)) == 2


def test_writable_peer_leads_before_a_read_only_one_since_2_10() -> None:
    assert chosen(score_rule, peer(1, {1: 9}, is_ro=True), peer(2)) == 2


def test_voter_does_not_lead_if_there_is_a_candidate() -> None:
    def unborn(number: int, *, can_lead: bool = False) -> Candidate:
        return peer(number, is_booted=False, is_ro=True, can_lead=can_lead)

    assert chosen(score_rule, unborn(1), unborn(2, can_lead=True), unborn(3)) == 2


@pytest.mark.parametrize("name", ["127.0.0.1:3302", str(uuid(2)), "storage-2"])
def test_only_the_configured_leader_matters(name: str) -> None:
    rule = configured_rule(name)
    assert chosen(rule, peer(1, {1: 9}), peer(2, instance_name="storage-2", is_booted=False)) == 2


def test_an_unknown_configured_leader_is_an_error() -> None:
    with pytest.raises(errors.Cfg, match="failed to connect to the bootstrap leader nobody"):
        configured_rule("nobody")([peer(1)])


def test_supervised_leader_announces_itself() -> None:
    named = peer(2, bootstrap_leader_uuid=uuid(2))
    assert chosen(supervised_rule, peer(1, {1: 9}, bootstrap_leader_uuid=uuid(2)), named) == 2
    assert supervised_rule([peer(1, bootstrap_leader_uuid=uuid(2))]) is None


def test_member_that_chose_another_leader_is_found() -> None:
    agreeing, undecided = peer(2, bootstrap_leader_uuid=uuid(1)), peer(3, bootstrap_leader_uuid=uuid(0))
    assert dissenter([agreeing, undecided, peer(4)], uuid(1)) is None
    other = peer(5, bootstrap_leader_uuid=uuid(2))
    assert dissenter([agreeing, other], uuid(1)) == other


def test_members_without_an_address_are_named() -> None:
    knowing = peer(1, registered_uuids=(uuid(1), uuid(2), uuid(3)))
    assert unlisted_members([knowing, peer(2)], 3, knowing) == ()
    assert unlisted_members([knowing, peer(2)], 2, knowing) == (uuid(3),)


def test_expelled_peer_names_no_members() -> None:
    leader, expelled = peer(1, registered_uuids=(uuid(1), uuid(2))), peer(3, registered_uuids=(uuid(3), uuid(4)))
    assert unlisted_members([leader, peer(2), expelled], 3, leader) == ()
    assert unlisted_members([peer(1), expelled], 1, peer(1)) == (uuid(4),)


class TestRejoin:
    def test_one_peer_with_the_logs_is_enough_to_follow(self) -> None:
        gone = peer(1, {1: 100}, gc_vclock=VClock({1: 50}))
        assert rejoin_source([gone, peer(2, {1: 90}, gc_vclock=VClock({1: 5}))], VClock({1: 10})) is None

    def test_most_advanced_peer_is_joined_if_none_has_the_logs(self) -> None:
        first = peer(1, {1: 100}, gc_vclock=VClock({1: 50}))
        second = peer(2, {1: 110}, gc_vclock=VClock({1: 60}))
        assert rejoin_source([first, second], VClock({1: 10})) == second

    def test_rejoin_is_rejected_if_it_would_lose_our_own_rows(self) -> None:
        source = peer(1, {1: 100}, gc_vclock=VClock({1: 50}))
        assert rejoin_source([source], VClock({1: 10, 2: 1})) is None

    def test_local_rows_do_not_prevent_a_rejoin(self) -> None:
        source = peer(1, {1: 100}, gc_vclock=VClock({1: 50}))
        assert rejoin_source([source], VClock({0: 7, 1: 10})) == source

    def test_expelled_peer_with_the_logs_cannot_be_followed(self) -> None:
        registered = (uuid(1), uuid(2))
        members = [peer(1, {1: 100}, registered_uuids=registered), peer(2, {1: 90}, registered_uuids=registered)]
        expelled, anonymous = peer(3, {1: 80}, registered_uuids=(uuid(1), uuid(3))), peer(4, {1: 70}, is_anon=True)
        assert followable([expelled, anonymous, *members], ()) == [*members, anonymous]

    def test_members_are_taken_from_our_own_list_if_ballots_do_not_name_them(self) -> None:
        assert followable([peer(1), peer(2)], [uuid(2)]) == [peer(2)]
        assert followable([peer(1), peer(2)], [uuid(3)]) == [peer(1), peer(2)]

    def test_no_peer_is_joined_without_peers(self) -> None:
        assert rejoin_source([], VClock({1: 10})) is None


def test_leader_given_as_a_uri_is_compared_by_address() -> None:
    candidates = [peer(1), Candidate(uuid(2), Ballot(), "db1:3301")]
    for text in ("db1:3301", "user:secret@db1:3301", "user:secret@db1:3301?transport=ssl"):
        named = named_leader(candidates, text)
        assert named is not None
        assert named.uuid == uuid(2)
    assert named_leader(candidates, "user:secret@db1:3302") is None


@pytest.mark.parametrize(
    "leader", ["user:secret@db1:3301", "user:s?secret@db1:3301", "user:secret:db1:3301", "u:secret@", "h:1?p=secret"]
)
def test_password_of_a_leader_is_never_shown(leader: str) -> None:
    assert "secret" not in leader_text(leader)
    with pytest.raises(errors.Cfg) as caught:
        configured_rule(leader)([peer(1)])
    assert "secret" not in str(caught.value)


def test_leader_without_a_password_is_shown_as_given() -> None:
    for leader in ("db1:3301", "name-1", str(uuid(2)), "user@db1:3301"):
        assert leader_text(leader) == leader
