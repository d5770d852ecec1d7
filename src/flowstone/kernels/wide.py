"""Moves wider than a byte, for kernels: words, literal texts and runs of bytes at any offset of a byte array.

Each function has two bodies with one meaning: the plain one here, which checks its bounds and runs where kernels run
uncompiled, and the one in `machine`, which becomes one or two instructions and checks nothing. So a kernel proves the
bounds before it calls, and its tests run it uncompiled to prove the proof. Numbers are int64, words are uint64: NumPy
and numba turn a mix of the two into a float.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def _span(array: Bytes, at: int, width: int) -> slice:
    if not 0 <= at <= array.size - width:
        raise IndexError(f"{width} bytes at {at} of {array.size}")
    return slice(int(at), int(at) + width)


def byte(buf: Bytes, at: int) -> int:
    """The byte at `at` as a number."""
    return int(buf[_span(buf, at, 1)][0])


def number(value: np.unsignedinteger[Any] | np.signedinteger[Any]) -> int:
    """An element of an integer array, or a word below 2^63, as a number."""
    return int(value)


def word(value: int) -> np.uint64:
    """A number as a word, a negative one in two's complement."""
    return np.uint64(int(value) & 0xFFFFFFFFFFFFFFFF)


def big16(buf: Bytes, at: int) -> int:
    """The unsigned 2-byte number at `at`, most significant byte first."""
    return int.from_bytes(buf[_span(buf, at, 2)].tobytes(), "big")


def big32(buf: Bytes, at: int) -> int:
    """The unsigned 4-byte number at `at`, most significant byte first."""
    return int.from_bytes(buf[_span(buf, at, 4)].tobytes(), "big")


def big64(buf: Bytes, at: int) -> np.uint64:
    """The 8-byte word at `at`, most significant byte first."""
    return np.uint64(int.from_bytes(buf[_span(buf, at, 8)].tobytes(), "big"))


def little64(buf: Bytes, at: int) -> np.uint64:
    """The 8-byte word at `at`, least significant byte first."""
    return np.uint64(int.from_bytes(buf[_span(buf, at, 8)].tobytes(), "little"))


def poke(out: Bytes, at: int, value: int) -> int:
    """Writes one byte; the offset behind it."""
    out[_span(out, at, 1)] = value
    return at + 1


def poke64(out: Bytes, at: int, value: np.uint64) -> None:
    """Writes the 8 bytes of `value`, least significant first."""
    out[_span(out, at, 8)] = np.frombuffer(int(value).to_bytes(8, "little"), np.uint8)


def put(out: Bytes, at: int, text: str) -> int:
    """Writes a literal text of ASCII characters; the offset behind it."""
    out[_span(out, at, len(text))] = np.frombuffer(text.encode("ascii"), np.uint8)
    return at + len(text)


def copy(out: Bytes, at: int, source: Bytes, start: int, count: int) -> int:
    """Copies `count` bytes between arrays that do not overlap; the offset behind them."""
    out[_span(out, at, int(count))] = source[_span(source, start, int(count))]
    return at + count


def copy32(out: Bytes, at: int, source: Bytes, start: int) -> None:
    """Copies 32 bytes, however many of them the caller will count as written."""
    out[_span(out, at, 32)] = source[_span(source, start, 32)]


def high_product(a: np.uint64, b: np.uint64) -> np.uint64:
    """The upper word of the product of two words."""
    return np.uint64((int(a) * int(b)) >> 64)


def trailing_zeros(value: np.uint64) -> int:
    """How many of the lowest bits are 0; 64 for 0."""
    bits = int(value)
    return (bits & -bits).bit_length() - 1 if bits else 64


def bit_length(value: np.uint64) -> int:
    """How many bits the number needs; 0 for 0."""
    return int(value).bit_length()
