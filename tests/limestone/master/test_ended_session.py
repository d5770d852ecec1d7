"""A session on the wire: in one message, in the original's messages, in parts, with blobs.

A long session is never entirely in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import entries, names
from flowstone.limestone.format.entries import WriteVersion, put
from flowstone.limestone.format.messages import (
    ACK,
    Blob,
    CommonAck,
    LogEntries,
    MessageParser,
    SessionFlags,
    WireEntry,
    wire_entry,
)
from flowstone.limestone.master.ended_session import BLOB_KEPT_MAX, KEPT_MAX, EndedSession, WireForm
from flowstone.outside import production

A = put(1, b"a", b"1", WriteVersion(5, 0))
B = put(1, b"b", b"2", WriteVersion(5, 1))
WITH_BLOB = put(1, b"c", b"3", WriteVersion(5, 2), (7,))


def form(directory: Path, *, compatible: bool = False, has_stale_end: bool = False, is_old: bool = False) -> WireForm:
    return WireForm(production().disk, str(directory), compatible, has_stale_end, is_old)


def parsed(pieces: Iterable[bytes]) -> list[LogEntries]:
    parser = MessageParser()
    found = []
    for piece in pieces:
        parser.feed(piece)
        while (message := parser.next_message()) is not None:
            assert isinstance(message, LogEntries)
            found.append(message)
    parser.feed(ACK)
    assert parser.next_message() == CommonAck()  # no bytes of earlier messages remain
    return found


def sent(form: WireForm, *parts: bytes, before: int = 0) -> list[LogEntries]:
    return parsed(EndedSession(form, 0, 5, lambda: parts, before).pieces())


def write_blob(directory: Path, blob_id: int, content: bytes) -> None:
    path = directory / names.blob(blob_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_session_is_one_message(tmp_path: Path) -> None:
    data = entries.encode(A) + entries.encode(B)
    assert sent(form(tmp_path), data) == [LogEntries(5, (wire_entry(A), wire_entry(B)), 7)]


def test_empty_session_is_one_message(tmp_path: Path) -> None:
    assert sent(form(tmp_path)) == sent(form(tmp_path), b"") == [LogEntries(5, (), 7)]


def test_first_part_begins_the_session_and_the_last_part_ends_it(tmp_path: Path) -> None:
    parts = [entries.encode(A), entries.encode(B), entries.encode(A)]
    assert [message.flags for message in sent(form(tmp_path), *parts)] == [1, 0, 6]


def test_compatible_session_has_one_message_per_call(tmp_path: Path) -> None:
    expected = [
        LogEntries(5, (), 1),
        LogEntries(5, (wire_entry(A),)),
        LogEntries(5, (wire_entry(B),)),
        LogEntries(5, (), 6),
    ]
    compatible = form(tmp_path, compatible=True)
    assert sent(compatible, entries.encode(A) + entries.encode(B), before=3) == expected
    assert sent(compatible, entries.encode(A), entries.encode(B)) == expected


def test_asynchronous_close_ends_with_the_epoch_of_the_previous_session(tmp_path: Path) -> None:
    stale = form(tmp_path, compatible=True, has_stale_end=True)
    found = sent(stale, entries.encode(A), before=3)
    assert found == [LogEntries(5, (), 1), LogEntries(5, (wire_entry(A),)), LogEntries(3, (), 6)]
    assert sent(form(tmp_path, has_stale_end=True), entries.encode(A), before=3)[-1].epoch == 5


@pytest.mark.parametrize("size", [11, BLOB_KEPT_MAX + 1])
def test_blobs_are_sent_with_their_content_and_large_ones_one_at_a_time(tmp_path: Path, size: int) -> None:
    content = bytes(size)
    write_blob(tmp_path, 7, content)
    session = EndedSession(form(tmp_path), 0, 5, lambda: [entries.encode(A) + entries.encode(WITH_BLOB)])
    assert (session.kept is None) == (size > BLOB_KEPT_MAX)
    carried = WireEntry(10, 1, b"c", b"3", WriteVersion(5, 2), (Blob(7, content),))
    assert [message.entries for message in parsed(session.pieces())] == [(wire_entry(A),), (carried,)]


def test_collected_blob_of_an_old_session_is_sent_as_empty(tmp_path: Path) -> None:
    data = entries.encode(WITH_BLOB)
    (message,) = sent(form(tmp_path, is_old=True), data)
    assert message.entries[0].blobs == (Blob(7, b""),)
    assert message.flags & SessionFlags.GONE
    with pytest.raises(FileNotFoundError):
        sent(form(tmp_path), data)


def test_long_session_is_read_again_for_each_replica(tmp_path: Path) -> None:
    part = b"".join(entries.encode(put(1, b"k%d" % n, bytes(1000), WriteVersion(5, n))) for n in range(1000))
    asked = []

    def parts() -> Iterable[bytes]:
        asked.append(1)
        return iter([part] * 6)

    session = EndedSession(form(tmp_path), 0, 5, parts)
    assert session.kept is None
    assert 6 * len(part) > KEPT_MAX
    first, second = parsed(session.pieces()), parsed(session.pieces())
    assert first == second
    assert sum(len(message.entries) for message in first) == 6000
    assert len(asked) == 3


def test_session_that_cannot_be_read_back_is_a_limestone_error(tmp_path: Path) -> None:
    part = entries.encode(put(1, b"k", bytes(KEPT_MAX), WriteVersion(5, 0)))
    asked = []

    def parts() -> Iterable[bytes]:
        asked.append(1)
        if len(asked) > 1:
            raise FileNotFoundError("pwal_0000")
        return iter([part])

    with pytest.raises(LimestoneError, match="cannot read back session"):
        list(EndedSession(form(tmp_path), 0, 5, parts).pieces())
