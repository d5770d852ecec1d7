"""The two bodies of each wide move are equivalent; the plain one rejects out-of-bounds moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.kernels import Kernel, kernel, wide

words = st.integers(0, 2**64 - 1).map(np.uint64)


@kernel
def _everything(buf: Any, out: Any, at: int, word: Any, other: Any) -> Any:
    numbers = (wide.byte(buf, at), wide.big16(buf, at), wide.big32(buf, at), wide.number(buf[at]))
    loaded = (wide.big64(buf, at), wide.little64(buf, at), wide.high_product(word, other), wide.word(-at))
    bits = (wide.trailing_zeros(word), wide.bit_length(word))
    to = wide.put(out, at, "literal text")
    to = wide.poke(out, to, 200)
    wide.poke64(out, to, word)
    to = wide.copy(out, to + 8, buf, at, 5)
    wide.copy32(out, to, buf, at)
    return numbers + loaded + bits + (to,)


@given(st.binary(min_size=64, max_size=64), st.integers(0, 20), words, words)
def test_compiled_and_plain_bodies_agree(data: bytes, at: int, word: np.uint64, other: np.uint64) -> None:
    buf = np.frombuffer(data, np.uint8)
    compiled, plain = np.zeros(128, np.uint8), np.zeros(128, np.uint8)
    assert isinstance(_everything, Kernel)
    assert _everything(buf, compiled, at, word, other) == _everything.py_func(buf, plain, at, word, other)
    assert compiled.tobytes() == plain.tobytes()


@pytest.mark.parametrize("at", [-1, -8, 1, 8, 100])
def test_the_plain_body_refuses_offsets_outside(at: int) -> None:
    buf = np.zeros(8, np.uint8)
    with pytest.raises(IndexError):
        wide.big64(buf, at)
    with pytest.raises(IndexError):
        wide.poke64(buf, at, np.uint64(1))
    with pytest.raises(IndexError):
        wide.put(buf, at, "12345678")
    with pytest.raises(IndexError):
        wide.copy(buf, 0, buf, at, 8)
