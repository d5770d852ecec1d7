"""One replica set in the dashboard's feed: rates, lag history and elections across polls, and the tail of its log.

Everything kept is bounded: points of history, elections, and transactions that have not been sent yet.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from flowstone.iproto.uri import Uri
from flowstone.observation.live_transaction import LiveTransaction
from flowstone.observation.places import place_of
from flowstone.observation.replica_set import Link, Member, ReplicaSet
from flowstone.observation.report import VClock
from flowstone.observation.tail import LiveTail, TailStatus
from flowstone.outside import Outside
from flowstone.web.feed_state import (
    ElectionEvent,
    ElectionKind,
    HistoryLink,
    HistoryPoint,
    LagHistory,
    SetState,
    TailState,
    TransactionBatch,
    link_state,
    member_state,
    to_json,
)

RATE_SECONDS: Final = 3.0
"""Approximate window over which rates are computed."""

HISTORY_SECONDS: Final = 15 * 60
POINTS_MAX: Final = HISTORY_SECONDS
"""Points of history kept: one per poll."""

POINT_LINKS_MAX: Final = 200
"""Maximum number of links kept per point; if a set has more links, the links with the largest lag are kept."""

ELECTIONS_MAX: Final = 200
BATCH_MAX: Final = 100
"""Transactions per batch; older ones are dropped and counted as skipped."""


class _Sample(msgspec.Struct, frozen=True):
    """Positions of all members at one time of the monotonic clock."""

    at: float
    vclocks: dict[str, VClock]
    tail_rows: int


class WatchedSet:
    """The state kept for a replica set. `look` records a poll; `state` returns the set as the feed publishes it."""

    def __init__(self, outside: Outside, uuid: str | None, on_change: Callable[[], None]) -> None:
        self.uuid = uuid
        self.tail: LiveTail | None = None
        self._outside = outside
        self._on_change = on_change
        self._members: list[Uri] = []
        self._now = ReplicaSet(uuid=uuid)
        self._samples: deque[_Sample] = deque()
        self._points: deque[msgspec.Raw] = deque(maxlen=POINTS_MAX)
        self._elections: list[ElectionEvent] = []
        self._leader: tuple[int, int] | None = None
        self._batch: dict[int, LiveTransaction] = {}
        self._untold = 0
        self._skipped_told = 0

    # --- the tail ---

    def follow(self) -> None:
        """Start following the log of the set."""
        self.tail = LiveTail(self._outside, lambda: self._members, on_shown=self._shown, on_leader=self._note_leader)
        self.tail.start()

    async def stop(self) -> None:
        if self.tail is not None:
            await self.tail.stop()

    def _shown(self, transaction: LiveTransaction) -> None:
        self._batch[id(transaction)] = transaction
        if len(self._batch) > BATCH_MAX:
            del self._batch[next(iter(self._batch))]
            self._untold += 1
        self._on_change()

    def take_batch(self) -> TransactionBatch | None:
        """Return the transactions that arrived or changed since the last call; None if there are none."""
        if self.tail is None:
            return None
        passed_by = self.tail.sink.skipped
        skipped = self._untold + max(0, passed_by - self._skipped_told)
        if not self._batch and not skipped:
            return None
        batch, self._batch = tuple(self._batch.values()), {}
        self._untold, self._skipped_told = 0, passed_by
        return TransactionBatch(replicaset_uuid=self.uuid or "", transactions=batch, skipped=skipped)

    # --- polls ---

    def look(self, replica_set: ReplicaSet, members: Sequence[Uri], asked_at: float) -> None:
        """Record a poll of the set.

        `members` lists the members that can be followed, best first; if it is empty because no member answers, the
        previous list is kept. `asked_at` is the time at which the poll began, in seconds since 1970: some servers take
        seconds to answer.
        """
        self._now = replica_set
        self._members = list(members) or self._members
        now = self._outside.clock.monotonic()
        vclocks = {member.uuid: member.vclock for member in replica_set.members}
        tail_rows = self.tail.sink.rows_seen if self.tail is not None else 0
        self._samples.append(_Sample(now, vclocks, tail_rows))
        while len(self._samples) > 2 and self._samples[1].at <= now - RATE_SECONDS:
            self._samples.popleft()
        self._note_election(replica_set, asked_at)
        self._note_point(replica_set)
        if self._is_followed_one_stuck():
            assert self.tail is not None
            self.tail.move()

    def _is_followed_one_stuck(self) -> bool:
        """Return True if the followed member no longer receives rows that others have and a better one is available."""
        tail, first, last = self.tail, self._samples[0], self._samples[-1]
        if tail is None or tail.status is not TailStatus.FOLLOWING or last.at - first.at < RATE_SECONDS:
            return False
        followed = next((one for one in self._now.members if _is_at(one, tail.followed)), None)
        if followed is None or not self._members or self._members[0] == tail.followed:
            return False
        before = first.vclocks.get(followed.uuid, {})
        return any(
            lsn > followed.vclock.get(number, 0) == before.get(number, 0) and followed.report is not None
            for number, lsn in self._now.vclock.items()
        )

    def _note_election(self, one: ReplicaSet, at: float) -> None:
        """Add an event if the leader or the term has changed since the last poll.

        Events have the time at which the poll began: a leader that the log reports during the poll comes after them.
        Members have a term even without elections. If they do not report their election mode, the presence of a leader
        shows that elections are on.
        """
        if one.term is None:
            return
        before, self._leader = self._leader, None if one.failover == "off" else (one.term, one.leader)
        if before == self._leader:
            return
        if self._leader is None:
            self._add_event("off", one.term, 0, at)
        elif one.leader:
            self._note_leader(one.term, one.leader, at)
        elif before is not None and before[1]:
            self._add_event("no_leader", one.term, 0, at)
        elif one.failover == "election" and (before is None or before[0] != one.term):
            self._add_event("term", one.term, 0, at)

    def _note_leader(self, term: int, replica_id: int, at: float) -> None:
        """Add the event of a new leader unless it is known already.

        Both the log and the polls report leaders. The earlier time of the two is kept: only the log has the exact one.
        """
        nobody: ElectionKind = "off" if self._now.failover == "off" else "no_leader"
        kind: ElectionKind = "leader" if replica_id else nobody
        for event in list(self._elections):
            is_same = (event.kind, event.term, event.leader) == (kind, term, replica_id)
            if not is_same or self._had_no_leader(event.at, at):
                continue
            if event.at <= at:
                return
            self._elections.remove(event)
        self._add_event(kind, term, replica_id, at)

    def _had_no_leader(self, one: float, other: float) -> bool:
        """Return True if the set was without a leader between two times: then the leader returned in the same term."""
        first, last = min(one, other), max(one, other)
        return any(event.kind in ("no_leader", "off") and first < event.at <= last for event in self._elections)

    def _add_event(self, kind: ElectionKind, term: int, leader: int, at: float) -> None:
        """Insert an event by time: the log can report events from before the first poll."""
        label = next((member.label for member in self._now.members if leader and member.id == leader), None)
        insort(
            self._elections,
            ElectionEvent(at=at, term=term, leader=leader, leader_label=label, kind=kind),
            key=lambda event: event.at,
        )
        del self._elections[:-ELECTIONS_MAX]
        self._on_change()

    def _note_point(self, one: ReplicaSet) -> None:
        links = sorted(one.links, key=lambda link: -(link.lag_lsn or 0))[:POINT_LINKS_MAX]
        point = HistoryPoint(
            at=self._outside.clock.wall(),
            links=tuple(
                HistoryLink(follower=link.follower, master=link.master, lag=link.lag, lag_lsn=link.lag_lsn)
                for link in links
            ),
            rows=self._rates(),
        )
        self._points.append(msgspec.Raw(to_json(point)))

    # --- queries ---

    def history(self) -> LagHistory:
        return LagHistory(points=tuple(self._points))

    def state(self) -> SetState:
        one = self._now
        return SetState(
            uuid=one.uuid,
            name=one.name,
            label=one.label,
            term=one.term,
            leader=one.leader,
            vclock=one.vclock,
            queue=one.queue,
            members=tuple(map(member_state, one.members)),
            links=tuple(link_state(link, self._link_rate(link)) for link in one.links),
            rows_per_second=self._rates(),
            waiting=tuple(self.tail.sink.waiting()) if self.tail is not None else (),
            tail=self._tail_state(),
            elections=tuple(self._elections),
        )

    def _tail_state(self) -> TailState:
        tail = self.tail
        if tail is None:
            return TailState(status="off")
        first, last = self._samples[0], self._samples[-1]
        return TailState(
            status=tail.status.value,
            address=tail.followed.address if tail.followed is not None else None,
            message=tail.message,
            rows_per_second=_rate(last.tail_rows - first.tail_rows, first, last),
            seen=tail.sink.transactions_seen,
        )

    def _rates(self) -> dict[str, float]:
        """Return the rows per second of each member, both its own and replicated ones."""
        first, last = self._samples[0], self._samples[-1]
        return {
            uuid: _rate(sum(vclock.values()) - sum(first.vclocks[uuid].values()), first, last)
            for uuid, vclock in last.vclocks.items()
            if uuid in first.vclocks
        }

    def _link_rate(self, link: Link) -> float | None:
        """Return the rows per second of a link: rows of its master and of members that the follower does not follow."""
        first, last = self._samples[0], self._samples[-1]
        before, after = first.vclocks.get(link.follower), last.vclocks.get(link.follower)
        follower, master = self._now.member(link.follower), self._now.member(link.master)
        if before is None or after is None or follower is None or master is None:
            return None
        others = {self._id_of(each.master) for each in self._now.links_to(link.follower) if each.is_following}
        elsewhere = (others | {follower.id}) - {master.id}
        rows = sum(lsn - before.get(number, 0) for number, lsn in after.items() if number not in elsewhere)
        return _rate(rows, first, last) if link.is_following else 0.0

    def _id_of(self, uuid: str) -> int:
        member = self._now.member(uuid)
        return member.id if member is not None else 0


def _is_at(member: Member, uri: Uri | None) -> bool:
    return uri is not None and member.address is not None and place_of(member.address) == place_of(uri.address)


def _rate(rows: int, first: _Sample, last: _Sample) -> float:
    seconds = last.at - first.at
    return round(max(0, rows) / seconds, 1) if seconds > 0 else 0.0
