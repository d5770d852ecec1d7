"""Kernels as machine code: every kind of value round-trips, and results equal those of plain Python."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from flowstone.kernels import Kernel, cache, inlined, kernel

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


def test_machine_code_equals_its_python_source() -> None:
    assert isinstance(total, Kernel)
    values, pair = np.arange(6, dtype=np.int64).reshape(2, 3), Pair(np.array([5]), np.array([6]))
    assert total(values, pair, 3, 1.0) == total.py_func(values, pair, 3, 1.0)


def test_kernel_writes_into_its_array_arguments() -> None:
    out = np.zeros(5, np.int64)
    assert mark(out[1:4], -9) is None
    assert out.tolist() == [0, -9, -9, -9, 0]


def test_words_are_unsigned_both_ways() -> None:
    assert above(np.uint64(2**64 - 2)) == 2**64 - 1


def test_kernel_with_an_unsupported_return_type_is_rejected() -> None:
    @kernel
    def half(value: int) -> float:
        return value / 2

    with pytest.raises(TypeError, match="only 64-bit numbers"):
        half(3)


@kernel
def checked(value: int) -> int:
    if value > 100:
        raise ValueError("too large")
    return value


@kernel
def through(value: int) -> int:
    return checked(value) + 1


@kernel
def stepped(value: int) -> int:
    found = 0
    for i in range(0, 100, value):  # a step of 0 is a ValueError
        found += i
    return found


@pytest.mark.parametrize("raising", [checked, through, stepped], ids=lambda each: each.__name__)
def test_kernel_that_can_raise_is_rejected_before_it_runs(raising: Any) -> None:
    with pytest.raises(TypeError, match=f"kernel {raising.__name__} can raise"):
        raising(1)


def test_machine_code_that_raises_is_an_error_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowstone.kernels import compiler

    monkeypatch.setattr(compiler, "_EXCEPTION", "never there")
    monkeypatch.setattr(cache, "save", lambda *_: None)

    @kernel
    def raising(value: int) -> int:
        if value > 100:
            raise ValueError("too large")
        return value

    assert raising(100) == 100
    with pytest.raises(AssertionError, match="raised"):
        raising(101)


def test_arguments_that_machine_code_would_misread_are_rejected() -> None:
    with pytest.raises(TypeError, match="byte order"):
        mark(np.zeros(3, ">i8"), 1)
    with pytest.raises(TypeError, match="not aligned"):
        mark(np.zeros(25, np.uint8)[1:].view(np.int64), 1)
    for number in (2**63, -(2**63) - 1):
        with pytest.raises(OverflowError, match="does not fit"):
            mark(np.zeros(3, np.int64), number)
    for other in ("1", None, np.float32(1.5)):
        with pytest.raises(TypeError, match="not a valid kernel argument"):
            mark(np.zeros(3, np.int64), other)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="by position"):
        mark(np.zeros(3, np.int64), value=1)


def test_arrays_of_other_elements_are_a_kind_of_their_own() -> None:
    out: Any = np.zeros(3, np.int32)
    mark(out, -1)
    assert out.tolist() == [-1, -1, -1]


def test_first_calls_from_many_threads_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of one kernel and of several at once, all to be compiled first."""
    monkeypatch.setenv("FLOWSTONE_KERNEL_CACHE", str(tmp_path))
    kernels: list[Any] = [Kernel(each.py_func) for each in (total, doubled, mark) if isinstance(each, Kernel)]
    values, pair = np.arange(6, dtype=np.int64).reshape(2, 3), Pair(np.array([5]), np.array([6]))
    arguments: list[tuple[Any, ...]] = [(values, pair, 3, 1.0), (21,), (np.zeros(3, np.int64), 1)]
    together = Barrier(12)

    def call(number: int) -> Any:
        together.wait()
        return kernels[number % 3](*arguments[number % 3])

    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(call, range(12)))
    assert found == [each.py_func(*args) for each, args in zip(kernels, arguments, strict=True)] * 4
    assert len(list(tmp_path.glob("*.o"))) == 3
