"""Numbers of one to eight bytes, literal texts and runs of bytes, at any offset of a byte array.

These are the interpreted forms of the inline functions in words.pxd, with bounds checks. A number is an int64, a word a
uint64; interpreted, both are Python integers, so arithmetic on words that may exceed 64 bits needs a mask.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def _span(array: Bytes, at: int, width: int) -> slice:
    if not 0 <= at <= array.size - width:
        raise IndexError(f"{width} bytes at {at} of {array.size}")
    return slice(int(at), int(at) + int(width))


def source(buf: Bytes) -> Bytes:
    """Return a pointer to the first byte of a read-only array, which may be empty."""
    return buf


def target(out: Bytes) -> Bytes:
    """Return a pointer to the first byte of a writable array, which may be empty."""
    return out


def content(raw: bytes) -> Bytes:
    """Return a pointer to the first of some bytes, which may be empty; it is valid as long as they exist."""
    return np.frombuffer(raw, np.uint8)


def piece(buf: Bytes, at: int, end: int) -> bytes:
    """Return a copy of the bytes from `at` to `end`."""
    return buf[_span(buf, at, end - at)].tobytes()


def written(out: Bytes, end: int) -> bytes:
    """Return a copy of the first `end` bytes of a writable array."""
    return out[_span(out, 0, end)].tobytes()


def numbers(array: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a pointer to the first number of a writable array, which may be empty."""
    return array


def byte(buf: Bytes, at: int) -> int:
    """Return the byte at `at` as a number."""
    return int(buf[_span(buf, at, 1)][0])


def signed(word: int) -> int:
    """Return a word, or an element of an array of words, as a number: from 2^63 on it is negative."""
    return int(word) - (1 << 64) if word >> 63 else int(word)


def signed32(value: int) -> int:
    """Return the lower 32 bits of a number as a signed number."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def word(value: int) -> int:
    """Return a number as a word, a negative one in two's complement."""
    return int(value) & 0xFFFFFFFFFFFFFFFF


def big16(buf: Bytes, at: int) -> int:
    """Return the unsigned 2-byte number at `at`, most significant byte first."""
    return int.from_bytes(buf[_span(buf, at, 2)].tobytes(), "big")


def big32(buf: Bytes, at: int) -> int:
    """Return the unsigned 4-byte number at `at`, most significant byte first."""
    return int.from_bytes(buf[_span(buf, at, 4)].tobytes(), "big")


def big64(buf: Bytes, at: int) -> int:
    """Return the 8-byte word at `at`, most significant byte first."""
    return int.from_bytes(buf[_span(buf, at, 8)].tobytes(), "big")


def little32(buf: Bytes, at: int) -> int:
    """Return the unsigned 4-byte number at `at`, least significant byte first."""
    return int.from_bytes(buf[_span(buf, at, 4)].tobytes(), "little")


def little64(buf: Bytes, at: int) -> int:
    """Return the 8-byte word at `at`, least significant byte first."""
    return int.from_bytes(buf[_span(buf, at, 8)].tobytes(), "little")


def float64(word: int) -> float:
    """Return the double that has the bits of `word`."""
    value: float = struct.unpack("<d", struct.pack("<Q", word))[0]
    return value


def float32(word: int) -> float:
    """Return the float that has the lower 32 bits of `word`, as a double."""
    value: float = struct.unpack("<f", struct.pack("<I", word))[0]
    return value


def float32_bits(value: float) -> int:
    """Return the bits of the float that is nearest to a double, which is not beyond the largest float."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def float_bits(value: float) -> int:
    """Return the word that has the bits of a double."""
    bits: int = struct.unpack("<Q", struct.pack("<d", value))[0]
    return bits


def poke(out: Bytes, at: int, value: int) -> int:
    """Write the lowest byte of `value`; return the offset after it."""
    out[_span(out, at, 1)] = value & 0xFF
    return at + 1


def poke64(out: Bytes, at: int, value: int) -> None:
    """Write the 8 bytes of a word, least significant first."""
    out[_span(out, at, 8)] = np.frombuffer(int(value).to_bytes(8, "little"), np.uint8)


def put(out: Bytes, at: int, text: bytes) -> int:
    """Write a literal without zero bytes; return the offset after it."""
    out[_span(out, at, len(text))] = np.frombuffer(text, np.uint8)
    return at + len(text)


def copy(out: Bytes, at: int, source: Bytes, start: int, count: int) -> int:
    """Copy `count` bytes between arrays that do not overlap; return the offset after them."""
    out[_span(out, at, int(count))] = source[_span(source, start, int(count))]
    return at + count


def copy32(out: Bytes, at: int, source: Bytes, start: int) -> None:
    """Copy 32 bytes; the caller may count fewer of them as written."""
    out[_span(out, at, 32)] = source[_span(source, start, 32)]


def high_product(a: int, b: int) -> int:
    """Return the upper word of the product of two words."""
    return (a * b) >> 64


def trailing_zeros(value: int) -> int:
    """Return how many of the lowest bits of a word are 0; 64 for 0."""
    return (value & -value).bit_length() - 1 if value else 64


def bit_length(value: int) -> int:
    """Return how many bits a word needs; 0 for 0."""
    return value.bit_length()
