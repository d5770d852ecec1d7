"""Blocks: a fixheader of 19 bytes and the rows of one or more whole transactions, plain or compressed with zstd.

Pure functions over bytes (`docs/spec/files.md#blocks`). A block encoded from the rows of a real server's plain block
equals that block, byte for byte. `reader.py` finds blocks in a file. `writer.py` decides which rows share a block: it
ends a block at `FLUSH_THRESHOLD` (128 KiB).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import crc32c
import numpy as np
import zstandard

from flowstone.iproto.limits import BLOCK_SIZE_MAX
from flowstone.iproto.row import encode_uint
from flowstone.xlog.block_table import FIXHEADER_SIZE, ROW_WORD, ZROW_WORD
from flowstone.xlog.errors import BlockTooLarge, DamagedLog
from flowstone.xlog.walk import read_fixheader

ROW_MAGIC = ROW_WORD.to_bytes(4, "big")
ZROW_MAGIC = ZROW_WORD.to_bytes(4, "big")
EOF_MAGIC = b"\xd5\x10\xad\xed"

COMPRESS_THRESHOLD = 2048
"""Size, fixheader included, from which real servers compress a block."""

FLUSH_THRESHOLD = 128 * 1024
"""A block ends after the transaction that makes it reach this size, like batches in the WAL of 2.6.0."""

TRANSACTION_SIZE_MAX = BLOCK_SIZE_MAX - FLUSH_THRESHOLD
"""A transaction must fit into a block together with the rows written before it. Larger transactions are rejected,
both from clients and from peers."""

ZSTD_LEVEL = 3

_PADDING = (b"", *(bytes((0xA0 + size,)) + bytes(size) for size in range(FIXHEADER_SIZE)))
"""MessagePack strings of zeros, by length."""


class Fixheader(NamedTuple):
    """A decoded fixheader. `size` and `crc` are the size and the checksum of the payload as stored."""

    is_compressed: bool
    size: int
    crc: int


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """Return the CRC32C of log files: initial value 0 and no final inversion, unlike the usual variant."""
    return int(crc32c.crc32c(payload, 0xFFFFFFFF)) ^ 0xFFFFFFFF


def encode_fixheader(is_compressed: bool, size: int, crc: int) -> bytes:
    """Return a fixheader: magic, size, checksum of the previous block (always 0), checksum, padding."""
    head = (ZROW_MAGIC if is_compressed else ROW_MAGIC) + encode_uint(size) + b"\x00" + encode_uint(crc)
    return head + _PADDING[FIXHEADER_SIZE - len(head)]


def decode_fixheader(data: bytes) -> Fixheader | None:
    """Decode the fixheader at the start of `data`; return None if there is none."""
    if len(data) < FIXHEADER_SIZE:
        return None
    magic, size, crc = read_fixheader(np.frombuffer(data, np.uint8), 0)
    return Fixheader(magic == ZROW_WORD, size, crc) if size >= 0 else None


def new_compressor() -> zstandard.ZstdCompressor:
    """Return a compressor for `encode_block`. Use one per writer: creating one costs twice the compression of 3 KiB."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL)


def encode_block(
    rows: Sequence[bytes] | bytes, compressor: zstandard.ZstdCompressor, path: str = "", offset: int = 0
) -> tuple[bytes, ...]:
    """Return the parts, in order, of one block that holds `rows`, compressed if a real writer would compress it.

    Plain rows are passed through unchanged. Raise BlockTooLarge, with `path` and `offset` in its message, for a block
    that no reader would accept.
    """
    payload = rows if isinstance(rows, bytes) else b"".join(rows)
    if len(payload) > BLOCK_SIZE_MAX:
        raise BlockTooLarge(path, offset, len(payload), BLOCK_SIZE_MAX)
    is_compressed = len(payload) + FIXHEADER_SIZE >= COMPRESS_THRESHOLD
    if is_compressed:
        payload = compressor.compress(payload)
    return encode_fixheader(is_compressed, len(payload), checksum(payload)), payload


def decompress(
    decompressor: zstandard.ZstdDecompressor,
    payload: bytes | memoryview,
    bound: int,
    size_max: int,
    path: str,
    offset: int,
) -> bytes:
    """Return the rows of a compressed block, whose `frame_bound` is `bound`; never allocate more than `size_max` bytes.

    Raise BlockTooLarge or DamagedFile for the block at `offset` of `path` if it has no readable rows.
    """
    if bound < 0:
        raise DamagedLog(path, offset, "compressed rows are not one whole zstd frame")
    try:
        # If the frame states its size, zstandard ignores `max_output_size`.
        if zstandard.frame_content_size(payload) <= size_max:
            room = max(min(bound, size_max), 1)  # 0 would require the size in the frame
            rows: bytes = decompressor.decompress(payload, max_output_size=room, allow_extra_data=False)
            return rows
    except zstandard.ZstdError as error:
        if bound <= size_max:
            raise DamagedLog(path, offset, f"compressed rows cannot be decompressed ({error})") from error
    raise BlockTooLarge(path, offset, bound, size_max)
