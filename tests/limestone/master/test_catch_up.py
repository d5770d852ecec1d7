"""Sessions that a replica lacks.

The resume position of a replica is found, and every later session is read from the files despite concurrent changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import catalog, entries, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, decode_all, put
from flowstone.limestone.format.wire_extensions import Action, HelloAck, Prepare
from flowstone.limestone.master.catch_up import WINDOW, LogFiles, LogSurvey, decide, open_files
from flowstone.outside import production

MASTER = "0e1f2a3b-0000-4000-8000-00000000000a"
OTHER = "0e1f2a3b-0000-4000-8000-00000000000c"
DISK = production().disk
SEED = Prepare(Action.SEED, 9)


def resume(epoch: int) -> Prepare:
    return Prepare(Action.RESUME, epoch)


def row(key: bytes, epoch: int, value: bytes = b"v") -> Entry:
    return put(1, key, value, WriteVersion(epoch, 0))


def session(epoch: int, *rows: Entry, kind: EntryType = EntryType.MARKER_BEGIN, ends: bool = True) -> bytes:
    end = entries.encode(Marker(EntryType.MARKER_END, epoch)) if ends else b""
    return b"".join((entries.encode(Marker(kind, epoch)), *map(entries.encode, rows), end))


def write(directory: Path, name: str, *sessions: bytes) -> None:
    (directory / name).write_bytes(b"".join(sessions))


BEGUN_WITH = 9
"""The epoch that recovery found in these directories."""


def opened(directory: Path, sizes: dict[str, int] | None = None) -> LogFiles:
    return open_files(DISK, str(directory), lambda: sizes or {}, BEGUN_WITH)


def lacking(directory: Path, prepared: Prepare, sizes: dict[str, int] | None = None) -> list[tuple[int, list[bytes]]]:
    """Return the sent epochs with their keys."""
    files = opened(directory, sizes)
    try:
        return [
            (epoch, [entry.key for entry in decode_all(data, "") if isinstance(entry, Entry)])
            for epoch, data in files.sessions(prepared)
        ]
    finally:
        files.close()


@pytest.mark.parametrize(
    ("follows", "durable", "ours", "horizon_epoch", "marked", "expected"),
    [
        (None, 0, 9, 0, (), SEED),
        (OTHER, 9, 9, 0, (), SEED),
        (MASTER, 7, 9, 0, (), resume(7)),
        (MASTER, 9, 9, 9, (), resume(9)),
        (MASTER, 7, 9, 7, (), resume(7)),
        (MASTER, 7, 9, 8, (), SEED),
        (MASTER, 0, 9, 0, (), resume(0)),
        (MASTER, 10, 9, 0, (), resume(9)),
        (MASTER, 10, 10, 0, (10,), resume(9)),
        (MASTER, 10, 12, 0, (10,), resume(9)),
        (MASTER, 10, 12, 9, (10,), resume(9)),
        (MASTER, 11, 12, 0, (10,), resume(11)),
        (MASTER, 10, 12, 0, (8, 9, 10), resume(7)),
        (MASTER, 9, 12, 0, (8, 9, 10), resume(7)),
        (MASTER, 10, 12, 8, (8, 9, 10), resume(8)),
        (MASTER, 2, 12, 0, (1, 2), resume(0)),
        (MASTER, 20, 20, 0, (1, 2), resume(20)),
    ],
)
def test_resume_position_of_a_replica(
    follows: str | None,
    durable: int,
    ours: int,
    horizon_epoch: int,
    marked: Sequence[int],
    expected: Prepare,
) -> None:
    """Every unmarked epoch up to 12 has a session."""
    ack = HelloAck(OTHER, follows, durable, bytes(32))
    valid = [epoch for epoch in range(1, 13) if epoch not in marked]
    survey = LogSurvey(np.array(valid, np.uint64), np.array(marked, np.uint64), 12)
    assert decide(ack, MASTER, ours, horizon_epoch, survey) == expected


def test_epoch_without_sessions_is_settled_unless_an_earlier_one_is_in_doubt() -> None:
    none = np.empty(0, np.uint64)
    survey = LogSurvey(np.array([3, 9], np.uint64), np.array([5, 6], np.uint64), 10)
    assert [survey.settled(epoch, 0) for epoch in range(2, 12)] == [2, 3, 4, 3, 3, 3, 3, 9, 10, 11]
    assert LogSurvey(none, np.array([5], np.uint64), 5).settled(5, 0) == 0
    assert LogSurvey(none, none, 5).settled(5, 0) == 5


def test_epochs_written_by_the_store_are_never_in_doubt() -> None:
    """A session of a later epoch may be written first, and one of this epoch only after the survey."""
    survey = LogSurvey(np.array([3, 9], np.uint64), np.array([5, 6], np.uint64), 6)
    assert [survey.settled(epoch, 0) for epoch in (6, 7, 8, 9)] == [3, 7, 8, 9]


def test_sessions_above_the_epoch_of_all_files_are_sent(tmp_path: Path) -> None:
    write(tmp_path, "pwal_0000", session(1, row(b"a", 1)), session(3, row(b"b", 3), row(b"c", 3)))
    write(tmp_path, "pwal_0001", session(2, row(b"d", 2)), session(4), session(5, row(b"e", 5)))
    write(tmp_path, "pwal_0000.00000000000001.0", session(1, row(b"f", 1)))
    assert lacking(tmp_path, resume(1)) == [(3, [b"b", b"c"]), (2, [b"d"]), (5, [b"e"])]
    assert lacking(tmp_path, resume(5)) == []
    assert lacking(tmp_path, SEED)[:3] == [(1, [b"a"]), (3, [b"b", b"c"]), (1, [b"f"])]


def test_sessions_of_one_epoch_are_sent_together(tmp_path: Path) -> None:
    write(tmp_path, "pwal_0000", *(session(2, row(b"%d" % n, 2)) for n in range(5)), session(3, row(b"x", 3)))
    assert lacking(tmp_path, resume(0)) == [(2, [b"0", b"1", b"2", b"3", b"4"]), (3, [b"x"])]


def test_session_marked_by_recovery_is_known_and_not_sent(tmp_path: Path) -> None:
    marked = session(4, row(b"b", 4), kind=EntryType.MARKER_INVALIDATED_BEGIN)
    write(tmp_path, "pwal_0000", session(3, row(b"a", 3)), marked, session(5, row(b"c", 5)))
    assert lacking(tmp_path, resume(0)) == [(3, [b"a"]), (5, [b"c"])]
    files = opened(tmp_path)
    survey = files.survey(DISK, str(tmp_path), 5)
    assert (survey.valid.tolist(), survey.marked.tolist()) == ([3, 5], [4])
    files.close()


def test_compacted_session_is_still_known(tmp_path: Path) -> None:
    name = "pwal_0000.00000000000001.0"
    write(tmp_path, name, session(3), session(4, kind=EntryType.MARKER_INVALIDATED_BEGIN))
    write(tmp_path, names.COMPACTED, session(0, ends=False))
    catalog.write(DISK, str(tmp_path), Catalog(((names.COMPACTED, 1),), (name, "pwal_0001.2.0"), max_epoch_id=4))
    files = opened(tmp_path)
    survey = files.survey(DISK, str(tmp_path), 5)
    assert (survey.valid.tolist(), survey.marked.tolist()) == ([3], [4])
    files.close()


def test_only_ended_sessions_of_a_growing_file_are_read(tmp_path: Path) -> None:
    finished = session(2, row(b"a", 2))
    write(tmp_path, "pwal_0000", finished, session(3, row(b"b", 3), ends=False)[:-3])
    write(tmp_path, "pwal_0001", session(3, row(b"c", 3), ends=False))
    assert lacking(tmp_path, resume(0), {"pwal_0000": len(finished), "pwal_0001": 0}) == [(2, [b"a"])]


def test_seed_begins_with_the_compacted_file(tmp_path: Path) -> None:
    rows = [put(1, b"a", b"", WriteVersion(0, 0)), put(1, b"b", b"", WriteVersion(0, 0))]
    write(tmp_path, names.COMPACTED, session(0, *rows, ends=False))
    write(tmp_path, "pwal_0000.00000000000001.0", session(1, row(b"a", 1)))
    write(tmp_path, "pwal_0000", session(5, row(b"c", 5)))
    catalog.write(
        DISK, str(tmp_path), Catalog(((names.COMPACTED, 1),), ("pwal_0000.00000000000001.0",), max_epoch_id=4)
    )
    assert lacking(tmp_path, SEED) == [(4, [b"a", b"b"]), (5, [b"c"])]
    assert lacking(tmp_path, resume(4)) == [(5, [b"c"])]


def test_compacted_rows_are_sent_to_a_seeded_replica(tmp_path: Path) -> None:
    """The horizon is the epoch that the compaction waited for, which may have no session."""
    catalog.write(DISK, str(tmp_path), Catalog(((names.COMPACTED, 1),), max_epoch_id=7))
    write(tmp_path, names.COMPACTED, session(0, row(b"a", 0), ends=False))
    assert lacking(tmp_path, Prepare(Action.SEED, 3)) == [(3, [b"a"])]


def test_compacted_file_missing_after_a_crash_is_not_an_error(tmp_path: Path) -> None:
    catalog.write(DISK, str(tmp_path), Catalog(((names.COMPACTED, 1),)))
    write(tmp_path, "pwal_0000", session(1, row(b"a", 1)))
    assert lacking(tmp_path, SEED) == [(1, [b"a"])]


@pytest.mark.parametrize(("compacted", "horizon_epoch"), [((), 0), (((names.COMPACTED, 1),), 4)])
def test_only_compacted_epochs_are_beyond_the_horizon(
    tmp_path: Path, compacted: tuple[tuple[str, int], ...], horizon_epoch: int
) -> None:
    if compacted:
        write(tmp_path, names.COMPACTED, session(0, ends=False))
    catalog.write(DISK, str(tmp_path), Catalog(compacted, max_epoch_id=4))
    files = opened(tmp_path)
    assert files.horizon == horizon_epoch
    files.close()


def test_long_entries_and_long_sessions_are_sent_whole(tmp_path: Path) -> None:
    long = row(b"long", 2, bytes(3 * WINDOW))
    many = [row(b"%06d" % n, 2, bytes(50)) for n in range(50_000)]
    write(tmp_path, "pwal_0000", session(2, *many[:25_000], long, *many[25_000:]))
    files = opened(tmp_path)
    sent = list(files.sessions(resume(1)))
    assert b"".join(data for _, data in sent) == b"".join(map(entries.encode, [*many[:25_000], long, *many[25_000:]]))
    assert max(len(data) for _, data in sent) < 5 * WINDOW
    assert all(len(data) <= WINDOW or b"long" in data for _, data in sent)
    files.close()


@given(
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.binary(max_size=6), max_size=4), st.booleans()), max_size=12),
    st.integers(0, 4),
)
def test_every_session_above_the_epoch_is_sent_in_order(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[tuple[int, list[bytes], bool]], above: int
) -> None:
    directory = tmp_path_factory.mktemp("master")
    kinds = (EntryType.MARKER_INVALIDATED_BEGIN, EntryType.MARKER_BEGIN)
    write(
        directory,
        "pwal_0000",
        *(session(epoch, *(row(key, epoch) for key in keys), kind=kinds[counts]) for epoch, keys, counts in sessions),
    )
    expected = [(epoch, key) for epoch, keys, counts in sessions for key in keys if counts and epoch > above]
    assert [(epoch, key) for epoch, keys in lacking(directory, resume(above)) for key in keys] == expected


def test_torn_tail_of_an_undurable_session_is_ignored(tmp_path: Path) -> None:
    torn = session(4, row(b"b", 4), kind=EntryType.MARKER_INVALIDATED_BEGIN)[:-12]
    write(tmp_path, "pwal_0000.00000000000001.0", session(3, row(b"a", 3)), torn)
    assert lacking(tmp_path, resume(0)) == [(3, [b"a"])]


def test_torn_durable_session_prevents_a_seed(tmp_path: Path) -> None:
    write(tmp_path, "pwal_0000", session(3, row(b"a", 3))[:-12])
    with pytest.raises(DamagedFile, match="is incomplete"):
        lacking(tmp_path, resume(0))


def while_opening(monkeypatch: pytest.MonkeyPatch, what: Callable[[], None]) -> None:
    """Run `what` once, between the listing of a directory and the opening of its files."""
    real = type(DISK).open
    happened: list[str] = []

    def intercepted(self: object, path: str) -> object:
        if not happened:
            happened.append(path)
            what()
        return real(DISK, path)

    monkeypatch.setattr(type(DISK), "open", intercepted)


def test_files_rotated_while_they_are_opened_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "pwal_0000", session(2, row(b"a", 2)))

    def rotate() -> None:
        os.rename(tmp_path / "pwal_0000", tmp_path / "pwal_0000.00000000000001.0")
        write(tmp_path, "pwal_0000", session(3, row(b"b", 3)))

    while_opening(monkeypatch, rotate)
    assert sorted(lacking(tmp_path, resume(0))) == [(2, [b"a"]), (3, [b"b"])]


def test_files_missing_when_they_are_opened_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "pwal_0000", session(2, row(b"a", 2)))
    new = tmp_path / "pwal_0000.00000000000001.0"
    while_opening(monkeypatch, lambda: os.rename(tmp_path / "pwal_0000", new))
    assert lacking(tmp_path, resume(0)) == [(2, [b"a"])]


def test_search_ends_when_files_are_renamed_continually(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "pwal_0000", session(2, row(b"a", 2)))
    count = iter(range(100))

    def sizes() -> dict[str, int]:
        write(tmp_path, f"pwal_0000.0000000000000{next(count)}.0", b"")
        return {}

    with pytest.raises(LimestoneError, match="keep changing"):
        open_files(DISK, str(tmp_path), sizes, BEGUN_WITH)


def test_session_that_begins_while_files_are_opened_is_not_sent(tmp_path: Path) -> None:
    """Another thread writes to the file of an earlier process: the first bytes may be in the file before they are
    aborted.
    """
    finished = session(2, row(b"a", 2))
    write(tmp_path, "pwal_0000", finished)

    def sizes_before_the_session() -> dict[str, int]:
        write(tmp_path, "pwal_0000", finished, session(3, row(b"aborted", 3), ends=False))
        return {}

    files = open_files(DISK, str(tmp_path), sizes_before_the_session, BEGUN_WITH)
    sent = [epoch for epoch, _ in files.sessions(resume(0))]
    files.close()
    assert sent == [2]


def test_session_that_ends_while_files_are_opened_is_sent_whole(tmp_path: Path) -> None:
    whole = session(3, row(b"a", 3), row(b"b", 3))
    write(tmp_path, "pwal_0000", session(3, row(b"a", 3), ends=False))

    def sizes_after_the_session() -> dict[str, int]:
        write(tmp_path, "pwal_0000", whole)
        return {"pwal_0000": len(whole)}

    files = open_files(DISK, str(tmp_path), sizes_after_the_session, BEGUN_WITH)
    ((epoch, data),) = files.sessions(resume(0))
    files.close()
    assert (epoch, data) == (3, whole[9:-10])


def test_open_file_stays_readable_after_its_name_is_removed(tmp_path: Path) -> None:
    write(tmp_path, "pwal_0000", session(2, row(b"a", 2)))
    files = opened(tmp_path)
    (tmp_path / "pwal_0000").unlink()
    assert [epoch for epoch, _ in files.sessions(resume(0))] == [2]
    files.close()


@pytest.mark.parametrize("name", ["pwal_0000.compacted", "pwal_0000.compacted.prev"])
def test_compacted_file_that_no_catalog_lists_counts(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, session(0, row(b"old", 0), ends=False))
    write(tmp_path, "pwal_0000", session(11, row(b"new", 11)))
    files = opened(tmp_path)
    assert files.horizon == BEGUN_WITH, "a replica below the horizon may lack data that only the compacted file has"
    files.close()
    assert lacking(tmp_path, Prepare(Action.SEED, 11)) == [(BEGUN_WITH, [b"old"]), (11, [b"new"])]
