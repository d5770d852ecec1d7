"""Kernels as machine code: what goes in comes out, whatever kind it is, and the same as in plain Python."""

from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from flowstone.kernels import Kernel, inlined, kernel

Numbers = NDArray[np.int64]


class Pair(NamedTuple):
    first: Numbers
    second: Numbers


@inlined
def doubled(value: int) -> int:
    return 2 * value


@kernel
def total(values: Numbers, pair: Pair, weight: int, factor: float) -> tuple[int, int]:
    found = np.int64(0)
    for i in range(values.shape[0]):
        for k in range(values.shape[1]):
            found += values[i, k] * weight
    for i in range(pair.first.shape[0]):
        found += doubled(pair.first[i]) - pair.second[i]
    return int(found), int(found * factor)


@kernel
def mark(out: Numbers, value: int) -> None:
    for i in range(out.shape[0]):
        out[i] = value


@kernel
def above(value: np.uint64) -> np.uint64:
    return value + np.uint64(1)


@pytest.mark.parametrize("columns", [slice(None), slice(0, 3), slice(1, None, 2)], ids=["whole", "slice", "strided"])
def test_arrays_tuples_and_numbers_arrive_whole(columns: slice) -> None:
    values = np.arange(40, dtype=np.int64).reshape(4, 10)[:, columns]
    pair = Pair(np.array([1, 2, -3]), np.array([10, 20, 30]))
    expected = int(values.sum()) * -7 + 2 * 0 - 60
    assert total(values, pair, -7, 0.5) == (expected, int(expected * 0.5))


def test_machine_code_equals_the_python_it_was_made_from() -> None:
    assert isinstance(total, Kernel)
    values, pair = np.arange(6, dtype=np.int64).reshape(2, 3), Pair(np.array([5]), np.array([6]))
    assert total(values, pair, 3, 1.0) == total.py_func(values, pair, 3, 1.0)


def test_a_kernel_writes_into_the_arrays_it_is_given() -> None:
    out = np.zeros(5, np.int64)
    assert mark(out[1:4], -9) is None
    assert out.tolist() == [0, -9, -9, -9, 0]


def test_words_are_unsigned_both_ways() -> None:
    assert above(np.uint64(2**64 - 2)) == 2**64 - 1


def test_a_kernel_that_returns_what_we_cannot_take_is_refused() -> None:
    @kernel
    def half(value: int) -> float:
        return value / 2

    with pytest.raises(TypeError, match="only 64-bit numbers"):
        half(3)
