"""Which entries of a log file count: its snippets against the durable epoch, torn and damaged tails, and their repair.

Pure: takes tokens of `entries.walk` or tables of `entry_table.py`, returns the entries that count, and a verdict with
the changes that the file needs (`docs/spec/limestone.md#recovery`). Never touches a file: `limestone/store/recovery.py`
does.

A snippet is a begin marker with what follows it, up to its end marker, the next begin marker or the end of the file. It
counts if its epoch is durable. Otherwise it is invalidated, so that it does not count when later epochs are durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

import numpy as np

from flowstone.limestone.format import entry_table
from flowstone.limestone.format.entries import MARKER_TYPES, Entry, EntryType, Marker, Token, Torn, Unknown
from flowstone.limestone.format.entry_table import Bytes, Table
from flowstone.limestone.format.log_scan_kernels import EPOCH, follow


class Verdict(IntEnum):
    """The condition of a file, with the numbers of the original: the largest is the worst."""

    OK = 0
    REPAIRED = 0x01
    TAIL_BROKEN_BUT_MARKED = 0x11
    NONDURABLE = 0x40
    TAIL_BROKEN = 0x41
    CORRUPTED_DURABLE = 0x42
    UNEXPECTED = 0x81

    @property
    def is_repairable(self) -> bool:
        """True if nothing durable is lost: the damage can be invalidated or cut off."""
        return self < Verdict.CORRUPTED_DURABLE

    @property
    def is_clean(self) -> bool:
        """True if the file can be used and appended to after the changes."""
        return self <= Verdict.REPAIRED


class Policy(Enum):
    """The treatment of a snippet that must not count."""

    REPORT = "report"
    MARK = "mark"
    CUT = "cut"


@dataclass(frozen=True)
class ScanMode:
    """A way of reading. The first four do exactly what the original does; `RECOVERY` is Flowstone's.

    `nondurable`: policy for a snippet of an epoch that is not durable. `torn`: for a file that ends inside an entry.
    `damaged`: for an unknown byte. `stops`: stop at the first unexpected entry.
    `forgives`: cut off the rest of a write that a power failure interrupted, if it cannot have been durable.
    """

    nondurable: Policy
    torn: Policy
    damaged: Policy
    stops: bool = False
    forgives: bool = False


STARTUP: Final = ScanMode(Policy.MARK, Policy.REPORT, Policy.REPORT, stops=True)
INSPECT: Final = ScanMode(Policy.REPORT, Policy.REPORT, Policy.REPORT)
REPAIR: Final = ScanMode(Policy.MARK, Policy.MARK, Policy.MARK)
REPAIR_CUT: Final = ScanMode(Policy.MARK, Policy.CUT, Policy.CUT)
RECOVERY: Final = ScanMode(Policy.MARK, Policy.CUT, Policy.REPORT, stops=True, forgives=True)
"""The mode at start: an incomplete session after a crash is repaired without a tool; other damage is left to one."""


@dataclass(frozen=True)
class ScanFinding:
    """Something that a healthy file does not have."""

    verdict: Verdict
    offset: int
    what: str


@dataclass(frozen=True)
class FileRepair:
    """The repair of a file: offsets to overwrite with MARKER_INVALIDATED_BEGIN, then the size to truncate it to."""

    marks: tuple[int, ...] = ()
    cut: int | None = None

    def __bool__(self) -> bool:
        return bool(self.marks) or self.cut is not None


_EPOCH_MAX: Final = (1 << 64) - 1


class LogScan:
    """One pass over a log file: iterate once over the entries that count, or `take` its parts; then read the results.

    `is_detached`: no channel appends to the file, so an invalidated broken tail is harmless.
    """

    def __init__(
        self, tokens: Iterable[tuple[int, Token]], durable_epoch: int, mode: ScanMode, *, is_detached: bool = False
    ) -> None:
        self.max_epoch = 0
        """The largest epoch of any begin marker, even an invalidated one."""
        self.findings: list[ScanFinding] = []
        self.counted = 0
        self._tokens = tokens
        self._durable_epoch = durable_epoch
        self._mode = mode
        self._is_detached = is_detached
        self._marks: list[int] = []
        self._cut: int | None = None
        self._is_open = self._is_valid = self._is_marked = self._has_entries = False
        self._epoch = 0
        self._head = 0

    @property
    def verdict(self) -> Verdict:
        found = [finding.verdict for finding in self.findings]
        if self._is_detached:
            found = [verdict for verdict in found if verdict is not Verdict.TAIL_BROKEN_BUT_MARKED]
        return max(found, default=Verdict.OK)

    @property
    def changes(self) -> FileRepair:
        cut = self._cut
        return FileRepair(tuple(mark for mark in self._marks if cut is None or mark < cut), cut)

    def __iter__(self) -> Iterator[Entry]:
        for offset, token in self._tokens:
            if isinstance(token, Entry):
                if self._is_valid and self._is_open:
                    self.counted += 1
                    self._has_entries = True
                    yield token
                elif not self._is_open and not self._entry_outside(offset, token.type):
                    return
            elif isinstance(token, Marker):
                if not self._marker(offset, token):
                    return
            else:
                self.take_end(offset, token)

    def take_table(self, table: Table, takes: Bytes, base: int) -> bool:
        """Scan the next part of the file, and set `takes` for the columns that count.

        `base` is the offset in the file of the table's buffer. Return True if the scan continues after it."""
        at = 0
        while True:
            at = self._follow(table, at, takes, base)
            if at < 0:
                return True
            offset, kind = base + int(table[entry_table.AT, at]), EntryType(int(table[entry_table.TYPE, at]))
            if kind in MARKER_TYPES:
                goes_on = self._marker(offset, Marker(kind, int(table[entry_table.MAJOR, at])))
            else:
                goes_on = self._entry_outside(offset, kind)
            at += 1
            if not goes_on:
                takes[at:] = 0
                return False

    def _follow(self, table: Table, at: int, takes: Bytes, base: int) -> int:
        before = (self._is_open, self._is_valid, self._is_marked, self._has_entries)
        state = np.array([*before, self._epoch, self._head, self.max_epoch, self.counted], np.uint64)
        at = follow(table, at, takes, base, min(self._durable_epoch, _EPOCH_MAX), state)
        flags, numbers = state[:EPOCH].astype(np.bool_).tolist(), state[EPOCH:].tolist()
        self._is_open, self._is_valid, self._is_marked, self._has_entries = flags
        self._epoch, self._head, self.max_epoch, self.counted = numbers
        return at

    def take_end(self, offset: int, token: Torn | Unknown) -> None:
        """Process what follows the last whole entry, if anything does."""
        if isinstance(token, Torn):
            self._torn(offset, token)
        else:
            self._unknown(offset, token)

    def _entry_outside(self, offset: int, kind: EntryType) -> bool:
        """Report an entry outside of a session. Return True if the scan continues after it."""
        self._find(Verdict.UNEXPECTED, offset, f"{kind.name} outside of a session")
        return not self._mode.stops

    def _marker(self, offset: int, marker: Marker) -> bool:
        """Process a marker. Return True if the scan continues after it."""
        if marker.type is EntryType.MARKER_BEGIN:
            self._begin(offset, marker.epoch)
            if marker.epoch > self._durable_epoch:
                self._is_valid = False
                self._nondurable(offset)
            return True
        if marker.type is EntryType.MARKER_INVALIDATED_BEGIN:
            self._begin(offset, marker.epoch)
            self._is_valid, self._is_marked = False, True
            return True
        if marker.type is EntryType.MARKER_END and self._is_open:
            self._is_open = False
            return True
        self._find(Verdict.UNEXPECTED, offset, f"{marker.type.name} outside of a session")
        return marker.type is EntryType.MARKER_DURABLE and not self._mode.stops

    def _begin(self, offset: int, epoch: int) -> None:
        self.max_epoch = max(self.max_epoch, epoch)
        self._is_open = self._is_valid = True
        self._is_marked = self._has_entries = False
        self._epoch, self._head = epoch, offset

    def _nondurable(self, offset: int) -> None:
        what = f"session of epoch {self._epoch} is not durable: durable epoch is {self._durable_epoch}"
        if self._mode.nondurable is Policy.REPORT:
            self._find(Verdict.NONDURABLE, offset, what)
            return
        self._marks.append(offset)
        self._is_marked = True
        self._find(Verdict.REPAIRED, offset, what)

    def _torn(self, offset: int, torn: Torn) -> None:
        what = f"file ends inside an entry {torn.type.name}"
        is_durable = self._is_open and self._epoch <= self._durable_epoch
        if torn.type is EntryType.MARKER_INVALIDATED_BEGIN:
            # The original accepts it and appends to it; the appended session would be lost.
            if self._mode.forgives:
                self._broken_at(offset, offset, what, Policy.CUT)
        elif torn.type is EntryType.MARKER_BEGIN:
            if is_durable and not self._mode.forgives:
                self._find(Verdict.CORRUPTED_DURABLE, offset, what)
            else:
                self._broken_at(offset, offset, what, self._mode.torn)
        elif not self._is_open or torn.type is EntryType.MARKER_DURABLE:
            self._find(Verdict.UNEXPECTED, offset, what + ", outside of a session")
        elif self._is_valid and is_durable:
            self._find(Verdict.CORRUPTED_DURABLE, offset, what)
        else:
            self._broken_at(self._head, offset, what, self._mode.torn)

    def _unknown(self, offset: int, unknown: Unknown) -> None:
        what = f"invalid entry type {unknown.byte:#04x}"
        policy, is_durable = self._mode.damaged, self._is_valid
        if self._mode.forgives:
            # Every byte of a durable session was synced, so zeros up to the end are of a later one. A begin marker
            # with only zeros after it may be half zeros itself, whatever epoch it seems to have.
            is_durable = self._is_valid and (self._has_entries or not unknown.zeros)
            if unknown.zeros or (self._is_open and not is_durable):
                policy = Policy.CUT
        if not self._is_open:
            self._broken_at(offset, offset, what, policy)
        elif is_durable:
            self._find(Verdict.CORRUPTED_DURABLE, offset, what)
        else:
            self._broken_at(self._head, offset, what, policy)

    def _broken_at(self, head: int, offset: int, what: str, policy: Policy) -> None:
        """Report that the tail from `head` on must not count; the damage is at `offset`."""
        if policy is Policy.CUT:
            self._cut = head
            self._find(Verdict.REPAIRED, offset, what)
        elif self._is_marked and head == self._head:
            self._find(Verdict.TAIL_BROKEN_BUT_MARKED, offset, what)
        elif policy is Policy.MARK:
            self._marks.append(head)
            self._find(Verdict.REPAIRED, offset, what)
        else:
            self._find(Verdict.TAIL_BROKEN, offset, what)

    def _find(self, verdict: Verdict, offset: int, what: str) -> None:
        self.findings.append(ScanFinding(verdict, offset, what))
