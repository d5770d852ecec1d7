"""The queue inside the limbo: transactions that are applied in memory and have no verdict yet, in log order.

`LimboQueue` knows the order in which entries leave (oldest first when confirmed, newest first when rolled back) and
which entries lack a quorum; `Acks` knows which replica has which rows. `limbo.py` decides which transactions may enter,
when they are decided, and what is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Final, Generic, NamedTuple, Protocol, Self, TypeVar, cast

from flowstone.replication.vclock import VClock

T = TypeVar("T")


class EntryState(Enum):
    """The state of an entry.

    WAITING -> COMMITTED by a verdict; -> UNDONE by a verdict, or if its write fails.
    WAITING -> RELEASED if the entry is asynchronous and not written yet when the entry before it is confirmed.
    RELEASED -> COMMITTED when it is written; -> UNDONE if its write fails.
    """

    WAITING = "waiting"
    RELEASED = "released"  # out of the queue: only its own write is pending
    COMMITTED = "committed"
    UNDONE = "undone"


TRANSITIONS: Final[dict[EntryState, frozenset[EntryState]]] = {
    EntryState.WAITING: frozenset({EntryState.RELEASED, EntryState.COMMITTED, EntryState.UNDONE}),
    EntryState.RELEASED: frozenset({EntryState.COMMITTED, EntryState.UNDONE}),
    EntryState.COMMITTED: frozenset(),
    EntryState.UNDONE: frozenset(),
}
"""Maps each state to the states that may follow it."""


class EntryRun(Protocol):
    """Several transactions handled as one, until a verdict on some of them splits the run."""

    def take_first(self, count: int) -> Self:
        """Remove and return the first `count` transactions."""
        ...

    def take_last(self, count: int) -> Self:
        """Remove and return the last `count` transactions."""
        ...


class LimboEntry(Generic[T]):
    """A transaction in the queue. Created and changed only by the limbo; the caller keeps a reference.

    `lsn` is that of its last global row; 0 until the journal has assigned it. `written_at` is None for transactions of
    other instances and for recovered ones: they have no timeout. `count` above 1 means a run of synchronous
    transactions of one row each, with consecutive LSNs; `transaction` is then an `EntryRun`. `is_part` is True for the
    part of a run that a verdict has split off while the rest remains pending.
    """

    __slots__ = (
        "count",
        "is_part",
        "is_synchronous",
        "is_written",
        "lsn",
        "origin_id",
        "size",
        "state",
        "transaction",
        "written_at",
    )

    def __init__(
        self,
        transaction: T,
        origin_id: int,
        *,
        is_synchronous: bool,
        lsn: int = 0,
        is_written: bool = False,
        size: int = 0,
        count: int = 1,
    ) -> None:
        self.transaction = transaction
        self.origin_id = origin_id
        self.is_synchronous = is_synchronous
        self.lsn = lsn
        self.is_written = is_written
        self.size = size
        self.count = count
        self.is_part = False
        self.written_at: float | None = None
        self.state = EntryState.WAITING

    def become(self, state: EntryState) -> None:
        """Change the state."""
        assert state in TRANSITIONS[self.state], f"invalid transition of an entry: {self.state.value} to {state.value}"
        self.state = state

    @property
    def first_lsn(self) -> int:
        """The LSN of the first transaction of the run; 0 until LSNs are assigned."""
        return self.lsn - self.count + 1 if self.lsn else 0

    def take_first(self, lsn: int) -> LimboEntry[T]:
        """Split off and return the transactions up to `lsn`, which leave the queue; this entry keeps the rest."""
        count = lsn - self.first_lsn + 1
        part = self._part(cast(T, cast(EntryRun, self.transaction).take_first(count)), count)
        part.lsn, part.is_part = lsn, True
        self._shrink(part)
        return part

    def take_others(self, count: int) -> LimboEntry[T]:
        """Return an entry of the first `count` transactions, to replace this one, which keeps the rest and leaves."""
        others = cast(T, cast(EntryRun, self.transaction).take_last(self.count - count))
        part = self._part(self.transaction, count)
        part.lsn = self.first_lsn + count - 1
        self.transaction, self.is_part = others, True
        self._shrink(part)
        return part

    def _part(self, transaction: T, count: int) -> LimboEntry[T]:
        size = self.size * count // self.count
        kind, origin_id = self.is_synchronous, self.origin_id
        part = LimboEntry(
            transaction, origin_id, is_synchronous=kind, is_written=self.is_written, size=size, count=count
        )
        part.written_at = self.written_at
        return part

    def _shrink(self, part: LimboEntry[T]) -> None:
        self.count -= part.count
        self.size -= part.size

    def __repr__(self) -> str:
        kind = "synchronous" if self.is_synchronous else "asynchronous"
        return f"<{kind} {self.origin_id}:{self.lsn or '?'} {self.state.value}>"


class Pending(NamedTuple, Generic[T]):
    """A transaction of the owner without a verdict, found by recovery or received in a join."""

    transaction: T
    lsn: int
    is_synchronous: bool


class LimboQueue(Generic[T]):
    """Entries in log order. Invariant: the first one, if any, is synchronous."""

    def __init__(self) -> None:
        self._entries: deque[LimboEntry[T]] = deque()
        # The synchronous entries that no quorum was seen to have; always the last ones of the queue.
        self._without_quorum: deque[LimboEntry[T]] = deque()
        self._count = 0
        self.size = 0
        self.rollback_count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[LimboEntry[T]]:
        return iter(self._entries)

    @property
    def first(self) -> LimboEntry[T] | None:
        return self._entries[0] if self._entries else None

    @property
    def last(self) -> LimboEntry[T] | None:
        return self._entries[-1] if self._entries else None

    @property
    def last_synchronous(self) -> LimboEntry[T] | None:
        return next((entry for entry in reversed(self._entries) if entry.is_synchronous), None)

    @property
    def is_numbered(self) -> bool:
        """True if every entry has its LSN. The journal assigns LSNs in order, so the last entry decides."""
        return not self._entries or self._entries[-1].lsn > 0

    @property
    def is_written(self) -> bool:
        """True if every entry is in the log. Writes are reported in order, so the last entry decides."""
        return not self._entries or self._entries[-1].is_written

    def append(self, entry: LimboEntry[T]) -> None:
        assert self._entries or entry.is_synchronous, "an asynchronous transaction waits only after a synchronous one"
        self._entries.append(entry)
        if entry.is_synchronous:
            self._without_quorum.append(entry)
        self.size += entry.size
        self._count += entry.count

    def reach(self, lsn: int) -> int:
        """Record that a quorum has all rows up to `lsn`; return the LSN of the last transaction newly covered, or 0."""
        newest, waiting = 0, self._without_quorum
        while waiting and 0 < waiting[0].lsn <= lsn:
            newest = waiting.popleft().lsn
        # A part of a run: it stays in the list, and its rest is counted by later calls.
        if waiting and 0 < waiting[0].first_lsn <= lsn:
            newest = lsn
        return newest

    def confirm(self, lsn: int) -> tuple[LimboEntry[T], ...]:
        """Remove the synchronous entries up to `lsn` and the asynchronous ones directly after them.

        Return the entries that this commits, in order. An asynchronous entry that is not written yet was submitted
        while the verdict was being written: it is released, and commits with its own write.
        """
        committed: list[LimboEntry[T]] = []
        entries = self._entries
        while entries:
            entry = entries[0]
            # LSN 0 means that none is assigned yet, so the entry was submitted after the verdict.
            if entry.is_synchronous and not 0 < entry.lsn <= lsn:
                if 0 < entry.first_lsn <= lsn:
                    committed.append(self._take_first(entry, lsn))
                break
            entries.popleft()
            self.size -= entry.size
            self._count -= entry.count
            # A synchronous entry up to `lsn` is written: a verdict is written after its transactions.
            if entry.is_synchronous or entry.is_written:
                entry.become(EntryState.COMMITTED)
                committed.append(entry)
            else:
                entry.become(EntryState.RELEASED)
        # Entries confirmed by another instance leave the list of those without a quorum, too.
        self.reach(lsn)
        return tuple(committed)

    def _take_first(self, entry: LimboEntry[T], lsn: int) -> LimboEntry[T]:
        part = entry.take_first(lsn)
        self.size -= part.size
        self._count -= part.count
        part.become(EntryState.COMMITTED)
        return part

    def rollback(self, lsn: int) -> tuple[LimboEntry[T], ...]:
        """Remove the first synchronous entry at or after `lsn` and all later entries; return them, newest first."""
        # Only synchronous entries are searched: an asynchronous one shares the fate of the one before it, and its LSN
        # can be one of another counter (local rows).
        first = next((entry for entry in self._entries if entry.is_synchronous and not 0 < entry.lsn < lsn), None)
        if first is None:
            return ()
        if 0 < first.first_lsn < lsn:
            kept = first.take_others(lsn - first.first_lsn)
            for entries in (self._entries, self._without_quorum):
                if first in entries:
                    entries.insert(entries.index(first), kept)
        return self.drop(first)

    def drop(self, first: LimboEntry[T]) -> tuple[LimboEntry[T], ...]:
        """Remove `first` and all later entries; return them, newest first."""
        dropped: list[LimboEntry[T]] = []
        while True:
            entry = self._entries.pop()
            # Entries that a quorum has are not in the list, although they may still be rolled back by another instance.
            if self._without_quorum and self._without_quorum[-1] is entry:
                self._without_quorum.pop()
            self.size -= entry.size
            self._count -= entry.count
            self.rollback_count += entry.count
            entry.become(EntryState.UNDONE)
            dropped.append(entry)
            if entry is first:
                return tuple(dropped)


class Acks:
    """The last acknowledged vclock of each other instance."""

    def __init__(self) -> None:
        self._vclocks: dict[int, VClock] = {}

    def note(self, replica_id: int, vclock: VClock) -> bool:
        """Record an ACK; return False if it changes nothing.

        Id 0 stands for all anonymous replicas, whose highest vclock counts.
        """
        known = self._vclocks.get(replica_id)
        # Anonymous replicas share id 0 in 2.6, so a lower vclock of a second one is no loss of the first.
        if known is not None and (known == vclock or (replica_id == 0 and vclock <= known)):
            return False
        self._vclocks[replica_id] = vclock
        return True

    def forget(self, replica_id: int) -> None:
        self._vclocks.pop(replica_id, None)

    def count(self, owner_id: int, lsn: int) -> int:
        """Return the number of replicas that acknowledged the owner's row `lsn`."""
        return len(self.holders(owner_id, lsn))

    def holders(self, owner_id: int, lsn: int) -> set[int]:
        """Return the replicas that acknowledged the owner's row `lsn`."""
        return {replica_id for replica_id, vclock in self._vclocks.items() if vclock.get(owner_id) >= lsn}

    def quorum_lsn(self, owner_id: int, own_lsn: int, quorum: int) -> int:
        """Return the LSN up to which `quorum` instances have the owner's rows; 0 if fewer instances are known.

        This instance counts with `own_lsn`.
        """
        lsns = [vclock.get(owner_id) for vclock in self._vclocks.values()]
        lsns.append(own_lsn)
        # Members that never acknowledged anything are not in the list; they certainly lack the row.
        if len(lsns) < quorum:
            return 0
        lsns.sort(reverse=True)
        return lsns[quorum - 1]
