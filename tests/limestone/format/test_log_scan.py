"""Which entries of a log file count: the original's verdict on every kind of damage, and recovery from crashes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.format import entry_table, entry_walk, log_scan
from flowstone.limestone.format.entries import Entry, EntryType, Marker, Token, WriteVersion, decode, encode, put, walk
from flowstone.limestone.format.entry_walk import EntryTail, tables
from flowstone.limestone.format.log_scan import (
    INSPECT,
    RECOVERY,
    REPAIR,
    REPAIR_CUT,
    STARTUP,
    FileRepair,
    LogScan,
    ScanMode,
    Verdict,
)
from flowstone.limestone.format.log_scan_kernels import follow
from tests.limestone import recorded
from tests.native.twins import twin

DURABLE = 5


def begin(epoch: int) -> bytes:
    return encode(Marker(EntryType.MARKER_BEGIN, epoch))


def end(epoch: int) -> bytes:
    return encode(Marker(EntryType.MARKER_END, epoch))


def marked(snippet: bytes) -> bytes:
    return b"\x06" + snippet[1:]


def an_entry(key: bytes = b"key", epoch: int = 5) -> bytes:
    return encode(put(1, key, b"value", WriteVersion(epoch, 1)))


def snippet(epoch: int, key: bytes = b"key") -> bytes:
    return begin(epoch) + an_entry(key, epoch) + end(epoch)


CLEAN = snippet(4) + snippet(5)
SIZE = len(CLEAN)
ENTRY = an_entry()


def scanned(
    data: bytes, mode: ScanMode, *, is_detached: bool = False, durable: int = DURABLE
) -> tuple[LogScan, list[Entry]]:
    """Scan entry by entry and by small tables, compiled and interpreted; all scans must agree."""
    scan = LogScan(walk(lambda at, size: data[at : at + size], len(data)), durable, mode, is_detached=is_detached)
    found = list(scan)
    for kernel in (follow, twin(follow)):
        by_tables = LogScan((), durable, mode, is_detached=is_detached)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log_scan, "follow", kernel)
            assert list(tabled(data, by_tables)) == found
        for name in ("verdict", "changes", "findings", "max_epoch", "counted"):
            assert getattr(by_tables, name) == getattr(scan, name)
    return scan, found


def tabled(data: bytes, scan: LogScan) -> Iterator[Token]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_walk, "COLUMNS", 3)
        for part in tables(lambda at, size: data[at : at + size], len(data)):
            if isinstance(part, EntryTail):
                scan.take_end(*part)
                return
            takes = np.full(part.table.shape[1], 7, np.uint8)
            goes_on = scan.take_table(part.table, takes, part.base)
            for offset in (part.table[entry_table.AT][takes == 1] + np.uint64(part.base)).tolist():
                yield decode(data, offset)[0]
            if not goes_on:
                return


class Case(NamedTuple):
    """Bytes appended to a clean file, and the original's verdict (docs/spec/limestone.md#damage-matrix).

    `startup`: whether it starts. `inspect`: its exit code. `repair` and `cut`: whether it changes the file, or reports
    it as unrepairable. `extra`: how many of the appended entries count. `ours`: whether Flowstone starts without a
    repair.
    """

    name: str
    appended: bytes
    startup: bool
    inspect: int
    repair: str
    cut: str
    extra: int = 0
    ours: bool = True


MATRIX = [
    Case("nothing", b"", True, 0, "ok", "ok"),
    Case("complete snippet of epoch 6", snippet(6), True, 1, "mark", "mark"),
    Case("same without end marker", begin(6) + ENTRY, True, 1, "mark", "mark"),
    Case("epoch 6 torn in an entry", begin(6) + ENTRY[:-1], False, 1, "mark", "cut"),
    Case("epoch 6 torn in the end marker", begin(6) + ENTRY + end(6)[:-1], False, 1, "mark", "cut"),
    Case("epoch 5 without end marker", begin(5) + ENTRY, True, 0, "ok", "ok", extra=1),
    Case("epoch 5 torn in an entry", begin(5) + ENTRY[:-1], False, 2, "lost", "lost", ours=False),
    Case("epoch 5 torn in the end marker", begin(5) + ENTRY + end(5)[:-1], False, 2, "lost", "lost", 1, ours=False),
    Case("short begin marker", b"\x02\x05\x00", False, 1, "mark", "cut"),
    Case("short marked begin marker", b"\x06\x05\x00", True, 0, "ok", "ok"),
    Case("zeros", bytes(40), False, 1, "mark", "cut"),
    Case("zeros in epoch 6", begin(6) + ENTRY + bytes(40), False, 1, "mark", "cut"),
    Case("zeros in epoch 5", begin(5) + ENTRY + bytes(40), False, 2, "lost", "lost", 1, ours=False),
    Case("unknown byte", b"\x55", False, 1, "mark", "cut", ours=False),
    Case("entry without begin", ENTRY, False, 2, "lost", "lost", ours=False),
    Case("torn entry without begin", ENTRY[:-1], False, 2, "lost", "lost", ours=False),
    Case("end marker without begin", end(5), False, 2, "lost", "lost", ours=False),
    Case("durable marker", encode(Marker(EntryType.MARKER_DURABLE, 5)), False, 2, "lost", "lost", ours=False),
    Case("marked snippet, then a good one", marked(snippet(6)) + snippet(5), True, 0, "ok", "ok", extra=1),
    Case("torn marked snippet", marked(begin(6)) + ENTRY[:-1], False, 1, "ok", "cut"),
]
every_case = pytest.mark.parametrize("case", MATRIX, ids=[case.name for case in MATRIX])


def outcome(scan: LogScan) -> str:
    if scan.verdict > Verdict.REPAIRED:
        return "lost"
    assert bool(scan.changes) == (scan.verdict is Verdict.REPAIRED)
    if scan.changes.cut is not None:
        assert scan.changes == FileRepair(cut=SIZE)
        return "cut"
    if scan.changes.marks:
        assert scan.changes == FileRepair(marks=(SIZE,))
        return "mark"
    return "ok"


@every_case
def test_startup_verdict_equals_that_of_the_real_program(case: Case) -> None:
    scan, found = scanned(CLEAN + case.appended, STARTUP)
    assert scan.verdict.is_clean is case.startup
    assert len(found) == scan.counted == 2 + case.extra


@every_case
def test_inspect_verdict_equals_that_of_the_real_program(case: Case) -> None:
    scan, found = scanned(CLEAN + case.appended, INSPECT)
    assert (0 if not scan.verdict else 1 if scan.verdict.is_repairable else 2) == case.inspect
    assert not scan.changes
    assert len(found) == 2 + case.extra


@every_case
def test_repair_verdict_equals_that_of_the_real_program(case: Case) -> None:
    """The original's repair rotates every file first."""
    assert outcome(scanned(CLEAN + case.appended, REPAIR, is_detached=True)[0]) == case.repair
    assert outcome(scanned(CLEAN + case.appended, REPAIR_CUT, is_detached=True)[0]) == case.cut


@every_case
def test_startup_keeps_durable_data_and_leaves_an_appendable_file(case: Case) -> None:
    data = CLEAN + case.appended
    scan, found = scanned(data, RECOVERY)
    assert scan.verdict.is_clean is case.ours
    if case.ours:
        assert len(found) == 2 + case.extra
        data = changed(data, scan.changes)
        again, after = scanned(data + snippet(7, b"new"), RECOVERY, durable=7)
        assert again.verdict is Verdict.OK
        assert after == [*found, put(1, b"new", b"value", WriteVersion(7, 1))]


def changed(data: bytes, changes: FileRepair) -> bytes:
    found = bytearray(data)
    for mark in changes.marks:
        found[mark] = 6
    return bytes(found[: changes.cut])


def test_damage_in_undurable_data_of_a_detached_file_is_tolerated_at_startup() -> None:
    torn = begin(6) + ENTRY[:-1]
    assert scanned(CLEAN + torn, STARTUP, is_detached=True)[0].verdict.is_clean
    assert scanned(CLEAN + marked(torn), STARTUP, is_detached=True)[0].verdict is Verdict.OK
    assert scanned(CLEAN + b"\x02\x05", STARTUP, is_detached=True)[0].verdict is Verdict.TAIL_BROKEN
    assert scanned(CLEAN + b"\x55", STARTUP, is_detached=True)[0].verdict is Verdict.TAIL_BROKEN


def test_max_epoch_is_the_largest_of_any_marker() -> None:
    assert scanned(CLEAN + marked(snippet(9)) + snippet(7), RECOVERY)[0].max_epoch == 9


def test_sessions_of_formats_before_6_have_no_end_marker() -> None:
    data = begin(4) + an_entry(b"a", 4) + begin(5) + an_entry(b"b", 5) + begin(6) + an_entry(b"c", 6)
    scan, found = scanned(data, RECOVERY)
    assert ([entry.key for entry in found], scan.changes) == ([b"a", b"b"], FileRepair(marks=(len(data) * 2 // 3,)))


sessions = st.lists(st.tuples(st.integers(0, 3), st.lists(recorded.entries, max_size=3)), max_size=5)


def file_of(found: list[tuple[int, list[Entry]]]) -> tuple[bytes, list[tuple[int, int, list[Entry]]]]:
    """Return a file of sessions whose epochs grow by these steps, and the end offset and epoch of each session."""
    data, epoch, ends = b"", 1, []
    for step, entries in found:
        epoch += step
        data += begin(epoch) + b"".join(map(encode, entries)) + end(epoch)
        ends.append((len(data), epoch, entries))
    return data, ends


@given(sessions, st.data())
def test_crash_at_any_byte_leaves_exactly_the_durable_sessions(
    found: list[tuple[int, list[Entry]]], choice: st.DataObject
) -> None:
    """The epoch of a session is durable only after the whole session is synced: cut or zeroed bytes can only follow the
    session.
    """
    data, ends = file_of(found)
    size = choice.draw(st.integers(0, len(data)), label="size")
    unsynced = [epoch for at, epoch, _ in ends if at > size]
    durable = choice.draw(st.integers(0, min(unsynced, default=100) - 1), label="durable")
    expected = [entry for _, epoch, entries in ends if epoch <= durable for entry in entries]
    safe = max((at for at, epoch, _ in ends if epoch <= durable), default=0)
    zeros = choice.draw(st.integers(0, size - safe), label="zeros")
    left = data[: size - zeros] + bytes(zeros)
    scan, delivered = scanned(left, RECOVERY, durable=durable)
    assert scan.verdict.is_clean
    assert delivered == expected
    after, again = scanned(changed(left, scan.changes) + snippet(200, b"new"), RECOVERY, durable=200)
    assert after.verdict is Verdict.OK
    assert again[:-1] == expected


@given(sessions, st.data())
def test_any_damaged_byte_is_found_or_has_a_bounded_effect(
    found: list[tuple[int, list[Entry]]], choice: st.DataObject
) -> None:
    data = bytearray(file_of(found)[0])
    if data:
        data[choice.draw(st.integers(0, len(data) - 1))] = choice.draw(st.integers(0, 255))
    for mode in (STARTUP, INSPECT, REPAIR, REPAIR_CUT, RECOVERY):
        scan, delivered = scanned(bytes(data), mode, durable=8)
        assert len(delivered) == scan.counted
        repaired = changed(bytes(data), scan.changes)
        # With REPAIR, a byte that became a marker makes the original continue after the damage.
        if scan.verdict.is_clean and mode is not REPAIR:
            assert scanned(repaired, mode, durable=8)[1] == delivered
            assert scanned(repaired, mode, is_detached=True, durable=8)[0].verdict is Verdict.OK
