"""The queue inside the limbo: transactions that took effect in memory and have no verdict yet, in log order.

It knows in which order they leave (forwards when confirmed, backwards when rolled back) and which of them still lack
a quorum; `Acks` knows who has what. Who may enter, who decides, and what is written about it is `limbo.py`'s business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Generic, NamedTuple, Protocol, Self, TypeVar, cast

from flowstone.replication.vclock import VClock

T = TypeVar("T")


class State(Enum):
    """Where an entry is. The last two are for ever."""

    WAITING = "waiting"
    RELEASED = "released"  # a plain transaction now: it waits for its own write and nothing else
    COMMITTED = "committed"
    UNDONE = "undone"


class Run(Protocol):
    """Several transactions as one, until a verdict divides them."""

    def take_first(self, count: int) -> Self:
        """The first `count` of them; the others stay."""
        ...

    def take_last(self, count: int) -> Self:
        """The last `count` of them; the others stay."""
        ...


class Entry(Generic[T]):
    """A transaction in the queue. Made by the limbo, held by whoever waits for it; only the limbo changes it.

    `lsn` is that of its last global row, 0 while the journal has not numbered it. `written_at` is None for
    transactions of others and those that recovery found: nobody's patience ends with them. `count` of more than one: a
    run of synchronous transactions of one row each, their LSNs without gaps; `transaction` is a `Run` then. What a
    verdict takes out of a run, while the rest waits on, `is_part` of it.
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
        self.state = State.WAITING

    @property
    def first_lsn(self) -> int:
        """The LSN of the first of its transactions, by which verdicts mean that."""
        return self.lsn - self.count + 1 if self.lsn else 0

    def take_first(self, lsn: int) -> Entry[T]:
        """What of this run is not behind `lsn`, to leave the queue; the rest stays this entry."""
        count = lsn - self.first_lsn + 1
        part = self._part(cast(T, cast(Run, self.transaction).take_first(count)), count)
        part.lsn, part.is_part = lsn, True
        self._shrink(part)
        return part

    def take_others(self, count: int) -> Entry[T]:
        """The first `count` of this run, in its place; the others are this entry, and leave the queue."""
        others = cast(T, cast(Run, self.transaction).take_last(self.count - count))
        part = self._part(self.transaction, count)
        part.lsn = self.first_lsn + count - 1
        self.transaction, self.is_part = others, True
        self._shrink(part)
        return part

    def _part(self, transaction: T, count: int) -> Entry[T]:
        size = self.size * count // self.count
        kind, origin_id = self.is_synchronous, self.origin_id
        part = Entry(transaction, origin_id, is_synchronous=kind, is_written=self.is_written, size=size, count=count)
        part.written_at = self.written_at
        return part

    def _shrink(self, part: Entry[T]) -> None:
        self.count -= part.count
        self.size -= part.size

    def __repr__(self) -> str:
        kind = "synchronous" if self.is_synchronous else "asynchronous"
        return f"<{kind} {self.origin_id}:{self.lsn or '?'} {self.state.value}>"


class Pending(NamedTuple, Generic[T]):
    """A transaction of the owner that recovery, or a join, found without a verdict."""

    transaction: T
    lsn: int
    is_synchronous: bool


class Queue(Generic[T]):
    """Entries in the order of the log. Invariant: the first one, if any, is synchronous."""

    def __init__(self) -> None:
        self._entries: deque[Entry[T]] = deque()
        # The synchronous ones among them that have not been seen with a quorum: a tail of those.
        self._without_quorum: deque[Entry[T]] = deque()
        self._count = 0
        self.size = 0
        self.rollback_count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries)

    @property
    def first(self) -> Entry[T] | None:
        return self._entries[0] if self._entries else None

    @property
    def last(self) -> Entry[T] | None:
        return self._entries[-1] if self._entries else None

    @property
    def last_synchronous(self) -> Entry[T] | None:
        return next((entry for entry in reversed(self._entries) if entry.is_synchronous), None)

    @property
    def is_numbered(self) -> bool:
        """Every entry has its LSN. The journal numbers in order, so the last one tells."""
        return not self._entries or self._entries[-1].lsn > 0

    @property
    def is_written(self) -> bool:
        """Every entry is in the log. It is told in order, so the last one tells."""
        return not self._entries or self._entries[-1].is_written

    def append(self, entry: Entry[T]) -> None:
        assert self._entries or entry.is_synchronous, "an asynchronous transaction waits behind a synchronous one only"
        self._entries.append(entry)
        if entry.is_synchronous:
            self._without_quorum.append(entry)
        self.size += entry.size
        self._count += entry.count

    def reach(self, lsn: int) -> int:
        """A quorum has everything up to `lsn`: the LSN of the newest transaction that this newly covers, or 0."""
        newest, waiting = 0, self._without_quorum
        while waiting and 0 < waiting[0].lsn <= lsn:
            newest = waiting.popleft().lsn
        if waiting and 0 < waiting[0].first_lsn <= lsn:
            newest = lsn
        return newest

    def confirm(self, lsn: int) -> tuple[Entry[T], ...]:
        """Takes out synchronous entries up to `lsn` and the asynchronous ones directly behind them.

        Returns those that are committed by it, in order. An asynchronous one that is not written yet was made while
        the verdict was being written; it is released, and committed by its own write.
        """
        committed: list[Entry[T]] = []
        entries = self._entries
        while entries:
            entry = entries[0]
            if entry.is_synchronous and not 0 < entry.lsn <= lsn:
                if 0 < entry.first_lsn <= lsn:
                    committed.append(self._take_first(entry, lsn))
                break
            entries.popleft()
            self.size -= entry.size
            self._count -= entry.count
            if entry.is_synchronous or entry.is_written:
                entry.state = State.COMMITTED
                committed.append(entry)
            else:
                entry.state = State.RELEASED
        self.reach(lsn)
        return tuple(committed)

    def _take_first(self, entry: Entry[T], lsn: int) -> Entry[T]:
        part = entry.take_first(lsn)
        self.size -= part.size
        self._count -= part.count
        part.state = State.COMMITTED
        return part

    def rollback(self, lsn: int) -> tuple[Entry[T], ...]:
        """Takes out the first synchronous entry at or behind `lsn` and all behind it; the newest comes first."""
        first = next((entry for entry in self._entries if entry.is_synchronous and not 0 < entry.lsn < lsn), None)
        if first is None:
            return ()
        if 0 < first.first_lsn < lsn:
            kept = first.take_others(lsn - first.first_lsn)
            for entries in (self._entries, self._without_quorum):
                if first in entries:
                    entries.insert(entries.index(first), kept)
        return self.drop(first)

    def drop(self, first: Entry[T]) -> tuple[Entry[T], ...]:
        """Takes out `first` and all behind it; the newest comes first."""
        dropped: list[Entry[T]] = []
        while True:
            entry = self._entries.pop()
            if self._without_quorum and self._without_quorum[-1] is entry:
                self._without_quorum.pop()
            self.size -= entry.size
            self._count -= entry.count
            self.rollback_count += entry.count
            entry.state = State.UNDONE
            dropped.append(entry)
            if entry is first:
                return tuple(dropped)


class Acks:
    """What other instances have in their logs, by the last word of each."""

    def __init__(self) -> None:
        self._vclocks: dict[int, VClock] = {}

    def note(self, replica_id: int, vclock: VClock) -> bool:
        """False: it is no news. 0 stands for all anonymous replicas: of them, what any has counts."""
        known = self._vclocks.get(replica_id)
        if known is not None and (known == vclock or (replica_id == 0 and vclock <= known)):
            return False
        self._vclocks[replica_id] = vclock
        return True

    def forget(self, replica_id: int) -> None:
        self._vclocks.pop(replica_id, None)

    def count(self, owner_id: int, lsn: int) -> int:
        """How many have the owner's row `lsn`."""
        return len(self.holders(owner_id, lsn))

    def holders(self, owner_id: int, lsn: int) -> set[int]:
        """Who has the owner's row `lsn`."""
        return {replica_id for replica_id, vclock in self._vclocks.items() if vclock.get(owner_id) >= lsn}

    def quorum_lsn(self, owner_id: int, own_lsn: int, quorum: int) -> int:
        """Up to where `quorum` instances have the owner's rows, one of them us with `own_lsn`; 0 if they are fewer."""
        lsns = [vclock.get(owner_id) for vclock in self._vclocks.values()]
        lsns.append(own_lsn)
        if len(lsns) < quorum:
            return 0
        lsns.sort(reverse=True)
        return lsns[quorum - 1]
