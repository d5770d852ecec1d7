"""Blocks: a 19-byte fixheader and the rows of one or more whole transactions, plain or zstd-compressed.

Pure functions over bytes (reference: files, blocks). What is built here from the rows of a real server's
plain block is that block, byte for byte. Finding blocks in a file is the reader's part, placing them the
writer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import crc32c
import zstandard

from flowstone.iproto.limits import BLOCK_SIZE_MAX
from flowstone.xlog.errors import BlockTooLarge

ROW_MAGIC = b"\xd5\xba\x0b\xab"
ZROW_MAGIC = b"\xd5\xba\x0b\xba"
EOF_MAGIC = b"\xd5\x10\xad\xed"
FIXHEADER_SIZE = 19

COMPRESS_THRESHOLD = 2048
"""Blocks of this size, fixheader included, are compressed by real servers."""

FLUSH_THRESHOLD = 128 * 1024
"""A block that reached this size ends with the transaction at hand; 2.6.0 does the same with batches in its WAL."""

ZSTD_LEVEL = 3


class Fixheader(NamedTuple):
    """What the 19 bytes say. `size` is that of the payload as stored, `crc` is computed over the same."""

    is_compressed: bool
    size: int
    crc: int


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """CRC32C as the log files have it: initial value 0 and no final inversion, unlike the usual variant."""
    return int(crc32c.crc32c(payload, 0xFFFFFFFF)) ^ 0xFFFFFFFF


def encode_fixheader(is_compressed: bool, size: int, crc: int) -> bytes:
    """The fixheader: magic, size, checksum of the previous block (always 0), checksum, padding."""
    head = (ZROW_MAGIC if is_compressed else ROW_MAGIC) + encode_uint(size) + b"\x00" + encode_uint(crc)
    padding = FIXHEADER_SIZE - len(head)
    return head + bytes((0xA0 + padding - 1,)) + bytes(padding - 1) if padding else head


def decode_fixheader(data: bytes) -> Fixheader | None:
    """What 19 bytes say, or None if they are no fixheader. As in 2.6.0, the padding may be anything."""
    if len(data) < FIXHEADER_SIZE or data[:3] != b"\xd5\xba\x0b" or data[3] not in (0xAB, 0xBA):
        return None
    offset, numbers = 4, []
    for _ in range(3):
        number, offset = _read_uint(data, offset)
        if number is None or offset > FIXHEADER_SIZE:
            return None
        numbers.append(number)
    size, _, crc = numbers
    return Fixheader(data[3] == 0xBA, size, crc)


def new_compressor() -> zstandard.ZstdCompressor:
    """What `encode_block` compresses with. One per writer: making it costs twice the compression of 3 KiB."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL)


def encode_block(
    rows: Sequence[bytes] | bytes, compressor: zstandard.ZstdCompressor, path: str = "", offset: int = 0
) -> tuple[bytes, ...]:
    """The parts, in order, of one block that holds `rows`; compressed where a real writer would.

    `rows` are passed through unchanged when plain. `path` and `offset` are for the message of a block that no
    reader would accept.
    """
    payload = rows if isinstance(rows, bytes) else b"".join(rows)
    if len(payload) > BLOCK_SIZE_MAX:
        raise BlockTooLarge(path, offset, len(payload), BLOCK_SIZE_MAX)
    is_compressed = len(payload) + FIXHEADER_SIZE >= COMPRESS_THRESHOLD
    if is_compressed:
        payload = compressor.compress(payload)
    return encode_fixheader(is_compressed, len(payload), checksum(payload)), payload


def encode_uint(value: int) -> bytes:
    """MessagePack of an unsigned number, as short as it can be."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x100:
        return b"\xcc" + bytes((value,))
    if value < 0x10000:
        return b"\xcd" + value.to_bytes(2, "big")
    if value < 0x1_0000_0000:
        return b"\xce" + value.to_bytes(4, "big")
    return b"\xcf" + value.to_bytes(8, "big")


def _read_uint(data: bytes, offset: int) -> tuple[int | None, int]:
    first = data[offset] if offset < len(data) else 0xC1
    if first < 0x80:
        return first, offset + 1
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(first)
    if width is None or offset + 1 + width > len(data):
        return None, offset
    return int.from_bytes(data[offset + 1 : offset + 1 + width], "big"), offset + 1 + width
