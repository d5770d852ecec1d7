"""Deliberate bugs, one at a time, that the ordinary runs must find: a test of the tests.

    with MUTATIONS["confirm_before_the_quorum"]():
        outcome = run(seed)

Each is a patch of one decision of the product, as small as its name says, and is removed after the `with`. Mutations
are switched on from outside: runs do not know of them, and none has its own seed, fault or checker. Each names the
message by which a run finds it: other messages may come from a patch that no longer fits the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch
from zlib import crc32

from flowstone.box.box import Box
from flowstone.box.engine.read_view import ReadView
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.row import Row
from flowstone.node.instance import Instance
from flowstone.node.synchro import linearizable
from flowstone.node.upstream.applier import Applier
from flowstone.node.upstream.node_sink import NodeSink
from flowstone.node.upstream.row_applier import Applying
from flowstone.node.wal import commits
from flowstone.node.wal.gc import GarbageCollector
from flowstone.node.wal.journal import Journal, WalMode
from flowstone.replication.limbo.limbo import Limbo
from flowstone.replication.limbo.queue import Acks, LimboQueue
from flowstone.replication.raft.election import ElectionState
from flowstone.replication.raft.raft import Raft
from flowstone.replication.settled_position import SettledTracker
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.transactions import LogTransaction, make_transaction

Make = Callable[[], AbstractContextManager[object]]

RAISED: Final = re.compile(r"\(\S+, line \d+ of \S+\)$|^\d+\.\d{6} | in a follower$")
"""Messages of exceptions in a run: the one that ended it, unhandled ones, and those that nodes logged."""

DOES_NOT_FIT: Final = re.compile(r"\b(TypeError|AttributeError|NameError|UnboundLocalError)\b")
"""Errors that a patch raises when the patched code has changed."""


@dataclass(frozen=True)
class Mutation:
    """A context manager (`with it():`).

    `words` is a regular expression for the message of a run that finds the bug; `is_raised`: the message is that of an
    assertion that fails in a node or workload.
    """

    make: Make
    words: str
    is_raised: bool

    def __call__(self) -> AbstractContextManager[object]:
        return self.make()

    def is_found(self, violations: Sequence[str]) -> bool:
        """Return True if a violation has the expected message, and none shows that the patch no longer fits the
        code."""
        if any(DOES_NOT_FIT.search(violation) for violation in violations):
            return False
        told = [violation for violation in violations if bool(RAISED.search(violation)) == self.is_raised]
        return any(re.search(self.words, violation) for violation in told)


MUTATIONS: Final[dict[str, Mutation]] = {}
"""All mutations by name."""


def mutation(words: str, *, is_raised: bool = False) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        MUTATIONS[make.__name__] = Mutation(make, words, is_raised)
        return make

    return add


CLIENTS_SAW: Final = r"^(register|append|set|bank)( \S+)?: "
"""Messages of all checkers of histories."""

CONFIRMED_ALONE: Final = r"^\w+ has row \d+ of \d+ confirmed, which only .* have; \d+ must"
NOT_ON_DISK: Final = r"^\w+ takes for written what \S+\.xlog would lose with the power now"


# --- quorums and verdicts ---


@mutation(CONFIRMED_ALONE)
def count_an_ack_twice() -> AbstractContextManager[object]:
    """Each acknowledgement counts twice."""

    def quorum_lsn(self: Acks, owner_id: int, own_lsn: int, quorum: int) -> int:
        lsns = [vclock.get(owner_id) for vclock in self._vclocks.values()]
        lsns = sorted([*lsns, *lsns, own_lsn], reverse=True)
        return lsns[quorum - 1] if quorum <= len(lsns) else 0

    return patch.object(Acks, "quorum_lsn", quorum_lsn)


@mutation(CONFIRMED_ALONE)
def confirm_before_the_quorum() -> AbstractContextManager[object]:
    """CONFIRM is written with one member less than the quorum."""
    original = Acks.quorum_lsn

    def quorum_lsn(self: Acks, owner_id: int, own_lsn: int, quorum: int) -> int:
        return original(self, owner_id, own_lsn, max(quorum - 1, 1))

    return patch.object(Acks, "quorum_lsn", quorum_lsn)


@mutation(rf"{CLIENTS_SAW}|^listener\d+ .* wrong tuples in space|its directory gives")
def forget_the_order_of_rollbacks() -> AbstractContextManager[object]:
    """Transactions that are rolled back together are undone oldest first."""
    original = LimboQueue.drop

    def drop(self: LimboQueue[Any], first: Any) -> tuple[Any, ...]:
        return original(self, first)[::-1]

    return patch.object(LimboQueue, "drop", drop)


@mutation(r"^\w+ takes the queue of \d+ over up to row \d+, and gives up row \d+, which it has")
def promote_without_waiting() -> AbstractContextManager[object]:
    """The new owner of the queue takes over without waiting for the pending transactions."""

    def try_transfer(self: Limbo[Any]) -> list[Any]:
        transfer = self._transfer
        if transfer is None:
            return []
        return [self._write(transfer.kind(self._owner_id, self.confirmed_lsn, transfer.term))]

    return patch.object(Limbo, "_try_transfer", try_transfer)


# --- terms and votes ---


@mutation(r"voted for \d+ (in term \d+, and then for|and) \d+")
def vote_twice_in_a_term() -> AbstractContextManager[object]:
    """A member votes again in the same term for the next candidate that asks."""
    original = Raft._heard_vote

    def heard_vote(self: Raft, source_id: int, told: Any) -> None:
        is_asked = told.state == ElectionState.CANDIDATE and self._state is ElectionState.FOLLOWER and self._is_on_disk
        if is_asked and self._volatile_vote not in (0, source_id):
            self._votes.revoke(self._id)
            self._volatile_vote = 0
        original(self, source_id, told)

    return patch.object(Raft, "_heard_vote", heard_vote)


@mutation(r"^\w+ went back from term \d+ to \d+|^\w+ leads term \d+, which .* does|^by the log of .* took term \d+ of ")
def reuse_a_term() -> AbstractContextManager[object]:
    """A restarted member is in the term before its last one, without a vote: it may run and vote in it again."""
    original = Raft.__init__

    def init(self: Raft, instance_id: int, *, term: int = 1, vote: int = 0, **others: Any) -> None:
        has_begun = term > 1
        original(self, instance_id, term=term - has_begun, vote=0 if has_begun else vote, **others)

    return patch.object(Raft, "__init__", init)


@mutation(r"^\w+ has voted for \d+ in term \d+, and would have for \d+ in \d+ if it lost its power now")
def skip_the_fsync_of_a_vote_in_mode_write() -> AbstractContextManager[object]:
    """In mode `write`, terms and votes are not synced either."""
    original = Journal._write

    def write(self: Journal, rows: list[bytes], after: dict[int, int], sync: bool = False) -> None:
        original(self, rows, after)

    return patch.object(Journal, "_write", write)


@mutation(NOT_ON_DISK)
def skip_the_fsync_of_a_vote() -> AbstractContextManager[object]:
    """A write that has only a term and a vote is not synced."""
    original = Journal._write

    def write(self: Journal, rows: list[bytes], after: dict[int, int], sync: bool = False) -> None:
        if not all(_is_vote(each) for each in rows if each):
            original(self, rows, after, sync)
            return
        with _unsynced(self):
            original(self, rows, after)

    return patch.object(Journal, "_write", write)


def _is_vote(rows: bytes) -> bool:
    """Decide by the type of the first row; a RAFT row is written alone."""
    return rows[1:3] == bytes((0, RequestType.RAFT))


@contextmanager
def _unsynced(journal: Journal) -> Iterator[None]:
    """For a write of a syncing journal that completes before anything else happens."""
    mode = journal.mode
    if mode is WalMode.FSYNC:
        journal.mode = WalMode.WRITE
    try:
        yield
    finally:
        journal.mode = mode


# --- the log ---


@mutation(NOT_ON_DISK)
def acknowledge_a_write_before_its_fsync() -> AbstractContextManager[object]:
    """In mode `fsync`, too, only terms and votes are synced."""
    original = Journal._write

    def write(self: Journal, rows: list[bytes], after: dict[int, int], sync: bool = False) -> None:
        with _unsynced(self):
            original(self, rows, after, sync)

    return patch.object(Journal, "_write", write)


@mutation(r"^space \d+ of \w+ had \d+ tuples, its directory gives")
def collect_a_log_too_early() -> AbstractContextManager[object]:
    """Garbage collection deletes one log too many."""
    original = GarbageCollector._delete

    def delete(self: GarbageCollector, oldest: VClock, needed: VClock) -> tuple[VClock, VClock | None]:
        original(self, oldest, needed)
        logs = scan_directory(self._outside.disk, self.wal_dir).logs
        if len(logs) > 1:
            self._unlink(logs[0].path)
        return original(self, oldest, needed)

    return patch.object(GarbageCollector, "_delete", delete)


@mutation(
    r"did not start: .* but transaction \d+ has not ended|any more: .* does not support interleaving transactions"
)
def lose_the_commit_flag() -> AbstractContextManager[object]:
    """The last row of a transaction lacks the COMMIT flag, in one of six transactions of several rows: the run must
    reach its faults."""

    def make(rows: Sequence[Row], flags: int = 0) -> LogTransaction:
        made = make_transaction(rows, flags)
        *others, last = made.rows
        if others and crc32(last.body) % 6 == 0:
            last = Row(
                last.type,
                last.replica_id,
                last.group_id,
                last.lsn,
                last.timestamp,
                last.tsn,
                last.flags & ~Flag.COMMIT.value,
                last.sync,
                last.stream_id,
                last.body,
            )
        return LogTransaction((*others, last))

    return patch.object(commits, "make_transaction", make)


# --- replication ---


@mutation(r"^\w+ has acknowledged .* to \w+, and written")
@contextmanager
def ack_before_the_write() -> Iterator[None]:
    """A replica acknowledges rows on arrival, before they are in its log."""
    original_apply, original_acknowledge = NodeSink.apply, Applier._acknowledge
    is_acknowledging = False

    async def apply(self: NodeSink, slab: Any) -> None:
        await original_apply(self, slab)
        for request_ack in list(self.on_written):
            request_ack()

    def acknowledge(self: Applier) -> None:
        nonlocal is_acknowledging
        is_acknowledging = True
        try:
            original_acknowledge(self)
        finally:
            is_acknowledging = False

    def vclock(self: NodeSink) -> VClock:
        return self._instance.journal.vclock if is_acknowledging else self._instance.vclock

    with (
        patch.multiple(NodeSink, apply=apply, vclock=property(vclock)),
        patch.object(Applier, "_acknowledge", acknowledge),
    ):
        yield


@mutation(r"^AssertionError: (.|\n)*rows of one originator come in their order, each once", is_raised=True)
def apply_below_the_vclock() -> AbstractContextManager[object]:
    """The last row of an originator in the log is applied again if it arrives again."""
    original = Applying._known
    return patch.object(Applying, "_known", lambda self, replica_id: max(original(self, replica_id) - 1, 0))


@mutation(r"^bank: the (total is|accounts are) ")
def apply_half_a_transaction() -> AbstractContextManager[object]:
    """A replica does not apply the last row of a transaction of several rows."""
    original_one, original_execute = Applying._one, Applying._execute
    left_out: list[int] = []

    def one(self: Applying, batch: Any, first: int, stop: int) -> None:
        left_out[:] = [stop - 1] if stop - first > 1 else []
        original_one(self, batch, first, stop)

    def execute(self: Applying, effect: Any, slab: Any, number: int) -> bool:
        return number in left_out or original_execute(self, effect, slab, number)

    return patch.multiple(Applying, _one=one, _execute=execute)


@mutation(r"^listener\d+ was told of .* while it waited for a verdict on")
def settle_one_too_far() -> AbstractContextManager[object]:
    """A follower treats the row directly after a confirmed row as confirmed."""
    original = SettledTracker._confirm
    return patch.object(SettledTracker, "_confirm", lambda self, lsn: original(self, lsn + 1))


# --- reads ---


@mutation(CLIENTS_SAW)
def read_what_is_not_confirmed() -> AbstractContextManager[object]:
    """Transactions with isolation read-confirmed see pending rows."""
    original = Box.open_view

    def open_view(self: Box, *, confirmed: bool = False) -> ReadView:
        return original(self)

    return patch.object(Box, "open_view", open_view)


@mutation(CLIENTS_SAW)
def read_without_asking_others() -> AbstractContextManager[object]:
    """A linearizable transaction starts from the local state without asking other members."""

    async def newest_vclock(instance: Instance) -> VClock:
        return instance.vclock.without_zero()

    return patch.object(linearizable, "_newest_vclock", newest_vclock)
