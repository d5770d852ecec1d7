"""All that a replica set ever wrote, by its final logs: each transaction once, with its outcome.

The changes that followers received during a run are compared with it. Pure: knows no follower and no node, and computes
the effect of each row on its own (`replay.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.iproto.row import Row
from flowstone.replication.vclock import VClock
from tests.simulation.logs import NodeLog, Position, Record, unpacked
from tests.simulation.replay import Change, Contents, Replay


class FinalHistory:
    """The history from the complete logs of all remaining nodes (`logs.read_all`) and of former members: if all members
    were replaced, only those have the beginning."""

    def __init__(self, logs: Sequence[NodeLog], departed: Sequence[NodeLog] = ()) -> None:
        # In this order each log continues where those before it end.
        eldest_first = sorted((*logs, *departed), key=lambda log: sum(log.snapshot_vclock.values()))
        self._start = eldest_first[0]
        self._records: list[Record] = []
        self.rows: dict[Position, Row] = {}
        """All committed rows."""
        self.withdrawn: dict[Position, None] = {}
        fates, self.conflicts = _fates(logs, departed)
        """Contradictions between logs about an outcome, as text."""
        for log in eldest_first:
            for first, record in _replicated(log):
                self._add(record, first, fates.get(first))
        self.withdrawn = {position: None for position in self.withdrawn if position not in self.rows}

    def _add(self, record: Record, first: Position, is_fact: bool | None) -> None:
        if is_fact is False:
            self.withdrawn |= dict.fromkeys((row.replica_id, row.lsn) for row in record.rows)
        elif is_fact and record.is_kept and first not in self.rows:
            self.rows |= {(row.replica_id, row.lsn): row for row in record.rows}
            self._records.append(record)

    @property
    def begin(self) -> VClock:
        """The first position for which data exists."""
        return VClock(self._start.snapshot_vclock).without_zero()

    def contents(self, vclock: VClock) -> Contents:
        """Return the contents of user spaces at a position."""
        replay = Replay()
        replay.apply(self._start.snapshot)
        for record, last in self._behind_start():
            if last[1] <= vclock.get(last[0]):
                replay.apply(record.rows)
        return {number: tuples for number, tuples in replay.spaces.items() if number >= FIRST_USER_SPACE_ID and tuples}

    @cached_property
    def changes(self) -> dict[Position, Change]:
        """Yield the effect of each row on a tuple of a user space, in a possible order of commits.

        A row without effect, such as an UPDATE of a missing tuple, is in the log but yields nothing.
        """
        replay = Replay()
        replay.apply(self._start.snapshot)
        found: dict[Position, Change] = {}
        for record, _ in self._behind_start():
            for row in record.rows:
                change = replay.change(row)
                if change is not None and change.space_id >= FIRST_USER_SPACE_ID:
                    found[row.replica_id, row.lsn] = change
        return found

    def _behind_start(self) -> Iterator[tuple[Record, Position]]:
        """Return the committed rows after the first snapshot, and the last position of each originator."""
        begin = self.begin
        for record in self._records:
            last = next(row for row in reversed(record.rows) if row.replica_id)
            if begin.get(last.replica_id) < last.lsn:
                yield record, (last.replica_id, last.lsn)

    def told(self, after: VClock, until: VClock | None = None) -> dict[Position, Change]:
        """Return the changes between two positions, or after one, in that order."""
        return {
            (replica_id, lsn): change
            for (replica_id, lsn), change in self.changes.items()
            if after.get(replica_id) < lsn and (until is None or lsn <= until.get(replica_id))
        }


def _fates(logs: Sequence[NodeLog], departed: Sequence[NodeLog]) -> tuple[dict[Position, bool], list[str]]:
    """Return the outcome of each transaction, by its first row, and the logs that contradict each other.

    Remaining nodes know all outcomes, except those that they missed before they joined again; a former member may have
    left before it received the verdict.
    """
    fates: dict[Position, tuple[bool, str]] = {}
    conflicts = []
    for number, log in enumerate((*logs, *departed)):
        for first, record in _replicated(log):
            if record.is_kept is None and (number >= len(logs) or record.is_before_gap):
                continue
            is_kept, other = fates.setdefault(first, (bool(record.is_kept), log.name))
            if is_kept != bool(record.is_kept):
                fact, other = (other, log.name) if is_kept else (log.name, other)
                conflicts.append(f"{first} is a fact by the log of {fact}, and none by that of {other}")
    return {first: is_kept for first, (is_kept, _) in fates.items()}, conflicts


def _replicated(log: NodeLog) -> Iterator[tuple[Position, Record]]:
    """Return the replicated transactions with their first positions."""
    for record in log.records:
        first = next((row for row in record.rows if row.replica_id), None)
        if first is not None and not record.is_nop:
            yield (first.replica_id, first.lsn), record


class OnDone(NamedTuple):
    """One change that a follower received: originator, LSN, and the packed tuple before and after."""

    position: Position
    old: bytes | None
    new: bytes | None


@dataclass
class Heard:
    """The changes that a follower received between its start, from a snapshot, and its end."""

    who: str
    start: VClock
    start_contents: Contents
    told: list[OnDone] = field(default_factory=list)
    leaps: list[tuple[VClock, VClock]] = field(default_factory=list)
    """Ranges of positions that a snapshot replaced."""
    end: VClock | None = None
    """None if the follower died: its end is then the last received position."""
    end_contents: Contents = field(default_factory=dict)

    def check(self, history: FinalHistory, *, has_one_order: bool = False) -> list[str]:
        """Check that the follower received exactly a prefix of the history, each committed row once.

        With `has_one_order`, all members write in one order; otherwise each has its own.
        """
        found = [*self._check_told(history), *self._check_complete(history), *self._check_contents(history)]
        return [*found, *self._check_order(history)] if has_one_order and not self.leaps else found

    def _check_told(self, history: FinalHistory) -> list[str]:
        found = []
        newest = self.start.to_mapping()
        for told in self.told:
            replica_id, lsn = position = told.position
            if lsn <= newest.get(replica_id, 0):
                found.append(f"{self.who} was told {position} again, behind {newest}")
            newest[replica_id] = max(lsn, newest.get(replica_id, 0))
            if position in history.withdrawn:
                found.append(f"{self.who} was told {position}, which was rolled back")
            elif position not in history.rows:
                found.append(f"{self.who} was told {position}, which never happened")
            elif lsn > history.begin.get(replica_id):
                found += self._check_change(told, history.changes.get(position))
        return found

    def _check_change(self, told: OnDone, expected: Change | None) -> list[str]:
        if expected is None:
            return [f"{self.who} was told {told.position}, which changed nothing"]
        seen = [None if raw is None else unpacked(raw) for raw in (told.old, told.new)]
        # Compare by repr: 1, 1.0 and True are equal.
        if repr(seen) == repr([expected.old, expected.new]):
            return []
        return [f"{self.who} was told {told.position} as {seen[0]} → {seen[1]}: {expected.old} → {expected.new}"]

    def _check_complete(self, history: FinalHistory) -> list[str]:
        told = {each.position for each in self.told}
        missing = [
            position
            for position in history.told(self.start, self.end or self._newest())
            if position not in told and not self._is_leapt(position)
        ]
        return [f"{self.who} was not told {missing[:5]} and went on"] if missing else []

    def _check_order(self, history: FinalHistory) -> list[str]:
        """Check that changes arrived in order across all originators."""
        told = [each.position for each in self.told if each.position in history.changes]
        for position, expected in zip(told, history.told(self.start), strict=False):
            if position != expected:
                return [f"{self.who} was told {position} where {expected} was next"]
        return []

    def _newest(self) -> VClock:
        newest = self.start.to_mapping()
        for (replica_id, lsn), _, _ in self.told:
            newest[replica_id] = max(lsn, newest.get(replica_id, 0))
        return VClock(newest)

    def _is_leapt(self, position: Position) -> bool:
        replica_id, lsn = position
        return any(before.get(replica_id) < lsn <= after.get(replica_id) for before, after in self.leaps)

    def _check_contents(self, history: FinalHistory) -> list[str]:
        found = []
        moments = [("began", self.start, self.start_contents)]
        if self.end is not None:
            moments.append(("ended", self.end, self.end_contents))
        for what, vclock, contents in moments:
            if history.begin <= vclock and contents != (expected := history.contents(vclock)):
                found.append(f"{self.who} {what} at {vclock} with {difference(contents, expected)}")
        return found


def contents_of(spaces: Iterable[tuple[int, Iterable[bytes]]]) -> Contents:
    """Return tuples of user spaces by their first field, the primary key of all spaces in the runs."""
    return {
        number: {(fields[0],): fields for fields in map(unpacked, tuples)}
        for number, tuples in spaces
        if number >= FIRST_USER_SPACE_ID and any(True for _ in tuples)
    }


def difference(found: Contents, expected: Contents) -> str:
    """Return the difference of two contents as text."""
    words = []
    for number in sorted({*found, *expected}):
        here, there = found.get(number, {}), expected.get(number, {})
        wrong = [key for key in {**here, **there} if here.get(key) != there.get(key)]
        if wrong:
            shown = [(here.get(key), there.get(key)) for key in wrong[:3]]
            words.append(f"{len(wrong)} wrong tuples in space {number}, found and expected: {shown}")
    return "; ".join(words)
