"""Reads files of Tarantool without our own code: names, text headers, blocks, rows (docs/spec/files.md).

Raises `Unreadable` where a real server of 2.11 or 3.8 stops; a file ends at a torn tail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import crc32c
import msgpack
import zstandard

ROW_MARKER, ZSTD_MARKER, EOF_MARKER = b"\xd5\xba\x0b\xab", b"\xd5\xba\x0b\xba", b"\xd5\x10\xad\xed"
FIXED_HEADER_SIZE = 19
COMMIT, WAIT_SYNC, WAIT_ACK = 1, 2, 4
_NAME = re.compile(r"(\d{20})\.(snap|xlog)")


Directory = Path | Mapping[str, bytes]
"""A directory, or its contents by file name."""


class Unreadable(Exception):
    """The reason why a server refuses the directory."""


@dataclass(frozen=True)
class Row:
    type: int
    replica_id: int
    group_id: int
    lsn: int
    tsn: int
    flags: int
    body: dict[int, Any]

    @property
    def is_commit(self) -> bool:
        return bool(self.flags & COMMIT)

    def __str__(self) -> str:
        return f"row {self.lsn} of replica {self.replica_id}, type {self.type}, flags {self.flags}"


@dataclass(frozen=True)
class LogFile:
    """One .snap or .xlog. `meta` has the keys of the text header."""

    path: Path
    signature: int
    kind: str
    content: bytes | None = None
    """Its contents, if it is in memory only."""

    @cached_property
    def _data(self) -> bytes:
        return self.path.read_bytes() if self.content is None else self.content

    @cached_property
    def meta(self) -> dict[str, str]:
        head, end, _ = self._data.partition(b"\n\n")
        lines = head.decode("ascii", "replace").split("\n")
        if not end or len(lines) < 3 or lines[0] != self.kind.upper():
            raise Unreadable(f"{self.path.name}: no header of a {self.kind}")
        return dict(line.split(": ", 1) for line in lines[2:])

    @property
    def instance_uuid(self) -> str:
        return self.meta.get("Instance") or self.meta.get("Server") or ""

    @property
    def vclock(self) -> dict[int, int]:
        return parse_vclock(self.meta["VClock"])

    @property
    def previous(self) -> dict[int, int] | None:
        return parse_vclock(self.meta["PrevVClock"]) if "PrevVClock" in self.meta else None

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", self.meta["Version"])[:3]))

    @property
    def has_end(self) -> bool:
        return self._data.endswith(EOF_MARKER)

    def rows(self) -> Iterator[Row]:
        at = self._data.index(b"\n\n") + 2
        while True:
            block = self._block(at)
            if block is None:
                return
            payload, at = block
            yield from _rows(payload, self.path.name)

    def _block(self, at: int) -> tuple[bytes, int] | None:
        """Return the rows of the block at `at` and its end; None at the end of the file or at a torn tail."""
        data = self._data
        marker = data[at : at + 4]
        if marker == EOF_MARKER or len(marker) < 4:
            return None
        if marker not in (ROW_MARKER, ZSTD_MARKER):
            raise Unreadable(f"{self.path.name}: invalid magic at byte {at}")
        head = data[at + 4 : at + FIXED_HEADER_SIZE]
        if len(head) < FIXED_HEADER_SIZE - 4:
            return None
        unpacker = msgpack.Unpacker(raw=True)
        unpacker.feed(head)
        size, _, checksum = (unpacker.unpack() for _ in range(3))
        begin = at + FIXED_HEADER_SIZE
        payload = data[begin : begin + size]
        if len(payload) < size:
            return None
        if crc32c.crc32c(payload, 0xFFFFFFFF) ^ 0xFFFFFFFF != checksum:
            raise Unreadable(f"{self.path.name}: tx checksum mismatch at byte {at}")
        if marker == ZSTD_MARKER:
            payload = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
        return payload, begin + size


def _rows(payload: bytes, name: str) -> Iterator[Row]:
    at = 0
    while at < len(payload):
        header, at = _unpack(payload, at, name)
        body: Any = {}
        # A NOP has no body; of all other types one follows.
        if header.get(0) != 12 and at < len(payload):
            body, at = _unpack(payload, at, name)
        lsn = header.get(3, 0)
        flags, tsn = header.get(9, 0), lsn
        if 8 in header:
            tsn = (lsn - header[8]) % 2**64
        else:
            flags |= COMMIT
        yield Row(header.get(0, 0), header.get(2, 0), header.get(7, 0), lsn, tsn, flags, body)


def _unpack(data: bytes, at: int, name: str) -> tuple[Any, int]:
    unpacker = msgpack.Unpacker(raw=True, strict_map_key=False, max_buffer_size=0)
    unpacker.feed(memoryview(data)[at:])
    try:
        return unpacker.unpack(), at + unpacker.tell()
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise Unreadable(f"{name}: row is not MessagePack: {error}") from error


def parse_vclock(text: str) -> dict[int, int]:
    pairs = re.findall(r"(\d+): (\d+)", text)
    return {int(number): int(lsn) for number, lsn in pairs}


def list_files(directory: Directory) -> tuple[list[LogFile], list[LogFile]]:
    """Return snapshots and logs in the order of their signatures; raise if names, headers and UUIDs disagree."""
    found: dict[str, list[LogFile]] = {"snap": [], "xlog": []}
    paths = directory.iterdir() if isinstance(directory, Path) else map(Path, directory)
    for path in sorted(paths):
        if match := _NAME.fullmatch(path.name):
            content = None if isinstance(directory, Path) else directory[path.name]
            file = LogFile(path, int(match[1]), match[2], content)
            if sum(file.vclock.values()) != file.signature:
                raise Unreadable(f"{path.name}: signature check failed")
            found[match[2]].append(file)
    snapshots, logs = found["snap"], found["xlog"]
    if not snapshots:
        raise Unreadable("no snapshot")
    for file in (*snapshots, *logs):
        if file.instance_uuid != snapshots[-1].instance_uuid:
            raise Unreadable(f"{file.path.name}: invalid instance UUID")
    return snapshots, logs
