"""Memory limits of a replica, shared by its connections: the more connections, the less memory for each.

There are four limits: how much a connection may read ahead, how much of an open session a log channel may buffer, and
how many channels may receive a large or a huge message at a time. They bound the bytes of messages and sessions in a
replica of a thousand channels to 256 MiB: 64 MiB each for read-ahead, open sessions, small and large messages. One huge
message comes on top. It takes up to four times its size while it is copied for the log; `--message-size-max` limits
its size, to 1 GiB by default. Of the blobs of a message, at most `BLOB_WHOLE_MAX` bytes are in memory; the rest goes to
files as it arrives. A replica of ten channels is not slowed down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from flowstone.limestone.format.entry_table import Bytes
from flowstone.limestone.format.transcode import SCRATCH_SIZE

READ_AHEAD_TOTAL: Final = 64 << 20
"""Received bytes that are not processed yet, over all connections."""

BUFFERED_TOTAL: Final = 64 << 20
"""Bytes of sessions that are not in a file yet, over all log channels."""

SHARE_MIN: Final = 16 << 10
"""Least share of a connection, however many there are: less would cost a system call for every few entries."""

LARGE_MESSAGE: Final = 64 << 10
"""Size of an unfinished message, in bytes, beyond which its channel needs a place for large messages."""

LARGE_MESSAGES_MAX: Final = 16
"""Number of places for large messages. A channel without a place stops reading, so its master waits. A channel with a
place needs no other channel to complete its message, so there is no deadlock."""

HUGE_MESSAGE: Final = 4 << 20
"""Size of an unfinished message, in bytes, beyond which its channel also needs the only place for huge messages."""


class Memory:
    """Limits of one replica. `count` returns the current number of connections."""

    def __init__(self, count: Callable[[], int]) -> None:
        self.large_messages = asyncio.Semaphore(LARGE_MESSAGES_MAX)
        self.huge_messages = asyncio.Semaphore(1)
        self.scratch: Bytes = np.empty(SCRATCH_SIZE, np.uint8)
        """Scratch buffer of all message readers: they run in the loop, one at a time."""
        self._count = count

    def share(self, total: int, most: int) -> int:
        """Return the share of one connection in `total` bytes, at most `most`."""
        return min(most, max(SHARE_MIN, total // max(1, self._count())))
