"""Log files in memory, intact and damaged, for tests of readers."""

from __future__ import annotations

from collections.abc import Sequence

from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.xlog.block import EOF_MAGIC, checksum, encode_block, encode_fixheader, new_compressor
from flowstone.xlog.meta import FileType, Meta, encode, parse
from flowstone.xlog.reader import LogFile
from tests.xlog.slabs import body

INSTANCE = "11111111-0000-4000-8000-000000000001"
PATH = "some.xlog"


class MemoryFile:
    """A readable File in memory; counts the bytes read, and the largest read."""

    path = PATH

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.bytes_read = 0
        self.largest_read = 0

    def size(self) -> int:
        return len(self.data)

    def read_at(self, offset: int, size: int) -> bytes:
        assert offset >= 0
        assert size >= 0
        found = self.data[offset : offset + size]
        self.bytes_read += len(found)
        self.largest_read = max(self.largest_read, len(found))
        return found

    def close(self) -> None:
        pass


def opened(data: bytes, **how: object) -> LogFile:
    """Return the reader of a file with these bytes."""
    meta, length = parse(data[:3072], PATH)
    return LogFile(PATH, MemoryFile(data), meta, length, **how)  # type: ignore[arg-type]


def header(file_type: FileType = FileType.XLOG, format: str = "0.13") -> bytes:
    return encode(Meta(file_type, INSTANCE, {1: 5}, version="2.6.0", format=format))


def row(lsn: int, note: str = "") -> bytes:
    pairs = {0x10: b"\xcd\x02\x00", 0x21: pack([lsn, note])}
    return Row(2, 1, lsn=lsn, tsn=lsn, timestamp=1.7e9, body=body(pairs)).encode()


def block(rows: Sequence[bytes] | bytes) -> bytes:
    """Return a block as written by our writer: compressed from 2 KiB on."""
    return b"".join(encode_block(rows, new_compressor()))


def framed(payload: bytes, is_compressed: bool = False) -> bytes:
    """Return a block with any payload and a valid checksum."""
    return encode_fixheader(is_compressed, len(payload), checksum(payload)) + payload


def small_log(
    *, file_type: FileType = FileType.XLOG, marker: bool = True
) -> tuple[bytes, list[list[bytes]], list[int]]:
    """Return a log of three plain blocks and a compressed one: its bytes, its rows per block, its block offsets."""
    blocks = [[row(6)], [row(7), row(8, "x")], [row(9, "y" * 2100)], [row(10)]]
    data, offsets = header(file_type), []
    for rows in blocks:
        offsets.append(len(data))
        data += block(rows)
    return data + (EOF_MAGIC if marker else b""), blocks, offsets
