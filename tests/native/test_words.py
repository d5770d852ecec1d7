"""Both forms of each function of `words` are equivalent; the interpreted one rejects out-of-bounds access."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowstone.native import words
from tests.native.every_word import every_word
from tests.native.twins import twin

anything = st.integers(0, 2**64 - 1)


def is_signaling(word: int) -> bool:
    """Return True for a NaN whose bits the processor changes when it is moved as a float."""
    return word & 0x7FF8_0000_0000_0000 == 0x7FF0_0000_0000_0000 and word & 0x0007_FFFF_FFFF_FFFF != 0


def flat(results: tuple[Any, ...]) -> list[float]:
    """Return all results in one list. Cython does not unpack tuples of C numbers into another tuple."""
    numbers, words, bits, end = results
    return [*numbers, *words, *bits, end]


@example(b"\x7f\xc0" * 32, 0, 0, 0)
@example(bytes(64), 0, 0, 2**64 - 1)
@given(st.binary(min_size=64, max_size=64), st.integers(0, 20), anything, anything)
def test_compiled_and_interpreted_forms_agree(data: bytes, at: int, first: int, second: int) -> None:
    if is_signaling(first):
        first = 0
    buf = np.frombuffer(data, np.uint8)
    compiled, interpreted = np.zeros(128, np.uint8), np.zeros(128, np.uint8)
    assert twin(every_word) is not every_word
    ours = flat(every_word(buf, compiled, at, first, second))
    theirs = flat(twin(every_word)(buf, interpreted, at, first, second))
    for one, other in zip(ours, theirs, strict=True):
        assert one == other or (math.isnan(one) and math.isnan(other))
    assert compiled.tobytes() == interpreted.tobytes()


@pytest.mark.parametrize("at", [-1, -8, 1, 8, 100])
def test_interpreted_form_rejects_out_of_bounds_offsets(at: int) -> None:
    buf = np.zeros(8, np.uint8)
    with pytest.raises(IndexError):
        words.big64(buf, at)
    with pytest.raises(IndexError):
        words.poke64(buf, at, 1)
    with pytest.raises(IndexError):
        words.put(buf, at, b"12345678")
    with pytest.raises(IndexError):
        words.copy(buf, 0, buf, at, 8)
