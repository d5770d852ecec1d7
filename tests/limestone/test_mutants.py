"""Simulated runs find deliberate bugs of a Limestone pair, within a hundred runs each."""

from __future__ import annotations

from typing import Final

import pytest

from flowstone.limestone.replica.log_file_channel import ReplicaChannel
from tests.conftest import FULL
from tests.limestone.mutants import MUTANTS, original, ours

RUNS_MAX: Final = 100
FOUND_BY: Final = {
    "acknowledge_a_session_before_its_fsync": 0,
    "acknowledge_an_epoch_before_its_fsync": 0,
    "count_a_replica_that_is_catching_up": 0,
    "defer_an_epoch_and_keep_the_last_only": 1,
    "keep_what_a_lost_master_began": 0,
    "leave_open_sessions_visible": 29,
    "never_show_hidden_sessions": 0,
    "record_an_epoch_with_open_sessions": 0,
    "recover_without_marking": 0,
    "report_without_the_replica": 0,
    "send_open_sessions_when_catching_up": 7,
    "store_blobs_without_fsync": 0,
    "withdraw_nothing": 0,
}
"""A seed near which each mutant is currently found: the search starts there if time is short."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_found(name: str) -> None:
    first, mutant = 0 if FULL else FOUND_BY[name], MUTANTS[name]
    with mutant():
        assert any(mutant.is_found(seed) for seed in (*range(first, RUNS_MAX), *range(first)))


@pytest.mark.parametrize("seed", range(100 if FULL else 2))
def test_no_violation_is_found_without_a_mutant(seed: int) -> None:
    assert original(seed) == []
    assert ours(seed) == []


def test_mutant_is_removed_after_its_with_block() -> None:
    flush = ReplicaChannel.flush
    for mutant in MUTANTS.values():
        with mutant():
            pass
    assert ReplicaChannel.flush is flush
    assert set(FOUND_BY) == set(MUTANTS)
    assert len(MUTANTS) >= 8
