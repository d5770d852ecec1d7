"""Derives inputs from others: by a few changes that often break decoders, and by joining two inputs."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Final

INTERESTING: Final = [0, 1, 0x7F, 0x80, 0x8F, 0x90, 0xC0, 0xC1, 0xC7, 0xCF, 0xD3, 0xD4, 0xD9, 0xDB, 0xDD, 0xDF, 0xFF]
_SIZES: Final = (0, 1, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)


def mutated(data: bytes, rng: random.Random, tokens: Sequence[bytes] = ()) -> bytes:
    """`tokens` are byte strings that the decoder may recognize."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        _change(changed, rng, tokens)
    return bytes(changed)


def _change(changed: bytearray, rng: random.Random, tokens: Sequence[bytes]) -> None:
    at = rng.randrange(len(changed) + 1)
    match rng.randrange(9 if tokens else 7):
        case 0:
            changed[at : at + 1] = bytes((rng.randrange(256),))
        case 1:
            changed[at : at + 1] = bytes((rng.choice(INTERESTING),))
        case 2:
            del changed[at : at + rng.randint(1, 8)]
        case 3:
            changed[at:at] = rng.randbytes(rng.randint(1, 8))
        case 4:
            start = rng.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + rng.randint(1, 32)]
        case 5:
            changed[at : at + 4] = struct.pack(">I", rng.choice(_SIZES))
        case 6:
            del changed[at:]
        case 7:
            token = rng.choice(tokens)
            changed[at : at + len(token)] = token
        case _:
            changed[at:at] = rng.choice(tokens)


def spliced(one: bytes, other: bytes, rng: random.Random) -> bytes:
    """Join the start of one input and the end of another."""
    return one[: rng.randrange(len(one) + 1)] + other[rng.randrange(len(other) + 1) :]
