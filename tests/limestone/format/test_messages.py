"""Messages of replication: recorded conversations byte for byte, in any fragmentation.

A length in a message is never trusted.
"""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import BadMessage
from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, decode_all, put
from flowstone.limestone.format.messages import (
    ACK,
    Blob,
    CommonAck,
    Error,
    GcBoundarySwitch,
    GroupCommit,
    LogChannelCreate,
    LogEntries,
    Message,
    MessageParser,
    MessageType,
    Parser,
    RdmaInit,
    RdmaInitAck,
    SessionBegin,
    SessionBeginAck,
    SessionFlags,
    WireEntry,
    encode,
    wire_entry,
)
from flowstone.limestone.format.transcode import DiskEntries, WireReader
from tests.conftest import FULL
from tests.limestone import recorded

STREAMS = sorted(recorded.HERE.rglob("conn*.bin"))
every_stream = pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.relative_to(recorded.HERE).as_posix())
ONE_PUT = (
    "11000000000000000100000001010000000000000001000000026b31000000027631000000000000000100000000000000010000000000"
)
GOLDEN: list[tuple[str, Message]] = [
    ("01000000000000000002000000000000000000000000", SessionBegin()),
    ("20000000001c7365727665725f2e6765745f73657373696f6e5f7365637265742829", SessionBeginAck()),
    ("030000000000000001", GroupCommit(1)),
    ("040102", GcBoundarySwitch(0x0102)),
    ("1001000000000000000000000000", LogChannelCreate(0)),
    ("1100000000000000010000000001", LogEntries(1, (), SessionFlags.BEGIN)),
    ("1100000000000000010000000006", LogEntries(1, (), SessionFlags.END | SessionFlags.FLUSH)),
    (ONE_PUT, LogEntries(1, (wire_entry(put(1, b"k1", b"v1", WriteVersion(1, 1))),))),
    ("2100", CommonAck()),
    ("2201000d00000002c3a4", Error(13, "ä")),
    ("3000000010", RdmaInit(16)),
    ("310000000000000010", RdmaInitAck(16)),
]
texts = st.binary(max_size=12)
wire_entries = st.builds(
    WireEntry,
    st.integers(0, 255),
    recorded.ids,
    texts,
    texts,
    recorded.versions,
    st.lists(st.builds(Blob, recorded.ids, texts, st.just(False)), max_size=2).map(tuple),
)
messages = st.one_of(
    st.builds(SessionBegin, recorded.ids, texts, recorded.ids, st.integers(0, 255)),
    st.builds(SessionBeginAck, texts),
    st.builds(GroupCommit, recorded.ids),
    st.builds(GcBoundarySwitch, st.integers(0, 2**16 - 1)),
    st.builds(LogChannelCreate, recorded.ids, texts, st.integers(0, 255)),
    st.builds(LogEntries, recorded.ids, st.lists(wire_entries, max_size=3).map(tuple), st.integers(0, 255)),
    st.just(CommonAck()),
    st.builds(Error, st.integers(0, 2**16 - 1), texts.map(lambda text: text.decode("utf-8", "surrogateescape"))),
    st.builds(RdmaInit, st.integers(0, 2**32 - 1)),
    st.builds(RdmaInitAck, recorded.ids),
)


def parsed(*pieces: bytes, size_max: int = 1 << 20) -> list[Message]:
    """Parse all messages of the pieces, which must end at a message boundary."""
    parser, found = MessageParser(size_max=size_max), []
    for piece in pieces:
        parser.feed(piece)
        while (message := parser.next_message()) is not None:
            found.append(message)
    parser.feed(ACK)
    assert parser.next_message() == CommonAck()  # no bytes of earlier messages remain
    return found


@pytest.mark.parametrize(("text", "message"), GOLDEN)
def test_golden_bytes(text: str, message: Message) -> None:
    assert encode(message).hex() == text
    assert parsed(bytes.fromhex(text)) == [message]


def test_every_type_is_among_the_golden_bytes() -> None:
    assert {bytes.fromhex(text)[0] for text, _ in GOLDEN} == set(MessageType)


@every_stream
def test_recorded_conversations_are_read_and_written_byte_for_byte(path: Path) -> None:
    data = path.read_bytes()
    found = parsed(data)
    assert b"".join(map(encode, found)) == data
    assert parsed(*(data[at : at + 7] for at in range(0, len(data), 7))) == found


@pytest.mark.parametrize("name", ["basic", "late_end", "epochs"])
@pytest.mark.parametrize("side", ["master", "replica"])
def test_recorded_messages_equal_the_logs_of_both_sides(name: str, side: str) -> None:
    for channel in range(2):
        path = recorded.HERE / name / "wire" / f"conn{channel}.m2r.bin"
        log = recorded.HERE / name / f"{side}-dir" / f"pwal_{channel:04d}"
        if not log.exists():
            continue
        sent = [message for message in parsed(path.read_bytes()) if isinstance(message, LogEntries)]
        logged = [entry.logged() for message in sent for entry in message.entries]
        kept = [token for token in decode_all(log.read_bytes(), str(log)) if not isinstance(token, Marker)]
        assert logged == kept != []


def test_blobs_are_sent_with_their_content() -> None:
    found = parsed((recorded.HERE / "basic" / "wire" / "conn0.m2r.bin").read_bytes())
    entries = [entry for message in found if isinstance(message, LogEntries) for entry in message.entries]
    blobs = [blob for entry in entries for blob in entry.blobs]
    assert [(blob.blob_id, len(blob.content)) for blob in blobs] == [(1, 11), (2, 0), (3, 70000)]


@given(st.lists(messages, max_size=4), st.data())
def test_messages_round_trip_for_any_fragmentation(found: list[Message], choice: st.DataObject) -> None:
    data = b"".join(map(encode, found))
    cuts = sorted(choice.draw(st.lists(st.integers(0, len(data)), max_size=5)))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert parsed(*pieces) == found
    assert parsed(*(bytes((byte,)) for byte in data)) == found


@given(messages)
def test_truncated_message_waits_for_the_rest(message: Message) -> None:
    data = encode(message)
    for size in range(1, len(data)):
        parser = MessageParser()
        parser.feed(data[:size])
        assert parser.next_message() is None
        parser.feed(data[size:] + b"\x21")
        assert parser.next_message() == message
        assert parser.next_message() is None


def drained(data: bytes, size_max: int) -> None:
    parser = MessageParser(size_max=size_max)
    try:
        for at in range(0, len(data), 1000):
            parser.feed(data[at : at + 1000])
            while parser.next_message() is not None:
                pass
    except BadMessage:
        return


def test_mutated_streams_are_read_or_rejected() -> None:
    rng = random.Random(7)
    corpus = [path.read_bytes()[:3000] for path in STREAMS]
    for _ in range(10_000 if FULL else 1000):
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0x10, 0x11, 0x7F, 0xFF, rng.randrange(256)))
        drained(bytes(data), 1 << 20)


@pytest.mark.parametrize("kind", [0x00, 0x02, 0x40, 0x7F, 0xFF])
def test_unknown_type_is_rejected_after_the_earlier_messages(kind: int) -> None:
    parser = MessageParser()
    parser.feed(encode(GroupCommit(5)) + bytes((kind,)))
    assert parser.next_message() == GroupCommit(5)
    with pytest.raises(BadMessage, match=f"{kind:#04x}"):
        parser.next_message()


@pytest.mark.parametrize("data", [b"\x20\x01\0\0\0\0", b"\x21\x01", b"\x22\x00\0\0\0\0\0\0"])
def test_response_of_the_wrong_kind_is_rejected(data: bytes) -> None:
    with pytest.raises(BadMessage, match="response_type"):
        parsed(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x10\x01" + bytes(8) + b"\xff\xff\xff\xff",
        b"\x11" + bytes(8) + b"\xff\xff\xff\xff",
        b"\x11" + bytes(8) + b"\0\0\0\x01" + b"\x01" + bytes(8) + b"\x7f\xff\xff\xff",
        b"\x11" + bytes(8) + b"\0\0\0\x01" + b"\x0a" + bytes(8 + 4 + 4 + 16) + b"\xff\xff\xff\xff",
    ],
    ids=["string", "entries", "key", "blobs"],
)
def test_length_above_the_limit_is_rejected_at_once_without_allocation(data: bytes) -> None:
    parser = MessageParser(size_max=1 << 20)
    tracemalloc.start()
    try:
        parser.feed(data)
        with pytest.raises(BadMessage, match="bytes"):
            parser.next_message()
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_limit_applies_to_each_whole_message() -> None:
    entry = wire_entry(put(1, b"k", b"v" * 100, WriteVersion(1, 1)))
    message = LogEntries(1, (entry,) * 10, 7)
    size = len(encode(message))
    assert parsed(encode(message) * 3, size_max=size) == [message] * 3
    with pytest.raises(BadMessage, match="exceeds the limit"):
        parsed(encode(message), size_max=size - 1)


def test_log_of_a_replica_equals_the_recorded_one_for_each_type() -> None:
    version, blob = WriteVersion(1, 2), Blob(4, b"content")
    logged = {kind: WireEntry(kind, 9, b"k", b"v", version, (blob,)) for kind in (1, 5, 7, 8, 9, 10, 11, 255)}
    assert logged[1].logged() == put(9, b"k", b"v", version)
    assert logged[10].logged() == put(9, b"k", b"v", version, (4,))
    assert logged[10]._replace(blobs=()).logged() == put(9, b"k", b"v", version)
    assert logged[5].logged() == Entry(EntryType.REMOVE, 9, version, b"k")
    assert [logged[kind].logged() for kind in (7, 8, 9)] == [Entry(EntryType(kind), 9, version) for kind in (7, 8, 9)]
    assert [logged[kind].logged() for kind in (11, 255)] == [None, None]
    for kind in (0, 2, 3, 4, 6):
        with pytest.raises(BadMessage, match="markers must not be sent"):
            WireEntry(kind, 9, b"", b"", version).logged()


def test_value_out_of_range_is_rejected_by_the_encoder() -> None:
    with pytest.raises(LocalProtocolError, match="GroupCommit"):
        encode(GroupCommit(2**64))
    with pytest.raises(LocalProtocolError, match="LogEntries"):
        encode(LogEntries(1, (), 256))
    with pytest.raises(LocalProtocolError, match="other blobs were passed"):
        wire_entry(put(1, b"", b"", WriteVersion(1, 1), (1,)))


def test_long_message_in_many_pieces_is_read_in_linear_time() -> None:
    """Each piece is scanned at most once, and pieces are joined only when a message may be complete."""
    blob = Blob(1, bytes(8 << 20))
    data = encode(LogEntries(1, (WireEntry(10, 1, b"", b"", WriteVersion(1, 1), (blob,)),), 7))
    parser, joined = MessageParser(), 0
    for at in range(0, len(data), 4096):
        before = parser._data
        parser.feed(data[at : at + 4096])
        message = parser.next_message()
        joined += parser._data is not before
    assert message is not None
    assert joined < 5


@pytest.mark.parametrize("reads", [MessageParser, WireReader])
def test_many_blobs_in_many_pieces_are_each_read_once(
    reads: type[Parser[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender of tiny pieces cannot make a reader restart the entry for each."""
    blobs = tuple(Blob(number, bytes(20)) for number in range(1000))
    entry = WireEntry(10, 1, b"k", b"v", WriteVersion(1, 1), blobs)
    data = encode(LogEntries(1, (entry, entry), 7))
    looks, require = [0], Parser._require

    def counted(parser: Parser[object], at: int, size: int) -> int:
        looks[0] += 1
        return require(parser, at, size)

    monkeypatch.setattr(Parser, "_require", counted)
    parser = reads()
    found: list[object] = []
    for at in range(0, len(data), 32):
        Parser.feed(parser, data[at : at + 32])
        found += iter(parser.next_message, None)
    assert looks[0] < 10 * 2 * len(blobs)
    (message,) = found
    if isinstance(message, DiskEntries):
        assert message.blobs == blobs + blobs
        assert decode_all(message.disk, "") == [entry.logged()] * 2
    else:
        assert message == LogEntries(1, (entry, entry), 7)
    Parser.feed(parser, ACK)
    assert parser.next_message() == CommonAck()  # no bytes of earlier messages remain
