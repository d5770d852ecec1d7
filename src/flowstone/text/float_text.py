"""A kernel that writes a double as the shortest decimal text that reads back to the same double.

The text equals Python's `repr`, except that JSON has no NaN and no infinities: they become the strings "NaN",
"Infinity" and "-Infinity". The algorithm is Schubfach (Raffaello Giulietti, "The Schubfach way to render doubles").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import Bytes, bit_length, high_product, number, poke, put
from flowstone.text.integer_text import write_eight, write_short, write_unsigned

DOUBLE_TEXT_MAX = 32 + 8
"""Room that one double needs: 17 digits with sign, point, leading zeros or exponent, and the writers' scribble."""

_POWER_MIN, _POWER_MAX = -292, 324


def _powers_of_ten() -> NDArray[np.uint64]:
    """10^k, its upper 128 bits rounded up, as (high, low) words; k from _POWER_MIN on."""
    words = []
    for k in range(_POWER_MIN, _POWER_MAX + 1):
        if k >= 0:
            shift = (10**k).bit_length() - 128
            bits = -(-(10**k) >> shift) if shift > 0 else 10**k << -shift
        else:
            divisor = 10**-k
            bits = -(-(1 << (divisor.bit_length() + 127)) // divisor)
        words += divmod(bits, 1 << 64)
    return np.array(words, np.uint64)


_POWERS = _powers_of_ten()
_SHORT_POWERS = np.array([10**k for k in range(20)], np.uint64)

_0, _1, _2, _3, _4, _10, _40 = (np.uint64(n) for n in (0, 1, 2, 3, 4, 10, 40))
_FRACTION_BITS = np.uint64(52)
_HIDDEN = np.uint64(1 << 52)
_FRACTION = np.uint64((1 << 52) - 1)
_EXPONENT = np.uint64(0x7FF)
_SIGN = np.uint64(1 << 63)
_E8 = np.uint64(10**8)


@inlined
def _round_to_odd(high: np.uint64, low: np.uint64, value: np.uint64) -> np.uint64:
    """The upper part of the 192-bit product; its lowest bit also says that something was cut off."""
    carry = high_product(low, value)
    middle = high * value + carry
    top = high_product(high, value)
    if middle < carry:
        top += _1
    return top | _1 if middle > _1 else top


@inlined
def _shortest(fraction: np.uint64, exponent: int) -> tuple[np.uint64, int]:
    """(digits, k) with digits * 10^k nearest to the finite, positive double, among the shortest."""
    if exponent != 0:
        c, q = fraction | _HIDDEN, exponent - 1075
    else:
        c, q = fraction, -1074
    closer = fraction == _0 and exponent > 1  # the double below is only half as far
    k = (q * 1262611 - (524031 if closer else 0)) >> 22
    shift = np.uint64(q + ((-k * 1741647) >> 19) + 1)
    index = 2 * (-k - _POWER_MIN)
    high, low = _POWERS[index], _POWERS[index + 1]
    middle = _round_to_odd(high, low, (_4 * c) << shift)
    lower = _round_to_odd(high, low, (_4 * c - (_1 if closer else _2)) << shift)
    upper = _round_to_odd(high, low, (_4 * c + _2) << shift)
    if c & _1:  # an odd neighbour does not own its boundary
        lower += _1
        upper -= _1
    s = middle >> _2
    if s >= _10:
        tens = s // _10
        down, up = lower <= _40 * tens, _40 * tens + _40 <= upper
        if down != up:
            return tens + (_1 if up else _0), k + 1
    down, up = lower <= _4 * s, _4 * s + _4 <= upper
    if down != up:
        return s + (_1 if up else _0), k
    half = _4 * s + _2
    if middle > half or (middle == half and s & _1):
        s += _1
    return s, k


@inlined
def _count_digits(value: np.uint64) -> int:
    count = (bit_length(value) * 1233) >> 12  # 1233 / 2^12 is just above log10(2)
    return count + 1 if value >= _SHORT_POWERS[count] else count


@inlined
def _write_padded(value: np.uint64, width: int, out: Bytes, at: int) -> int:
    """`value` as exactly `width` digits (at most 16), zeros in front."""
    if width > 8:
        high = value // _E8
        at = _write_padded_short(high, width - 8, out, at)
        return write_eight(value - high * _E8, out, at)
    return _write_padded_short(value, width, out, at)


@inlined
def _write_padded_short(value: np.uint64, width: int, out: Bytes, at: int) -> int:
    """`value` as exactly `width` digits (at most 8): eight are written, those behind count as room."""
    scaled = value * _SHORT_POWERS[8 - width]
    write_eight(scaled, out, at)
    return at + width


@kernel
def _write_decimal(digits: np.uint64, k: int, out: Bytes, at: int) -> int:
    """digits * 10^k, digits without trailing zeros, in the layout of `repr`."""
    count = _count_digits(digits)
    point = count + k  # digits before the decimal point
    if -4 < point <= 0:
        at = put(out, at, "0.")
        for _ in range(-point):
            at = poke(out, at, 48)
        return write_unsigned(digits, out, at)
    if 0 < point <= 16:
        if k >= 0:
            at = write_unsigned(digits * _SHORT_POWERS[k], out, at)
            return put(out, at, ".0")
        whole = digits // _SHORT_POWERS[-k]
        at = write_unsigned(whole, out, at)
        at = poke(out, at, 46)
        return _write_padded(digits - whole * _SHORT_POWERS[-k], -k, out, at)
    whole = digits // _SHORT_POWERS[count - 1]
    at = poke(out, at, 48 + number(whole))
    if count > 1:
        at = poke(out, at, 46)
        at = _write_padded(digits - whole * _SHORT_POWERS[count - 1], count - 1, out, at)
    return _write_exponent(point - 1, out, at)


@inlined
def _write_exponent(exponent: int, out: Bytes, at: int) -> int:
    """`e`, the sign, and at least two digits."""
    at = put(out, at, "e-") if exponent < 0 else put(out, at, "e+")
    exponent = abs(exponent)
    if exponent < 10:
        at = poke(out, at, 48)
    return write_short(np.uint64(exponent), out, at)


@kernel
def write_double(value: float, out: Bytes, at: int) -> int:
    """`value` as JSON; the offset behind it. Needs DOUBLE_TEXT_MAX bytes of room."""
    bits = np.float64(value).view(np.uint64)
    fraction = bits & _FRACTION
    exponent = number((bits >> _FRACTION_BITS) & _EXPONENT)
    if exponent == 0x7FF:
        if fraction:
            return put(out, at, '"NaN"')
        return put(out, at, '"-Infinity"') if bits & _SIGN else put(out, at, '"Infinity"')
    if bits & _SIGN:
        at = poke(out, at, 45)
    if fraction == _0 and exponent == 0:
        return put(out, at, "0.0")
    cut = 1075 - exponent
    if 0 <= cut <= 52:
        whole = (fraction | _HIDDEN) >> np.uint64(cut)
        if whole << np.uint64(cut) == fraction | _HIDDEN:  # a whole number below 2^53
            at = write_unsigned(whole, out, at)
            return put(out, at, ".0")
    digits, k = _shortest(fraction, exponent)
    while True:
        tenth = digits // _10
        if tenth * _10 != digits:
            return _write_decimal(digits, k, out, at)
        digits, k = tenth, k + 1
