"""Combines the reports of servers into replica sets: their members, the links between them, and the lag.

Pure. Servers report each other, so a member that did not answer is included with the facts that the others report. Lag
is given in seconds and in rows: a server reports the lag in seconds of the last row that it received, which means
nothing while no rows are written or received.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from flowstone.observation.places import place_of, seen_from
from flowstone.observation.report import (
    Report,
    ReportedDownstream,
    ReportedPeer,
    ReportedQueue,
    ReportedUpstream,
    Unreachable,
    VClock,
)

FOLLOWING = ("follow", "sync")
"""The states of a link in which it transfers rows."""

FAILED: Final = frozenset({"stopped", "disconnected", "loading"})
"""States of a link that has failed: no rows arrive until it is established again."""

BEHIND_SECONDS: Final = 5.0
"""Minimum lag that is reported, in all outputs. With less, rows may still be in transit: a lost connection is noticed
after 4 × `replication_timeout`, which is 1 s by default."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """`follower` receives rows from `master`; both are UUIDs."""

    follower: str
    master: str
    status: str
    """State reported by the follower (`follow`, `sync`, `stopped`, `disconnected`, …), or by the master if only the
    master answered."""

    downstream: str | None = None
    """State reported by the master (`follow`, `stopped`); None if it reports none, or did not answer."""

    lag: float | None = None
    """Lag of the follower in seconds; 0 if it has every row, however long ago the last one arrived."""

    lag_lsn: int | None = None
    """Number of rows that the master has and the follower lacks; None if one of the positions is unknown."""

    idle: float | None = None
    message: str | None = None

    @property
    def is_following(self) -> bool:
        return self.status in FOLLOWING

    @property
    def is_failed(self) -> bool:
        """True if the link has failed; a link that is being established again still has the message."""
        return self.status in FAILED or (self.message is not None and not self.is_following)

    @property
    def is_behind(self) -> bool:
        """True if rows have been missing for more than BEHIND_SECONDS. Seconds alone mean nothing."""
        return bool(self.lag_lsn) and (self.lag or 0.0) > BEHIND_SECONDS


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A member, or a server that is not a member (id 0): an anonymous replica, or an expelled member."""

    uuid: str
    id: int
    """Its id in `_cluster` of the other members; 0 for an expelled member, even if it does not know that."""

    name: str | None = None
    address: str | None = None
    report: Report | None = None
    unreachable: Unreachable | None = None
    copy: str | None = None
    """Address of another process with the same UUID, if any."""

    vclock: VClock = {}
    """The position that it reports; for a member that did not answer, the rows that others know it has."""

    is_leader: bool = False

    @property
    def mode(self) -> str:
        """The mode as in `tt replicaset status`: rw, read or unknown."""
        if self.report is None:
            return "unknown"
        return "read" if self.report.ro else "rw"

    @property
    def label(self) -> str:
        """Short name for people: its name, its address, or its id."""
        return self.name or self.address or (f"replica {self.id}" if self.id else f"anonymous {self.uuid[:8]}")


class ReplicaSet(msgspec.Struct, frozen=True, kw_only=True):
    """A replica set at one moment."""

    uuid: str | None
    name: str | None = None
    members: tuple[Member, ...] = ()
    links: tuple[Link, ...] = ()
    term: int | None = None
    leader: int = 0
    """Replica id of the elected leader; 0 if there is none, if it is gone, or without elections."""

    queue: ReportedQueue | None = None
    """The queue of synchronous transactions as its owner reports it."""

    vclock: VClock = {}
    """The furthest position of any member, by component."""

    @property
    def label(self) -> str:
        return self.name or self.uuid or "unknown"

    @property
    def failover(self) -> str:
        """The failover as in `tt replicaset status`: `election` if any member takes part in elections, else `off`."""
        answered = [member for member in self.members if member.report is not None]
        registered = [member for member in answered if member.id] or answered
        reports = [member.report for member in registered if member.report is not None]
        if any(_takes_part(report) for report in reports):
            return "election"
        is_known = any(report.cfg is not None or report.election is None for report in reports)
        return "off" if is_known else "unknown"

    @property
    def master(self) -> str:
        """The number of writable members as in `tt replicaset status`: single, multi or no."""
        registered = [member for member in self.members if member.id] or self.members
        count = sum(member.mode == "rw" for member in registered)
        return "no" if not count else "single" if count == 1 else "multi"

    def role(self, member: Member) -> str:
        """Return leader, candidate or follower with elections, master or replica without; anonymous or expelled for a
        server that is not a member, and unknown for one that did not answer."""
        if member.report is None:
            return "unknown"
        if not member.id:
            return "expelled" if member.report.id else "anonymous"
        if self.failover == "election" and member.report.election is not None:
            return member.report.election.state
        return "replica" if member.report.ro else "master"

    def member(self, uuid: str) -> Member | None:
        return next((member for member in self.members if member.uuid == uuid), None)

    def find(self, text: str) -> Member | None:
        """Return the member with this id, UUID, name or address."""
        if text.isdecimal() and int(text):
            return next((member for member in self.members if member.id == int(text)), None)
        return next((member for member in self.members if text in (member.uuid, member.name, member.address)), None)

    def label_of(self, uuid: str) -> str:
        """Return the member's label, or its UUID if the member is unknown."""
        member = self.member(uuid)
        return member.label if member is not None else uuid

    def links_to(self, uuid: str) -> tuple[Link, ...]:
        """Return the links through which a member receives rows."""
        return tuple(link for link in self.links if link.follower == uuid)

    def gets_rows_of(self, uuid: str, origin: str) -> bool:
        """Return True if links lead from `origin` to the member; stopped links count, because they may resume."""
        reached, new = {origin}, [origin]
        while new:
            masters, new = new, []
            for link in self.links:
                if link.master in masters and link.follower not in reached:
                    reached.add(link.follower)
                    new.append(link.follower)
        return uuid in reached


def replica_sets(answers: Sequence[Report | Unreachable]) -> tuple[ReplicaSet, ...]:
    """Return the replica sets of the servers, in the order of `answers`.

    A server that did not answer belongs to the set that lists its UUID, if that is known, or in which a member follows
    its address, to the only set, or to a set without a UUID. A server that was queried at two addresses is included
    once, and so is a server with a running copy, with the address of the copy.
    """
    first: dict[str, Report] = {}
    for answer in answers:
        if isinstance(answer, Report):
            first.setdefault(answer.uuid, answer)
    reports = list(first.values())
    copies = {
        answer.uuid: answer.address
        for answer in answers
        if isinstance(answer, Report) and answer.pid != first[answer.uuid].pid
    }
    lost = [answer for answer in answers if isinstance(answer, Unreachable)]
    uuids = list(dict.fromkeys(report.replicaset_uuid for report in reports))
    groups = {uuid: [report for report in reports if report.replicaset_uuid == uuid] for uuid in uuids}
    strays: list[Unreachable] = []
    found: dict[str | None, list[Unreachable]] = {uuid: [] for uuid in uuids}
    for one in lost:
        home = [uuid for uuid in uuids if _uuid_of(one, groups[uuid]) is not None]
        if home or len(uuids) == 1:
            found[(home or uuids)[0]].append(one)
        else:
            strays.append(one)
    sets = [_replica_set(uuid, groups[uuid], found[uuid], copies) for uuid in uuids]
    if strays:
        sets.append(ReplicaSet(uuid=None, members=tuple(map(_stray, strays))))
    return tuple(sets)


def missing_row_count(ahead: VClock, behind: VClock) -> int:
    """Return the number of rows in `ahead` that are not in `behind`."""
    return sum(max(0, lsn - behind.get(replica_id, 0)) for replica_id, lsn in ahead.items())


def most_behind(links: Iterable[Link]) -> list[Link]:
    """Return the link with the largest lag of each lagging follower, as a slow follower lags all its masters."""
    worst: dict[str, Link] = {}
    for link in links:
        known = worst.get(link.follower)
        if link.is_behind and (known is None or _behind_by(link) > _behind_by(known)):
            worst[link.follower] = link
    return list(worst.values())


def _behind_by(link: Link) -> tuple[int, float]:
    return link.lag_lsn or 0, link.lag or 0.0


def furthest(positions: Iterable[VClock]) -> VClock:
    """Return the position that covers all positions: the largest LSN of each component."""
    found: VClock = {}
    for vclock in positions:
        for replica_id, lsn in vclock.items():
            found[replica_id] = max(lsn, found.get(replica_id, 0))
    return {replica_id: found[replica_id] for replica_id in sorted(found)}


def rows_alone(own: VClock, others: Iterable[VClock]) -> dict[int, tuple[int, int]]:
    """Return the rows in `own` that are in none of the others: first and last LSN by replica id."""
    elsewhere = furthest(others)
    return {
        replica_id: (elsewhere.get(replica_id, 0) + 1, lsn)
        for replica_id, lsn in own.items()
        if lsn > elsewhere.get(replica_id, 0)
    }


def document(replica_set: ReplicaSet) -> dict[str, Any]:
    """Return a replica set for JSON, including its computed properties."""
    found: dict[str, Any] = msgspec.to_builtins(replica_set, str_keys=True)
    found |= {"label": replica_set.label, "failover": replica_set.failover, "master": replica_set.master}
    for member, shown in zip(replica_set.members, found["members"], strict=True):
        why = member.report.why_read_only if member.report is not None else None
        role = replica_set.role(member)
        shown |= {"label": member.label, "mode": member.mode, "role": role, "why_read_only": why}
    return found


def _replica_set(
    uuid: str | None, reports: Sequence[Report], lost: Sequence[Unreachable], copies: Mapping[str, str]
) -> ReplicaSet:
    outsiders = _outsiders(reports)
    counted = [report for report in reports if report.uuid not in outsiders]
    term = max((report.election.term for report in counted if report.election is not None), default=None)
    leader = _leader(counted, term)
    members = _members(reports, lost, copies, leader, outsiders)
    links = _links(reports, members)
    if leader and not any(member.is_leader and _is_there(member, links) for member in members):
        leader, members = 0, tuple(msgspec.structs.replace(member, is_leader=False) for member in members)
    return ReplicaSet(
        uuid=uuid,
        name=next((report.replicaset_name for report in reports if report.replicaset_name), None),
        members=members,
        links=links,
        term=term,
        leader=leader,
        queue=_queue(counted),
        vclock=furthest(report.vclock for report in counted),
    )


def expelled(reports: Sequence[Report]) -> frozenset[str]:
    """Return the UUIDs of servers that answered and are in `_cluster` of no other member that answered.

    A member that was down when it was expelled does not know about its expulsion, because it lacks the row that removed
    it. A member that has just joined is no such case: it has a row that the others lack.
    """
    return frozenset(report.uuid for report in reports if _is_expelled(report, reports))


def _outsiders(reports: Sequence[Report]) -> frozenset[str]:
    """Return the UUIDs of servers that do not count as members: the expelled, unless members expelled each other."""
    found, members = expelled(reports), {report.uuid for report in reports if report.id}
    return found - members if members <= found else found


def _is_expelled(report: Report, reports: Sequence[Report]) -> bool:
    others = [one for one in reports if one.id and one is not report and one.status != "loading"]
    if not report.id:
        is_anonymous = (report.cfg or {"replication_anon": True}).get("replication_anon", False)
        return not is_anonymous and report.status in ("running", "orphan") and bool(others)
    lists_it = any(peer.uuid == report.uuid for one in others for peer in one.replication)
    return not lists_it and any(missing_row_count(one.vclock, report.vclock) for one in others)


def _is_there(member: Member, links: Iterable[Link]) -> bool:
    """Return True if the member answers or another one follows it.

    A member without a quorum starts no new term, so it reports a dead leader forever.
    """
    return member.report is not None or any(link.master == member.uuid and link.is_following for link in links)


def _takes_part(report: Report) -> bool:
    """Return True if the server takes part in elections; if its options are unknown, a known leader shows it."""
    has_leader = report.election is not None and bool(report.election.leader)
    return has_leader or (report.cfg or {}).get("election_mode", "off") != "off"


def _leader(reports: Sequence[Report], term: int | None) -> int:
    """Return the leader of the newest term, as reported by any server that knows it; 0 if there is none."""
    elections = [report.election for report in reports if report.election is not None]
    return next((election.leader for election in elections if election.term == term and election.leader), 0)


def _queue(reports: Sequence[Report]) -> ReportedQueue | None:
    """Return the queue that its owner reports, or else the one with the newest term and the most transactions."""
    shown = [(report.id, report.queue) for report in reports if report.queue is not None]
    owners = [queue for replica_id, queue in shown if queue.owner == replica_id]
    queues = owners or [queue for _, queue in shown]
    return max(queues, key=lambda queue: (queue.term, queue.len), default=None)


# --- members ---


def _members(
    reports: Sequence[Report],
    lost: Sequence[Unreachable],
    copies: Mapping[str, str],
    leader: int,
    outsiders: frozenset[str],
) -> tuple[Member, ...]:
    own = {report.uuid: report for report in reports}
    registered = {
        peer.uuid for report in reports if report.uuid not in outsiders for peer in report.replication if peer.id
    }
    seen: dict[str, list[ReportedPeer]] = {report.uuid: [] for report in reports}
    for report in reports:
        for peer in (*report.replication, *report.anonymous):
            seen.setdefault(peer.uuid, []).append(peer)
    addresses = {uuid: place for place, uuid in _followed(reports)}
    places, strays = _silent(seen, own, reports, lost)
    members = [
        _answered(own[uuid], peers, copies.get(uuid), leader, is_expelled=uuid in outsiders)
        if uuid in own
        else _unheard(uuid, peers, places.get(uuid), addresses.get(uuid), leader, _kept_for(uuid, reports))
        for uuid, peers in seen.items()
    ]
    # Members that only an expelled server lists may have been expelled before it.
    members = [
        member if member.uuid in own or member.uuid in registered else msgspec.structs.replace(member, id=0)
        for member in members
    ]
    members += map(_stray, strays)
    return tuple(sorted(members, key=lambda member: (member.id == 0, member.id, member.address or "", member.uuid)))


def _silent(
    seen: dict[str, list[ReportedPeer]], own: dict[str, Report], reports: Sequence[Report], lost: Sequence[Unreachable]
) -> tuple[dict[str, Unreachable], list[Unreachable]]:
    """Assign addresses that did not answer to members; return the assignments and the addresses left over.

    A member that no other follows, or follows at another address, is found by elimination: if one member and one
    address are left, they belong together, unless another instance is known to run there.
    """
    places: dict[str, Unreachable] = {}
    strays: list[Unreachable] = []
    for one in lost:
        uuid = _uuid_of(one, reports)
        if uuid is None:
            strays.append(one)
        else:
            places.setdefault(uuid, one)
    silent = [uuid for uuid, peers in seen.items() if uuid not in own and uuid not in places and peers[0].id]
    if len(strays) == len(silent) == 1 and strays[0].uuid in (None, silent[0]):
        places[silent[0]] = strays.pop()
    return places, strays


def _answered(
    report: Report, peers: Sequence[ReportedPeer], copy: str | None, leader: int, *, is_expelled: bool
) -> Member:
    replica_id = 0 if is_expelled else report.id
    return Member(
        uuid=report.uuid,
        id=replica_id,
        name=report.name or _name(peers),
        address=report.address,
        report=report,
        copy=copy,
        vclock=report.vclock,
        is_leader=bool(replica_id) and replica_id == leader,
    )


def _unheard(
    uuid: str,
    peers: Sequence[ReportedPeer],
    unreachable: Unreachable | None,
    address: str | None,
    leader: int,
    kept: Iterable[VClock],
) -> Member:
    """Return a member that only others report.

    It has the rows that it acknowledged, the rows that others received from it, and all rows before the logs that are
    kept for it.
    """
    replica_id = peers[0].id
    acknowledged = [peer.downstream.vclock for peer in peers if peer.downstream is not None]
    own = [{replica_id: peer.lsn} for peer in peers if replica_id and peer.lsn]
    return Member(
        uuid=uuid,
        id=replica_id,
        name=_name(peers),
        address=unreachable.address if unreachable is not None else address,
        unreachable=unreachable,
        vclock=furthest((*acknowledged, *own, *kept)),
        is_leader=bool(replica_id) and replica_id == leader,
    )


def _name(peers: Iterable[ReportedPeer]) -> str | None:
    """Return the member's name as reported by others; 3.x reports names."""
    return next((peer.name for peer in peers if peer.name), None)


def _kept_for(uuid: str, reports: Iterable[Report]) -> Iterator[VClock]:
    """Yield the positions from which on others keep logs for this member: it has all rows before them."""
    for report in reports:
        for consumer in report.gc.consumers if report.gc is not None else ():
            if consumer.replica_uuid == uuid:
                yield consumer.vclock


def _stray(one: Unreachable) -> Member:
    return Member(uuid=one.address, id=0, address=one.address, unreachable=one)


def _uuid_of(one: Unreachable, reports: Sequence[Report]) -> str | None:
    """Return the UUID of the server that did not answer; None if it is unknown, or no report lists it.

    A UUID that answers elsewhere has moved: nobody knows which instance is at its old address now.
    """
    listed = {peer.uuid for report in reports for peer in (*report.replication, *report.anonymous)}
    if one.uuid in listed and all(report.uuid != one.uuid for report in reports):
        return one.uuid
    return _uuid_at(one.address, reports)


def _uuid_at(address: str, reports: Iterable[Report]) -> str | None:
    """Return the UUID of the server that members follow at this address; None if no member does."""
    return next((uuid for place, uuid in _followed(reports) if place == place_of(address)), None)


def _followed(reports: Iterable[Report]) -> Iterator[tuple[str, str]]:
    """Yield each place that a server follows, and the UUID of the upstream there."""
    for report in reports:
        for peer in report.replication:
            if peer.upstream is not None and peer.upstream.peer:
                yield seen_from(report.address, peer.upstream.peer), peer.uuid


# --- links ---


def _links(reports: Sequence[Report], members: Sequence[Member]) -> tuple[Link, ...]:
    """Return the links, sorted by follower and then by master, in the order of the members."""
    order = {member.uuid: number for number, member in enumerate(members)}
    links = _told_links(reports, {member.uuid: member.vclock for member in members})
    return tuple(sorted(links, key=lambda link: (order[link.follower], order[link.master])))


def _told_links(reports: Sequence[Report], positions: Mapping[str, VClock]) -> Iterator[Link]:
    answered = {report.uuid for report in reports}
    downstreams = {
        (peer.uuid, report.uuid): peer.downstream
        for report in reports
        for peer in (*report.replication, *report.anonymous)
        if peer.downstream is not None and peer.uuid != report.uuid
    }
    for report in reports:
        for peer in report.replication:
            if peer.upstream is not None and peer.uuid != report.uuid:
                downstream = downstreams.pop((report.uuid, peer.uuid), None)
                missing = missing_row_count(positions[peer.uuid], report.vclock)
                # A master that did not answer may have more rows than others know of.
                is_known = missing or peer.uuid in answered
                yield _link(report.uuid, peer.uuid, peer.upstream, downstream, missing if is_known else None)
    for (follower, master), side in downstreams.items():
        if follower in answered and side.status != "follow":
            continue  # the follower was reconfigured: the master still shows the end of the old connection
        missing = missing_row_count(positions[master], side.vclock)
        yield _link(follower, master, side, side, missing if side.vclock else None)


def _link(
    follower: str,
    master: str,
    side: ReportedUpstream | ReportedDownstream,
    downstream: ReportedDownstream | None,
    missing: int | None,
) -> Link:
    return Link(
        follower=follower,
        master=master,
        status=side.status,
        downstream=downstream.status if downstream is not None else None,
        lag=_lag(side, missing),
        lag_lsn=missing,
        idle=side.idle,
        message="; ".join(filter(None, (side.message, side.system_message))) or None,
    )


def _lag(side: ReportedUpstream | ReportedDownstream, missing: int | None) -> float | None:
    """Return the lag: 0 if no rows are missing; otherwise at least the time since the last message."""
    if missing == 0:
        return 0.0
    if missing:
        return max(side.lag or 0.0, side.idle or 0.0)
    return side.lag if side.status in FOLLOWING else None
