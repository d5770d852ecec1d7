"""Sessions in progress, and their effect on the epochs that a master commits."""

from __future__ import annotations

from flowstone.limestone.replica.epoch_commits import EpochCommits


def test_new_master_has_no_pending_epochs() -> None:
    commits = EpochCommits()
    assert commits.is_idle
    assert not commits.is_syncing(5)
    assert not commits.has_lost(5)


def test_open_session_is_not_awaited() -> None:
    commits = EpochCommits()
    commits.begun(0, 3)
    assert not commits.is_idle
    assert not commits.is_syncing(3)
    assert not commits.has_lost(3)


def test_ended_session_is_pending_until_it_is_synced() -> None:
    commits = EpochCommits()
    commits.begun(0, 3)
    commits.ended(0)
    commits.begun(0, 4)
    commits.ended(0)
    assert not commits.is_idle
    assert not commits.is_syncing(2)
    assert commits.is_syncing(3)
    commits.synced(0)
    assert not commits.is_syncing(4)
    assert commits.is_idle


def test_epoch_of_a_dropped_session_and_later_ones_are_lost() -> None:
    commits = EpochCommits()
    commits.begun(0, 3)
    commits.begun(1, 2)
    commits.ended(1)
    commits.dropped(0)
    assert commits.is_syncing(2)
    assert not commits.has_lost(2)
    assert commits.has_lost(3)
    commits.dropped(1)
    assert commits.lost == 2
    assert not commits.has_lost(1)
    assert commits.has_lost(2)
    assert not commits.is_syncing(2)
    commits.dropped(7)
    assert commits.lost == 2


def test_drop_of_an_idle_channel_loses_nothing() -> None:
    commits = EpochCommits()
    commits.begun(0, 3)
    commits.ended(0)
    commits.synced(0)
    commits.dropped(0)
    assert commits.lost is None
