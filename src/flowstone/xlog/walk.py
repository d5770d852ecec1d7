"""Compiled: the block walker, which steps from block to block through a chunk of a log file and verifies checksums.

The walker accepts only complete, valid blocks and stops at anything else; `xlog/reader.py` classifies that place as end
marker, torn tail, damage, or a block cut by the end of the chunk.
"""

from __future__ import annotations

import cython
import numpy as np
from numpy.typing import NDArray

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.scan import Bytes, Cells
    from flowstone.native.msgpack import read_uint
    from flowstone.native.words import big32, byte, little64, signed, source, word
    from flowstone.xlog.block_table import (
        BLOCK_AT,
        CONTENT_BOUND,
        FIXHEADER_SIZE,
        FULL,
        IS_ZSTD,
        NEED,
        OTHER,
        PAYLOAD_AT,
        PAYLOAD_END,
        ROW_WORD,
        ZROW_WORD,
    )

    ZSTD_MAGIC = 0x28B52FFD
    ZSTD_BLOCK_SIZE_MAX = 128 * 1024
    RUN, COMPRESSED = 1, 2  # types of a zstd block; 0 is raw, and a run is one byte with a repeat count


def crc_tables() -> NDArray[np.uint64]:
    """Return the slicing-by-8 tables of CRC32C (Castagnoli, reflected)."""
    tables = np.zeros((8, 256), np.uint64)
    for value in range(256):
        crc = value
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        tables[0, value] = crc
    for i in range(1, 8):
        previous = tables[i - 1]
        tables[i] = tables[0][previous & np.uint64(0xFF)] ^ (previous >> np.uint64(8))
    return tables


CRC = crc_tables()


def column(value: int, number: int) -> int:
    """Return byte `number` of a word, as an index."""
    return (value >> (8 * number)) & 0xFF


def crc32c(buf: Bytes, at: int, end: int) -> int:
    """Return the CRC32C as computed by Tarantool: initial value 0 and no final inversion."""
    crc = word(0)
    while at + 8 <= end:
        value = little64(buf, at) ^ crc
        crc = word(
            CRC[7, column(value, 0)]
            ^ CRC[6, column(value, 1)]
            ^ CRC[5, column(value, 2)]
            ^ CRC[4, column(value, 3)]
            ^ CRC[3, column(value, 4)]
            ^ CRC[2, column(value, 5)]
            ^ CRC[1, column(value, 6)]
            ^ CRC[0, column(value, 7)]
        )
        at += 8
    while at < end:
        crc = word(CRC[0, (crc ^ byte(buf, at)) & 0xFF]) ^ (crc >> 8)
        at += 1
    return signed(crc)


def checksum(buf: Bytes, at: int, end: int) -> int:
    """Return the CRC32C of the bytes between `at` and `end`."""
    return crc32c(source(buf), at, end)


def checksums(buf: Bytes, edges: Cells, out: Cells) -> None:
    """Compute the CRC32C of the bytes between each edge and the next."""
    data = source(buf)
    with cython.nogil:
        for number in range(out.shape[0]):
            out[number] = crc32c(data, edges[number], edges[number + 1])


def parse_fixheader(buf: Bytes, at: int) -> tuple[int, int, int]:
    """Return magic, size and checksum of the 19 bytes at `at`; the size is -1 if they are not a fixheader.

    As in 2.6.0, the padding may have any content.
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


def read_fixheader(buf: Bytes, at: int) -> tuple[int, int, int]:
    """Return the result of `parse_fixheader` for the at least 19 bytes at `at`."""
    return parse_fixheader(source(buf), at)


def bound_of_frame(buf: Bytes, at: int, end: int) -> int:
    """Return a bound of the decompressed size of the zstd frame at `at`; -1 unless exactly one frame ends at `end`.

    Steps over the blocks of the frame (RFC 8878, 3.1.1) instead of trusting its content size: a forged size allocates
    no memory, and truncated frames are distinguished from oversized ones before decompression.
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
    for i in range(min(size_width, 7)):  # a size of more than 7 bytes exceeds any bound
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
        if kind > COMPRESSED or size > ZSTD_BLOCK_SIZE_MAX:
            return -1
        at += 3 + (1 if kind == RUN else size)
        bound += ZSTD_BLOCK_SIZE_MAX if kind == COMPRESSED else size
    if at + 4 * (descriptor >> 2 & 1) != end:  # a checksum may follow
        return -1
    if size_width == 0:
        return bound
    return claimed if claimed <= bound else -1


def frame_bound(buf: Bytes, at: int, end: int) -> int:
    """Return the `bound_of_frame` of the bytes between `at` and `end`."""
    return bound_of_frame(source(buf), at, end)


def is_blank(buf: Bytes, payload: int, size: int, crc: int) -> bool:
    """Return True if the checksum is 0 and the payload is empty or starts with a zero byte.

    A loss of power can leave zeros after a header, and their checksum is 0. A valid payload begins with a map or the
    magic number of zstd.
    """
    return crc == 0 and (size == 0 or byte(buf, payload) == 0)


def walk(buf: Bytes, at: int, blocks: Cells, count: int, verify: bool) -> tuple[int, int, int]:
    """Walk from `at` on, and add the blocks to the table from line `count` on; return (count, at, why it stopped).

    Without `verify`, checksums are ignored: for planning, when the payloads are read later.
    """
    with cython.nogil:
        return walk_blocks(source(buf), buf.shape[0], at, blocks, count, verify)


def walk_blocks(buf: Bytes, limit: int, at: int, blocks: Cells, count: int, verify: bool) -> tuple[int, int, int]:
    """Run the loop of `walk`, up to offset `limit`."""
    while count < blocks.shape[0]:
        if at + FIXHEADER_SIZE > limit:
            return count, at, NEED
        magic, size, crc = parse_fixheader(buf, at)
        payload = at + FIXHEADER_SIZE
        if size < 0:
            return count, at, OTHER
        if size > limit - payload:
            return count, at, NEED
        if verify and (is_blank(buf, payload, size, crc) or crc32c(buf, payload, payload + size) != crc):
            return count, at, OTHER
        blocks[count, BLOCK_AT] = at
        blocks[count, PAYLOAD_AT] = payload
        blocks[count, PAYLOAD_END] = payload + size
        blocks[count, IS_ZSTD] = 1 if magic == ZROW_WORD else 0
        blocks[count, CONTENT_BOUND] = bound_of_frame(buf, payload, payload + size) if magic == ZROW_WORD else size
        count += 1
        at = payload + size
    return count, at, FULL
