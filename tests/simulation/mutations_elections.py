"""Deliberate bugs in elections, in the synchronous queue, and in the answers to clients about both."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest.mock import patch

from flowstone.node.instance import Instance
from flowstone.node.synchro import linearizable
from flowstone.node.synchro.limbo_driver import LimboDriver
from flowstone.replication.limbo.limbo import Limbo
from flowstone.replication.limbo.queue import LimboEntry, LimboQueue
from flowstone.replication.raft.election import Votes
from flowstone.replication.raft.raft import Raft
from flowstone.replication.vclock import VClock
from tests.simulation.mutations import CLIENTS_SAW, CONFIRMED_ALONE, mutation

VOTED_FOR_LESS: Final = r"^\w+ votes for \d+ in term \d+, a candidate at .*, and had .* when that term began"
TWO_LEADERS: Final = r"^\w+ leads term \d+, which .* does|^by the log of .* took term \d+ of "
LACKS_WHAT_WAS_CONFIRMED: Final = r"^\w+ leads term \d+ at .*, and .* was confirmed before"
DIFFERENT_DATA: Final = (
    r"^\w+ and \w+ are at .*, but in \d+ only|^space \d+: \w+ has \d+ tuples, \w+ has|^\(\d+, \d+\) is "
    r"|^space \d+ of \w+ had \d+ tuples, its directory gives|^index \w+ of \d+ on \w+ has"
)


# --- votes ---


@mutation(VOTED_FOR_LESS)
def vote_without_a_second_look() -> AbstractContextManager[object]:
    """A vote is not checked again after the term, and with it all rows being written, is on disk."""
    return patch.object(Raft, "_is_vote_revoked", lambda self: False)


@mutation(rf"{VOTED_FOR_LESS}|{LACKS_WHAT_WAS_CONFIRMED}")
def vote_for_who_is_behind() -> AbstractContextManager[object]:
    """A voter votes for a candidate that lacks its rows."""
    return patch.object(Raft, "_may_vote_for", lambda self, vclock: True)


@mutation(rf"{TWO_LEADERS}|{LACKS_WHAT_WAS_CONFIRMED}")
def lead_by_one_vote_too_few() -> AbstractContextManager[object]:
    """A candidate becomes leader with one vote less than the quorum."""
    has_won = property(lambda self: self._votes.count(self._id) >= max(self._peers.quorum - 1, 1))
    return patch.object(Raft, "_has_won", has_won)


@mutation(rf"{TWO_LEADERS}|^not within \d+ s after all faults: a leader exists")
def count_votes_of_terms_before() -> AbstractContextManager[object]:
    """Votes from an earlier term count in the next one."""
    original = Votes.clear

    def clear(self: Votes) -> None:
        before = dict(self._votes)
        original(self)
        self._votes |= {voter: candidate for voter, candidate in before.items() if voter != candidate}

    return patch.object(Votes, "clear", clear)


# --- quorums of the queue ---


@mutation(rf"{CONFIRMED_ALONE}|^\w+ takes the queue of \d+ over up to row \d+, which it knows \d+ to have; \d+ must")
def promote_by_one_too_few() -> AbstractContextManager[object]:
    """The new owner of the queue waits for the pending transactions on one member less than the quorum."""
    original = Limbo._try_transfer

    def try_transfer(self: Limbo[Any]) -> list[Any]:
        quorum, self._quorum = self._quorum, max(self._quorum - 1, 1)
        try:
            return original(self)
        finally:
            self._quorum = quorum

    return patch.object(Limbo, "_try_transfer", try_transfer)


@mutation(r"^\w+ has answered clients by the PROMOTE \d+:\d+, which only .* have; \d+ must")
def answer_before_a_promote_is_proven() -> AbstractContextManager[object]:
    """Clients get the outcome decided by a PROMOTE when their member has read it, without a quorum."""
    original = LimboDriver._commit

    def commit(self: LimboDriver, entries: Sequence[LimboEntry[Any]], *, is_proven: bool) -> None:
        original(self, entries, is_proven=True)

    return patch.object(LimboDriver, "_commit", commit)


@mutation(r"^\w+ counts acknowledgements of \[.*\], whom it does not have for members")
def count_an_expelled_member() -> AbstractContextManager[object]:
    """Acknowledgements of a member count after it was expelled."""
    return patch.object(LimboDriver, "forget", lambda self, replica_id: None)


@mutation(CONFIRMED_ALONE)
def count_who_only_follows() -> AbstractContextManager[object]:
    """In 2.11, too, all anonymous replicas together count as one member."""

    def ack(self: Limbo[Any], replica_id: int, vclock: VClock) -> list[Any]:
        if replica_id == self.instance_id:
            return []
        is_news = self._acks.note(replica_id, vclock)
        return self._advance() if is_news and (self._queue or self._unproven) else []

    return patch.object(Limbo, "ack", ack)


# --- verdicts ---


@mutation(rf"{CONFIRMED_ALONE}|{CLIENTS_SAW}|{DIFFERENT_DATA}")
def confirm_one_too_far() -> AbstractContextManager[object]:
    """A verdict covers one row more than its LSN."""
    original = Limbo._confirm
    return patch.object(Limbo, "_confirm", lambda self, lsn: original(self, lsn + 1))


@mutation(r"a new owner finds the queue empty", is_raised=True)
def roll_back_one_too_few() -> AbstractContextManager[object]:
    """Of several transactions to roll back, the oldest is kept."""
    original = LimboQueue.rollback

    def rollback(self: LimboQueue[Any], lsn: int) -> tuple[Any, ...]:
        doomed = [entry for entry in self if entry.is_synchronous and not 0 < entry.lsn < lsn]
        return self.drop(doomed[1]) if len(doomed) > 1 else original(self, lsn)

    return patch.object(LimboQueue, "rollback", rollback)


@mutation(rf"{DIFFERENT_DATA}|{CLIENTS_SAW}|transactions in the queue with nothing to do|write to space")
def forget_a_failed_write() -> AbstractContextManager[object]:
    """A transaction whose write failed stays pending as if it had been written."""
    return patch.object(Limbo, "write_failed", lambda self, entry: [])


@mutation(rf"{DIFFERENT_DATA}|{CLIENTS_SAW}")
def keep_what_was_undone() -> AbstractContextManager[object]:
    """The waiter for a transaction gets the rollback, but the transaction stays applied."""
    original = LimboDriver._undo

    def undo(self: LimboDriver, entry: LimboEntry[Any], error: Any) -> None:
        with patch.object(type(entry.transaction.effect), "rollback", lambda self: None):
            original(self, entry, error)

    return patch.object(LimboDriver, "_undo", undo)


# --- reads ---


@mutation(CLIENTS_SAW)
def read_before_the_verdict() -> AbstractContextManager[object]:
    """A linearizable transaction does not wait for pending transactions on its member."""

    async def decided(instance: Instance) -> None:
        return None

    return patch.object(linearizable, "_decided", decided)


@mutation(CLIENTS_SAW)
def read_before_it_is_here() -> AbstractContextManager[object]:
    """A linearizable transaction asks other members for their positions, but does not wait for them."""

    async def reach(instance: Instance, vclock: VClock) -> None:
        return None

    return patch.object(linearizable, "_reach", reach)
