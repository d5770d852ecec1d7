"""Integers of every length are printed exactly, by the inline functions of compiled modules and interpreted."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowstone.native.words import Bytes
from flowstone.text.integer_text import UNSIGNED_TEXT_MAX, write_signed, write_unsigned
from flowstone.text.json_text import json_column

UINT64, INT64 = 0xCF, 0xD3


def compiled(marker: int, *values: int) -> list[str]:
    """Return the texts that a compiled module writes for MessagePack integers of eight bytes."""
    packed = b"".join(bytes((marker,)) + value.to_bytes(8, "big", signed=marker == INT64) for value in values)
    ends = 9 * np.arange(1, len(values) + 1)
    offsets, text = json_column(np.frombuffer(packed, np.uint8), ends - 9, ends)
    return [text[a:b].tobytes().decode() for a, b in itertools.pairwise(offsets)]


def interpreted(write: Callable[[int, Bytes, int], int], value: int) -> str:
    out = np.full(1 + UNSIGNED_TEXT_MAX, ord("#"), np.uint8)
    return out[: write(value, out, 0)].tobytes().decode()


@given(st.integers(0, 2**64 - 1))
def test_unsigned_numbers_are_exact(value: int) -> None:
    assert interpreted(write_unsigned, value) == str(value)
    assert compiled(UINT64, value) == [str(value)]


@given(st.integers(-(2**63), 2**63 - 1))
def test_signed_numbers_are_exact(value: int) -> None:
    assert interpreted(write_signed, value) == str(value)
    assert compiled(INT64, value) == [str(value)]


def test_integers_of_every_length_are_exact() -> None:
    values = [10**power + step for power in range(20) for step in (-1, 0, 1)]
    assert compiled(UINT64, *values) == [str(value) for value in values]
    assert [interpreted(write_unsigned, value) for value in values] == [str(value) for value in values]
    edges = (-(2**63), -1, 0, 2**63 - 1)
    assert compiled(INT64, *edges) == [str(value) for value in edges]
    assert [interpreted(write_signed, value) for value in edges] == [str(value) for value in edges]
