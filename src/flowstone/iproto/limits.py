"""Bounds on what a peer or a file may ask of us, each with its reason.

A length is compared with its bound before a byte is allocated for it.
"""

from __future__ import annotations

PACKET_SIZE_MAX = 2 * 1024**3
"""Tarantool's IPROTO_PACKET_SIZE_MAX: what a server accepts from an authenticated client."""

PACKET_SIZE_MAX_BEFORE_AUTH = 64 * 1024
"""A stranger needs no more than AUTH, ID, VOTE and PING; Tarantool itself has no smaller bound here."""

NESTING_MAX = 128
"""Depth of arrays and maps in one value: what a server's own Lua encoder writes at most (`encode_max_depth`).

Whatever walks a value in plain Python takes up to four frames per level, of the 1000 that the interpreter allows.
"""

ROW_HEADER_SIZE_MAX = 1024
"""A full header of eleven keys is below 100 bytes; the rest is room for keys of newer servers."""

BLOCK_SIZE_MAX = 256 * 1024**2
"""Decompressed size of one log block, that is of one transaction or batch: wal_max_size, a whole file, is 256 MiB."""
