"""Compiled: a scan over a table of entries, up to the first entry that an intact log file does not have there."""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    import numpy as np
    from numpy.typing import NDArray

    from flowstone.limestone.format.entry_table import AT, MAJOR, TYPE, Bytes, Table

    # Elements of the state of a scan. Those before EPOCH are truth values.
    OPEN, VALID, MARKED, HAS_ENTRIES, EPOCH, HEAD, MAX_EPOCH, COUNTED = range(8)


def follow(table: Table, start: int, takes: Bytes, base: int, durable: int, state: NDArray[np.uint64]) -> int:
    """Scan the table from `start` on; return the first column that an intact file does not have there, or -1.

    `takes[i]` becomes 1 if entry i belongs to a valid session, else 0. `state` is that of a LogScan."""
    with cython.nogil:
        for index in range(start, takes.shape[0]):
            takes[index] = 0
            kind = table[TYPE, index]
            if kind == 2 or kind == 6:
                epoch = table[MAJOR, index]
                if kind == 2 and epoch > durable:
                    return index
                state[MAX_EPOCH] = max(state[MAX_EPOCH], epoch)
                state[OPEN], state[HAS_ENTRIES] = 1, 0
                state[VALID] = 1 if kind == 2 else 0
                state[MARKED] = 0 if kind == 2 else 1
                state[EPOCH] = epoch
                state[HEAD] = base + table[AT, index]
            elif state[OPEN] == 0 or kind == 4:
                return index
            elif kind == 3:
                state[OPEN] = 0
            elif state[VALID] != 0:
                takes[index] = 1
                state[HAS_ENTRIES] = 1
                state[COUNTED] += 1
    return -1
