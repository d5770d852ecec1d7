"""Conversion of entries between the form of log files and the form of the wire, many at once, by compiled loops.

A master converts the entries that it has encoded for its own log, and a replica converts them back for its log, without
an object per entry. The result equals the result of `messages.py` and `entries.py`, byte for byte; these modules handle
entries with blobs, whose content is in files. Pure, except for the content of blobs that a caller passes in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import BadMessage
from flowstone.limestone.format.entries import Entry, decode, encode
from flowstone.limestone.format.entry_table import Bytes
from flowstone.limestone.format.messages import (
    MESSAGE_SIZE_MAX,
    Blob,
    Message,
    MessageType,
    Parser,
    SessionFlags,
    Starved,
    WireEntry,
    encode_blob_head,
    encode_entries,
    encode_entry_head,
)
from flowstone.limestone.format.transcode_kernels import (
    DONE,
    HEAD_SIZE,
    SINGLE,
    STARVED,
    log_entries,
    log_messages,
    to_wire,
)

SCRATCH_SIZE: Final = 1 << 20
"""Size of a reader's scratch buffer; longer input uses memory of its own."""

BLOB_WHOLE_MAX: Final = 1 << 20
"""Bytes of blobs that a reader returns with one message. Blobs beyond this sum are returned piece by piece."""

BLOBS_ONLY: Final = 255
"""Type of an entry that only carries blobs. Replicas store the blobs, but do not log entries of unknown types."""

_TYPE_ENTRIES: Final = int(MessageType.LOG_ENTRIES)
_BEGIN: Final = int(SessionFlags.BEGIN)
_ENDS: Final = int(SessionFlags.END | SessionFlags.FLUSH)
_HEAD: Final = struct.Struct(">BQI")


class BlobContent(NamedTuple):
    """Size and content of a blob. The pieces are read lazily, and can be iterated once."""

    size: int
    pieces: Iterable[bytes]


OpenBlob = Callable[[int], BlobContent | None]
"""Returns the content of the blob with this id, or None if the blob was deleted."""


def wire_parts(
    disk: bytes | memoryview,
    epoch: int,
    *,
    begin: bool,
    end: bool,
    compatible: bool = False,
    open_blob: OpenBlob | None = None,
) -> Iterator[bytes]:
    """Yield what is sent for whole log entries without markers: pieces, to be sent in order.

    This is one LOG_ENTRIES that begins and ends the session as requested. With `compatible`, there is one message for
    the begin, one for each entry, and one for the end, as in the original. An entry with blobs always has a message of
    its own, in as many pieces as its blobs have; each piece is read only after the previous one was consumed. Raise
    LocalProtocolError if `disk` has anything else, or a blob is too large for a message.
    """
    if not 0 <= epoch < 1 << 64:
        raise LocalProtocolError(f"epoch {epoch} is not a 64-bit number")
    flags, ends = _BEGIN if begin else 0, _ENDS if end else 0
    messages = _messages(bytes(disk), epoch, compatible, open_blob)
    if compatible:
        if begin:
            yield encode_entries(epoch, (), 0, flags)
        for message in messages:
            if isinstance(message, _BlobMessage):
                yield from message.pieces()
                yield bytes((message.flags,))
            else:
                yield message.tobytes()
        if end:
            yield encode_entries(epoch, (), 0, ends)
        return
    held: Bytes | None = None
    for message in messages:
        if held is not None:
            yield held.tobytes()
        if isinstance(message, _BlobMessage):
            yield from message.pieces()
            held = np.array([message.flags], np.uint8)
        else:
            held = message
        held[-1] |= flags
        flags = 0
    if held is not None:
        held[-1] |= ends
        yield held.tobytes()
    elif begin or end:
        yield encode_entries(epoch, (), 0, flags | ends)


def _messages(disk: bytes, epoch: int, alone: bool, open_blob: OpenBlob | None) -> Iterator[Bytes | _BlobMessage]:
    """Yield LOG_ENTRIES without flags, of at least one byte each; if `alone`, an array holds one message per entry."""
    buf, at = np.frombuffer(disk, np.uint8), 0
    big_epoch = int.from_bytes(epoch.to_bytes(8), "little")
    while at < buf.size:
        # An entry has at least 25 bytes, and grows by 12, or by 26 in a message of its own.
        out = np.empty((buf.size - at) * (51 if alone else 37) // 25 + HEAD_SIZE + 1, np.uint8)
        at, to, count, status = to_wire(buf, at, out, 0 if alone else HEAD_SIZE, big_epoch, alone)
        if count:
            if not alone:
                _HEAD.pack_into(out.data, 0, _TYPE_ENTRIES, epoch, count)
                out[to] = 0
                to += 1
            yield out[:to]
        if status == SINGLE:
            entry, at = _blob_entry(disk, at)
            yield from _blob_messages(entry, epoch, open_blob)
        elif status != DONE:
            raise LocalProtocolError(f"no whole entry at byte {at} of {buf.size}")


def _blob_entry(disk: bytes, at: int) -> tuple[Entry, int]:
    entry, end = decode(disk, at)
    if not isinstance(entry, Entry):
        raise LocalProtocolError(f"no whole entry at byte {at} of {len(disk)}")
    return entry, end


def _blob_messages(entry: Entry, epoch: int, open_blob: OpenBlob | None) -> Iterator[_BlobMessage]:
    """Return the message of an entry with blobs; before it, a message of the empty blobs if other blobs were deleted.

    GONE makes the replica keep its files for all empty blobs of a message. The first message, without GONE, replaces
    the files of blobs that are really empty."""
    blob_ids = entry.blob_ids
    if blob_ids and open_blob is None:
        raise LocalProtocolError(f"entry names blobs {blob_ids}, but their content was not passed")
    contents = [open_blob(blob_id) for blob_id in blob_ids if open_blob is not None]
    empty = [blob_id for blob_id, content in zip(blob_ids, contents, strict=True) if content and not content.size]
    if None in contents and empty:
        carrier = WireEntry(BLOBS_ONLY, entry.storage_id, b"", b"", entry.version)
        yield _BlobMessage(carrier, epoch, empty, [BlobContent(0, ())] * len(empty))
    head = WireEntry(entry.type, entry.storage_id, entry.key, entry.value, entry.version)
    yield _BlobMessage(head, epoch, blob_ids, contents)


class _BlobMessage:
    """A LOG_ENTRIES of one entry with blobs; `flags`, its last byte, is left to the caller."""

    def __init__(
        self, head: WireEntry, epoch: int, blob_ids: Sequence[int], contents: Sequence[BlobContent | None]
    ) -> None:
        self._head = head
        self._epoch = epoch
        self._blob_ids = blob_ids
        self._contents = contents
        self.flags = SessionFlags.GONE if None in contents else SessionFlags.NONE

    def pieces(self) -> Iterator[bytes]:
        blob_ids = self._blob_ids
        try:
            held = _HEAD.pack(_TYPE_ENTRIES, self._epoch, 1) + encode_entry_head(self._head, len(blob_ids))
            heads = [
                encode_blob_head(blob_id, content.size if content else 0)
                for blob_id, content in zip(blob_ids, self._contents, strict=True)
            ]
        except struct.error as error:
            raise LocalProtocolError(f"cannot encode entry with blobs {blob_ids}: {error}") from None
        for blob_head, content in zip(heads, self._contents, strict=True):
            held += blob_head
            for piece in content.pieces if content else ():
                yield held + piece if held else piece
                held = b""
        if held:
            yield held


@dataclass(frozen=True, slots=True)
class DiskEntries:
    """One LOG_ENTRIES, or several that add up to one: the bytes for the log, without markers.

    `flags` tell the replica to begin the session before the entries, or to end or flush it after them. `count` is the
    number of entries in `disk`. Blobs must be files before an entry that names them is in the log.
    """

    epoch: int
    flags: int
    disk: bytes
    count: int
    blobs: tuple[Blob, ...] = ()


@dataclass(frozen=True, slots=True)
class BlobPart:
    """A piece of a blob. All pieces come, in order, before the DiskEntries of their message."""

    blob_id: int
    data: bytes
    is_last: bool


class _Streams(Exception):
    """Raised at the start of a blob whose pieces are returned before its message is complete."""


class WireReader(Parser[DiskEntries | BlobPart]):
    """The receiving side of a log channel: `feed` bytes, and get what to write.

    Accepts what `MessageParser` accepts, except markers. It needs memory for the entries of one message, for
    BLOB_WHOLE_MAX bytes of its blobs, and for the bytes that are fed at once.
    """

    def __init__(self, size_max: int = MESSAGE_SIZE_MAX, scratch: Bytes | None = None) -> None:
        """`scratch` is a buffer that several readers of one thread may share; it is used only during a call."""
        super().__init__(size_max=size_max)
        self._scratch = np.empty(SCRATCH_SIZE, np.uint8) if scratch is None else scratch
        # Of the incomplete message: bytes for the log, number of entries in them, number of entries read.
        self._parts: list[bytes] = []
        self._logged = self._done = 0
        self._blobs: list[Blob] = []
        self._refused: BadMessage | None = None
        # Id and remaining bytes of a blob that arrives piece by piece.
        self._coming = self._left = 0
        # Bytes of blobs of the unfinished message: returned as BlobPart, and held until the message is complete.
        self._streamed = self._whole = 0

    @property
    def held(self) -> int:
        """Bytes of the incomplete message in memory: entries and blobs, without the pieces that were returned."""
        return self._available + (0 if self._head is None else self._size - self._streamed)

    def feed(self, data: bytes) -> Iterator[DiskEntries | BlobPart | Message]:  # type: ignore[override]
        """Yield what these bytes complete. Raise BadMessage after all complete messages: close the connection."""
        super().feed(data)
        return iter(self.next_message, None)

    def _out(self, size: int) -> Bytes:
        return self._scratch if size <= SCRATCH_SIZE else np.empty(size, np.uint8)

    def _message(self) -> DiskEntries | BlobPart | Message:
        data, at = self._data, self._at
        if data[at] == _TYPE_ENTRIES:
            out = self._out(len(data) - at)
            end, to, logged, flags = log_messages(np.frombuffer(data, np.uint8), at, self._size_max, out)
            if end > at:
                self._taken(end)
                return DiskEntries(int.from_bytes(data[at + 1 : at + 9]), flags, out[:to].tobytes(), logged)
        return super()._message()

    def _log_entries(self) -> DiskEntries | BlobPart:
        assert self._head is not None
        epoch, count = self._head
        while self._done < count:
            if self._left:
                return self._blob_part()
            with suppress(_Streams):
                self._read_entries(count - self._done)
        flags = self._flags()
        if self._refused is not None:
            raise self._refused
        entries = DiskEntries(epoch, flags, b"".join(self._parts), self._logged, tuple(self._blobs))
        self._parts, self._blobs = [], []
        self._logged = self._done = self._streamed = self._whole = 0
        return entries

    def _read_entries(self, count: int) -> None:
        """Read entries up to and including the first with blobs."""
        if self._unfinished is not None:
            self._read_single()
            return
        buf, out = np.frombuffer(self._data, np.uint8), self._out(len(self._data) - self._at)
        end, to, done, logged, status, size = log_entries(buf, self._at, count, self._size_max - self._size, out)
        if to:
            self._parts.append(out[:to].tobytes())
        self._logged += logged
        self._done += done
        self._read_to(end)
        if status == STARVED:
            self._require(self._at, size)
        elif status == SINGLE:
            self._read_single()

    def _blob(self) -> Blob:
        content_at, blob_id, size = self._blob_head()
        if self._whole + size <= BLOB_WHOLE_MAX:
            blob = super()._blob()
            self._whole += size
            return blob
        self._check_size(content_at + size)
        self._read_to(content_at)
        self._coming, self._left = blob_id, size
        raise _Streams

    def _blob_part(self) -> BlobPart:
        end = min(self._at + self._left, len(self._data))
        if end == self._at:
            self._wanted = 1
            raise Starved
        part = BlobPart(self._coming, self._data[self._at : end], is_last=end - self._at == self._left)
        self._left -= len(part.data)
        self._streamed += len(part.data)
        self._read_to(end)
        if part.is_last:
            self._come.append(Blob(self._coming, b"", has_come=True))
        return part

    def _read_single(self) -> None:
        entry = self._entry()
        self._done += 1
        self._blobs += entry.blobs
        try:
            logged = entry.logged()
        except BadMessage as error:
            self._refused = self._refused or error  # raised after the rest of the message was read
            return
        if logged is not None:
            self._parts.append(encode(logged))
            self._logged += 1
