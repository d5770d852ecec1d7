"""Plans the expulsion of a member: the member that executes it, the rows that would be lost, and the remaining quorum.

Pure. A writable member deletes the row from `_cluster`; replication applies the deletion on all others.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.observation.findings.connection_findings import is_alive
from flowstone.observation.findings.queue_findings import lost_quorum
from flowstone.observation.findings.wording import position, rows_text
from flowstone.observation.replica_set import Member, ReplicaSet, rows_alone
from flowstone.observation.report import VClock


class NoSuchMember(FlowstoneError):
    """No member of the replica set has this id, UUID, name or address."""


class Expulsion(msgspec.Struct, frozen=True, kw_only=True):
    """The member to expel, and the consequences."""

    member: Member
    asked: Member
    by: Member
    """The member that deletes the row."""

    alone: dict[int, tuple[int, int]]
    """Rows that no other live member has: first and last LSN by replica id."""

    members_left: int
    alive_left: int
    quorum_left: int | None
    """Quorum of the remaining members; None if no member reports how to compute it."""

    listed_by: tuple[Member, ...] = ()
    """Other members that answered and whose `replication` lists the member."""

    @property
    def has_quorum(self) -> bool | None:
        return None if self.quorum_left is None else self.alive_left >= self.quorum_left

    def objections(self) -> Iterator[str]:
        """Yield the reasons not to expel the member unless forced."""
        label = self.member.label
        if self.member.uuid == self.asked.uuid:
            yield f"{label} is the member at the given URI itself"
        if self.member.is_leader:
            yield f"{label} is the leader"
        if self.alone:
            yield f"only {label} has {alone_text(self.alone)}"
        if self.has_quorum is False:
            yield f"no quorum is left without {label}: {self._left()}"

    def consequences(self) -> Iterator[str]:
        """Yield the consequences of the expulsion, one sentence each."""
        if self.member.report is not None:
            bound = "it will no longer replicate or accept writes"
            if not self.member.report.is_flowstone:
                bound = "it will no longer replicate, but may still accept writes: stop it"
            yield f"it is running: {bound}; its data stay until they are deleted"
        else:
            yield f"it does not answer; the other members know that it reached at least {position(self.member.vclock)}"
        yield (
            f"rows that exist only on this member: {alone_text(self.alone)}"
            if self.alone
            else "no rows are known to exist only on this member"
        )
        verdict = {None: "the quorum is unknown", True: "a quorum is left", False: "NO QUORUM IS LEFT"}
        yield f"{self._left()}: {verdict[self.has_quorum]}"

    def afterwards(self) -> str:
        """Return what remains to be done on the other members, as a sentence."""
        if not self.listed_by:
            return (
                "remove the member from `replication` in the configuration of the other members, if it is listed there"
            )
        others = " and ".join(each.label for each in self.listed_by)
        return (
            f"unless a new member gets its address, remove {self.member.label} from `replication` of {others}; while "
            "`replication` lists an expelled member, a start may wait the whole `replication_connect_timeout` for it"
        )

    def _left(self) -> str:
        needed = "" if self.quorum_left is None else f", {self.quorum_left} are needed"
        return f"{self.alive_left} of {self.members_left} other members are alive{needed}"


def plan(one: ReplicaSet, asked: Member, wanted: str, *, before: VClock | None = None) -> Expulsion:
    """Plan the expulsion of the member that `wanted` names; `asked` is the member at the operator's URI.

    `before` is the member's position in an earlier survey: members answer one after another, so rows that are written
    in between seem to exist only on the member that answers last.
    """
    member = one.find(wanted)
    if member is None or not member.id:
        raise no_such_member(one, wanted)
    others = [each for each in one.members if each.id and each.uuid != member.uuid]
    alive = [each for each in others if is_alive(one, each)]
    by = _writer(one, member, asked, others)
    return Expulsion(
        member=member,
        asked=asked,
        by=by,
        alone=rows_alone(member.vclock if before is None else before, (each.vclock for each in alive)),
        members_left=len(others),
        alive_left=len(alive),
        quorum_left=_quorum([by, *alive], len(others)),
        listed_by=tuple(each for each in others if _lists(each, member.uuid)),
    )


def _lists(member: Member, uuid: str) -> bool:
    """Return True if the member has an applier for `uuid`, so that its `replication` lists that address."""
    peers = member.report.replication if member.report is not None else ()
    return any(peer.uuid == uuid and peer.upstream is not None for peer in peers)


def no_such_member(one: ReplicaSet, wanted: str, why: str | None = None) -> NoSuchMember:
    """Return the error for an unknown member; its hint lists the members."""
    known = ", ".join(f"{each.id} ({each.label})" for each in one.members if each.id)
    hint = f"its members are {known}" if why is None else f"{why}; its members are {known}"
    return NoSuchMember(f"{wanted} is not a member of the replica set {one.label}", hint=hint)


def _writer(one: ReplicaSet, member: Member, asked: Member, others: list[Member]) -> Member:
    """Return the member that deletes the row: the leader, else `asked`, else any other writable member.

    A member cannot delete its own row.
    """
    writable = [each for each in others if each.mode == "rw"]
    chosen = [*(each for each in writable if each.is_leader), *(each for each in writable if each == asked), *writable]
    if chosen:
        return chosen[0]
    if member.mode == "rw":
        hint = "promote another member, or make one writable: a member cannot delete its own row"
        raise FlowstoneError(f"no other member of {one.label} is writable", hint=hint)
    lost = lost_quorum(one)
    why, hint = (f": {lost.what}", lost.advice) if lost is not None else ("", "promote a member, or make one writable")
    raise FlowstoneError(f"no member of {one.label} is writable{why}", hint=hint)


def _quorum(members: list[Member], count: int) -> int | None:
    """Return the quorum of `count` members by the options of the first member that reports them.

    The writer comes first in `members`: an operator may have lowered the quorum only there.
    """
    told = (each.report.quorum_of(count) for each in members if each.report is not None)
    return next((quorum for quorum in told if quorum is not None), None)


def alone_text(alone: dict[int, tuple[int, int]]) -> str:
    """Return rows as text, such as `3 rows, 5..7 of replica 3`."""
    count = sum(last - first + 1 for first, last in alone.values())
    spans = (
        f"{first}..{last} of replica {number}" if last > first else f"{first} of replica {number}"
        for number, (first, last) in alone.items()
    )
    return f"{rows_text(count)}, {' and '.join(spans)}"
