"""The state of a limbo as others read it: owner, term, confirmed LSNs, pending entries, frozen, busy.

This module only reads the state. It changes by the events in `limbo.py`, whose `Limbo` extends `LimboState`:

- owner: no instance, this one or another one. PROMOTE and DEMOTE change it; in 2.6 the first entry of an empty queue.
- frozen: the limbo writes no verdict of its own, because another instance may decide. It starts frozen, except
  in 2.6, freezes on a newer term or a lost quorum (fenced), and thaws with the PROMOTE or DEMOTE of the newest term.
- busy: a control row is being written or waits for that. Rows of other instances must wait, because the outcome decides
  whether they are accepted. A CONFIRM of our own does not count: it cannot change that.
"""

from __future__ import annotations

from collections import deque
from typing import Generic

from flowstone.box.dialect import Dialect
from flowstone.replication.limbo.control_rows import Confirm, Promote
from flowstone.replication.limbo.queue import LimboEntry, LimboQueue, T
from flowstone.replication.limbo.split_brain import QueueHistory, SettlingRequest
from flowstone.replication.limbo.tenures import Tenures
from flowstone.replication.vclock import VClock, VClockBuilder


class LimboState(Generic[T]):
    """The readable state. `instance_id` is 0 for anonymous instances and until the instance is registered."""

    def __init__(self, *, instance_id: int, dialect: Dialect, quorum: int) -> None:
        self.instance_id = instance_id
        self.is_validating = True
        """True if control rows must match our history: not with a schema up to 2.10.1, nor during a join."""
        self._has_transfers = dialect is not Dialect.V2_6
        self._quorum = quorum
        self._queue: LimboQueue[T] = LimboQueue()
        self._owner_id = 0
        self._term = 0
        self._tenures = Tenures({}, (), {})
        self._confirmed = VClockBuilder()
        self._writing: SettlingRequest | None = None
        self._held: deque[SettlingRequest] = deque()
        self._is_fenced = False
        # While this instance was down, another one may have been promoted (docs/spec/synchro.md#claimed-ownership).
        self._is_frozen_until_promotion = self._has_transfers

    @property
    def owner_id(self) -> int:
        """The instance whose transactions may enter the queue; 0 if there is none."""
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
        """Per instance, the newest term of a PROMOTE or DEMOTE that it wrote. The dict is a copy."""
        return dict(self._tenures.promote_terms)

    def promote_term(self, instance_id: int) -> int:
        """Return the newest term of a PROMOTE or DEMOTE that `instance_id` wrote; 0 if it wrote none."""
        return self._tenures.promote_terms.get(instance_id, 0)

    @property
    def tenures(self) -> Tenures:
        """The tenures; read only."""
        return self._tenures

    @property
    def confirmed_vclock(self) -> VClock:
        """Per instance that was ever the owner, its highest confirmed LSN."""
        return self._confirmed.vclock()

    @property
    def confirmed_lsn(self) -> int:
        return self._confirmed.get(self._owner_id)

    @property
    def quorum(self) -> int:
        return self._quorum

    @property
    def rollback_count(self) -> int:
        """The number of transactions undone since the start, including transactions whose write failed."""
        return self._queue.rollback_count

    @property
    def size(self) -> int:
        """The size of the pending entries in bytes."""
        return self._queue.size

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def pending(self) -> tuple[LimboEntry[T], ...]:
        """The pending entries, in log order."""
        return tuple(self._queue)

    @property
    def newest(self) -> LimboEntry[T] | None:
        """The last pending entry. A checkpoint or join contains it, so it waits until the entry is committed."""
        return self._queue.last

    @property
    def newest_synchronous(self) -> LimboEntry[T] | None:
        """The last pending synchronous entry: its LSN is confirmed when `newest` is committed."""
        return self._queue.last_synchronous

    @property
    def is_frozen(self) -> bool:
        """True if no verdict is written: another instance may decide about the queue, or has done so meanwhile."""
        return self._is_fenced or self._is_frozen_until_promotion

    @property
    def is_fenced(self) -> bool:
        """True if frozen because of a newer term or a lost quorum."""
        return self._is_fenced

    @property
    def is_read_only(self) -> bool:
        """True if the queue makes the instance read-only; never in 2.6."""
        return self._has_transfers and self._owner_id != 0 and (not self.is_owner or self.is_frozen)

    @property
    def is_in_rollback(self) -> bool:
        """True if a row that may roll back the queue is being written or held.

        A transaction that entered now could not be distinguished from the transactions that the row decides.
        """
        requests = self._held if self._writing is None else (self._writing, *self._held)
        return any(not isinstance(request.body, Confirm) for request in requests)

    @property
    def is_busy(self) -> bool:
        """True if rows of other instances must wait for a write: `admit` and `receive` would raise."""
        writing = self._writing
        # A held row counts even if our own CONFIRM is being written: rows after it must not overtake it.
        if writing is None or self._held:
            return bool(self._held)
        return not (isinstance(writing.body, Confirm) and writing.origin_id == self._owner_id == self.instance_id)

    @property
    def history(self) -> QueueHistory:
        ends = self._queue.first, self._queue.last_synchronous
        # The last *synchronous* LSN: a PROMOTE names one of these, never that of an asynchronous entry.
        first, last = ends[0].first_lsn if ends[0] else 0, ends[1].lsn if ends[1] else 0
        terms, former = self._tenures.promote_terms, self._tenures.former
        return QueueHistory(self._owner_id, self._term, self.confirmed_vclock, terms, first, last, former)

    def checkpoint(self) -> Promote:
        """Return the state for a snapshot or JOIN_META, which does not include pending entries."""
        return Promote(self._owner_id, self.confirmed_lsn, self._term, self._confirmed.vclock())
