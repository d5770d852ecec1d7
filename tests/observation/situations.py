"""Replica sets with real problems: processes of Flowstone and of real Tarantool servers, and their findings.

`explained` returns the findings of `flowstone explain` about the members; each maker leaves a set in one situation.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.uri import parse_uri
from flowstone.observation.findings.finding import Finding, Kind
from flowstone.observation.investigation import Investigation
from flowstone.observation.replica_set import ReplicaSet
from flowstone.observation.survey import Survey
from flowstone.outside import production
from tests.interop import ledger
from tests.interop.client import Request
from tests.interop.cluster import Cluster
from tests.interop.member import SECONDS, Member, by_id, eventually

HALF_SEEN: Final = (
    "further query failed",
    "conflicting row not found",
    ": and at least ",
    "which it does not report to us",
)
"""Text of a finding about a server that was too slow for a full query: the next poll is complete."""

Seen = Callable[[ReplicaSet], ReplicaSet]


def as_it_is(replica_set: ReplicaSet) -> ReplicaSet:
    return replica_set


def explained(*members: Member | str, seen_as: Seen = as_it_is, seconds: float = SECONDS) -> tuple[Finding, ...]:
    """Return the findings about members, queried as guests, or URIs; `seen_as` changes their reports first.

    Wait up to `seconds` for members that are merely slow on a busy machine.
    """
    uris = [parse_uri(one if isinstance(one, str) else one.address) for one in members]

    async def look() -> tuple[Finding, ...]:
        outside = production()
        survey = Survey(outside, uris, timeout=seconds)
        try:
            return await Investigation(outside, survey).findings([seen_as(one) for one in await survey.look()])
        finally:
            await survey.close()

    return asyncio.run(look())


def found(kind: Kind, *members: Member | str, seen_as: Seen = as_it_is) -> Finding:
    """Wait for the complete finding of this kind; a problem takes a moment to appear."""
    last: tuple[Finding, ...] = ()

    def look() -> Finding | None:
        nonlocal last
        last = explained(*members, seen_as=seen_as)
        finding = next((finding for finding in last if finding.kind is kind), None)
        return finding if finding is not None and is_seen_whole(finding) else None

    try:
        finding: Finding = eventually(f"{kind.value} is found", look)
    except AssertionError as error:
        raise AssertionError(f"no {kind.value} among {last}") from error
    return finding


def is_seen_whole(finding: Finding) -> bool:
    told = "\n".join((finding.why, *finding.evidence))
    return not any(words in told for words in HALF_SEEN)


def assert_well(*members: Member | str) -> None:
    """Wait until there are no findings."""
    last: tuple[Finding, ...] = ()

    def look() -> bool:
        nonlocal last
        last = explained(*members)
        return not last

    try:
        eventually("nothing is wrong", look)
    except AssertionError as error:
        raise AssertionError(f"found {last}") from error


def make(cluster: Cluster, kind: str, name: str, **options: object) -> Member:
    """Return a member of a kind, `real` or `ours`."""
    member: Member = getattr(cluster, kind)(name, **options)
    return member


def pair(cluster: Cluster, master_kind: str, replica_kind: str, **options: object) -> tuple[Member, Member]:
    """Return a master with a space, and its followers."""
    master = make(cluster, master_kind, "master", **options)
    ledger.define(master)
    replica = make(cluster, replica_kind, "replica", replication=[master.uri])
    replica.wait_follow(master)
    replica.catch_up(master)
    return master, replica


def write(member: Member, numbers: Sequence[int]) -> None:
    write_rows(member, ledger.LEDGER, [(number, 1, "x" * 100) for number in numbers])


def write_rows(member: Member, space: int, rows: Sequence[tuple[object, ...]]) -> None:
    """Replace the tuples in order, with many requests in flight."""
    requests = [Request(RequestType.REPLACE, {Key.SPACE_ID: space, Key.TUPLE: row}) for row in rows]
    for answer in member.client.pipeline(requests):
        if answer.is_error:
            raise answer.error()


def lose_rows(cluster: Cluster, master: Member, replica: Member, written: int, kept: Sequence[int] = ()) -> None:
    """Write that many rows on the master and its replica; the master restarts without them, from an old
    backup, and writes the rows `kept`. The replica is paused meanwhile, as if it could not connect.
    """
    master.stop()
    saved = cluster.directory / "saved"
    shutil.copytree(master.directory, saved)
    master.start()
    write(master, range(1, written + 1))
    replica.catch_up(master)
    replica.pause()
    master.kill()
    for path in (*master.files("xlog"), *master.files("snap")):
        path.unlink()
    for path in (*saved.glob("*.xlog"), *saved.glob("*.snap")):
        shutil.copy(path, master.directory)
    master.start()
    for number in kept:
        master.client.replace(ledger.LEDGER, number, 1, "written since")
    replica.resume()


def wait_acknowledged(master: Member, follower: Member) -> None:
    """Wait until the master knows that the follower has all rows."""
    number, vclock = follower.id, master.vclock()

    def is_known() -> bool:
        told = by_id(master.downstream(number).get("vclock") or {})
        return all(told.get(replica_id, 0) >= lsn for replica_id, lsn in vclock.items())

    eventually(f"{master} knows that {follower} has {vclock}", is_known)


def status_is(member: Member, of: int, *statuses: str) -> None:
    """Wait until the upstream is in one of `states`."""
    eventually(f"{member} is {statuses}", partial(_is_in, member, of, statuses))


def _is_in(member: Member, of: int, statuses: tuple[str, ...]) -> bool:
    return member.upstream(of).get("status") in statuses
