"""The settled position: before any pending transaction, and never after an unsettled one."""

from __future__ import annotations

from flowstone.archive.settled_tracker import Verdicts
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row
from flowstone.replication.vclock import VClock
from tests.node.archived_rows import (
    QUEUED,
    SYNC,
    SYNC_SPACE,
    alone,
    confirm,
    define_space,
    promote,
    rollback,
    row,
    slab,
    transaction,
)


def started(version: tuple[int, ...] = (2, 11, 9)) -> Verdicts:
    verdicts = Verdicts()
    verdicts.start(VClock({1: 0}))
    verdicts.follow_version(version)
    return verdicts


def pushed(verdicts: Verdicts, *rows: bytes) -> tuple[tuple[int, int, int], ...]:
    together = slab(*rows)
    return verdicts.push(together, 0, len(together)).rolled_back


def test_plain_rows_are_settled_at_once() -> None:
    verdicts = started()
    both = slab(alone(1), alone(2), alone(1, origin=2))
    assert verdicts.push(both, 0, 3) == (False, False, False, ())
    assert verdicts.settled == VClock({1: 2, 2: 1})


def test_rows_after_a_pending_transaction_are_not_settled() -> None:
    verdicts = started()
    judged = verdicts.push(slab(alone(1), alone(2, flags=SYNC), alone(3, flags=QUEUED)), 0, 3)
    assert judged.has_synchronous
    assert verdicts.settled == VClock({1: 1})
    assert verdicts.pending_transactions == 2
    assert pushed(verdicts, confirm(4, 2)) == ()
    assert verdicts.settled == VClock({1: 4})


def test_rolled_back_rows_are_listed() -> None:
    verdicts = started()
    two = transaction([row(2), row(3)], SYNC)
    pushed(verdicts, alone(1), two, alone(4, flags=QUEUED))
    assert pushed(verdicts, rollback(5, 3)) == ((1, 2, 3), (1, 4, 4))
    assert verdicts.settled == VClock({1: 5})


def test_nop_in_place_of_a_row_of_a_former_leader_is_settled_at_once() -> None:
    """A member that knew the new leader when the rows arrived wrote the NOP, with the original flags."""
    verdicts = started()
    pushed(verdicts, alone(1, flags=SYNC), promote(1, 0, term=2, origin=2))
    late = transaction([Row(RequestType.NOP, 1, lsn=2, timestamp=102.0)], SYNC)
    assert pushed(verdicts, late, alone(2, origin=2)) == ()
    assert verdicts.is_quiet
    assert verdicts.settled == VClock({1: 2, 2: 2})


def test_rows_discarded_by_a_new_leader_are_listed() -> None:
    verdicts = started()
    pushed(verdicts, alone(1, flags=SYNC), alone(2, flags=SYNC), alone(3, flags=QUEUED))
    assert verdicts.settled == VClock({1: 0})
    assert pushed(verdicts, promote(1, 1, term=2, origin=2)) == ((1, 2, 2), (1, 3, 3))
    assert verdicts.settled == VClock({1: 3, 2: 1})


def test_space_definition_decides_what_is_pending_before_2_8_1() -> None:
    verdicts = started((2, 6, 0))
    judged = verdicts.push(slab(define_space(1, SYNC_SPACE, is_sync=True), alone(2, SYNC_SPACE), alone(3)), 0, 3)
    assert judged.has_definitions
    assert judged.has_synchronous
    assert verdicts.settled == VClock({1: 1})
    assert pushed(verdicts, rollback(4, 2)) == ((1, 2, 2), (1, 3, 3))
    assert verdicts.settled == VClock({1: 4})


def test_rolled_back_definition_no_longer_counts() -> None:
    verdicts = started((2, 6, 0))
    pushed(verdicts, define_space(1, SYNC_SPACE, is_sync=True), alone(2, SYNC_SPACE))
    pushed(verdicts, define_space(3, 600, is_sync=True), rollback(4, 2))
    pushed(verdicts, alone(5, 600))
    assert verdicts.settled == VClock({1: 5})
    pushed(verdicts, alone(6, SYNC_SPACE))
    assert verdicts.settled == VClock({1: 5})


def test_flags_decide_what_is_pending_after_an_upgrade() -> None:
    verdicts = started((2, 6, 0))
    pushed(verdicts, define_space(1, SYNC_SPACE, is_sync=True))
    verdicts.follow_version((2, 11, 9))
    pushed(verdicts, alone(2, SYNC_SPACE))
    assert verdicts.settled == VClock({1: 2})
