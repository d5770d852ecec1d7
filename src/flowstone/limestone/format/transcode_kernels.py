"""Compiled: the conversion of entries between the form of log files and that of the wire.

The result is byte for byte that of `messages.py` and `entries.py`. Reads are bounded by the input; the caller provides
output buffers of the size that each function documents.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.limestone.format.entry_table import Bytes
    from flowstone.limestone.format.messages import ENTRY_SIZE_MIN, MessageType, SessionFlags
    from flowstone.native.words import big32, big64, byte, copy, little32, poke, poke64, source, target, word

    HEAD_SIZE = 13
    """Size of a LOG_ENTRIES before its entries. One byte of flags follows them."""

    DONE, STARVED, SINGLE, OTHER = range(4)
    """Why a loop stopped: no input is left; an entry exceeds the buffer or the rest of its message; an entry must be
    handled alone, because it has blobs or is not allowed; the next byte begins no entry."""

    MARKERS = 0b1011101
    """Bit n: type n is a marker and must not be sent."""


def _put_head_of_one(out: Bytes, to: int, epoch: int) -> int:
    """Write the head of a LOG_ENTRIES with one entry. `epoch` is already in wire byte order."""
    poke(out, to, MessageType.LOG_ENTRIES)
    poke64(out, to + 5, 0)  # also covers the end of the epoch, which is written last
    poke(out, to + 12, 1)
    poke64(out, to + 1, epoch)
    return to + HEAD_SIZE


def to_wire(buf: Bytes, at: int, out: Bytes, to: int, epoch: int, alone: bool) -> tuple[int, int, int, int]:
    """Convert log entries from `at` on to wire form at `to`; return both end offsets, the count, and why it stopped.

    If `alone`, each entry gets a LOG_ENTRIES of its own. An entry grows by at most 26 bytes."""
    data, written = source(buf), target(out)
    limit = buf.shape[0]
    count = 0
    with cython.nogil:
        while at < limit:
            kind = byte(data, at)
            if kind == 10:
                return at, to, count, SINGLE
            key_size = value_size = 0
            if kind == 1 or kind == 5:
                if limit - at < 29:
                    return at, to, count, STARVED
                key_size = little32(data, at + 1)
                if kind == 1:
                    value_size = little32(data, at + 5)
                storage_at = at + (9 if kind == 1 else 5)
                version_at = storage_at + 8 + key_size
            elif 7 <= kind <= 9:
                storage_at = at + 1
                version_at = at + 9
            else:
                return at, to, count, OTHER
            end = version_at + 16 + value_size
            if end > limit:
                return at, to, count, STARVED
            if alone:
                to = _put_head_of_one(written, to, epoch)
            poke(written, to, kind)
            poke64(written, to + 1, big64(data, storage_at))
            # A length is written as a whole word; the next write overwrites its other half.
            poke64(written, to + 9, big32(data, at + 1) if key_size else 0)
            to = copy(written, to + 13, data, storage_at + 8, key_size)
            poke64(written, to, big32(data, at + 5) if value_size else 0)
            to = copy(written, to + 4, data, version_at + 16, value_size)
            poke64(written, to + 12, 0)
            poke64(written, to + 8, big64(data, version_at + 8))
            poke64(written, to, big64(data, version_at))
            to += 20
            if alone:
                to = poke(written, to, 0)
            count += 1
            at = end
    return at, to, count, DONE


def _log_entry(data: Bytes, limit: int, at: int, size_max: int, out: Bytes, to: int) -> tuple[int, int, int, int]:
    """Convert the wire entry at `at` to log form; return both end offsets, whether it is logged, and a status.

    `size_max` is that of the rest of the message. If STARVED, a lower bound of its size replaces its end."""
    left = limit - at
    size = 13
    key_size = value_size = 0
    if left >= size:
        key_size = big32(data, at + 9)
        size += key_size + 4
        if left >= size:
            value_size = big32(data, at + size - 4)
            size += value_size + 20
    if left < size or size > size_max:
        return size, to, 0, STARVED
    kind = byte(data, at)
    end = at + size
    if big32(data, end - 4) or (kind < 8 and (MARKERS >> kind) & 1):
        return 0, to, 0, SINGLE
    if kind > 10:
        return end, to, 0, DONE
    storage_id = big64(data, at + 1)
    if kind == 1 or kind == 10:
        poke(out, to, 1)
        poke64(out, to + 1, word(key_size) | word(value_size) << 32)
        poke64(out, to + 9, storage_id)
        to = copy(out, to + 17, data, at + 13, key_size)
    elif kind == 5:
        poke(out, to, 5)
        poke64(out, to + 1, key_size)
        poke64(out, to + 5, storage_id)
        to = copy(out, to + 13, data, at + 13, key_size)
        value_size = 0
    else:
        poke(out, to, kind)
        poke64(out, to + 1, storage_id)
        to += 9
        value_size = 0
    poke64(out, to, big64(data, end - 20))
    poke64(out, to + 8, big64(data, end - 12))
    return end, copy(out, to + 16, data, at + 17 + key_size, value_size), 1, DONE


def log_entries(buf: Bytes, at: int, count: int, size_max: int, out: Bytes) -> tuple[int, int, int, int, int, int]:
    """Convert up to `count` entries of a message; return the end offset, bytes of `out`, entries read, entries logged,
    why it stopped, and if STARVED the number of bytes needed.

    `out` has as many bytes as `buf` after `at`: no entry is longer in log form."""
    data, written = source(buf), target(out)
    to = logged = done = 0
    start = at
    with cython.nogil:
        while done < count:
            end, to, is_logged, status = _log_entry(data, buf.shape[0], at, size_max - (at - start), written, to)
            if status != DONE:
                return at, to, done, logged, status, end
            at = end
            done += 1
            logged += is_logged
    return at, to, done, logged, DONE, 0


def log_messages(buf: Bytes, at: int, size_max: int, out: Bytes) -> tuple[int, int, int, int]:
    """Convert complete LOG_ENTRIES without blobs that add up to one; return the end offset, bytes of `out`, entries
    logged, and flags.

    Messages of one epoch add up until one of them ends or flushes the session, or begins another. Later messages are
    not converted."""
    data, written = source(buf), target(out)
    limit = buf.shape[0]
    start = at
    to = logged = flags = 0
    with cython.nogil:
        while limit - at >= HEAD_SIZE + 1 and byte(data, at) == MessageType.LOG_ENTRIES:
            count = big32(data, at + 9)
            if HEAD_SIZE + count * ENTRY_SIZE_MIN > size_max or big64(data, at + 1) != big64(data, start + 1):
                break
            entry_at = at + HEAD_SIZE
            entry_to = to
            entries = 0
            status = DONE
            for _ in range(count):
                left = size_max - (entry_at - at)
                entry_at, entry_to, is_logged, status = _log_entry(data, limit, entry_at, left, written, entry_to)
                entries += is_logged
                if status != DONE:
                    break
            if status != DONE or entry_at >= limit or entry_at - at >= size_max:
                break
            own = byte(data, entry_at)
            if own & SessionFlags.BEGIN and at > start:
                break
            at = entry_at + 1
            to = entry_to
            logged += entries
            flags |= own
            if own & (SessionFlags.END | SessionFlags.FLUSH):
                break
    return at, to, logged, flags
