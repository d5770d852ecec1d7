"""Mutations of bytes as disks, networks and attackers damage them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

INTERESTING: Final = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    0x10,
    0x11,
    0x20,
    0x21,
    0x22,
    0x30,
    0x40,
    0x41,
    0x7F,
    0x80,
    0xFF,
)
"""Types of entries and messages, and the bounds of ranges."""

LENGTHS: Final = (0, 1, 0x7F, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)

Mutation = Callable[[bytearray, random.Random, Sequence[bytes]], None]


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return the data with one to four errors; pieces of `others` may appear in it."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        rng.choice(MUTATIONS)(found, rng, others)
    return bytes(found)


def _replace_byte(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((rng.randrange(256), *INTERESTING))


def _flip_bit(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _replace_length(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at : at + 4] = rng.choice(LENGTHS).to_bytes(4, rng.choice(("little", "big")))


def _cut(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _drop(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.randint(1, 40)]


def _insert(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randint(1, 40))


def _repeat(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    data[end:end] = data[at : min(end, at + 4000)]


def _zero(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    data[at:end] = bytes(end - at)


def _splice(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    other = rng.choice(others) if others else b""
    start = rng.randrange(len(other) + 1)
    at = rng.randrange(len(data) + 1)
    data[at:at] = other[start : start + rng.randint(1, 400)]


def _append_other(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    if others:
        data += rng.choice(others)[:4000]


MUTATIONS: Final[tuple[Mutation, ...]] = (
    _replace_byte,
    _replace_byte,
    _flip_bit,
    _replace_length,
    _cut,
    _drop,
    _insert,
    _repeat,
    _zero,
    _splice,
    _append_other,
)
