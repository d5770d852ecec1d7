"""Plans of runs are as varied as intended, and never void a promise."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation import faults
from tests.simulation.plan import (
    ASYNCHRONOUS,
    FAULTS,
    LOSES_A_MEMBER,
    POWER,
    SUCCESSION,
    TERMS,
    UNFENCED_SECONDS,
    WITH_TRANSACTIONS,
    Plan,
    plan,
)

PLANS = [plan(seed) for seed in range(1000)]


def test_sets_have_three_members_in_most_runs_and_seven_in_few() -> None:
    sizes = Counter(each.size for each in PLANS)
    assert sizes[3] == pytest.approx(600, abs=50)
    assert sizes[5] == pytest.approx(300, abs=50)
    assert sizes[7] == pytest.approx(100, abs=30)


def test_every_kind_of_set_occurs() -> None:
    kinds = {(each.dialect, each.election_mode, each.wal_mode) for each in PLANS}
    modes = [("2.11", "candidate"), ("2.11", "manual"), ("2.11", "off"), ("2.6", "off")]
    assert kinds == {(*mode, wal_mode) for mode in modes for wal_mode in ("fsync", "write")}


def test_some_members_only_vote_where_others_stand() -> None:
    with_voter = [each for each in PLANS if each.has_voter]
    assert len(with_voter) > 50
    assert {each.election_mode for each in with_voter} == {"candidate"}


def test_every_fault_that_is_planned_exists_and_every_one_that_exists_is_planned() -> None:
    assert set(FAULTS) == set(faults.FAULTS)
    assert {kind for each in PLANS for kind in each.faults} == set(FAULTS)


def test_the_power_goes_only_where_the_log_is_synced() -> None:
    for each in PLANS:
        if not each.is_durable:
            assert not any(FAULTS[kind] in (POWER, SUCCESSION) for kind in each.faults), each


def test_leaders_are_made_only_where_the_queue_may_change_hands() -> None:
    for each in PLANS:
        if not each.has_elections:
            assert not any(FAULTS[kind] in (TERMS, SUCCESSION) for kind in each.faults), each


def test_leaders_notice_that_they_are_alone_before_they_take_anything_back() -> None:
    for each in PLANS:
        if each.has_elections:
            assert each.synchro_timeout > 4 * each.replication_timeout, each


def test_leaders_that_never_notice_take_nothing_back_while_a_fault_lasts() -> None:
    unfenced = [each for each in PLANS if each.has_elections and each.fencing_mode == "off"]
    assert len(unfenced) > 100
    assert all(each.synchro_timeout >= UNFENCED_SECONDS for each in unfenced)


def test_clients_of_2_6_have_no_transactions() -> None:
    assert not [each for each in PLANS if each.dialect == "2.6" and set(WITH_TRANSACTIONS) & set(each.workloads)]


def test_nothing_is_written_asynchronously_where_leaders_change() -> None:
    assert not [each for each in PLANS if each.has_elections and set(ASYNCHRONOUS) & set(each.workloads)]


def test_no_member_goes_for_good_where_all_of_them_write() -> None:
    with_masters = [each for each in PLANS if each.has_masters]
    assert with_masters
    assert not [each for each in with_masters if set(LOSES_A_MEMBER) & set(each.faults)]


def test_the_same_seed_is_the_same_plan() -> None:
    assert plan(7) == plan(7)
    assert isinstance(plan(7), Plan)
    assert plan(7) != plan(8)
