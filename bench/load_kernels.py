"""Compiled: the loop that sends requests and counts replies, without the interpreter lock."""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    import os
    import select
    import time

    import numpy as np
    from numpy.typing import NDArray

    from flowstone.native.words import Bytes, big32, byte

    Numbers = NDArray[np.int64]
    Polled = NDArray[np.int32]

    POLLIN, POLLOUT, ENDED = 1, 4, 8 | 16 | 32

    # Why a run ended: all replies arrived; a connection was closed; no reply arrived for too long; a reply is wrong.
    DONE, CLOSED, SILENT, WRONG = range(4)

    # Lines of the table of connections: bytes in the buffer, requests answered, end of what was sent, last arrival.
    FILLED, ANSWERED, SENT, HEARD = range(4)

    def now() -> int:
        return time.monotonic_ns()

    def wait(polled: Polled) -> None:
        """Wait for up to a second. Each row has a file, its events, and in the upper half what happened."""
        poll = select.poll()
        for file, events in polled.tolist():
            poll.register(file, events & 0xFFFF)
        happened = dict(poll.poll(1000))
        for row in polled:
            row[1] = (int(row[1]) & 0xFFFF) | happened.get(int(row[0]), 0) << 16

    def receive(file: int, buffers: Bytes, connection: int, at: int) -> int:
        """Read into a buffer from `at` on; return the number of bytes, 0 at the end, or -1 if there are none yet."""
        try:
            return os.readv(file, [buffers[connection, at:].data])
        except OSError:
            return -1

    def transmit(file: int, blob: Bytes, at: int, end: int) -> int:
        """Write some of the bytes from `at` to `end`; return their number, or -1 if there is no room yet."""
        try:
            return os.write(file, blob[at:end].data)
        except OSError:
            return -1

    def buffer(buffers: Bytes, connection: int) -> Bytes:
        """Return a pointer to the buffer of a connection."""
        found: Bytes = buffers[connection]
        return found

    def move_down(buffers: Bytes, connection: int, at: int, end: int) -> None:
        """Move the bytes from `at` to `end` to the beginning of the buffer."""
        buffers[connection, : end - at] = buffers[connection, at:end].copy()


def _whole(data: Bytes, end: int, answer_size: int) -> tuple[int, int]:
    """Return the number of complete replies up to `end` and their bytes.

    For a wrong reply the count is negative, and the bytes are its place."""
    at = count = 0
    while end - at >= 5:
        size = 5 + big32(data, at + 1)
        if byte(data, at) != 0xCE:
            return -1, at
        if end - at < size:
            break
        # The header has three keys, and the type, which comes first, is 0.
        if size < answer_size or byte(data, at + 5) != 0x83 or byte(data, at + 7) != 0xCE or big32(data, at + 8) != 0:
            return -1, at
        at += size
        count += 1
    return count, at


def drive(
    polled: Polled,
    connections: Numbers,
    ends: Numbers,
    blob: Bytes,
    edges: Numbers,
    window: int,
    answer_size: int,
    buffers: Bytes,
    pauses: Numbers,
    silence: int,
) -> tuple[int, int, int, int]:
    """Send the requests; return why the run ended, the number of replies, nanoseconds, and the place of a wrong reply
    (connection << 32 | offset).

    `polled` has the file of each connection, `connections` its first request (ANSWERED), `ends` the end of its
    requests. `pauses`, where not empty, takes how long each connection waited between two moments at which replies
    arrived. `answer_size` is at least 12. `silence` is the limit in nanoseconds for a time without any reply."""
    count = polled.shape[0]
    total = seen = waits = 0
    with cython.nogil:
        started = latest = now()
        for c in range(count):
            polled[c, 1] = POLLIN | POLLOUT
            total += ends[c] - connections[ANSWERED, c]
            connections[FILLED, c] = 0
            connections[SENT, c] = edges[connections[ANSWERED, c]]
            connections[HEARD, c] = started
        while seen < total:
            wait(polled)
            moment = now()
            if moment - latest > silence:
                return SILENT, seen, moment - started, 0
            for c in range(count):
                happened = polled[c, 1] >> 16
                if happened == 0:
                    continue
                if happened & (POLLIN | ENDED):
                    got = receive(polled[c, 0], buffers, c, connections[FILLED, c])
                    if got == 0:
                        return CLOSED, seen, moment - started, 0
                    if got > 0:
                        filled = connections[FILLED, c] + got
                        replies, end = _whole(buffer(buffers, c), filled, answer_size)
                        if replies < 0:
                            return WRONG, seen, moment - started, c << 32 | end
                        move_down(buffers, c, end, filled)
                        connections[FILLED, c] = filled - end
                        if replies > 0:
                            connections[ANSWERED, c] += replies
                            seen += replies
                            latest = moment
                            if waits < pauses.shape[0]:
                                pauses[waits] = moment - connections[HEARD, c]
                                waits += 1
                            connections[HEARD, c] = moment
                limit = edges[min(connections[ANSWERED, c] + window, ends[c])]
                if connections[SENT, c] < limit:
                    wrote = transmit(polled[c, 0], blob, connections[SENT, c], limit)
                    if wrote > 0:
                        connections[SENT, c] += wrote
                polled[c, 1] = POLLIN | POLLOUT if connections[SENT, c] < limit else POLLIN
    return DONE, seen, now() - started, 0
