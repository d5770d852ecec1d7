"""Membership: which peers may be followed according to `_cluster`, and the errors about expelled members.

Pure: it reads `_cluster` through `Members`, and returns decisions or raises the error that ends the attempt.

Theory of operation
-------------------

A row names its originator by an id, and ids are reissued: rows of an expelled member that still runs look like those of
its successor. So rows and RAFT messages of a peer are accepted only while `_cluster` has the peer's UUID under the id
that the peer claims. Real servers check membership only when a replica subscribes
(docs/spec/replication.md#unregistered-originators).

A `Standing` judges the peer at one address, across its connections. For the peer of the current connection:

- member: `_cluster` lists it, or it is anonymous and claims no id. Everything that it sends is accepted.
- not yet a member: `_cluster` does not list it, but it has rows that we lack, and one of them may register it. `split`
  lets other originators' rows through, up to the first row of an unregistered originator. `hear` keeps its RAFT message
  until it is a member. A peer without rows that we lack is rejected at SUBSCRIBE.
- expelled: it was a member during this connection and no longer is. `check` raises NotAMember before its next message.

NotAMember ends the attempt, and the applier retries: the registration may arrive through another member.

A member may also have lost rows of its own, for example with its disk. `subscribed` compares its vclock with ours: a
peer that lacks rows which it wrote is not followed until it has them back (`replication/applier/lost_tail.py`).

Invariants:

- No row of an originator without an entry in `_cluster` is applied, except rows that we already have.
- A peer that was expelled is not followed again before it is registered again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final, Protocol
from uuid import UUID

import numpy as np

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors, scan
from flowstone.iproto.constants import VCLOCK_MAX, Flag
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.replication.applier.lost_tail import LostTails
from flowstone.replication.applier.received_rows import check_own_rows
from flowstone.replication.vclock import VClock

REJOIN: Final = (
    "this instance was expelled from its replica set: to let it join again, stop it and delete its data "
    "(`flowstone rebootstrap`); else stop it"
)
_REJOIN: Final = "this instance was expelled from its replica set; rejoin it with `flowstone rebootstrap`"
_DELETE: Final = "delete its data (`flowstone rebootstrap`) and start it"
_EXPELLED: Final = f"it was expelled: to let it join again, {_DELETE}"
_UNREGISTERED: Final = f"if it is an anonymous replica, start it with replication_anon; otherwise {_EXPELLED}"
_COMMIT: Final = Flag.COMMIT.value
_NOT_A_MEMBER: Final = (
    "it was expelled, or the row that registers it has not arrived yet; if it was expelled, stop it and remove it "
    "from replication"
)

NO_MEMBERS: Final = "Anonymous replica does not support non-anonymous followers."
NO_FOLLOWERS: Final = "Instance that was expelled from its replica set does not support followers"
"""Answers of an expelled instance to SUBSCRIBE: to a member, as 3.8 does, and to any other replica."""

NO_SNAPSHOTS: Final = "Instance that was expelled from its replica set does not support snapshots"
"""Answer of an expelled instance to `box.snapshot()`: a snapshot would not show that the instance was a member.

Only the log shows it, and nothing more is written to the log.
"""

LOSSES_MAX: Final = 10
"""Retries with a peer that has lost rows of its own and does not follow us: it may follow us soon and get them back."""


class NotAMember(FlowstoneError):
    """A peer claims an id that `_cluster` does not have for it. Worth a retry: the row may be on its way."""


class VClockLags(FlowstoneError):
    """A peer reported a vclock without rows that it has written and sent. Worth a retry."""


def expelled(replica_id: int) -> TarantoolError:
    """Return the error that stops the appliers of an expelled instance and rejects its promotion.

    The message begins with the text of real servers. Clients do not get hints, so it includes what to do.
    """
    return errors.LocalInstanceIdIsReadOnly(f"The local instance id {replica_id} is read-only: {_REJOIN}")


def unregistered(instance_uuid: UUID, replicaset_uuid: UUID | None, *, was_member: bool) -> TarantoolError:
    """Return the error that ends the start of an instance that is not in its own `_cluster`, as in 2.11."""
    text = f"Replica {instance_uuid} is not registered with replica set {replicaset_uuid}"
    return errors.UnknownReplica(text, hint=_EXPELLED if was_member else _UNREGISTERED)


def not_anonymous(instance_uuid: UUID) -> TarantoolError:
    """Return the error that ends the start, with `replication_anon`, of an instance that was expelled.

    Its own rows may be missing on other members, or have the same LSNs as rows of a member that got its id later. An
    anonymous replica would keep its own rows and skip the rows of that member.
    """
    text = f"Incorrect value for option 'replication_anon': replica {instance_uuid} was a member of its replica set"
    return errors.Cfg(text, hint=f"to make it an anonymous replica, {_DELETE}")


def unused_id(taken: Collection[int], used: Collection[int]) -> int:
    """Return the id for a new member: the smallest one that is neither `taken` by a member nor was `used` before.

    Rows of a former member may still arrive through other members; a new member with the same id would write different
    rows under the same LSNs. If all ids were used, return the smallest one that is not taken, as real servers do; if
    all are taken, return VCLOCK_MAX, which `_cluster` rejects.
    """
    free = [number for number in range(1, VCLOCK_MAX) if number not in taken]
    unused = [number for number in free if number not in used]
    return min(unused or free, default=VCLOCK_MAX)


class Members(Protocol):
    """The members in `_cluster`, unconfirmed rows included."""

    def has(self, replica_id: int, uuid: UUID) -> bool:
        """Return True if this UUID is registered under this id."""
        ...

    def has_id(self, replica_id: int) -> bool:
        """Return True if an instance is registered under this id."""
        ...

    def is_intact(self, uuid: UUID) -> bool:
        """Return True if the member follows us, and subscribed with all its own rows that we had at that time."""
        ...


class Standing:
    """Decides whether the peer at one address may be followed; one per address, across its connections.

    `members` is None if rows of any peer are accepted. `may_regain` returns whether a peer that has lost rows of its
    own may get them back from us; if it is None, lost rows are not checked for.
    """

    def __init__(
        self, peer: str, *, members: Members | None = None, may_regain: Callable[[UUID], bool] | None = None
    ) -> None:
        self._peer = peer
        self._members = members
        self._may_regain = may_regain
        self._uuid = UUID(int=0)
        self._replica_id = 0
        self._was_member = False
        self._raft: Row | None = None
        self.is_new = False
        """True if the peer has become a member during this connection, until the applier has reported that."""
        self.own_lsn_seen = 0
        """The highest LSN of our own rows that the peer is known to have. If our own vclock is lower, we lost rows."""
        self._lost_tails = LostTails()
        self._losses = 0

    def start(self) -> None:
        """Reset the retries when the applier is restarted."""
        self._losses = 0

    def subscribed(self, uuid: UUID, replica_id: int, theirs: VClock, ours: VClock) -> None:
        """Check the answer to a SUBSCRIBE at vclock `ours`; raise NotAMember, TailLost or VClockLags."""
        self._uuid, self._replica_id = uuid, replica_id
        self._was_member, self._raft, self.is_new = self.is_member, None, False
        lacks_nothing = all(lsn <= ours.get(number) for number, lsn in theirs if number not in (0, replica_id))
        if not self._was_member and lacks_nothing:
            raise self._not_a_member()
        self._check_tail(theirs, ours)

    @property
    def is_member(self) -> bool:
        """False while `_cluster` does not have the peer under the id that it claims. An anonymous peer claims none."""
        return not self._replica_id or self._members is None or self._members.has(self._replica_id, self._uuid)

    @property
    def member_id(self) -> int:
        """The id of the peer, for elections; 0 while `_cluster` does not have it as a member."""
        return self._replica_id if self.is_member else 0

    def check(self) -> None:
        """Check the peer before each message: set `is_new` if it has just become a member.

        Raise NotAMember if it was expelled.
        """
        before, self._was_member = self._was_member, self.is_member
        if before and not self._was_member:
            raise self._not_a_member()
        self.is_new = self.is_new or (self._was_member and not before)

    def admit(self, slab: Slab, ours: VClock, own_id: int) -> tuple[Slab, Slab | None]:
        """Check the peer and its rows; return the rows that may be applied now, and the rest, as `split` does.

        `own_id` is the id of this instance at vclock `ours`. Raise NotAMember, or OwnRowRefused for a row of our own
        that we do not know, except rows that we lost and the peer is known to have.
        """
        self.check()
        part, rest = (slab, None) if self._was_member else self.split(slab, ours)
        if own_id > 0:
            check_own_rows(part, own_id, max(ours.get(own_id), self.own_lsn_seen))
        return part, rest

    def split(self, slab: Slab, ours: VClock) -> tuple[Slab, Slab | None]:
        """Return the transactions that may be applied now, and the rest, to be split again when the former are applied.

        The rest begins with a transaction whose originator is not a member: rows before it may register the originator.
        Raise NotAMember if the slab begins with such a transaction.
        """
        if self.is_member or self._members is None:
            return slab, None
        origin_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        is_refused = np.zeros(len(slab), np.bool_)
        for number in np.unique(origin_ids).tolist():
            if number == self._replica_id or not self._members.has_id(number):
                is_refused |= (origin_ids == number) & (lsns > ours.get(number))
        if not is_refused.any():
            return slab, None
        ends = np.flatnonzero(slab.cells[scan.FLAGS, : int(np.argmax(is_refused))] & _COMMIT)
        if not len(ends):
            raise self._not_a_member()
        cut = int(ends[-1]) + 1
        return replace(slab, cells=slab.cells[:, :cut]), replace(slab, cells=slab.cells[:, cut:])

    def hear(self, row: Row) -> None:
        """Keep a RAFT row of the peer; `heard` returns the last one as soon as the peer is a member."""
        self._raft = row

    def heard(self) -> Row | None:
        if self._raft is None or not self._was_member:
            return None
        row, self._raft = self._raft, None
        return row

    def _not_a_member(self) -> NotAMember:
        text = f"{self._peer} is not a member: _cluster does not have {self._uuid} as {self._replica_id}"
        return NotAMember(text, hint=_NOT_A_MEMBER)

    # --- rows of the peer itself ---

    def _check_tail(self, theirs: VClock, ours: VClock) -> None:
        """Raise if the peer lacks rows of its own: it would reuse their LSNs, and we would skip the new rows."""
        if self._may_regain is None:
            return
        if theirs.get(self._replica_id) < ours.get(self._replica_id) and self._is_intact:
            text = f"vclock of {self._peer} does not include its own row {ours.get(self._replica_id)} yet"
            raise VClockLags(text, hint="no action is needed: the connection is retried")
        lost = self._lost_tails.check(self._peer, self._uuid, self._replica_id, theirs, ours)
        if lost is None:
            self._losses = 0
            return
        self._losses += 1
        if self._losses > LOSSES_MAX and not self._may_regain(self._uuid):
            lost.may_come_back = False
        raise lost

    @property
    def _is_intact(self) -> bool:
        """True if a lower vclock is not a loss: a real relay may send a row before its instance's vclock has it."""
        return self._members is not None and self._members.is_intact(self._uuid)

    def acknowledged(self, replica_id: int, vclock: VClock) -> None:
        """Record that a member that follows us has all rows up to `vclock`, perhaps also rows it had lost."""
        self._lost_tails.acknowledged(replica_id, vclock)
