"""Doubles are printed as by `repr`: random bit patterns, common values, and the edges of the format."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from flowstone.text.float_text import DOUBLE_TEXT_MAX
from flowstone.text.json_text import json_column
from tests.conftest import FULL
from tests.native.twins import interpreted_module

COUNT = 2_000_000 if FULL else 60_000
JSON = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}


def texts(values: NDArray[np.float64]) -> list[str]:
    """Return the texts that a compiled module writes for MessagePack doubles."""
    packed = np.empty((values.size, 9), np.uint8)
    packed[:, 0] = 0xCB
    packed[:, 1:] = values.astype(">f8").view(np.uint8).reshape(-1, 8)
    ends = 9 * np.arange(1, values.size + 1)
    offsets, text = json_column(packed.reshape(-1), ends - 9, ends)
    data = text.tobytes()
    return [data[a:b].decode() for a, b in itertools.pairwise(offsets)]


def interpreted_texts(values: NDArray[np.float64]) -> list[str]:
    """Return the texts that the interpreted module writes, each into the smallest permitted buffer."""
    write_double = interpreted_module("flowstone.text.float_text").write_double
    out = np.empty(DOUBLE_TEXT_MAX, np.uint8)
    return [out[: write_double(value, out, 0)].tobytes().decode() for value in values.tolist()]


def expected(values: NDArray[np.float64]) -> list[str]:
    return [JSON.get(repr(value), repr(value)) for value in values.tolist()]


RANDOM = np.random.default_rng(20261115)
SAMPLES = {
    "bit patterns": RANDOM.integers(0, 2**64, COUNT, np.uint64).view(np.float64),
    "times": 1794773471 + RANDOM.random(COUNT) * 1e6,
    "prices": np.round(RANDOM.random(COUNT) * 1e4, 2),
    "whole numbers": RANDOM.integers(-(2**63), 2**63, COUNT).astype(np.float64),
    "float32": RANDOM.integers(0, 0x7F800000, COUNT, np.uint32).view(np.float32).astype(np.float64),
    "few digits": RANDOM.integers(1, 10**6, COUNT) * 10.0 ** RANDOM.integers(-300, 300, COUNT),
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_text_of_a_double_equals_repr(sample: str) -> None:
    assert texts(SAMPLES[sample]) == expected(SAMPLES[sample])
    few = SAMPLES[sample][:500]
    assert interpreted_texts(few) == expected(few)


def test_text_of_a_double_equals_repr_at_the_edges() -> None:
    edges = [2.0**k for k in range(-1074, 1024)] + [float(f"1e{k}") for k in range(-323, 309)]
    edges += [0.0, 5e-324, 2.225073858507201e-308, 2.2250738585072014e-308, 1.7976931348623157e308]
    edges += [9007199254740991.0, 9007199254740993.0, 1e15, 1e16, 123456789012345680.0, 1e22, 1e23, 0.0001, 0.00001]
    around = np.array(edges)
    below, above = np.nextafter(around, 0.0), np.nextafter(around[around < 1.7e308], np.inf)
    values = np.concatenate([around, -around, below, above, [np.nan, np.inf, -np.inf]])
    assert texts(values) == interpreted_texts(values) == expected(values)
