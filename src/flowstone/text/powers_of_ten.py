"""Tables of powers of ten for `float_text`, as bytes of little-endian words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

POWER_MIN, POWER_MAX = -292, 324


def _powers_of_ten() -> NDArray[np.uint8]:
    """Return the upper 128 bits of each 10^k, rounded up, as (high, low) words; k from POWER_MIN on."""
    words = []
    for k in range(POWER_MIN, POWER_MAX + 1):
        if k >= 0:
            shift = (10**k).bit_length() - 128
            bits = -(-(10**k) >> shift) if shift > 0 else 10**k << -shift
        else:
            divisor = 10**-k
            bits = -(-(1 << (divisor.bit_length() + 127)) // divisor)
        words += divmod(bits, 1 << 64)
    return np.array(words, "<u8").view(np.uint8)


POWERS = _powers_of_ten()
SHORT_POWERS = np.array([10**k for k in range(20)], "<u8").view(np.uint8)
"""10^k as one word; k from 0 to 19."""
