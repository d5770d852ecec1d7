"""Compiled: calls every function of `flowstone.native.words`, for the test that compares both forms."""

from __future__ import annotations

from typing import Any

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.native.words import (
        Bytes,
        big16,
        big32,
        big64,
        bit_length,
        byte,
        copy,
        copy32,
        float32,
        float64,
        float_bits,
        high_product,
        little32,
        little64,
        poke,
        poke64,
        put,
        signed,
        source,
        target,
        trailing_zeros,
        word,
    )


def every_word(buf: Bytes, out: Bytes, at: int, first: int, second: int) -> tuple[Any, ...]:
    """Call all functions; write to `out` and return their results."""
    data = source(buf)
    room = target(out)
    numbers = (byte(data, at), big16(data, at), big32(data, at), little32(data, at), signed(first), word(-at))
    words = (big64(data, at), little64(data, at), high_product(first, second))
    bits = (trailing_zeros(first), bit_length(first), float_bits(float64(first)), float32(big32(data, at)))
    to = put(room, at, b"literal text")
    to = poke(room, to, 200)
    poke64(room, to, first)
    to = copy(room, to + 8, data, at, 5)
    copy32(room, to, data, at)
    return numbers, words, bits, to
