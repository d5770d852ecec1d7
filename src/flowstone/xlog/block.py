"""Blocks: a fixheader of 19 bytes and the rows of one or more whole transactions, plain or compressed with zstd.

Pure functions over bytes (`docs/spec/files.md#blocks`). A block encoded from the rows of a real server's plain block
equals that block, byte for byte. `reader.py` finds blocks in a file, `writer.py` places them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import crc32c
import numpy as np
import zstandard

from flowstone.iproto.limits import BLOCK_SIZE_MAX
from flowstone.iproto.row import encode_uint
from flowstone.iproto.scan import read_uint
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import Bytes, big32, byte
from flowstone.xlog.errors import BlockTooLarge, DamagedLog

ROW_MAGIC = b"\xd5\xba\x0b\xab"
ZROW_MAGIC = b"\xd5\xba\x0b\xba"
EOF_MAGIC = b"\xd5\x10\xad\xed"
ROW_WORD, ZROW_WORD = int.from_bytes(ROW_MAGIC, "big"), int.from_bytes(ZROW_MAGIC, "big")
FIXHEADER_SIZE = 19

COMPRESS_THRESHOLD = 2048
"""Size, fixheader included, from which real servers compress a block."""

FLUSH_THRESHOLD = 128 * 1024
"""A block ends with the transaction with which it reaches this size, as do batches in the WAL of 2.6.0."""

TRANSACTION_SIZE_MAX = BLOCK_SIZE_MAX - FLUSH_THRESHOLD
"""A transaction must fit into a block together with the rows written before it. Larger transactions are rejected,
both from clients and from peers."""

ZSTD_LEVEL = 3

_PADDING = (b"", *(bytes((0xA0 + size,)) + bytes(size) for size in range(FIXHEADER_SIZE)))
"""By length: one MessagePack string of zeros."""


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


@inlined
def read_fixheader(buf: Bytes, at: int) -> tuple[int, int, int]:
    """The magic, the size and the checksum that 19 bytes say; the size is -1 where they are no fixheader.

    As in 2.6.0, the padding may be anything.
    """
    magic = big32(buf, at)
    if magic != ROW_WORD and magic != ZROW_WORD:
        return magic, -1, 0
    end = at + FIXHEADER_SIZE
    size, after = read_uint(buf, at + 4, end)
    if after >= 0:
        _, after = read_uint(buf, after, end)
    crc = 0
    if after >= 0:
        crc, after = read_uint(buf, after, end)
    return magic, (size if after >= 0 else -1), crc


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


ZSTD_MAGIC = 0x28B52FFD
ZSTD_BLOCK_SIZE_MAX = 128 * 1024
_RUN, _COMPRESSED = 1, 2  # types of a zstd block, 0 is raw; a run is one byte and how often it stands there


@kernel
def frame_bound(buf: Bytes, at: int, end: int) -> int:
    """Maximum size of the decompressed zstd frame at `at`; -1 unless exactly one frame ends at `end`.

    Steps over the frame's own blocks (RFC 8878, 3.1.1), so no more memory than this is ever asked for on the word of
    a few bytes, and a frame cut short is told from one that is too large before anything is unpacked.
    """
    if end - at < 6 or big32(buf, at) != ZSTD_MAGIC:
        return -1
    descriptor = byte(buf, at + 4)
    single_segment, size_flag, dictionary_flag = descriptor >> 5 & 1, descriptor >> 6, descriptor & 3
    size_width = 1 << size_flag if size_flag or single_segment else 0
    at += 5 + (1 - single_segment) + ((1 << dictionary_flag) >> 1)
    if at + size_width > end:
        return -1
    claimed = 256 if size_width == 2 else 0
    for i in range(min(size_width, 7)):  # a claim of more than 7 bytes is beyond any bound
        claimed += byte(buf, at + i) << (8 * i)
    if size_width == 8 and byte(buf, at + 7):
        return -1
    at += size_width
    bound, is_last = 0, 0
    while not is_last:
        if at + 3 > end:
            return -1
        head = byte(buf, at) | byte(buf, at + 1) << 8 | byte(buf, at + 2) << 16
        is_last, kind, size = head & 1, head >> 1 & 3, head >> 3
        if kind > _COMPRESSED or size > ZSTD_BLOCK_SIZE_MAX:
            return -1
        at += 3 + (1 if kind == _RUN else size)
        bound += ZSTD_BLOCK_SIZE_MAX if kind == _COMPRESSED else size
    if at + 4 * (descriptor >> 2 & 1) != end:  # a checksum may follow
        return -1
    if size_width == 0:
        return bound
    return claimed if claimed <= bound else -1


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
