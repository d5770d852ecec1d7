"""Compares a directory of logs with live members: whether the same LSNs denote the same rows on both sides.

Vclocks contain only LSNs. An instance that has lost rows (a lost disk, an old backup) assigns their LSNs to new rows:
then two sides at the same position have different rows. Compares the newest rows that the directory shares with each
member, as far as the member has logs and permits reading them. Size and time are limited, because an operator waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri
from flowstone.observation.findings.fork import Digests, digests, used_twice
from flowstone.observation.log_directory import Directory, digests_of
from flowstone.observation.log_section import read_section
from flowstone.observation.replica_set import Member
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock

ROWS_MAX: Final = 10_000
"""Limit of rows of each replica id that are compared: the newest ones that both sides have."""

TRANSACTIONS_MAX: Final = 100_000
SECONDS_MAX: Final = 30.0
"""Limits of reading from each member."""


@dataclass(frozen=True)
class Overlap:
    """The result of the comparison."""

    compared: int
    """Number of rows that were read on both sides; 0 if only their LSNs are known."""

    unlike: dict[int, tuple[int, int]]
    """LSNs that denote different rows at the members, and at no member the same row: first and last by replica id."""

    unread: tuple[str, ...]
    """Reasons why rows of a member could not be compared, one per line."""


async def overlap(
    outside: Outside, directories: Sequence[Directory], end: VClock, members: Sequence[tuple[Member, Uri]]
) -> Overlap:
    """Compare the directories of one instance, which end at `end`, with members that have a report."""
    ours: dict[tuple[int, int], int] = {}
    for directory in directories:
        ours |= digests_of(outside, directory, after=_newest(end))
    theirs: dict[tuple[int, int], int] = {}
    unread = []
    for member, uri in members:
        common = end.common(VClock(member.vclock).without_zero())
        begin = _begin(common, member)
        try:
            section = await read_section(
                outside, uri, begin, common, transactions_max=TRANSACTIONS_MAX, seconds=SECONDS_MAX
            )
        except FlowstoneError as error:
            unread.append(f"{member.label}: {error.message}")
            continue
        found = digests(section.transactions)
        if not section.is_whole:
            unread.append(f"{member.label} did not send all rows within {SECONDS_MAX:g} s")
        elif not found.keys() & ours.keys():
            unread.append(f"{member.label} no longer has logs of these rows, or the directory has none")
        theirs = _best(ours, theirs, found)
    return Overlap(len(ours.keys() & theirs.keys()), _spans(used_twice(ours, theirs)), tuple(unread))


def _newest(end: VClock) -> VClock:
    """Return the position before the rows that are compared."""
    return VClock({number: lsn - ROWS_MAX for number, lsn in end.without_zero() if lsn > ROWS_MAX})


def _begin(common: VClock, member: Member) -> VClock:
    """Return the position to read from, not before the member's oldest log."""
    gc = member.report.gc if member.report is not None else None
    oldest = VClock(gc.vclock).without_zero() if gc is not None else common
    return _newest(common).merged(oldest)


def _best(ours: Digests, before: Mapping[tuple[int, int], int], found: Digests) -> dict[tuple[int, int], int]:
    """Merge digests of members; if one member has the same row as we do, it counts, whatever others have."""
    same = {place: one for place, one in before.items() if ours.get(place) == one}
    return {**before, **found, **same}


def _spans(places: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for replica_id, lsn in sorted(places):
        first, _ = found.get(replica_id, (lsn, lsn))
        found[replica_id] = (first, lsn)
    return found
