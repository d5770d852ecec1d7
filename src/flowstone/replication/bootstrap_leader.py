"""Whom an instance without data takes its data from, and whom one takes it from whose logs are gone.

The rules are those of real servers (reference sections 8 and 13), over what peers say of themselves in their ballots.
Candidates are asked in the order of their UUIDs, whatever order they come in, so that all members choose alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from flowstone.iproto import errors
from flowstone.iproto.uri import UriError, parse_uri
from flowstone.replication.messages import Ballot
from flowstone.replication.vclock import Order, VClock

_NAME: Final = re.compile(r"[\w-]+")
"""What names and UUIDs look like."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that answered: who it is, where, and what it says of itself."""

    uuid: UUID
    ballot: Ballot
    address: str = ""


Rule = Callable[[Iterable[Candidate]], Candidate | None]


def oldest_rule(candidates: Iterable[Candidate]) -> Candidate | None:
    """Of 1.10 to 2.6: who can be written to, if anybody can; then who has left loading, then the larger vclock."""
    ordered = _in_order(candidates)
    return _round(candidate for candidate in ordered if not candidate.ballot.is_ro_cfg) or _round(ordered)


def _round(ordered: Iterable[Candidate]) -> Candidate | None:
    leader: Candidate | None = None
    for candidate in ordered:
        if leader is None:
            leader = candidate
        elif candidate.ballot.is_loading and not leader.ballot.is_loading:
            continue
        elif _is_ahead(candidate, leader):
            leader = candidate
    return leader


def score_rule(candidates: Iterable[Candidate]) -> Candidate | None:
    """Since 2.10: booted before writable by configuration before writable now before who can lead; then the vclock."""
    leader: Candidate | None = None
    best = -1
    for candidate in _in_order(candidates):
        score = _score(candidate.ballot)
        if score > best or (score == best and leader is not None and _is_ahead(candidate, leader)):
            leader, best = candidate, score
    return leader


def _score(ballot: Ballot) -> int:
    return 1000 * ballot.is_booted + 100 * (not ballot.is_ro_cfg) + 10 * (not ballot.is_ro) + ballot.can_lead


def configured_rule(leader: str) -> Rule:
    """Strategy `config`: the peer that `bootstrap_leader` names, by address, UUID or name; the others do not count."""

    def rule(candidates: Iterable[Candidate]) -> Candidate | None:
        named = named_leader(candidates, leader)
        if named is None:
            raise errors.Cfg(
                "Incorrect value for option 'bootstrap_leader': failed to connect to the bootstrap leader"
                f" {leader_text(leader)}"
            )
        return named

    return rule


def named_leader(candidates: Iterable[Candidate], leader: str) -> Candidate | None:
    """The one among them that `bootstrap_leader` names; of a URI only the address counts."""
    names = (leader, leader.lower(), _address(leader))
    for candidate in _in_order(candidates):
        if candidate.address in names or str(candidate.uuid) in names or candidate.ballot.instance_name == leader:
            return candidate
    return None


def _address(leader: str) -> str | None:
    try:
        return parse_uri(leader).address
    except UriError:
        return None


def leader_text(leader: str) -> str:
    """`bootstrap_leader` as it may be shown to anybody: without the password that a URI may have."""
    if _NAME.fullmatch(leader):
        return leader
    try:
        return str(parse_uri(leader))
    except UriError:
        return "(neither URI nor UUID nor name)"


def supervised_rule(candidates: Iterable[Candidate]) -> Candidate | None:
    """Strategy `supervised`: the peer that was made the leader, and says so."""
    for candidate in _in_order(candidates):
        if candidate.ballot.bootstrap_leader_uuid == candidate.uuid:
            return candidate
    return None


def rejoin_source(candidates: Iterable[Candidate], vclock: VClock) -> Candidate | None:
    """Whom to join anew because nobody has the logs behind `vclock` any more; None while following is possible.

    A peer that lacks rows which we have is no source: they would be lost.
    """
    source: Candidate | None = None
    for candidate in _in_order(candidates):
        ballot = candidate.ballot
        if ballot.gc_vclock.compare(vclock, ignore_zero=True) in (Order.BEFORE, Order.EQUAL):
            return None
        if vclock.compare(ballot.vclock, ignore_zero=True) not in (Order.BEFORE, Order.EQUAL):
            continue
        if source is None or ballot.vclock.signature > source.ballot.vclock.signature:
            source = candidate
    return source


def followable(candidates: Iterable[Candidate], registered: Collection[UUID]) -> list[Candidate]:
    """Return the candidates that can be followed: members and anonymous replicas, not those that were expelled.

    Members are those that the ballot of the most advanced candidate names, or else (2.6) those in our own `_cluster`,
    `registered`. If none is left, all are returned.
    """
    ordered = _in_order(candidates)
    telling = [each.ballot for each in ordered if each.ballot.registered_uuids]
    known: Collection[UUID] = registered
    if telling:
        known = max(telling, key=lambda ballot: ballot.vclock.signature).registered_uuids
    return [each for each in ordered if each.ballot.is_anon or each.uuid in known] or list(ordered)


def unlisted_members(candidates: Iterable[Candidate], uri_count: int, leader: Candidate) -> tuple[UUID, ...]:
    """Members that ballots know and nobody is connected to, where there are more members than addresses.

    Since 2.11 an instance that joins an existing replica set must be able to reach all of it. Real servers count the
    lists of all peers. Here the list of a peer that `leader` does not have does not count: that peer was expelled, and
    may still list members that were expelled after it.
    """
    ordered = _in_order(candidates)
    known = leader.ballot.registered_uuids
    members = [candidate for candidate in ordered if not known or candidate.uuid in known]
    registered = {uuid: None for candidate in members for uuid in candidate.ballot.registered_uuids}
    if len(registered) <= uri_count:
        return ()
    connected = [candidate.uuid for candidate in ordered]
    return tuple(sorted(uuid for uuid in registered if uuid not in connected))


def dissenter(candidates: Iterable[Candidate], own_uuid: UUID) -> Candidate | None:
    """A peer that has chosen somebody else than us as the leader of the replica set to be born."""
    for candidate in _in_order(candidates):
        if candidate.ballot.bootstrap_leader_uuid not in (None, UUID(int=0), own_uuid):
            return candidate
    return None


def _in_order(candidates: Iterable[Candidate]) -> Sequence[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.uuid)


def _is_ahead(candidate: Candidate, leader: Candidate) -> bool:
    """Walking up the UUIDs, equal vclocks keep who was first; incomparable ones count as larger."""
    order = candidate.ballot.vclock.compare(leader.ballot.vclock, ignore_zero=True)
    return order in (Order.AFTER, Order.INCOMPARABLE)
