"""Integers as decimal text, eight digits at a time.

Each writer returns the end offset of its text and may overwrite up to 8 bytes after it; the caller reserves that much
room. These are the interpreted forms of the functions in integer_text.pxd, which are inline because a call would take
more time than a short number.
"""

from __future__ import annotations

from flowstone.native.words import Bytes, poke, poke64, trailing_zeros, word

UNSIGNED_TEXT_MAX = 20 + 8
"""Room that a writer needs: the digits of 2^64, and the bytes after them that it may overwrite."""

E16 = 10**16
LANES_2 = 0x0000007F_0000007F
LANES_4 = 0x000F000F_000F000F
ZEROS = 0x30303030_30303030
MASK = 0xFFFFFFFF_FFFFFFFF


def eight_digits(value: int) -> int:
    """Return the digits of a number below 10^8, one per byte, with the most significant digit in the lowest byte."""
    high = value // 10_000
    x = high | ((value - high * 10_000) << 32)
    high = ((x * 10_486) >> 20) & LANES_2  # 10486 / 2^20 is about 1/100: exact below 10^4
    x = high | ((x - high * 100) << 16)
    high = ((x * 103) >> 10) & LANES_4  # 103 / 2^10 is about 1/10: exact below 10^2
    return high | ((x - high * 10) << 8)


def write_eight(value: int, out: Bytes, at: int) -> int:
    """Write a number below 10^8 as exactly eight digits."""
    poke64(out, at, eight_digits(value) | ZEROS)
    return at + 8


def write_short(value: int, out: Bytes, at: int) -> int:
    """Write a number below 10^8 without leading zeros."""
    digits = eight_digits(value)
    skipped = min(trailing_zeros(digits) >> 3, 7)
    poke64(out, at, (digits | ZEROS) >> (skipped << 3))
    return at + 8 - skipped


def write_unsigned(value: int, out: Bytes, at: int) -> int:
    """Write an unsigned number."""
    if value < 100_000_000:
        return write_short(value, out, at)
    if value < E16:
        high = value // 100_000_000
        at = write_short(high, out, at)
        return write_eight(value - high * 100_000_000, out, at)
    top = value // E16
    value -= top * E16
    high = value // 100_000_000
    at = write_short(top, out, at)
    at = write_eight(high, out, at)
    return write_eight(value - high * 100_000_000, out, at)


def write_signed(value: int, out: Bytes, at: int) -> int:
    """Write a signed number."""
    size = word(value)
    if value < 0:
        at = poke(out, at, 45)
        size = (0 - size) & MASK
    return write_unsigned(size, out, at)
