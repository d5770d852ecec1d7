"""The table of blocks that a walk fills, with one line per block, and constants of the fixheader.

`walk.py` fills tables.
"""

from __future__ import annotations

# Columns of the table. Offsets are into the walked buffer. CONTENT_BOUND is the maximum size of the rows in bytes;
# -1 if a compressed payload is not exactly one frame.
BLOCK_AT, PAYLOAD_AT, PAYLOAD_END, IS_ZSTD, CONTENT_BOUND = range(5)
BLOCK_COLUMNS = 5

FULL, NEED, OTHER = 0, 1, 2
"""Why a walk stopped: the table is full; the block continues after the buffer; there is no valid block."""

ROW_WORD, ZROW_WORD = 0xD5BA0BAB, 0xD5BA0BBA
"""The first four bytes of a block with plain or with compressed rows, as a number."""

FIXHEADER_SIZE = 19
