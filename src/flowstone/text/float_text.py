"""Compiled: a double as the shortest decimal text that reads back to the same double.

The text equals Python's `repr`, except that JSON has no NaN and no infinities: they become the strings "NaN",
"Infinity" and "-Infinity". The algorithm is Schubfach (Raffaello Giulietti, "The Schubfach way to render doubles").
Each writer returns the end offset of its text and may overwrite up to 8 bytes after it.
"""

from __future__ import annotations

import cython

from flowstone.text.powers_of_ten import POWERS as _POWERS
from flowstone.text.powers_of_ten import SHORT_POWERS as _SHORT_POWERS

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.native.words import (
        Bytes,
        bit_length,
        float_bits,
        high_product,
        little64,
        poke,
        put,
        signed,
        source,
        word,
    )
    from flowstone.text.integer_text import write_eight, write_short, write_unsigned
    from flowstone.text.powers_of_ten import POWER_MIN

    MASK = 0xFFFFFFFF_FFFFFFFF
    HIDDEN = 1 << 52
    FRACTION = (1 << 52) - 1
    SIGN = 1 << 63

DOUBLE_TEXT_MAX = 32 + 8
"""Room that a double needs: 17 digits with sign, point, leading zeros or exponent, and the bytes overwritten after."""

POWERS = _POWERS
SHORT_POWERS = _SHORT_POWERS


def ten_to(k: int) -> int:
    """Return 10^k as a word, for k from 0 to 19."""
    return little64(source(SHORT_POWERS), 8 * k)


def round_to_odd(high: int, low: int, value: int) -> int:
    """Return the upper word of the 192-bit product; its lowest bit also marks an inexact result."""
    carry = high_product(low, value)
    middle = (high * value + carry) & MASK
    top = high_product(high, value)
    if middle < carry:
        top += 1
    return top | 1 if middle > 1 else top


def shortest(fraction: int, exponent: int) -> tuple[int, int]:
    """Return (digits, k) such that digits * 10^k is the nearest to a finite, positive double among the shortest."""
    if exponent != 0:
        c, q = fraction | HIDDEN, exponent - 1075
    else:
        c, q = fraction, -1074
    closer = fraction == 0 and exponent > 1  # the next lower double is only half as far away
    k = (q * 1262611 - (524031 if closer else 0)) >> 22
    shift = q + ((-k * 1741647) >> 19) + 1
    powers, index = source(POWERS), 16 * (-k - POWER_MIN)
    high, low = little64(powers, index), little64(powers, index + 8)
    middle = round_to_odd(high, low, (4 * c) << shift)
    lower = round_to_odd(high, low, (4 * c - (1 if closer else 2)) << shift)
    upper = round_to_odd(high, low, (4 * c + 2) << shift)
    if c & 1:  # an interval around an odd number excludes its ends
        lower += 1
        upper -= 1
    s = middle >> 2
    if s >= 10:
        tens = s // 10
        down, up = lower <= 40 * tens, 40 * tens + 40 <= upper
        if down != up:
            return tens + (1 if up else 0), k + 1
    down, up = lower <= 4 * s, 4 * s + 4 <= upper
    if down != up:
        return s + (1 if up else 0), k
    half = 4 * s + 2
    if middle > half or (middle == half and s & 1):
        s += 1
    return s, k


def count_digits(value: int) -> int:
    """Return the number of decimal digits of `value`, which is not 0."""
    count = (bit_length(value) * 1233) >> 12  # 1233 / 2^12 is just above log10(2)
    return count + 1 if value >= ten_to(count) else count


def write_padded(value: int, width: int, out: Bytes, at: int) -> int:
    """Write `value` as exactly `width` digits, at most 16, with leading zeros."""
    if width > 8:
        high = value // 100_000_000
        at = write_padded_short(high, width - 8, out, at)
        return write_eight(value - high * 100_000_000, out, at)
    return write_padded_short(value, width, out, at)


def write_padded_short(value: int, width: int, out: Bytes, at: int) -> int:
    """Write `value` as exactly `width` digits, at most 8, with leading zeros."""
    write_eight(value * ten_to(8 - width), out, at)
    return at + width


def write_decimal(digits: int, k: int, out: Bytes, at: int) -> int:
    """Write digits * 10^k in the format of `repr`; `digits` has no trailing zeros."""
    count = count_digits(digits)
    point = count + k  # digits before the decimal point
    if -4 < point <= 0:
        at = put(out, at, b"0.")
        for _ in range(-point):
            at = poke(out, at, 48)
        return write_unsigned(digits, out, at)
    if 0 < point <= 16:
        if k >= 0:
            at = write_unsigned(digits * ten_to(k), out, at)
            return put(out, at, b".0")
        whole = digits // ten_to(-k)
        at = write_unsigned(whole, out, at)
        at = poke(out, at, 46)
        return write_padded(digits - whole * ten_to(-k), -k, out, at)
    whole = digits // ten_to(count - 1)
    at = poke(out, at, 48 + signed(whole))
    if count > 1:
        at = poke(out, at, 46)
        at = write_padded(digits - whole * ten_to(count - 1), count - 1, out, at)
    return write_exponent(point - 1, out, at)


def write_exponent(exponent: int, out: Bytes, at: int) -> int:
    """Write `e`, a sign, and at least two digits."""
    at = put(out, at, b"e-") if exponent < 0 else put(out, at, b"e+")
    exponent = -exponent if exponent < 0 else exponent
    if exponent < 10:
        at = poke(out, at, 48)
    return write_short(word(exponent), out, at)


def write_double(value: float, out: Bytes, at: int) -> int:
    """Write `value` as JSON. Needs DOUBLE_TEXT_MAX bytes of room."""
    bits = float_bits(value)
    fraction = bits & FRACTION
    exponent = signed((bits >> 52) & 0x7FF)
    if exponent == 0x7FF:
        if fraction:
            return put(out, at, b'"NaN"')
        return put(out, at, b'"-Infinity"') if bits & SIGN else put(out, at, b'"Infinity"')
    if bits & SIGN:
        at = poke(out, at, 45)
    if fraction == 0 and exponent == 0:
        return put(out, at, b"0.0")
    cut = 1075 - exponent
    if 0 <= cut <= 52:
        whole = (fraction | HIDDEN) >> cut
        if whole << cut == fraction | HIDDEN:  # a whole number below 2^53
            at = write_unsigned(whole, out, at)
            return put(out, at, b".0")
    digits, k = shortest(fraction, exponent)
    while True:
        tenth = digits // 10
        if tenth * 10 != digits:
            return write_decimal(digits, k, out, at)
        digits, k = tenth, k + 1
