"""The block walker: steps from block to block through the bytes of a log file and verifies their checksums.

One compiled pass over a chunk of a file. It accepts only whole, sound blocks and stops at anything else;
`xlog/reader.py` classifies that place as end marker, torn tail, damage, or a block cut by the end of the chunk.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.iproto.scan import Bytes, Cells
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import byte, little64
from flowstone.xlog.block import FIXHEADER_SIZE, ZROW_WORD, frame_bound, read_fixheader

# Columns of the table of blocks; offsets are into the walked buffer. CONTENT_BOUND is the maximum size of
# the rows in bytes; -1 if a compressed payload is not exactly one frame.
BLOCK_AT, PAYLOAD_AT, PAYLOAD_END, IS_ZSTD, CONTENT_BOUND = range(5)
BLOCK_COLUMNS = 5

LOW_BYTE = np.uint64(0xFF)

FULL, NEED, OTHER = 0, 1, 2
"""Why a walk stopped: no room in the table; the block goes on behind the buffer; what stands here is no sound block."""


def _crc_tables() -> NDArray[np.uint64]:
    """Slicing-by-8 tables of CRC32C (Castagnoli, reflected)."""
    tables = np.zeros((8, 256), np.uint64)
    for value in range(256):
        crc = value
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        tables[0, value] = crc
    for i in range(1, 8):
        previous = tables[i - 1]
        tables[i] = tables[0][previous & LOW_BYTE] ^ (previous >> np.uint64(8))
    return tables


CRC = _crc_tables()


@inlined
def _column(word: np.uint64, number: int) -> np.uint64:
    """Byte `number` of a word, as an index."""
    return (word >> np.uint64(8 * number)) & LOW_BYTE


@kernel
def checksum(buf: Bytes, at: int, end: int) -> int:
    """CRC32C as Tarantool computes it: initial value 0 and no final inversion."""
    crc = np.uint64(0)
    while at + 8 <= end:
        word = little64(buf, at) ^ crc
        crc = (
            CRC[7, _column(word, 0)]
            ^ CRC[6, _column(word, 1)]
            ^ CRC[5, _column(word, 2)]
            ^ CRC[4, _column(word, 3)]
            ^ CRC[3, _column(word, 4)]
            ^ CRC[2, _column(word, 5)]
            ^ CRC[1, _column(word, 6)]
            ^ CRC[0, _column(word, 7)]
        )
        at += 8
    while at < end:
        crc = CRC[0, (crc ^ np.uint64(byte(buf, at))) & LOW_BYTE] ^ (crc >> np.uint64(8))
        at += 1
    return int(crc)


@inlined
def _is_blank(buf: Bytes, payload: int, size: int, crc: int) -> bool:
    """Zeros behind a header's first bytes, as a loss of power leaves them: their checksum is 0, and so it fits. Rows
    begin with a map, what is compressed with a magic number, and nobody writes blocks without any."""
    return crc == 0 and (size == 0 or byte(buf, payload) == 0)


@kernel
def walk(buf: Bytes, at: int, blocks: Cells, count: int, verify: bool) -> tuple[int, int, int]:
    """Walks on from `at`, adding lines to `blocks` from line `count`. Returns (count, at, why it stopped).

    With `verify` off the checksums are not looked at: for planning, where somebody else reads the payloads later.
    """
    limit = buf.shape[0]
    while count < blocks.shape[0]:
        if at + FIXHEADER_SIZE > limit:
            return count, at, NEED
        magic, size, crc = read_fixheader(buf, at)
        payload = at + FIXHEADER_SIZE
        if size < 0:
            return count, at, OTHER
        if size > limit - payload:
            return count, at, NEED
        if verify and (_is_blank(buf, payload, size, crc) or checksum(buf, payload, payload + size) != crc):
            return count, at, OTHER
        blocks[count, BLOCK_AT] = at
        blocks[count, PAYLOAD_AT] = payload
        blocks[count, PAYLOAD_END] = payload + size
        blocks[count, IS_ZSTD] = 1 if magic == ZROW_WORD else 0
        blocks[count, CONTENT_BOUND] = frame_bound(buf, payload, payload + size) if magic == ZROW_WORD else size
        count += 1
        at = payload + size
    return count, at, FULL
