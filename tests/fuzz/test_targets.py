"""Every fuzz target, briefly: on any bytes, on mutations of valid ones, and on inputs that once broke it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import FULL
from tests.fuzz.__main__ import CORPORA
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import TARGETS

every_target = pytest.mark.parametrize("name", sorted(TARGETS))


@every_target
def test_the_corpus_is_valid(name: str) -> None:
    for data in TARGETS[name].corpus[:1]:
        TARGETS[name].decode(data)


@every_target
@given(data=st.binary(max_size=300))
def test_any_bytes_are_decoded_or_rejected(name: str, data: bytes) -> None:
    TARGETS[name].try_input(data)


@every_target
def test_mutations_of_valid_inputs_are_decoded_or_rejected(name: str) -> None:
    target, rng = TARGETS[name], random.Random(name)
    for _ in range(20_000 if FULL else 600):
        target.try_input(mutated(rng.choice(target.corpus), rng))


@every_target
def test_few_bytes_never_allocate_much_memory(name: str) -> None:
    target, rng = TARGETS[name], random.Random(name)
    inputs = [mutated(rng.choice(target.corpus), rng) for _ in range(100)]
    for data in inputs[:10]:
        target.try_input(data)
    tracemalloc.start()
    try:
        for data in inputs:
            target.try_input(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def kept_inputs() -> list[Path]:
    return sorted(CORPORA.glob("*.hex"))


@pytest.mark.parametrize("path", kept_inputs(), ids=lambda path: path.stem)
def test_earlier_fuzz_findings_do_not_break_decoders(path: Path) -> None:
    name, _, _ = path.stem.rpartition("-")
    TARGETS[name].try_input(bytes.fromhex(path.read_text()))


def test_kernels_as_plain_python_detect_an_out_of_bounds_read() -> None:
    """Guard against a vacuous test: interpreted kernels must raise on an out-of-bounds read."""
    code = "import numpy as np; from flowstone.native.msgpack import value_end; value_end(np.zeros(1, np.uint8), -1, 9)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"FLOWSTONE_INTERPRETED": "1"}, capture_output=True, check=False
    )
    assert b"IndexError" in found.stderr
