"""Choice of the peer to join: for an instance without data, and for one whose upstreams have deleted the logs it needs.

They follow the rules of real servers (docs/spec/replication.md#bootstrap-leader). They work on the ballots of the
peers. Candidates are always considered in the order of their UUIDs, so that all members make the same choice.
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
"""Matches instance names and UUIDs."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that answered: its UUID, its ballot and its address."""

    uuid: UUID
    ballot: Ballot
    address: str = ""


Rule = Callable[[Iterable[Candidate]], Candidate | None]


def oldest_rule(candidates: Iterable[Candidate]) -> Candidate | None:
    """Rule of 1.10 to 2.6: prefer peers writable by configuration, then peers not loading, then the larger vclock."""
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
    """Rule since 2.10: prefer the higher score, then the larger vclock.

    The score ranks booted above writable by configuration, that above writable now, and that above able to lead.
    """
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
    """Strategy `config`: the peer that `bootstrap_leader` names by address, UUID or name, regardless of the others.

    The rule raises ER_CFG if that peer is not among the candidates.
    """

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
    """Return the candidate that `bootstrap_leader` names; None if there is none. Only the address in a URI is
    compared."""
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
    """Return `bootstrap_leader` without the password that a URI may contain, for logs and errors."""
    if _NAME.fullmatch(leader):
        return leader
    try:
        return str(parse_uri(leader))
    except UriError:
        return "(not a URI, UUID or name)"


def supervised_rule(candidates: Iterable[Candidate]) -> Candidate | None:
    """Strategy `supervised`: the peer whose ballot names itself as the bootstrap leader."""
    for candidate in _in_order(candidates):
        if candidate.ballot.bootstrap_leader_uuid == candidate.uuid:
            return candidate
    return None


def rejoin_source(candidates: Iterable[Candidate], vclock: VClock) -> Candidate | None:
    """Return the peer to rejoin from if no candidate still has the logs after `vclock`.

    Return None if a candidate still has these logs. Also return None if no candidate has all our rows, because the
    missing rows would be lost.
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
    """Return the candidates that can be followed: members and anonymous replicas, but no expelled members.

    The ballot of the most advanced candidate names the members. If it names none (2.6), `registered`, from our own
    `_cluster`, names them. If none is left, all are returned.
    """
    ordered = _in_order(candidates)
    telling = [each.ballot for each in ordered if each.ballot.registered_uuids]
    known: Collection[UUID] = registered
    if telling:
        known = max(telling, key=lambda ballot: ballot.vclock.signature).registered_uuids
    return [each for each in ordered if each.ballot.is_anon or each.uuid in known] or list(ordered)


def unlisted_members(candidates: Iterable[Candidate], uri_count: int, leader: Candidate) -> tuple[UUID, ...]:
    """Return the registered members that are not connected, if there are more members than URIs; else nothing.

    Since 2.11 an instance that joins an existing replica set must be able to reach all members. Real servers use the
    member lists of all peers. Here the list of a peer that is not in the list of `leader` is ignored: that peer was
    expelled, and may still list members that were expelled after it.
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
    """Return a peer that has chosen another bootstrap leader than us for the new replica set; None if there is none."""
    for candidate in _in_order(candidates):
        if candidate.ballot.bootstrap_leader_uuid not in (None, UUID(int=0), own_uuid):
            return candidate
    return None


def _in_order(candidates: Iterable[Candidate]) -> Sequence[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.uuid)


def _is_ahead(candidate: Candidate, leader: Candidate) -> bool:
    """Return True if the candidate replaces the leader chosen so far.

    Equal vclocks keep the leader, which has the smaller UUID. An incomparable vclock counts as larger, as in real
    servers.
    """
    order = candidate.ballot.vclock.compare(leader.ballot.vclock, ignore_zero=True)
    return order in (Order.AFTER, Order.INCOMPARABLE)
