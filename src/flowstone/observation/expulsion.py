"""What it means to take a member out of its replica set: who does it, what is lost with it, and whether a quorum stays.

Pure. The row of `_cluster` is deleted by somebody who can write; all others learn it from there.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.observation.connection_findings import is_alive
from flowstone.observation.queue_findings import lost_quorum
from flowstone.observation.replica_set import Member, ReplicaSet, rows_alone
from flowstone.observation.report import VClock
from flowstone.observation.wording import position, rows_text


class NoSuchMember(FlowstoneError):
    """Nobody of the replica set is called so."""


class Expulsion(msgspec.Struct, frozen=True, kw_only=True):
    """A member that is to go, and what that means."""

    member: Member
    asked: Member
    by: Member
    """Who deletes its row."""

    alone: dict[int, tuple[int, int]]
    """What it has and nobody else that answered: by replica id the first and the last LSN."""

    members_left: int
    alive_left: int
    quorum_left: int | None
    """Of those that are left; None where no member shows how it is counted."""

    listed_by: tuple[Member, ...] = ()
    """Other members that answered, and whose `replication` lists the member."""

    @property
    def has_quorum(self) -> bool | None:
        return None if self.quorum_left is None else self.alive_left >= self.quorum_left

    def objections(self) -> Iterator[str]:
        """Why it should not be done without being forced."""
        label = self.member.label
        if self.member.uuid == self.asked.uuid:
            yield f"{label} is the member that was asked itself"
        if self.member.is_leader:
            yield f"{label} leads"
        if self.alone:
            yield f"only {label} has {alone_text(self.alone)}"
        if self.has_quorum is False:
            yield f"no quorum is left without {label}: {self._left()}"

    def consequences(self) -> Iterator[str]:
        """In words, a sentence each."""
        if self.member.report is not None:
            bound = "it will neither replicate nor take writes any more"
            if not self.member.report.is_flowstone:
                bound = "it will follow nobody any more, but may go on taking writes: stop it"
            yield f"it runs: {bound}; it keeps its data until somebody deletes them"
        else:
            yield f"it does not answer; the others know that it was at {position(self.member.vclock)} at least"
        yield (
            f"only there: {alone_text(self.alone)}" if self.alone else "no rows are known to exist only on this member"
        )
        verdict = {None: "how many make a quorum is not known", True: "a quorum is left", False: "NO QUORUM IS LEFT"}
        yield f"{self._left()}: {verdict[self.has_quorum]}"

    def afterwards(self) -> str:
        """Return what remains to be done on the other members, as a sentence."""
        if not self.listed_by:
            return (
                "take the member out of `replication` in the configuration of the other members, if it is listed there"
            )
        others = " and ".join(each.label for each in self.listed_by)
        return (
            f"unless a new member gets its address, take {self.member.label} out of `replication` of {others}; while "
            "`replication` lists an expelled member, a start may wait the whole `replication_connect_timeout` for it"
        )

    def _left(self) -> str:
        needed = "" if self.quorum_left is None else f", {self.quorum_left} are needed"
        return f"{self.alive_left} of {self.members_left} other members are alive{needed}"


def plan(one: ReplicaSet, asked: Member, wanted: str, *, before: VClock | None = None) -> Expulsion:
    """For the member that `wanted` names, as seen from the one that was asked.

    `before` is where the member was in an earlier look: members answer one after the other, and rows that are written
    meanwhile seem to be nowhere but at the last of them.
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
    """Return True if the member has an applier for `uuid`: then its `replication` has the address."""
    peers = member.report.replication if member.report is not None else ()
    return any(peer.uuid == uuid and peer.upstream is not None for peer in peers)


def no_such_member(one: ReplicaSet, wanted: str, why: str | None = None) -> NoSuchMember:
    """Return the error about a member that is not in the set, with those that are."""
    known = ", ".join(f"{each.id} ({each.label})" for each in one.members if each.id)
    hint = f"there are {known}" if why is None else f"{why}; there are {known}"
    return NoSuchMember(f"{wanted} is no member of the replica set {one.label}", hint=hint)


def _writer(one: ReplicaSet, member: Member, asked: Member, others: list[Member]) -> Member:
    """The leader; without one whoever was asked, or anybody, who can write. Nobody can delete the row of its own."""
    writable = [each for each in others if each.mode == "rw"]
    chosen = [*(each for each in writable if each.is_leader), *(each for each in writable if each == asked), *writable]
    if chosen:
        return chosen[0]
    if member.mode == "rw":
        hint = "promote another one, or make one writable: nobody can delete its own row"
        raise FlowstoneError(f"no other member of {one.label} can be written to", hint=hint)
    lost = lost_quorum(one)
    why, hint = (f": {lost.what}", lost.advice) if lost is not None else ("", "promote one, or make one writable")
    raise FlowstoneError(f"no member of {one.label} can be written to{why}", hint=hint)


def _quorum(members: list[Member], count: int) -> int | None:
    """By the word of the first that tells. Who writes goes before: on that one alone it may have been lowered."""
    told = (each.report.quorum_of(count) for each in members if each.report is not None)
    return next((quorum for quorum in told if quorum is not None), None)


def alone_text(alone: dict[int, tuple[int, int]]) -> str:
    """`3 rows, 5..7 of replica 3`"""
    count = sum(last - first + 1 for first, last in alone.values())
    spans = (
        f"{first}..{last} of replica {number}" if last > first else f"{first} of replica {number}"
        for number, (first, last) in alone.items()
    )
    return f"{rows_text(count)}, {' and '.join(spans)}"
