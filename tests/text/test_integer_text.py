"""Whole numbers read back as themselves, at every length."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowstone.text.integer_text import UNSIGNED_TEXT_MAX, write_rare, write_signed, write_unsigned


def text(write: Any, value: Any) -> str:
    out = np.full(1 + UNSIGNED_TEXT_MAX, ord("#"), np.uint8)
    return out[: write(value, out, 0)].tobytes().decode()


@given(st.integers(0, 2**64 - 1))
def test_unsigned_numbers_are_exact(value: int) -> None:
    assert text(write_unsigned, np.uint64(value)) == str(value)


@given(st.integers(-(2**63), 2**63 - 1))
def test_signed_numbers_are_exact(value: int) -> None:
    assert text(write_signed, np.int64(value)) == text(write_rare, np.int64(value)) == str(value)


def test_every_length_and_its_neighbours() -> None:
    for power in range(20):
        for value in (10**power - 1, 10**power, 10**power + 1):
            assert text(write_unsigned, np.uint64(value)) == str(value)
    for value in (-(2**63), -1, 0, 2**63 - 1):
        assert text(write_signed, np.int64(value)) == str(value)
