"""The queue inside the limbo, and the acknowledged rows."""

from __future__ import annotations

from flowstone.replication.limbo.queue import Acks, EntryState, LimboEntry, LimboQueue
from flowstone.replication.vclock import VClock


def queue_of(*entries: str) -> LimboQueue[str]:
    """Parse a transaction: `sync 3` has LSN 3, `async` has none."""
    queue: LimboQueue[str] = LimboQueue()
    for number, text in enumerate(entries):
        kind, _, lsn = text.partition(" ")
        is_written = bool(lsn)
        name = "abcdefgh"[number]
        entry = LimboEntry(name, 1, is_synchronous=kind == "sync", lsn=int(lsn or 0), is_written=is_written, size=10)
        queue.append(entry)
    return queue


def names(entries: tuple[LimboEntry[str], ...]) -> str:
    return "".join(entry.transaction for entry in entries)


def test_confirm_releases_covered_transactions_and_asynchronous_ones_directly_after() -> None:
    queue = queue_of("sync 3", "async 4", "sync 5", "async 6", "sync 7")
    assert names(queue.confirm(4)) == "ab"
    assert names(queue.confirm(6)) == "cd"
    assert (len(queue), queue.size) == (1, 10)


def test_unwritten_transactions_are_released_only_if_asynchronous() -> None:
    queue = queue_of("sync 3", "async", "sync", "async")
    _, released, *_ = queue
    assert names(queue.confirm(9)) == "a"
    assert released.state is EntryState.RELEASED
    assert names(tuple(queue)) == "cd"


def test_rollback_removes_the_newest_first_and_keeps_older_ones() -> None:
    queue = queue_of("sync 3", "async 4", "sync 5", "async 6", "sync 7")
    assert queue.rollback(8) == ()
    assert names(queue.rollback(4)) == "edc"
    assert names(tuple(queue)) == "ab"
    assert queue.rollback_count == 3
    assert queue.size == 20


def test_quorum_covers_each_transaction_once() -> None:
    queue = queue_of("sync 3", "async 4", "sync 5", "sync")
    assert queue.reach(2) == 0
    assert queue.reach(4) == 3
    assert queue.reach(4) == 0
    assert queue.reach(99) == 5
    last = queue.last
    assert last is not None
    last.lsn = 6
    assert queue.reach(99) == 6


def test_first_and_last_transaction_of_the_queue() -> None:
    queue = queue_of("sync 3", "async 4", "sync 5", "async")
    first, _, newest, last = queue
    assert (queue.first, queue.last, queue.last_synchronous) == (first, last, newest)
    assert not queue.is_numbered
    assert not queue.is_written
    empty = queue_of()
    assert (empty.first, empty.last, empty.last_synchronous) == (None, None, None)
    assert empty.is_numbered
    assert empty.is_written


def test_quorum_lsn_is_the_nth_highest_ack() -> None:
    acks = Acks()
    acks.note(2, VClock({1: 5}))
    acks.note(3, VClock({1: 7}))
    assert [acks.quorum_lsn(1, 9, quorum) for quorum in (1, 2, 3, 4)] == [9, 7, 5, 0]
    assert acks.count(1, 6) == 1
    acks.forget(3)
    assert acks.quorum_lsn(1, 9, 2) == 5


def test_last_ack_counts_except_for_anonymous_replicas() -> None:
    acks = Acks()
    assert acks.note(2, VClock({1: 5}))
    assert not acks.note(2, VClock({1: 5}))
    assert acks.note(2, VClock({1: 4}))
    assert acks.note(0, VClock({1: 5}))
    assert not acks.note(0, VClock({1: 4}))
    assert acks.quorum_lsn(1, 9, 2) == 5
