"""A peer that lost rows of its own is remembered until it is seen with the last of them."""

from __future__ import annotations

from uuid import UUID

from flowstone.replication.applier.lost_tail import LostTails, TailLost
from flowstone.replication.vclock import VClock

PEER = UUID(int=7)
OURS = VClock({1: 3, 2: 10})


def check(tails: LostTails, lsn: int, *, uuid: UUID = PEER, number: int = 2, ours: VClock = OURS) -> TailLost | None:
    return tails.check("peer", uuid, number, VClock({1: 3, number: lsn}), ours)


def test_loss_is_reported_with_the_rows_and_may_be_recovered() -> None:
    lost = check(LostTails(), 4)
    assert lost is not None
    assert lost.may_come_back
    assert lost.message == "peer has lost its rows 5…10: its vclock is {1: 3, 2: 4}, ours {1: 3, 2: 10}"


def test_peer_without_lag_is_accepted() -> None:
    tails = LostTails()
    assert [check(tails, lsn) for lsn in (10, 11, 500)] == [None] * 3
    assert tails.check("peer", PEER, 0, VClock(), OURS) is None


def test_peer_seen_with_exactly_the_lost_rows_is_accepted() -> None:
    tails = LostTails()
    assert check(tails, 4)
    assert check(tails, 7)
    assert check(tails, 10) is None
    assert check(tails, 12) is None


def test_peer_with_more_rows_than_seen_is_rejected() -> None:
    tails = LostTails()
    assert check(tails, 4)
    assert check(tails, 7)
    for _ in range(2):
        lost = check(tails, 12)
        assert lost is not None
        assert not lost.may_come_back
        text = "peer had lost its rows 5…10 and has written new rows since, possibly under the same LSNs: "
        assert lost.message.startswith(text)


def test_loss_grows_when_others_send_more_rows_of_the_peer() -> None:
    tails = LostTails()
    assert check(tails, 4, ours=VClock({2: 8}))
    assert check(tails, 8)
    lost = check(tails, 12)
    assert lost is not None
    assert "its rows 5…10" in lost.message


def test_acknowledgement_of_the_last_lost_row_ends_the_loss() -> None:
    tails = LostTails()
    assert check(tails, 4)
    tails.acknowledged(3, VClock({3: 10, 2: 10}))
    tails.acknowledged(2, VClock({2: 9}))
    tails.acknowledged(2, VClock({2: 11}))
    assert check(tails, 12)
    tails.acknowledged(2, VClock({2: 10}))
    assert check(tails, 12) is None


def test_loss_concerns_only_its_peer_and_id() -> None:
    tails = LostTails()
    assert check(tails, 4)
    assert check(tails, 12, uuid=UUID(int=8)) is None
    assert check(tails, 12, number=3) is None
