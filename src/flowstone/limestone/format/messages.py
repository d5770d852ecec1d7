"""Encoding of the messages of Limestone's replication protocol, version 2.

Pure; the only state is the bytes of an incomplete message (`docs/spec/limestone.md#wire-protocol`). Messages have no
frames: only the type tells the length, so after an invalid message the connection must be closed. No length is trusted:
it counts against `size_max` before its bytes are awaited, and memory is allocated only for bytes that have arrived.
Never decides when a message is allowed: master and replica do.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum, IntFlag
from typing import Final, Generic, NamedTuple, TypeVar

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import BadMessage
from flowstone.limestone.format.entries import Entry, EntryType, WriteVersion, put

PROTOCOL_VERSION: Final = 2
MESSAGE_SIZE_MAX: Final = 1 << 30
"""Default maximum size of one message, blobs included. The original is limited only by its memory."""

ENTRY_SIZE_MIN: Final = 37
PLACEHOLDER_SECRET: Final = b"server_.get_session_secret()"
"""The secret in SESSION_BEGIN_ACK of every original replica: a placeholder left in its source."""


class MessageType(IntEnum):
    """The first byte of a message. 0x02 is reserved, and closes a connection like any unknown type."""

    SESSION_BEGIN = 0x01
    GROUP_COMMIT = 0x03
    GC_BOUNDARY_SWITCH = 0x04
    LOG_CHANNEL_CREATE = 0x10
    LOG_ENTRIES = 0x11
    SESSION_BEGIN_ACK = 0x20
    ACK = 0x21
    ERROR = 0x22
    RDMA_INIT = 0x30
    RDMA_INIT_ACK = 0x31


class ErrorCode(IntEnum):
    """Codes of ERROR that the protocol defines."""

    UNEXPECTED_TYPE = 1
    CONTROL_CHANNEL_EXISTS = 10
    CONTROL_CHANNEL_WRONG_TYPE = 11
    CONTROL_CHANNEL_CONFUSED = 12
    UNSUPPORTED_VERSION = 13
    TOO_MANY_LOG_CHANNELS = 20
    LOG_CHANNEL_WRONG_TYPE = 21
    LOG_CHANNEL_CONFUSED = 22
    RDMA_WRONG_CHANNEL = 100
    RDMA_NOT_AVAILABLE = 101
    RDMA_NO_ADDRESS = 102
    RDMA_INITIALISED_BEFORE = 103


class SessionFlags(IntFlag):
    """Flags of a LOG_ENTRIES message: begin the session before the entries, end or flush it after them."""

    NONE = 0
    BEGIN = 0x01
    END = 0x02
    FLUSH = 0x04
    GONE = 0x80
    """An extension for catch-up between Flowstone peers: the empty blobs of this message were deleted at the master, or
    an earlier message has stored them. It is never sent to the original, which ignores the bit."""


class Blob(NamedTuple):
    blob_id: int
    content: bytes
    has_come: bool = False
    """True if the content was returned before, piece by piece; then `content` is empty."""


class WireEntry(NamedTuple):
    """An entry on the wire: every type has all fields, and blobs include their content."""

    type: int
    storage_id: int
    key: bytes
    value: bytes
    version: WriteVersion
    blobs: tuple[Blob, ...] = ()

    def logged(self) -> Entry | None:
        """Return the entry that a replica writes to its log, as the original does; None for unknown larger types.

        Raise BadMessage for a marker, because the flags of a message begin and end sessions."""
        if self.type == EntryType.NORMAL:
            return put(self.storage_id, self.key, self.value, self.version)
        if self.type == EntryType.NORMAL_WITH_BLOB:
            blob_ids = tuple(blob.blob_id for blob in self.blobs)
            return put(self.storage_id, self.key, self.value, self.version, blob_ids)
        if self.type == EntryType.REMOVE:
            return Entry(EntryType.REMOVE, self.storage_id, self.version, self.key)
        if self.type in (EntryType.CLEAR_STORAGE, EntryType.ADD_STORAGE, EntryType.REMOVE_STORAGE):
            return Entry(EntryType(self.type), self.storage_id, self.version)
        if self.type > max(EntryType):
            return None
        raise BadMessage(f"entry of type {self.type} in LOG_ENTRIES: markers must not be sent")


def wire_entry(entry: Entry, blobs: tuple[Blob, ...] = ()) -> WireEntry:
    """Return the wire form of an entry; `blobs` are the blobs that it names, in order."""
    if entry.blob_ids != tuple(blob.blob_id for blob in blobs):
        raise LocalProtocolError(f"entry names blobs {entry.blob_ids}, but other blobs were passed")
    return WireEntry(entry.type, entry.storage_id, entry.key, entry.value, entry.version, blobs)


class SessionBegin(NamedTuple):
    """Opens the control channel. The original leaves all fields except the version empty."""

    protocol_version: int = PROTOCOL_VERSION
    configuration_id: bytes = b""
    epoch: int = 0
    connection_type: int = 0


class SessionBeginAck(NamedTuple):
    session_secret: bytes = PLACEHOLDER_SECRET


class GroupCommit(NamedTuple):
    """The epoch has become durable at the master, or will as soon as the replica acknowledges it."""

    epoch: int


class GcBoundarySwitch(NamedTuple):
    """Known, but never sent; a replica closes the connection."""

    write_version: int


class LogChannelCreate(NamedTuple):
    """Opens a log channel."""

    channel_id: int
    secret: bytes = b""
    connection_type: int = 1


class LogEntries(NamedTuple):
    """Entries of a session. The flags follow the entries, so no entry may be written before all have arrived."""

    epoch: int
    entries: tuple[WireEntry, ...] = ()
    flags: int = SessionFlags.NONE


class CommonAck(NamedTuple):
    pass


class Error(NamedTuple):
    code: int
    message: str


class RdmaInit(NamedTuple):
    slot_count: int


class RdmaInitAck(NamedTuple):
    address: int


Message = (
    SessionBegin
    | SessionBeginAck
    | GroupCommit
    | GcBoundarySwitch
    | LogChannelCreate
    | LogEntries
    | CommonAck
    | Error
    | RdmaInit
    | RdmaInitAck
)

ACK: Final = b"\x21\x00"

_ENTRIES_HEAD: Final = struct.Struct(">BQI")
_ENTRY_HEAD: Final = struct.Struct(">BQI")
_LENGTH: Final = struct.Struct(">I")
_ENTRY_TAIL: Final = struct.Struct(">QQI")
_BLOB_HEAD: Final = struct.Struct(">QI")
_SUCCESS: Final = 0
_FAILURE: Final = 1

# Bodies of messages other than LOG_ENTRIES: numbers, then at most one string. In SESSION_BEGIN a number follows it.
_BODIES: Final = {
    MessageType.SESSION_BEGIN: (struct.Struct(">BQ"), True, 8),
    MessageType.GROUP_COMMIT: (struct.Struct(">Q"), False, 0),
    MessageType.GC_BOUNDARY_SWITCH: (struct.Struct(">H"), False, 0),
    MessageType.LOG_CHANNEL_CREATE: (struct.Struct(">BQ"), True, 0),
    MessageType.SESSION_BEGIN_ACK: (struct.Struct(">B"), True, 0),
    MessageType.ACK: (struct.Struct(">B"), False, 0),
    MessageType.ERROR: (struct.Struct(">BH"), True, 0),
    MessageType.RDMA_INIT: (struct.Struct(">I"), False, 0),
    MessageType.RDMA_INIT_ACK: (struct.Struct(">Q"), False, 0),
}


def encode(message: Message) -> bytes:
    """Encode a message. Raise LocalProtocolError if its numbers or lengths do not fit the protocol."""
    try:
        return _encode(message)
    except struct.error as error:
        raise LocalProtocolError(f"cannot encode {type(message).__name__}: {error}") from None


def _encode(message: Message) -> bytes:
    match message:
        case LogEntries(epoch, entries, flags):
            return encode_entries(epoch, map(encode_entry, entries), len(entries), flags)
        case SessionBegin(version, configuration_id, epoch, connection_type):
            head = _fields(MessageType.SESSION_BEGIN, (connection_type, version), configuration_id)
            return head + struct.pack(">Q", epoch)
        case SessionBeginAck(secret):
            return _fields(MessageType.SESSION_BEGIN_ACK, (_SUCCESS,), secret)
        case GroupCommit(epoch):
            return _fields(MessageType.GROUP_COMMIT, (epoch,))
        case GcBoundarySwitch(write_version):
            return _fields(MessageType.GC_BOUNDARY_SWITCH, (write_version,))
        case LogChannelCreate(channel_id, secret, connection_type):
            return _fields(MessageType.LOG_CHANNEL_CREATE, (connection_type, channel_id), secret)
        case Error(code, text):
            return _fields(MessageType.ERROR, (_FAILURE, code), text.encode("utf-8", "surrogateescape"))
        case RdmaInit(slot_count):
            return _fields(MessageType.RDMA_INIT, (slot_count,))
        case RdmaInitAck(address):
            return _fields(MessageType.RDMA_INIT_ACK, (address,))
        case CommonAck():
            return ACK


def _fields(kind: MessageType, numbers: tuple[int, ...], text: bytes | None = None) -> bytes:
    head = bytes((kind,)) + _BODIES[kind][0].pack(*numbers)
    return head if text is None else b"".join((head, _LENGTH.pack(len(text)), text))


def encode_entries(epoch: int, encoded: Iterable[bytes], count: int, flags: int) -> bytes:
    """Return a LOG_ENTRIES of `count` encoded entries."""
    head = _ENTRIES_HEAD.pack(MessageType.LOG_ENTRIES, epoch, count)
    return b"".join((head, *encoded, struct.pack(">B", flags)))


def encode_entry(entry: WireEntry) -> bytes:
    parts = [encode_entry_head(entry, len(entry.blobs))]
    for blob_id, content, _ in entry.blobs:
        parts += (encode_blob_head(blob_id, len(content)), content)
    return b"".join(parts)


def encode_entry_head(entry: WireEntry, blob_count: int) -> bytes:
    """Return the encoding of an entry up to its blobs."""
    kind, storage_id, key, value, version, _ = entry
    head, tail = _ENTRY_HEAD.pack(kind, storage_id, len(key)), _ENTRY_TAIL.pack(*version, blob_count)
    return b"".join((head, key, _LENGTH.pack(len(value)), value, tail))


def encode_blob_head(blob_id: int, size: int) -> bytes:
    """Return the bytes before the content of a blob: its id and its size."""
    return _BLOB_HEAD.pack(blob_id, size)


class Starved(Exception):
    """The buffer ends inside a message."""


Entries = TypeVar("Entries")


class Parser(Generic[Entries]):
    """Takes the bytes of one direction of a connection, returns messages: `feed`, then `next_message` until None.

    `next_message` raises BadMessage after it has returned all messages before the invalid one; close the connection
    then. Subclasses implement `_log_entries`, which is called again after it was starved.
    """

    def __init__(self, *, size_max: int = MESSAGE_SIZE_MAX) -> None:
        self._size_max = size_max
        self._data = b""
        self._fed: list[bytes] = []
        self._at = 0
        self._wanted = 1
        """Number of bytes from `_at` on without which parsing makes no progress."""
        self._available = 0
        self._head: tuple[int, int] | None = None
        """Epoch and number of entries of an incomplete LOG_ENTRIES; `_at` is the end of the part that was read."""
        self._size = 0
        """Size of that part."""
        self._unfinished: tuple[WireEntry, int] | None = None
        """An entry that was read up to its blobs, and its number of blobs; `_come` contains the blobs read so far."""
        self._come: list[Blob] = []

    def feed(self, data: bytes) -> None:
        self._fed.append(data)
        self._available += len(data)

    def next_message(self) -> Message | Entries | None:
        if self._available < self._wanted:
            self._forget()
            return None
        if self._fed:
            self._data = b"".join((self._data[self._at :], *self._fed)) if self._available else b""
            self._fed, self._at = [], 0
        try:
            message = self._log_entries() if self._head is not None else self._message()
        except Starved:
            self._forget()
            return None
        self._wanted = 1
        return message

    def _forget(self) -> None:
        """Drop the bytes that were read, so that an idle connection does not hold its last message."""
        if self._at:
            self._data, self._at = self._data[self._at :], 0

    def _require(self, at: int, size: int) -> int:
        """Return the end offset of these bytes. Raise Starved if they have not arrived, BadMessage if the message
        would be too long."""
        end = at + size
        self._check_size(end)
        return self._wait_for(end)

    def _wait_for(self, end: int) -> int:
        """Return this end offset. Raise Starved if the bytes before it have not arrived."""
        if end > len(self._data):
            self._wanted = end - self._at
            raise Starved
        return end

    def _check_size(self, end: int) -> None:
        if self._size + end - self._at > self._size_max:
            raise BadMessage(f"message exceeds the limit of {self._size_max} bytes")

    def _taken(self, end: int) -> None:
        self._available -= end - self._at
        self._at = end

    def _message(self) -> Message | Entries:
        try:
            kind = MessageType(self._data[self._at])
        except ValueError:
            raise BadMessage(f"unknown message type {self._data[self._at]:#04x}") from None
        self._size = 0
        if kind is MessageType.LOG_ENTRIES:
            end = self._require(self._at, _ENTRIES_HEAD.size)
            _, epoch, count = _ENTRIES_HEAD.unpack_from(self._data, self._at)
            if _ENTRIES_HEAD.size + count * ENTRY_SIZE_MIN > self._size_max:
                raise BadMessage(f"{count} entries in a message exceed the limit of {self._size_max} bytes")
            self._head, self._size = (epoch, count), _ENTRIES_HEAD.size
            self._taken(end)
            return self._log_entries()
        numbers, has_text, tail_size = _BODIES[kind]
        at = self._at + 1
        end = self._require(at, numbers.size)
        fields, text = numbers.unpack_from(self._data, at), b""
        if has_text:
            text_at = self._require(end, _LENGTH.size)
            end = self._require(text_at, _LENGTH.unpack_from(self._data, end)[0])
            text = self._data[text_at:end]
        tail_at = end
        if tail_size:
            end = self._require(end, tail_size)
        message = _decoded(kind, fields, text, self._data[tail_at:end])
        self._taken(end)
        return message

    def _log_entries(self) -> Entries:
        raise NotImplementedError

    def _flags(self) -> int:
        """Read the last byte of a LOG_ENTRIES."""
        end = self._require(self._at, 1)
        flags = self._data[end - 1]
        self._taken(end)
        self._head = None
        return flags

    def _read_to(self, end: int) -> None:
        """Note that everything before `end` has been read."""
        self._size += end - self._at
        self._taken(end)

    def _entry(self) -> WireEntry:
        """Return the next entry. If it was starved among its blobs, resume with the missing one."""
        if self._unfinished is None:
            entry, blob_count, end = self._entry_without_blobs()
            self._require(end, blob_count * _BLOB_HEAD.size)
            self._read_to(end)
            if not blob_count:
                return entry
            self._unfinished = entry, blob_count
        entry, blob_count = self._unfinished
        while len(self._come) < blob_count:
            self._come.append(self._blob())
        entry = entry._replace(blobs=tuple(self._come))
        self._unfinished, self._come = None, []
        return entry

    def _blob(self) -> Blob:
        content_at, blob_id, size = self._blob_head()
        end = self._require(content_at, size)
        blob = Blob(blob_id, self._data[content_at:end])
        self._read_to(end)
        return blob

    def _blob_head(self) -> tuple[int, int, int]:
        """Return the offset of the content of the next blob, its id and its size."""
        content_at = self._require(self._at, _BLOB_HEAD.size)
        return content_at, *_BLOB_HEAD.unpack_from(self._data, self._at)

    def _entry_without_blobs(self) -> tuple[WireEntry, int, int]:
        """Return the next entry, the number of its blobs, and the offset of the first."""
        data, require = self._data, self._require
        key_at = require(self._at, _ENTRY_HEAD.size)
        kind, storage_id, key_size = _ENTRY_HEAD.unpack_from(data, self._at)
        key_end = require(key_at, key_size)
        value_at = require(key_end, _LENGTH.size)
        value_end = require(value_at, _LENGTH.unpack_from(data, key_end)[0])
        end = require(value_end, _ENTRY_TAIL.size)
        major, minor, blob_count = _ENTRY_TAIL.unpack_from(data, value_end)
        version = WriteVersion(major, minor)
        return WireEntry(kind, storage_id, data[key_at:key_end], data[value_at:value_end], version), blob_count, end


class MessageParser(Parser[LogEntries]):
    """Returns all messages decoded, entry by entry."""

    def __init__(self, *, size_max: int = MESSAGE_SIZE_MAX) -> None:
        super().__init__(size_max=size_max)
        self._entries: list[WireEntry] = []

    def _log_entries(self) -> LogEntries:
        assert self._head is not None
        epoch, count = self._head
        entries = self._entries
        while len(entries) < count:
            entries.append(self._entry())
        message = LogEntries(epoch, tuple(entries), self._flags())
        self._entries = []
        return message


def _decoded(kind: MessageType, fields: tuple[int, ...], text: bytes, tail: bytes) -> Message:
    match kind:
        case MessageType.SESSION_BEGIN:
            return SessionBegin(fields[1], text, int.from_bytes(tail), fields[0])
        case MessageType.GROUP_COMMIT:
            return GroupCommit(fields[0])
        case MessageType.GC_BOUNDARY_SWITCH:
            return GcBoundarySwitch(fields[0])
        case MessageType.LOG_CHANNEL_CREATE:
            return LogChannelCreate(fields[1], text, fields[0])
        case MessageType.RDMA_INIT:
            return RdmaInit(fields[0])
        case MessageType.RDMA_INIT_ACK:
            return RdmaInitAck(fields[0])
    if fields[0] != (_FAILURE if kind is MessageType.ERROR else _SUCCESS):
        raise BadMessage(f"{kind.name} with response_type {fields[0]}")
    if kind is MessageType.ERROR:
        return Error(fields[1], text.decode("utf-8", "surrogateescape"))
    return SessionBeginAck(text) if kind is MessageType.SESSION_BEGIN_ACK else CommonAck()
