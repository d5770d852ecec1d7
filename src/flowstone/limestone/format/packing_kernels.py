"""Compiled: the encoding of many keys and values as log entries."""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    import numpy as np
    from numpy.typing import NDArray

    from flowstone.limestone.format.entry_table import Bytes
    from flowstone.native.words import copy, poke, poke64, source, target, word

    Sizes = NDArray[np.int64]


def pack_puts(
    out: Bytes,
    keys: Bytes,
    key_sizes: Sizes,
    values: Bytes,
    value_sizes: Sizes,
    storage_id: int,
    major: int,
    first_minor: int,
) -> int:
    """Encode one entry for each key and value, which are concatenated; return the size of all entries.

    The caller sizes `out` for all entries. Every size must fit in 4 bytes, and every minor version in 8."""
    to, key_data, value_data = target(out), source(keys), source(values)
    at = key_at = value_at = 0
    with cython.nogil:
        for index in range(key_sizes.shape[0]):
            key_size, value_size = key_sizes[index], value_sizes[index]
            at = poke(to, at, 1)
            poke64(to, at, word(key_size) | word(value_size) << 32)
            poke64(to, at + 8, storage_id)
            at = copy(to, at + 16, key_data, key_at, key_size)
            poke64(to, at, major)
            poke64(to, at + 8, first_minor + index)
            at = copy(to, at + 16, value_data, value_at, value_size)
            key_at += key_size
            value_at += value_size
    return at
