"""What a limbo knows and shows: owner, terms, what is confirmed, what waits, whether it is frozen.

Here is nothing but how that is read; it changes by the events in `limbo.py`, which builds on this.
"""

from __future__ import annotations

from collections import deque
from typing import Generic

from flowstone.box.dialect import Dialect
from flowstone.replication.limbo_queue import Entry, Queue, T
from flowstone.replication.split_brain import History, Request
from flowstone.replication.synchro import Confirm, Promote
from flowstone.replication.tenures import Tenures
from flowstone.replication.vclock import VClock, VClockBuilder


class LimboState(Generic[T]):
    """`instance_id` is 0 until the instance is registered, and for anonymous ones."""

    def __init__(self, *, instance_id: int, dialect: Dialect, quorum: int) -> None:
        self.instance_id = instance_id
        self.is_validating = True
        """Whether control rows have to fit our history. Not on schemas up to 2.10.1, nor while joining."""
        self._has_transfers = dialect is not Dialect.V2_6
        self._quorum = quorum
        self._queue: Queue[T] = Queue()
        self._owner_id = 0
        self._term = 0
        self._tenures = Tenures({}, (), {})
        self._confirmed = VClockBuilder()
        self._writing: Request | None = None
        self._held: deque[Request] = deque()
        self._is_fenced = False
        self._is_frozen_until_promotion = self._has_transfers

    @property
    def owner_id(self) -> int:
        """Whose transactions may wait; 0 for nobody's."""
        return self._owner_id

    @property
    def is_owner(self) -> bool:
        return self._owner_id != 0 and self._owner_id == self.instance_id

    @property
    def term(self) -> int:
        """The newest term of a PROMOTE or DEMOTE."""
        return self._term

    @property
    def promote_terms(self) -> dict[int, int]:
        """Per instance, the newest term of a PROMOTE or DEMOTE that it wrote. The caller's own."""
        return dict(self._tenures.promote_terms)

    def promote_term(self, instance_id: int) -> int:
        """The newest term of a PROMOTE or DEMOTE that `instance_id` wrote."""
        return self._tenures.promote_terms.get(instance_id, 0)

    @property
    def tenures(self) -> Tenures:
        """To be read only."""
        return self._tenures

    @property
    def confirmed_vclock(self) -> VClock:
        """Per instance that ever was owner, its highest LSN known to be confirmed."""
        return self._confirmed.vclock()

    @property
    def confirmed_lsn(self) -> int:
        return self._confirmed.get(self._owner_id)

    @property
    def quorum(self) -> int:
        return self._quorum

    @property
    def rollback_count(self) -> int:
        """How many transactions were ever undone here, also by failed writes."""
        return self._queue.rollback_count

    @property
    def size(self) -> int:
        """Bytes of what waits."""
        return self._queue.size

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def pending(self) -> tuple[Entry[T], ...]:
        """What waits, in the order of the log."""
        return tuple(self._queue)

    @property
    def newest(self) -> Entry[T] | None:
        """What a checkpoint or a join waits for: it contains all up to here, and none of it may be undone."""
        return self._queue.last

    @property
    def newest_synchronous(self) -> Entry[T] | None:
        """Up to where the queue will be confirmed once `newest` is."""
        return self._queue.last_synchronous

    @property
    def is_frozen(self) -> bool:
        """No verdict is given: another instance may be about to give it, or has while we were away."""
        return self._is_fenced or self._is_frozen_until_promotion

    @property
    def is_fenced(self) -> bool:
        """Frozen, because a newer term has begun or a quorum is out of reach."""
        return self._is_fenced

    @property
    def is_read_only(self) -> bool:
        """Whether the instance must not write because of the queue. 2.6 does not know that."""
        return self._has_transfers and self._owner_id != 0 and (not self.is_owner or self.is_frozen)

    @property
    def is_in_rollback(self) -> bool:
        """A row that may undo the queue is being written: whatever enters now could not be told before from behind."""
        requests = self._held if self._writing is None else (self._writing, *self._held)
        return any(not isinstance(request.body, Confirm) for request in requests)

    @property
    def is_busy(self) -> bool:
        """Rows of others have to wait until what is being written is decided: `admit` and `receive` would refuse."""
        writing = self._writing
        if writing is None or self._held:
            return bool(self._held)
        return not (isinstance(writing.body, Confirm) and writing.origin_id == self._owner_id == self.instance_id)

    @property
    def history(self) -> History:
        ends = self._queue.first, self._queue.last_synchronous
        first, last = ends[0].first_lsn if ends[0] else 0, ends[1].lsn if ends[1] else 0
        terms, former = self._tenures.promote_terms, self._tenures.former
        return History(self._owner_id, self._term, self.confirmed_vclock, terms, first, last, former)

    def checkpoint(self) -> Promote:
        """The state as snapshots and JOIN_META have it; what waits is not part of it."""
        return Promote(self._owner_id, self.confirmed_lsn, self._term, self._confirmed.vclock())
