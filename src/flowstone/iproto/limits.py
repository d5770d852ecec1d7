"""Limits on the sizes that a peer or a file may claim, each with its reason.

A length is compared with its limit before memory is allocated for it.
"""

from __future__ import annotations

PACKET_SIZE_MAX = 2 * 1024**3
"""Tarantool's IPROTO_PACKET_SIZE_MAX, the largest packet that a server accepts."""

PACKET_SIZE_MAX_BEFORE_AUTH = 64 * 1024
"""An unauthenticated peer needs only AUTH, ID, VOTE and PING. Tarantool has no smaller limit here."""

NESTING_MAX = 128
"""Depth of arrays and maps in one value: the most that a server's Lua encoder writes (`encode_max_depth`).

Code that walks a value in plain Python takes up to four frames per level, of the 1000 that the interpreter allows.
"""

ROW_HEADER_SIZE_MAX = 1024
"""A full header of eleven keys has less than 100 bytes; the rest is room for keys of newer servers."""

BLOCK_SIZE_MAX = 256 * 1024**2
"""Decompressed size of a log block (a transaction or a batch): the default wal_max_size of a whole file is 256 MiB."""
