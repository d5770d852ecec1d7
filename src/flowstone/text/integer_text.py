"""Kernels that write whole numbers as decimal text, eight digits at a time.

A writer may overwrite up to 8 bytes after the end offset that it returns; the caller reserves that much room.
"""

from __future__ import annotations

import numpy as np

from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import Bytes, poke, poke64, trailing_zeros, word

UNSIGNED_TEXT_MAX = 20 + 8
"""Room that one number needs: the digits of 2^64, and the scribble."""

_E4, _E8, _E16 = np.uint64(10**4), np.uint64(10**8), np.uint64(10**16)
_8, _10, _16, _20, _32 = np.uint64(8), np.uint64(10), np.uint64(16), np.uint64(20), np.uint64(32)
_TEN, _HUNDRED = np.uint64(10), np.uint64(100)
_HUNDREDTH, _TENTH = np.uint64(10486), np.uint64(103)  # over 2^20 and 2^10: exact below 10^4 and 10^2
_LANES_2 = np.uint64(0x0000007F_0000007F)
_LANES_4 = np.uint64(0x000F000F_000F000F)
_ZEROS = np.uint64(0x30303030_30303030)


@inlined
def eight_digits(value: np.uint64) -> np.uint64:
    """The digits of a number below 10^8, one per byte, the most significant in the lowest byte."""
    high = value // _E4
    x = high | ((value - high * _E4) << _32)
    high = ((x * _HUNDREDTH) >> _20) & _LANES_2
    x = high | ((x - high * _HUNDRED) << _16)
    high = ((x * _TENTH) >> _10) & _LANES_4
    return high | ((x - high * _TEN) << _8)


@inlined
def write_eight(value: np.uint64, out: Bytes, at: int) -> int:
    """A number below 10^8 as exactly eight digits."""
    poke64(out, at, eight_digits(value) | _ZEROS)
    return at + 8


@inlined
def write_short(value: np.uint64, out: Bytes, at: int) -> int:
    """A number below 10^8 without leading zeros."""
    digits = eight_digits(value)
    skipped = min(trailing_zeros(digits) >> 3, 7)
    poke64(out, at, (digits | _ZEROS) >> np.uint64(skipped << 3))
    return at + 8 - skipped


@inlined
def write_unsigned(value: np.uint64, out: Bytes, at: int) -> int:
    """`value` in decimal; the offset behind it."""
    if value < _E8:
        return write_short(value, out, at)
    if value < _E16:
        high = value // _E8
        at = write_short(high, out, at)
        return write_eight(value - high * _E8, out, at)
    top = value // _E16
    value -= top * _E16
    high = value // _E8
    at = write_short(top, out, at)
    at = write_eight(high, out, at)
    return write_eight(value - high * _E8, out, at)


@inlined
def write_signed(value: int, out: Bytes, at: int) -> int:
    """`value` in decimal with its sign; the offset behind it."""
    if value < 0:
        at = poke(out, at, 45)
        value = -value
    return write_unsigned(word(value), out, at)


@kernel
def write_rare(value: int, out: Bytes, at: int) -> int:
    """As `write_signed`, for places that rarely see a number."""
    return write_signed(value, out, at)
