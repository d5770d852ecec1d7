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


def test_most_sets_have_three_members_and_few_have_seven() -> None:
    sizes = Counter(each.size for each in PLANS)
    assert sizes[3] == pytest.approx(600, abs=50)
    assert sizes[5] == pytest.approx(300, abs=50)
    assert sizes[7] == pytest.approx(100, abs=30)


def test_every_kind_of_set_occurs() -> None:
    kinds = {(each.dialect, each.election_mode, each.wal_mode) for each in PLANS}
    modes = [("2.11", "candidate"), ("2.11", "manual"), ("2.11", "off"), ("2.6", "off")]
    assert kinds == {(*mode, wal_mode) for mode in modes for wal_mode in ("fsync", "write")}


def test_voters_occur_only_in_sets_with_candidates() -> None:
    with_voter = [each for each in PLANS if each.has_voter]
    assert len(with_voter) > 50
    assert {each.election_mode for each in with_voter} == {"candidate"}


def test_planned_faults_and_existing_faults_are_the_same() -> None:
    assert set(FAULTS) == set(faults.FAULTS)
    assert {kind for each in PLANS for kind in each.faults} == set(FAULTS)


def test_power_losses_are_planned_only_if_the_log_is_synced() -> None:
    for each in PLANS:
        if not each.is_durable:
            assert not any(FAULTS[kind] in (POWER, SUCCESSION) for kind in each.faults), each


def test_leaders_change_only_in_sets_with_elections() -> None:
    for each in PLANS:
        if not each.has_elections:
            assert not any(FAULTS[kind] in (TERMS, SUCCESSION) for kind in each.faults), each


def test_synchro_timeout_is_longer_than_the_detection_of_isolation() -> None:
    for each in PLANS:
        if each.has_elections:
            assert each.synchro_timeout > 4 * each.replication_timeout, each


def test_synchro_timeout_without_fencing_is_longer_than_any_fault() -> None:
    unfenced = [each for each in PLANS if each.has_elections and each.fencing_mode == "off"]
    assert len(unfenced) > 100
    assert all(each.synchro_timeout >= UNFENCED_SECONDS for each in unfenced)


def test_clients_of_2_6_have_no_transactions() -> None:
    assert not [each for each in PLANS if each.dialect == "2.6" and set(WITH_TRANSACTIONS) & set(each.workloads)]


def test_asynchronous_workloads_are_left_out_if_leaders_change() -> None:
    assert not [each for each in PLANS if each.has_elections and set(ASYNCHRONOUS) & set(each.workloads)]


def test_multi_master_sets_lose_no_member() -> None:
    with_masters = [each for each in PLANS if each.has_masters]
    assert with_masters
    assert not [each for each in with_masters if set(LOSES_A_MEMBER) & set(each.faults)]


def test_plan_is_determined_by_its_seed() -> None:
    assert plan(7) == plan(7)
    assert isinstance(plan(7), Plan)
    assert plan(7) != plan(8)
