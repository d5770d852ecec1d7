"""Targets for Limestone: log files in every reading mode, streams of messages, and the small files."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from flowstone.limestone.errors import BadMessage
from flowstone.limestone.format import catalog, manifest
from flowstone.limestone.format import wire_extensions as extensions
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, encode, put, remove, walk
from flowstone.limestone.format.entry_walk import EntryTail, tables
from flowstone.limestone.format.epoch_file import parse, record
from flowstone.limestone.format.log_scan import INSPECT, RECOVERY, REPAIR, REPAIR_CUT, STARTUP, LogScan, ScanMode
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.format.messages import (
    Blob,
    CommonAck,
    Error,
    GroupCommit,
    LogChannelCreate,
    LogEntries,
    Message,
    MessageParser,
    SessionBegin,
    SessionBeginAck,
    WireEntry,
    wire_entry,
)
from flowstone.limestone.format.messages import encode as encode_message
from flowstone.limestone.format.transcode import DiskEntries, WireReader
from flowstone.limestone.format.wire_extensions import Action, ControlParser, Hello, HelloAck, Prepare
from flowstone.limestone.store.latest_entries import Winners
from tests.limestone.plain_state import Snapshot, encode_compacted, encode_snapshot

MODES = (STARTUP, INSPECT, REPAIR, REPAIR_CUT, RECOVERY)


def log_file(data: bytes) -> None:
    """Check that every valid entry can be encoded again, and that every change is inside the file."""
    for mode in MODES:
        snapshot, scan = Snapshot(), LogScan(walk(lambda at, size: data[at : at + size], len(data)), 5, mode)
        snapshot.add(scan)
        changes = scan.changes
        assert all(mark < len(data) for mark in changes.marks)
        assert changes.cut is None or changes.cut < len(data)
        assert scan.verdict.is_clean or scan.findings
        assert len(encode_snapshot(snapshot.changes(with_removes=True))) <= len(data) + 9
        encode_compacted(snapshot.rows())
        by_columns(data, mode, scan, snapshot)


def by_columns(data: bytes, mode: ScanMode, plain: LogScan, state: Snapshot) -> None:
    """Check that the compiled path agrees, and reads only existing bytes."""
    scan, winners = LogScan((), 5, mode), Winners()
    for part in tables(lambda at, size: data[at : at + size], len(data)):
        if isinstance(part, EntryTail):
            scan.take_end(*part)
            break
        takes = np.empty(part.table.shape[1], np.uint8)
        goes_on = scan.take_table(part.table, takes, part.base)
        winners.add(part.buf, part.base, 1, part.table, takes)
        if not goes_on:
            break
    assert (scan.findings, scan.changes, scan.counted) == (plain.findings, plain.changes, plain.counted)
    found = winners.sorted()
    wanted = state.changes(with_removes=True)
    assert [found.key(place) for place in range(len(found.rows))] == [entry.key for entry in wanted]
    assert (winners.max_blob_id, winners.cleared) == (state.max_blob_id, state.cleared)


def stream(data: bytes) -> None:
    """Check that one piece and two give the same messages, each equal to its bytes."""
    found: list[bytes] = []
    for pieces in ((data,), (data[: len(data) // 2], data[len(data) // 2 :])):
        parser, written = MessageParser(size_max=1 << 20), b""
        for piece in pieces:
            parser.feed(piece)
            while (message := parser.next_message()) is not None:
                written += encode_message(message)
                if isinstance(message, LogEntries):
                    for entry in message.entries:
                        with suppress(BadMessage):
                            entry.logged()
        assert data.startswith(written)
        found.append(written)
    assert found[0] == found[1]


def log_channel(data: bytes) -> None:
    """Check that one piece and two give the same bytes for the log, or the same error."""
    found: list[tuple[bytes, str]] = []
    for pieces in ((data,), (data[: len(data) // 2], data[len(data) // 2 :])):
        reader, disk, refusal = WireReader(1 << 20), b"", ""
        try:
            for piece in pieces:
                for message in reader.feed(piece):
                    disk += message.disk if isinstance(message, DiskEntries) else b""
        except BadMessage as error:
            refusal = str(error)
        assert len(disk) <= len(data)
        found.append((disk, refusal))
    assert found[0] == found[1]


def control_channel(data: bytes) -> None:
    """Check that one piece and two give the same messages and frames, each of which round-trips, or an error."""
    found: list[tuple[list[object], str]] = []
    for pieces in ((data,), (data[: len(data) // 2], data[len(data) // 2 :])):
        parser, refusal = ControlParser(extended=True), ""
        read: list[object] = []
        try:
            for piece in pieces:
                parser.feed(piece)
                while (message := parser.next_message()) is not None:
                    read.append(message)
                    if isinstance(message, extensions.Frame):
                        again = ControlParser(extended=True)
                        again.feed(extensions.encode(message))
                        assert again.next_message() == message
        except BadMessage as error:
            refusal = str(error)
        found.append((read, refusal))
    assert found[0] == found[1]


def epochs(data: bytes) -> None:
    found = parse(data)
    assert parse(data[: found.sound_size]).durable == found.durable
    assert not found.is_damaged or found.durable <= found.salvaged


def manifest_file(data: bytes) -> None:
    found = manifest.parse(data, "limestone-manifest.json")
    assert manifest.parse(manifest.encode(found), "again") == found


def catalog_file(data: bytes) -> None:
    found = catalog.parse(data, "compaction_catalog")
    assert catalog.parse(catalog.encode(found), "again") == found


def _session(epoch: int) -> bytes:
    version = WriteVersion(epoch, 1)
    inside = (
        put(1, b"key", b"value", version),
        put(2, b"key", b"value", version, (1, 2)),
        remove(1, b"other", version),
        Entry(EntryType.CLEAR_STORAGE, 3, version),
        Entry(EntryType.ADD_STORAGE, 4, version),
        Entry(EntryType.REMOVE_STORAGE, 5, version),
    )
    markers = Marker(EntryType.MARKER_BEGIN, epoch), Marker(EntryType.MARKER_END, epoch)
    return encode(markers[0]) + b"".join(map(encode, inside)) + encode(markers[1])


def _stream(*messages: Message) -> bytes:
    return b"".join(map(encode_message, messages))


LOGS = (
    _session(4) + _session(5),
    _session(5) + _session(6)[:-20],
    _session(5) + bytes(30),
    b"\x06" + _session(6)[1:] + _session(5),
)
_PUT = wire_entry(put(1, b"key", b"value", WriteVersion(1, 1)))
_BLOBS = WireEntry(10, 1, b"key", b"value", WriteVersion(1, 1), (Blob(1, b"content"), Blob(2, b"")))
STREAMS = (
    _stream(LogChannelCreate(0), LogEntries(1, (), 1), LogEntries(1, (_PUT, _BLOBS), 6)),
    _stream(SessionBegin(), GroupCommit(1), GroupCommit(2)),
    _stream(SessionBeginAck(), CommonAck(), Error(13, "Unsupported protocol version"), CommonAck()),
)
CONTROLS = (
    _stream(SessionBegin())
    + extensions.encode(Hello("7036c76f-ef9c-4258-9711-665964110f2a", 7, 3, bytes(32), bytes(32)))
    + extensions.encode(Prepare(Action.SEED, 7))
    + _stream(GroupCommit(8)),
    _stream(SessionBeginAck(extensions.offer(bytes(32))))
    + extensions.encode(HelloAck("7036c76f-ef9c-4258-9711-665964110f2a", None, 7, bytes(32)))
    + _stream(CommonAck(), Error(200, "who is there?")),
)
EPOCHS = (record(1) + record(2), record(5) + record(6)[:4], record(5) + bytes(9), b"")
MANIFESTS = (
    manifest.encode(Manifest("7036c76f-ef9c-4258-9711-665964110f2a")),
    manifest.encode(Manifest(None, 4, "1.0")),
)
CATALOGS = (
    catalog.encode(Catalog((("pwal_0000.compacted", 1),), ("pwal_0000.01794772615522.0",), 7, 3)),
    catalog.encode(Catalog()),
)
