"""Tenures that may be ignored, and owners that keep late rows. Whole stories: limbo_unread_promote.txt."""

from __future__ import annotations

from flowstone.replication.limbo.tenures import Tenures


def of_two_owners() -> Tenures:
    """Return tenures in which 1 owned the queue up to 1:5, then 2 wrote PROMOTE in term 3."""
    tenures = Tenures({}, (), {})
    tenures.hand_over((0, 0), by=1, term=2, first_void=0)
    tenures.note_async_commit()
    tenures.hand_over((1, 5), by=2, term=3, first_void=0)
    return tenures


def test_tenure_without_commits_may_be_ignored() -> None:
    assert of_two_owners().former == ((1, 5),)


def test_several_tenures_without_commits_may_be_ignored() -> None:
    tenures = of_two_owners()
    tenures.hand_over((2, 0), by=3, term=4, first_void=0)
    assert tenures.former == ((1, 5), (2, 0))


def test_tenure_with_a_commit_may_not_be_ignored() -> None:
    tenures = of_two_owners()
    tenures.note_async_commit()
    assert tenures.former == ()


def test_newest_term_of_each_instance_is_known() -> None:
    assert of_two_owners().promote_terms == {1: 2, 2: 3}


def test_former_owner_keeps_rows_directly_after_confirmed_ones() -> None:
    tenures = of_two_owners()
    assert tenures.keeps(1)
    tenures.note_void(1, 7)
    tenures.note_void(1, 9)
    assert not tenures.keeps(1)
    assert tenures.voids == {1: 7}


def test_rows_rolled_back_with_a_tenure_are_void_until_the_next_one() -> None:
    tenures = of_two_owners()
    tenures.hand_over((2, 0), by=1, term=4, first_void=6)
    assert not tenures.keeps(2)
    tenures.hand_over((1, 9), by=2, term=5, first_void=0)
    tenures.hand_over((2, 14), by=1, term=6, first_void=0)
    assert tenures.keeps(2)


def test_tenures_of_a_log_are_adopted() -> None:
    tenures = Tenures({2: 3}, [(1, 5)], {1: 6})
    assert (tenures.promote_terms, tenures.former, tenures.voids) == ({2: 3}, ((1, 5),), {1: 6})


def test_late_promote_may_overtake_a_tenure_without_commits() -> None:
    tenures = of_two_owners()
    tenures.overtake((1, 5), (3, 0))
    tenures.overtake((1, 4), (4, 0))
    assert tenures.former == ((1, 5), (3, 0))
