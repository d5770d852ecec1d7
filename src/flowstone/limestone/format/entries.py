"""Encoding of the entries of `pwal_*`, epoch, snapshot and compacted files.

Pure functions over bytes (`docs/spec/limestone.md#log-entries-on-disk`). All persistent formats share this encoding.
Before format 6 sessions had no end marker, which matters only to code that follows snippets. A length is checked
against the available bytes before memory is allocated for it. Never decides whether an entry counts: `log_scan.py`
does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import DamagedFile

LENGTH_MAX: Final = (1 << 32) - 1
"""Maximum length of a key, of a value, and of a list of blobs."""

WINDOW_SIZE: Final = 1 << 20
"""Bytes that `walk` reads at once. A longer entry is read as a whole."""

NO_CRC: Final = 1
"""The checksum type of end markers: none. No version of Limestone has written other types."""


class EntryType(IntEnum):
    """The first byte of an entry."""

    NORMAL = 1
    MARKER_BEGIN = 2
    MARKER_END = 3
    MARKER_DURABLE = 4
    REMOVE = 5
    MARKER_INVALIDATED_BEGIN = 6
    CLEAR_STORAGE = 7
    ADD_STORAGE = 8
    REMOVE_STORAGE = 9
    NORMAL_WITH_BLOB = 10


STORAGE_TYPES: Final = frozenset({EntryType.CLEAR_STORAGE, EntryType.ADD_STORAGE, EntryType.REMOVE_STORAGE})
"""Entries about a whole storage."""

MARKER_TYPES: Final = frozenset(
    {EntryType.MARKER_BEGIN, EntryType.MARKER_END, EntryType.MARKER_DURABLE, EntryType.MARKER_INVALIDATED_BEGIN}
)


class WriteVersion(NamedTuple):
    """The version of an entry, ordered by major, then minor. The top bit of minor marks long transactions."""

    major: int
    minor: int


class Entry(NamedTuple):
    """A change of one key or of a storage. Key, value and blobs are empty if the type has none."""

    type: EntryType
    storage_id: int
    version: WriteVersion
    key: bytes = b""
    value: bytes = b""
    blob_ids: tuple[int, ...] = ()


class Marker(NamedTuple):
    """The begin or end of a session in a log file, or a durable epoch in an epoch file."""

    type: EntryType
    epoch: int


class Torn(NamedTuple):
    """The file ends inside an entry of this type."""

    type: EntryType


class Unknown(NamedTuple):
    """A byte that begins no entry. Nothing after it can be read, because entries have no frames."""

    byte: int
    zeros: bool = False
    """True if this byte and all after it are 0: the file size reached the disk before the content."""


Token = Entry | Marker | Torn | Unknown

_NORMAL = struct.Struct("<BIIQ")
_REMOVE = struct.Struct("<BIQ")
_STORAGE = struct.Struct("<BQQQ")
_MARKER = struct.Struct("<BQ")
_END = struct.Struct("<BQB")
_VERSION = struct.Struct("<QQ")
_COUNT = struct.Struct("<I")
_LENGTHS = struct.Struct("<II")

MARKER_SIZE: Final = _MARKER.size
"""Size of all markers except the end marker, which has one byte more."""

_NORMAL_SIZE: Final = _NORMAL.size + _VERSION.size
_REMOVE_SIZE: Final = _REMOVE.size + _VERSION.size

# Plain integers: enumerations hash and compare in Python code, which would slow down every entry.
_TYPES: Final = {type.value: type for type in EntryType}
_NORMAL_BYTE: Final = EntryType.NORMAL.value
_REMOVE_BYTE: Final = EntryType.REMOVE.value
_BLOB_BYTE: Final = EntryType.NORMAL_WITH_BLOB.value
_SIZES: Final = {
    EntryType.MARKER_BEGIN.value: _MARKER.size,
    EntryType.MARKER_END.value: _END.size,
    EntryType.MARKER_DURABLE.value: _MARKER.size,
    EntryType.MARKER_INVALIDATED_BEGIN.value: _MARKER.size,
    EntryType.CLEAR_STORAGE.value: _STORAGE.size,
    EntryType.ADD_STORAGE.value: _STORAGE.size,
    EntryType.REMOVE_STORAGE.value: _STORAGE.size,
}


def put(storage_id: int, key: bytes, value: bytes, version: WriteVersion, blob_ids: tuple[int, ...] = ()) -> Entry:
    """Return an entry that sets a key. Without blobs it is a NORMAL entry, as in the original."""
    kind = EntryType.NORMAL_WITH_BLOB if blob_ids else EntryType.NORMAL
    return Entry(kind, storage_id, version, key, value, blob_ids)


def remove(storage_id: int, key: bytes, version: WriteVersion) -> Entry:
    return Entry(EntryType.REMOVE, storage_id, version, key)


def encode(token: Entry | Marker) -> bytes:
    """Encode an entry or marker. Raise LocalProtocolError if its numbers or lengths do not fit the format."""
    try:
        if isinstance(token, Marker):
            if token.type is EntryType.MARKER_END:
                return _END.pack(token.type, token.epoch, NO_CRC)
            if token.type not in MARKER_TYPES:
                raise LocalProtocolError(f"cannot encode {token.type.name} as a marker")
            return _MARKER.pack(token.type, token.epoch)
        kind, storage_id, version, key, value, blob_ids = token
        if kind is EntryType.NORMAL:
            head = _NORMAL.pack(_NORMAL_BYTE, len(key), len(value), storage_id)
            return b"".join((head, key, _VERSION.pack(*version), value))
        if kind is EntryType.REMOVE:
            return b"".join((_REMOVE.pack(kind, len(key), storage_id), key, _VERSION.pack(*version)))
        if kind is EntryType.NORMAL_WITH_BLOB:
            head = _NORMAL.pack(kind, len(key), len(value), storage_id)
            blobs = struct.pack(f"<I{len(blob_ids)}Q", len(blob_ids), *blob_ids)
            return b"".join((head, key, _VERSION.pack(*version), value, blobs))
        if kind in STORAGE_TYPES:
            return _STORAGE.pack(kind, storage_id, *version)
        raise LocalProtocolError(f"cannot encode {kind.name} as an entry: it is a marker")
    except struct.error as error:
        raise LocalProtocolError(f"cannot encode entry {token.type.name}: {error}") from None


def extent(data: bytes, offset: int) -> int:
    """Return the size of the entry at `offset`, as far as `data` tells; 0 if its first byte begins no entry.

    The result is a lower bound, and exact once `data` has that many bytes. A reader fetches that many and calls again.
    """
    byte = data[offset]
    if byte in _SIZES:
        return _SIZES[byte]
    left = len(data) - offset
    if byte == _REMOVE_BYTE:
        return _REMOVE_SIZE + (int(_COUNT.unpack_from(data, offset + 1)[0]) if left >= _REMOVE.size else 0)
    if byte != _NORMAL_BYTE and byte != _BLOB_BYTE:
        return 0
    with_blobs = 4 if byte == _BLOB_BYTE else 0
    if left < _NORMAL.size:
        return _NORMAL_SIZE + with_blobs
    key_size, value_size = _LENGTHS.unpack_from(data, offset + 1)
    size: int = _NORMAL_SIZE + key_size + value_size + with_blobs
    if with_blobs and left >= size:
        size += 8 * int(_COUNT.unpack_from(data, offset + size - 4)[0])
    return size


def decode(data: bytes, offset: int = 0) -> tuple[Token, int]:
    """Return the entry at `offset` and its end offset. Torn and Unknown end where they begin."""
    size = extent(data, offset)
    byte = data[offset]
    end = offset + size
    if not size:
        return Unknown(byte), offset
    kind = _TYPES[byte]
    if end > len(data):
        return Torn(kind), offset
    if byte in (_NORMAL_BYTE, _BLOB_BYTE):
        _, key_size, value_size, storage_id = _NORMAL.unpack_from(data, offset)
        key_at = offset + _NORMAL.size
    elif byte == _REMOVE_BYTE:
        _, key_size, storage_id = _REMOVE.unpack_from(data, offset)
        key_at, value_size = offset + _REMOVE.size, 0
    elif size == _STORAGE.size:
        _, storage_id, major, minor = _STORAGE.unpack_from(data, offset)
        return Entry(kind, storage_id, WriteVersion(major, minor)), end
    else:
        return Marker(kind, _MARKER.unpack_from(data, offset)[1]), end
    version_at = key_at + key_size
    value_at = version_at + _VERSION.size
    value_end = value_at + value_size
    blob_ids: tuple[int, ...] = ()
    if byte == _BLOB_BYTE:
        blob_ids = struct.unpack_from(f"<{(end - value_end - 4) // 8}Q", data, value_end + 4)
    version = WriteVersion._make(_VERSION.unpack_from(data, version_at))
    return Entry(kind, storage_id, version, data[key_at:version_at], data[value_at:value_end], blob_ids), end


def walk(read_at: Callable[[int, int], bytes], size: int, *, start: int = 0) -> Iterator[tuple[int, Token]]:
    """Yield each entry of `size` bytes with its offset, reading in windows. Torn or Unknown, if any, comes last.

    `read_at(offset, size)` is the method of a File. The length of an entry is requested only if the file is that long.
    """
    base, offset, data = start, 0, b""
    while base + offset < size:
        needed = extent(data, offset) if offset < len(data) else 1
        left = size - base - offset
        if needed > len(data) - offset and len(data) - offset < left and needed <= left:
            base, offset = base + offset, 0
            data = read_at(base, min(max(needed, WINDOW_SIZE), left))
            if len(data) < needed:
                size = base + len(data)  # the file was truncated meanwhile
            continue
        token, end = decode(data, offset)
        if isinstance(token, Unknown):
            token = Unknown(token.byte, only_zeros(read_at, base + offset, size))
        yield base + offset, token
        if end == offset:
            return
        offset = end


def only_zeros(read_at: Callable[[int, int], bytes], offset: int, size: int) -> bool:
    """Return True if all bytes from `offset` on are 0."""
    while offset < size:
        data = read_at(offset, min(WINDOW_SIZE, size - offset))
        if not data or data.count(0) != len(data):
            return not data
        offset += len(data)
    return True


def decode_all(data: bytes, path: str) -> list[Entry | Marker]:
    """Return every entry of a file that must be complete, such as a snapshot or a compacted file."""
    found: list[Entry | Marker] = []
    for offset, token in walk(lambda at, size: data[at : at + size], len(data)):
        if isinstance(token, Torn):
            raise DamagedFile(path, offset, f"file ends inside an entry {token.type.name}")
        if isinstance(token, Unknown):
            raise DamagedFile(path, offset, f"invalid entry type {token.byte:#04x}")
        found.append(token)
    return found
