"""The compiled conversions between log and wire agree with the plain ones, entry by entry."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import BadMessage
from flowstone.limestone.format import entries, messages, transcode
from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, put
from flowstone.limestone.format.messages import (
    Blob,
    GroupCommit,
    LogEntries,
    Message,
    MessageParser,
    WireEntry,
    wire_entry,
)
from flowstone.limestone.format.transcode import BlobContent, BlobPart, DiskEntries, WireReader, wire_parts
from tests.conftest import FULL
from tests.limestone import recorded
from tests.native.twins import twin

STREAMS = sorted(recorded.HERE.rglob("conn*.bin"))
every_stream = pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.relative_to(recorded.HERE).as_posix())

entry_lists = st.lists(recorded.entries, max_size=6)
texts = st.binary(max_size=12)
wire_entries = st.builds(
    WireEntry,
    st.sampled_from((0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 11, 64, 255)),
    recorded.ids,
    texts,
    texts,
    recorded.versions,
    st.one_of(st.just(()), st.lists(st.builds(Blob, recorded.ids, texts, st.just(False)), max_size=2).map(tuple)),
)
plain_entries = recorded.entries.map(lambda entry: wire_entry(entry._replace(blob_ids=())))
streams = st.lists(
    st.one_of(
        st.builds(GroupCommit, recorded.ids),
        st.builds(LogEntries, st.integers(1, 2), st.lists(plain_entries, max_size=4).map(tuple), st.integers(0, 7)),
        st.builds(LogEntries, st.integers(1, 2), st.lists(wire_entries, max_size=3).map(tuple), st.integers(0, 255)),
    ),
    max_size=5,
)


@pytest.fixture(params=["compiled", "interpreted"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, a read or write outside the buffer raises."""
    if request.param == "interpreted":
        for name in ("to_wire", "log_entries", "log_messages"):
            monkeypatch.setattr(transcode, name, twin(getattr(transcode, name)))


def content(blob_id: int) -> bytes:
    return b"blob %d" % blob_id


def opened(blob_id: int) -> BlobContent:
    """Return the content of a blob in two pieces."""
    data = content(blob_id)
    return BlobContent(len(data), [data[:3], data[3:]])


def sent(found: list[Entry], epoch: int, *, begin: bool, end: bool) -> bytes:
    """Return the messages of the original's master."""
    wire = [wire_entry(entry, tuple(Blob(each, content(each)) for each in entry.blob_ids)) for entry in found]
    parts = [LogEntries(epoch, (), 1)] if begin else []
    parts += [LogEntries(epoch, (entry,)) for entry in wire]
    return b"".join(map(messages.encode, [*parts, *([LogEntries(epoch, (), 6)] if end else [])]))


def parsed(data: bytes) -> list[LogEntries]:
    parser, found = MessageParser(), []
    parser.feed(data)
    while (message := parser.next_message()) is not None:
        assert isinstance(message, LogEntries)
        found.append(message)
    parser.feed(messages.ACK)
    assert parser.next_message() == messages.CommonAck()  # no bytes of earlier messages remain
    return found


@pytest.mark.usefixtures("_both_ways")
@given(entry_lists, recorded.ids, st.booleans(), st.booleans())
def test_compatible_master_sends_the_bytes_of_the_original(
    found: list[Entry], epoch: int, begin: bool, end: bool
) -> None:
    disk = b"".join(map(entries.encode, found))
    parts = wire_parts(disk, epoch, begin=begin, end=end, compatible=True, open_blob=opened)
    assert b"".join(parts) == sent(found, epoch, begin=begin, end=end)


@pytest.mark.usefixtures("_both_ways")
@given(entry_lists, recorded.ids, st.booleans(), st.booleans())
def test_batch_has_the_same_entries_in_few_messages(found: list[Entry], epoch: int, begin: bool, end: bool) -> None:
    disk = memoryview(b"".join(map(entries.encode, found)))
    batch = parsed(b"".join(wire_parts(disk, epoch, begin=begin, end=end, open_blob=opened)))
    alone = parsed(sent(found, epoch, begin=False, end=False))
    assert [entry for message in batch for entry in message.entries] == [message.entries[0] for message in alone]
    assert {message.epoch for message in batch} <= {epoch}
    with_blobs = sum(entry.type is EntryType.NORMAL_WITH_BLOB for entry in found)
    assert len(batch) <= 1 + 2 * with_blobs
    assert (1 if begin or end or found else 0) <= len(batch)
    for number, message in enumerate(batch):
        is_first, is_last = number == 0, number == len(batch) - 1
        assert message.flags == (1 if begin and is_first else 0) + (6 if end and is_last else 0)


def test_recorded_sessions_can_be_sent_again_from_the_log() -> None:
    """Both recordings are in the original's messages; the log lacks the content of blobs, which the files have."""
    for name in ("basic", "late_end", "epochs"):
        directory = recorded.HERE / name
        for channel in range(2):
            path = directory / "master-dir" / f"pwal_{channel:04d}"
            if path.exists():
                wire = (directory / "wire" / f"conn{channel}.m2r.bin").read_bytes()
                created = messages.encode(messages.LogChannelCreate(channel))
                assert created + b"".join(resent(path)) == wire


def resent(path: Path) -> Iterator[bytes]:
    def blob(blob_id: int) -> BlobContent:
        data = next(path.parent.rglob(f"{blob_id:016x}.blob")).read_bytes()
        return BlobContent(len(data), [data])

    data = path.read_bytes()
    head = epoch = 0
    for offset, token in entries.walk(lambda at, size: data[at : at + size], len(data)):
        if isinstance(token, Marker) and token.type is EntryType.MARKER_BEGIN:
            head, epoch = offset + 9, token.epoch
        elif isinstance(token, Marker):
            yield from wire_parts(data[head:offset], epoch, begin=True, end=True, compatible=True, open_blob=blob)


def test_only_complete_entries_are_sent() -> None:
    entry = entries.encode(put(1, b"key", b"value", WriteVersion(1, 1)))
    with_blobs = entries.encode(put(1, b"key", b"value", WriteVersion(1, 1), (7,)))
    marker = entries.encode(Marker(EntryType.MARKER_BEGIN, 1))
    for bad in (entry[:-1], entry[:20], with_blobs[:-1], marker, b"\0", b"\x0b"):
        with pytest.raises(LocalProtocolError, match=f"byte {len(entry)} of"):
            list(wire_parts(entry + bad, 1, begin=True, end=True, open_blob=opened))
    with pytest.raises(LocalProtocolError, match="their content was not passed"):
        list(wire_parts(with_blobs, 1, begin=True, end=True))
    with pytest.raises(LocalProtocolError, match="not a 64-bit number"):
        list(wire_parts(entry, 1 << 64, begin=True, end=True))


def test_blobs_are_read_immediately_before_they_are_sent() -> None:
    asked: list[int] = []

    def note(blob_id: int) -> BlobContent:
        asked.append(blob_id)
        return BlobContent(0, ())

    disk = b"".join(entries.encode(put(1, b"k", b"", WriteVersion(1, 1), (number,))) for number in range(5))
    parts = wire_parts(disk, 1, begin=True, end=True, open_blob=note)
    next(parts)
    assert len(asked) <= 2


def logged(stream: list[Message]) -> list[DiskEntries | Message]:
    """Return the actions that a replica takes for each message, one by one."""
    found: list[DiskEntries | Message] = []
    for message in stream:
        if isinstance(message, LogEntries):
            kept = [entry for each in message.entries if (entry := each.logged()) is not None]
            blobs = tuple(blob for entry in message.entries for blob in entry.blobs)
            disk = b"".join(map(entries.encode, kept))
            found.append(DiskEntries(message.epoch, message.flags, disk, len(kept), blobs))
        else:
            found.append(message)
    return found


def merged(found: list[DiskEntries | Message]) -> list[DiskEntries | Message]:
    """Merge actions that can be combined: the replica ends with the same files and the same number of
    acknowledgements.
    """
    merging: list[DiskEntries | Message] = []
    for each in found:
        last = merging[-1] if merging else None
        if (
            isinstance(each, DiskEntries)
            and isinstance(last, DiskEntries)
            and last.epoch == each.epoch
            and not last.flags & 6
            and not each.flags & 1
        ):
            disk, flags = last.disk + each.disk, last.flags | each.flags
            merging[-1] = DiskEntries(last.epoch, flags, disk, last.count + each.count, last.blobs + each.blobs)
        else:
            merging.append(each)
    return merging


def read(*pieces: bytes, size_max: int = 1 << 20) -> tuple[list[DiskEntries | Message], BadMessage | None]:
    reader = WireReader(size_max)
    parts: list[BlobPart] = []
    found: list[DiskEntries | Message] = []
    try:
        for piece in pieces:
            found += whole(reader.feed(piece), parts)
    except BadMessage as error:
        return found, error
    return found, None


def whole(stream: Iterable[DiskEntries | BlobPart | Message], parts: list[BlobPart]) -> Iterator[DiskEntries | Message]:
    """Return the stream with the content of blobs in place, whether it arrived before or not."""
    for each in stream:
        if isinstance(each, BlobPart):
            parts.append(each)
        elif isinstance(each, DiskEntries):
            yield replace(each, blobs=tuple(_with_content(blob, parts) for blob in each.blobs))
            assert not parts
        else:
            yield each


def _with_content(blob: Blob, parts: list[BlobPart]) -> Blob:
    content = b""
    while blob.has_come:
        part = parts.pop(0)
        assert part.blob_id == blob.blob_id
        content += part.data
        if part.is_last:
            return Blob(blob.blob_id, content)
    return blob


def expected(*pieces: bytes, size_max: int = 1 << 20) -> tuple[list[DiskEntries | Message], BadMessage | None]:
    parser = MessageParser(size_max=size_max)
    found: list[DiskEntries | Message] = []
    try:
        for piece in pieces:
            parser.feed(piece)
            while (message := parser.next_message()) is not None:
                found += logged([message])
    except BadMessage as error:
        return found, error
    return found, None


def check(*pieces: bytes, size_max: int = 1 << 20) -> None:
    found, error = read(*pieces, size_max=size_max)
    want, bad = expected(b"".join(pieces), size_max=size_max)
    assert merged(found) == merged(want)
    assert str(error) == str(bad)


@pytest.fixture(params=[3, transcode.BLOB_WHOLE_MAX], ids=["in pieces", "whole"])
def _large_blobs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcode, "BLOB_WHOLE_MAX", request.param)


@pytest.mark.usefixtures("_both_ways", "_large_blobs")
@given(streams, st.data())
def test_entries_equal_those_of_a_replica_for_any_fragmentation(found: list[Message], choice: st.DataObject) -> None:
    data = b"".join(map(messages.encode, found))
    cuts = sorted(choice.draw(st.lists(st.integers(0, len(data)), max_size=5)))
    check(*(data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)))


@given(streams)
def test_messages_cut_at_any_byte_equal_the_plain_decoder(found: list[Message]) -> None:
    data = b"".join(map(messages.encode, found))
    check(*(bytes((byte,)) for byte in data))
    for at in range(0, len(data), 1 if FULL else 7):
        check(data[:at], data[at:])


@every_stream
def test_recorded_conversations_equal_the_plain_decoder(path: Path) -> None:
    data = path.read_bytes()
    for size in (7, 100, 4096, len(data)):
        check(*(data[at : at + size] for at in range(0, len(data), size)))


@pytest.mark.parametrize("name", ["basic", "late_end", "epochs"])
def test_files_equal_those_of_the_real_replica(name: str) -> None:
    for channel in range(2):
        path = recorded.HERE / name / "replica-dir" / f"pwal_{channel:04d}"
        if not path.exists():
            continue
        found, error = read((recorded.HERE / name / "wire" / f"conn{channel}.m2r.bin").read_bytes())
        log = b""
        for each in found:
            if isinstance(each, DiskEntries):
                log += entries.encode(Marker(EntryType.MARKER_BEGIN, 0)) if each.flags & 1 else b""
                log += each.disk
                log += entries.encode(Marker(EntryType.MARKER_END, 0)) if each.flags & 6 else b""
        assert log == path.read_bytes()
        assert error is None


def test_messages_of_a_session_are_merged() -> None:
    found = [put(1, b"key%d" % number, b"value", WriteVersion(1, number)) for number in range(1000)]
    disk = b"".join(map(entries.encode, found))
    wire = sent(found, 5, begin=True, end=True)
    assert read(wire * 2)[0] == [DiskEntries(5, 7, disk, 1000)] * 2
    one = b"".join(wire_parts(disk, 5, begin=True, end=True))
    assert read(one)[0] == [DiskEntries(5, 7, disk, 1000)]


@pytest.mark.usefixtures("_both_ways")
@given(streams, st.integers(1, 200), st.integers(1, 50))
def test_size_limit_is_the_same_for_all_forms(found: list[Message], size_max: int, size: int) -> None:
    data = b"".join(map(messages.encode, found))
    check(data, size_max=size_max)
    check(*(data[at : at + size] for at in range(0, len(data), size)), size_max=size_max)


def test_mutated_streams_give_the_same_messages_or_errors() -> None:
    rng = random.Random(11)
    corpus = [path.read_bytes()[:3000] for path in STREAMS]
    for _ in range(10_000 if FULL else 1000):
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 5, 0x0A, 0x10, 0x11, 0x7F, 0xFF, rng.randrange(256)))
        size = rng.choice((100, 1000, 3000))
        check(*(bytes(data[at : at + size]) for at in range(0, len(data), size)))


@pytest.mark.parametrize(
    "data",
    [
        b"\x10\x01" + bytes(8) + b"\xff\xff\xff\xff",
        b"\x11" + bytes(8) + b"\xff\xff\xff\xff",
        b"\x11" + bytes(8) + b"\0\0\0\x01" + b"\x01" + bytes(8) + b"\x7f\xff\xff\xff",
        b"\x11" + bytes(8) + b"\0\0\0\x01" + b"\x01" + bytes(12) + b"\xff\xff\xff\xff",
        b"\x11" + bytes(8) + b"\0\0\0\x01" + b"\x0a" + bytes(8 + 4 + 4 + 16) + b"\xff\xff\xff\xff",
    ],
    ids=["string", "entries", "key", "value", "blobs"],
)
def test_length_above_the_limit_is_rejected_at_once_without_allocation(data: bytes) -> None:
    reader = WireReader(1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage, match="bytes"):
            list(reader.feed(data))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_long_message_in_many_pieces_is_read_in_linear_time() -> None:
    wire = LogEntries(1, (WireEntry(1, 1, b"", bytes(8 << 20), WriteVersion(1, 1)),), 7)
    data = messages.encode(wire)
    reader, joined = WireReader(), 0
    for at in range(0, len(data), 4096):
        before = reader._data
        found = list(reader.feed(data[at : at + 4096]))
        joined += reader._data is not before
    assert found == logged([wire])
    assert joined < 5


def test_large_blob_is_streamed_and_never_entirely_in_memory() -> None:
    content = bytes(range(256)) * (8 << 12)
    wire = LogEntries(1, (WireEntry(10, 1, b"k", b"v", WriteVersion(1, 1), (Blob(1, content), Blob(2, b""))),), 7)
    data = messages.encode(wire)
    reader, found = WireReader(), list[DiskEntries | BlobPart | Message]()
    tracemalloc.start()
    try:
        for at in range(0, len(data), 4096):
            for each in reader.feed(data[at : at + 4096]):
                found.append(each if isinstance(each, DiskEntries) else replace(each, data=b""))  # type: ignore[type-var]
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    *parts, last = found
    assert all(isinstance(part, BlobPart) and part.blob_id == 1 for part in parts)
    assert isinstance(last, DiskEntries)
    assert last.blobs == (Blob(1, b"", has_come=True), Blob(2, b""))
    check(data[:100], data[100:5000], data[5000:], size_max=16 << 20)


def test_many_blobs_of_one_message_are_streamed() -> None:
    """The message holds a bounded number of bytes, however small each blob is."""
    size, ids = 1 << 20, tuple(range(64))
    disk = entries.encode(put(1, b"k", b"v", WriteVersion(1, 1), ids))
    reader, held, received = WireReader(), [0], 0
    for piece in wire_parts(disk, 1, begin=True, end=True, open_blob=lambda _: BlobContent(size, [bytes(size)])):
        for each in reader.feed(piece):
            if isinstance(each, BlobPart):
                received += len(each.data)
        held.append(reader.held)
    assert max(held) < transcode.BLOB_WHOLE_MAX + 10_000
    assert isinstance(each, DiskEntries)
    assert [blob.blob_id for blob in each.blobs] == list(ids)
    assert sum(len(blob.content) for blob in each.blobs) <= transcode.BLOB_WHOLE_MAX
    assert received + sum(len(blob.content) for blob in each.blobs) == size * len(ids)


def test_blobs_of_an_unfinished_message_count_as_memory_in_use() -> None:
    blobs = tuple(Blob(number, bytes(1000)) for number in range(50))
    version = WriteVersion(1, 1)
    entries = (WireEntry(10, 1, b"k", b"v", version, blobs[:25]), WireEntry(10, 1, b"l", b"v", version, blobs[25:]))
    data = messages.encode(LogEntries(1, entries, 7))
    reader = WireReader()
    for at in range(0, len(data) - 1, 100):
        assert not list(reader.feed(data[at : min(at + 100, len(data) - 1)]))
    assert reader.held >= 50_000
    assert len(list(reader.feed(data[-1:]))) == 1
    assert reader.held == 0


def test_reader_keeps_no_bytes_of_a_returned_message() -> None:
    """An idle connection must not keep the bytes of its last message, even after the next message has begun."""
    data = messages.encode(LogEntries(1, (WireEntry(1, 1, b"k", bytes(4 << 20), WriteVersion(1, 1)),), 7))
    for wire in (data, data + data[:5]):
        reader = WireReader(scratch=np.empty(transcode.SCRATCH_SIZE, np.uint8))
        tracemalloc.start()
        try:
            for at in range(0, len(wire), 1 << 20):
                list(reader.feed(wire[at : at + (1 << 20)]))
            assert tracemalloc.get_traced_memory()[0] < 100_000
        finally:
            tracemalloc.stop()


def test_oversized_blob_is_rejected_at_its_header() -> None:
    wire = LogEntries(1, (WireEntry(10, 1, b"k", b"v", WriteVersion(1, 1), (Blob(1, bytes(3 << 20)),)),), 7)
    found, error = read(messages.encode(wire)[:100], size_max=2 << 20)
    assert not found
    assert "message exceeds the limit of 2097152 bytes" in str(error)


def test_deleted_blobs_are_distinguished_from_empty_ones() -> None:
    disk = b"".join(entries.encode(put(1, b"k", b"", WriteVersion(1, 1), (number,))) for number in range(3))
    contents = [BlobContent(0, ()), None, BlobContent(1, [b"x"])]
    sent = parsed(b"".join(wire_parts(disk, 1, begin=True, end=True, open_blob=contents.__getitem__)))
    assert [message.flags for message in sent] == [1, 0x80, 6]
    assert [message.entries[0].blobs[0].content for message in sent] == [b"", b"", b"x"]


def test_entry_with_deleted_and_empty_blobs_sends_the_empty_ones_first() -> None:
    """The flag applies to all empty blobs of a message."""
    entry = put(1, b"k", b"v", WriteVersion(1, 1), (5, 6, 7))
    contents = {5: None, 6: BlobContent(0, ()), 7: BlobContent(1, [b"x"])}
    wire = b"".join(wire_parts(entries.encode(entry), 1, begin=True, end=True, open_blob=contents.__getitem__))
    first, second = parsed(wire)
    assert (first.flags, first.entries[0].blobs) == (1, (Blob(6, b""),))
    assert (second.flags, second.entries) == (
        0x86,
        (wire_entry(entry, (Blob(5, b""), Blob(6, b""), Blob(7, b"x"))),),
    )
    found = [each for each in read(wire)[0] if isinstance(each, DiskEntries)]
    assert b"".join(each.disk for each in found) == entries.encode(entry)
