"""When the record of an epoch may be written: after every session of it that has begun, whatever a master waits for."""

from __future__ import annotations

from flowstone.limestone.replica_commits import Commits, Decision


def test_nothing_is_on_its_way() -> None:
    assert Commits().decide(5) is Decision.RECORD
    assert Commits().is_idle


def test_an_open_session_of_the_epoch_defers_the_record_to_its_end() -> None:
    commits = Commits()
    commits.begun(0, 3)
    commits.begun(1, 5)
    assert commits.decide(2) is Decision.RECORD
    assert commits.decide(4) is Decision.DEFER
    commits.defer(4)
    assert commits.due() is None
    commits.ended(0)
    assert commits.due() is None
    commits.synced(0)
    assert commits.due() == 4
    assert commits.due() is None


def test_a_session_that_is_being_synced_is_waited_for() -> None:
    commits = Commits()
    commits.begun(0, 3)
    commits.ended(0)
    commits.begun(0, 4)
    assert commits.decide(3) is Decision.WAIT
    assert not commits.is_idle
    commits.synced(0)
    assert commits.decide(3) is Decision.RECORD
    assert commits.decide(4) is Decision.DEFER


def test_of_several_deferred_epochs_the_largest_is_recorded() -> None:
    commits = Commits()
    commits.begun(0, 1)
    commits.defer(1)
    commits.defer(3)
    commits.defer(2)
    commits.ended(0)
    commits.synced(0)
    assert commits.due() == 3


def test_what_lost_a_session_is_never_whole() -> None:
    commits = Commits()
    commits.begun(0, 3)
    commits.begun(1, 2)
    commits.ended(1)
    commits.defer(3)
    commits.dropped(0)
    assert commits.due() is None
    assert commits.decide(2) is Decision.WAIT
    assert commits.decide(3) is Decision.REFUSE
    commits.dropped(1)
    assert commits.lost == 2
    assert commits.decide(1) is Decision.RECORD
    assert commits.decide(2) is Decision.REFUSE
    commits.dropped(7)
    assert commits.lost == 2
