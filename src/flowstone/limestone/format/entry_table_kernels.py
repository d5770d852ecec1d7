"""Compiled: one pass over the entries of a log file, which tabulates their offsets and fields.

A walk accepts only complete entries and stops at anything else. Every read is bounded, so any bytes yield a table and
the offset of the first byte that does not start a complete entry.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.limestone.format.entry_table import (
        AT,
        BLOB_COUNT,
        END,
        FULL,
        KEY_AT,
        KEY_END,
        MAJOR,
        MINOR,
        NEED,
        OTHER,
        STORAGE_ID,
        TYPE,
        VALUE_AT,
        VALUE_END,
        Bytes,
        Table,
    )
    from flowstone.native.words import byte, little32, little64, source


def walk_table(buf: Bytes, at: int, table: Table, count: int) -> tuple[int, int, int]:
    """Fill the table from column `count` on with the entries from `at` on; return the count, the end offset and why."""
    data = source(buf)
    limit = buf.shape[0]
    with cython.nogil:
        while count < table.shape[1]:
            if at >= limit:
                return count, at, NEED
            kind = byte(data, at)
            left = limit - at
            key_at = key_end = value_at = value_end = end = at
            blobs = 0
            if kind == 1 or kind == 10 or kind == 5:
                # The shortest of these has 29 bytes, so both lengths can be read before their presence is known.
                if left < 29:
                    return count, at, NEED
                key_at, value_size = at + 17, little32(data, at + 5)
                if kind == 5:
                    key_at, value_size = at + 13, 0
                key_end = key_at + little32(data, at + 1)
                value_at = key_end + 16
                value_end = end = value_at + value_size
                if kind == 10:
                    if end + 4 > limit:
                        return count, at, NEED
                    blobs = little32(data, end)
                    end += 4 + 8 * blobs
                if end > limit:
                    return count, at, NEED
                table[STORAGE_ID, count] = little64(data, key_at - 8)
                table[MAJOR, count] = little64(data, key_end)
                table[MINOR, count] = little64(data, key_end + 8)
            elif 7 <= kind <= 9:
                end = at + 25
                if end > limit:
                    return count, at, NEED
                table[STORAGE_ID, count] = little64(data, at + 1)
                table[MAJOR, count] = little64(data, at + 9)
                table[MINOR, count] = little64(data, at + 17)
            elif kind == 2 or kind == 3 or kind == 4 or kind == 6:
                end = at + (10 if kind == 3 else 9)
                if end > limit:
                    return count, at, NEED
                table[STORAGE_ID, count] = 0
                table[MAJOR, count] = little64(data, at + 1)
                table[MINOR, count] = 0
            else:
                return count, at, OTHER
            table[AT, count] = at
            table[END, count] = end
            table[TYPE, count] = kind
            table[KEY_AT, count] = key_at
            table[KEY_END, count] = key_end
            table[VALUE_AT, count] = value_at
            table[VALUE_END, count] = value_end
            table[BLOB_COUNT, count] = blobs
            count += 1
            at = end
    return count, at, FULL
