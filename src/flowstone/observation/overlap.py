"""Whether a directory of logs and live members have the same rows by the same numbers, where both have them.

Vclocks tell of numbers only. Who has lost rows (a lost disk, an old backup) gives their numbers to others: two sides at
one position hold different rows then. Compares the newest rows that the directory shares with each member, as far as
the member has logs and lets them be read; the bounds are those of a question that somebody waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri
from flowstone.observation.directory import Directory, digests_of
from flowstone.observation.fork import Digests, digests, used_twice
from flowstone.observation.log_section import read_section
from flowstone.observation.replica_set import Member
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock

ROWS_MAX: Final = 10_000
"""Rows of each origin that are compared, the newest that both sides have."""

TRANSACTIONS_MAX: Final = 100_000
SECONDS_MAX: Final = 30.0
"""For each member."""


@dataclass(frozen=True)
class Overlap:
    """What the comparison has shown."""

    compared: int
    """Rows that were seen on both sides; 0 where only their numbers are known."""

    unlike: dict[int, tuple[int, int]]
    """By replica id the first and the last LSN of rows that stand for others at the members, and at none for the same.
    """

    unread: tuple[str, ...]
    """Why a member's part could not be compared, a line each."""


async def overlap(
    outside: Outside, directories: Sequence[Directory], end: VClock, members: Sequence[tuple[Member, Uri]]
) -> Overlap:
    """`end` is how far the directories go, which are those of one instance; members have a report."""
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
            unread.append(f"{member.label} did not send all of them within {SECONDS_MAX:g} s")
        elif not found.keys() & ours.keys():
            unread.append(f"{member.label} has no logs of them any more, or the directory has none")
        theirs = _best(ours, theirs, found)
    return Overlap(len(ours.keys() & theirs.keys()), _spans(used_twice(ours, theirs)), tuple(unread))


def _newest(end: VClock) -> VClock:
    """What comes before the rows that are compared."""
    return VClock({number: lsn - ROWS_MAX for number, lsn in end.without_zero() if lsn > ROWS_MAX})


def _begin(common: VClock, member: Member) -> VClock:
    """Not before the member's oldest log."""
    gc = member.report.gc if member.report is not None else None
    oldest = VClock(gc.vclock).without_zero() if gc is not None else common
    return _newest(common).merged(oldest)


def _best(ours: Digests, before: Mapping[tuple[int, int], int], found: Digests) -> dict[tuple[int, int], int]:
    """A row that one member has as we do is not lost, whatever others have by its number."""
    same = {place: one for place, one in before.items() if ours.get(place) == one}
    return {**before, **found, **same}


def _spans(places: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for replica_id, lsn in sorted(places):
        first, _ = found.get(replica_id, (lsn, lsn))
        found[replica_id] = (first, lsn)
    return found
