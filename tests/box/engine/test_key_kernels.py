"""The compiled key encoder stays within its arrays for any input; test_sort_keys.py checks its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.box.engine.key_kernels import encode_keys
from flowstone.box.engine.key_parts import FIXED_SIZE_MAX, PART_INTEGER, PART_SCALAR, PART_STRING, PART_UUID
from flowstone.iproto.msgpack import pack
from tests.places import ROOT

INTERPRETED = os.environ.get("FLOWSTONE_INTERPRETED") == "1"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=9) | st.uuids(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
WHOLE = st.lists(VALUES, max_size=4).map(pack)
CUT = st.builds(lambda raw, size: raw[:size], WHOLE, st.integers(0, 30))
TUPLES = st.lists(
    WHOLE | CUT | st.binary(max_size=20) | st.binary(max_size=20).map(lambda raw: b"\x94" + raw), max_size=5
)
GUARD = 16


def encoded(tuples: list[bytes], fields: list[int], kinds: list[int]) -> list[bytes | None]:
    """Return the keys; check guards around the output."""
    buf = np.frombuffer(b"".join(tuples), np.uint8)
    offsets = np.cumsum([0, *map(len, tuples)])
    guarded = np.full(2 * GUARD + len(tuples) * len(kinds) * FIXED_SIZE_MAX + 2 * len(buf), 0xEE, np.uint8)
    ends, is_done = np.zeros(len(tuples) + 1, np.int64), np.zeros(len(tuples), np.uint8)
    out = guarded[GUARD:-GUARD]
    starts = np.empty(len(kinds), np.int64)
    done = encode_keys(buf, offsets, np.array(fields), np.array(kinds), starts, out, ends[1:], is_done)
    assert (guarded[:GUARD] == 0xEE).all()
    assert (guarded[-GUARD:] == 0xEE).all()
    assert done == is_done.sum()
    return [
        out[start:end].tobytes() if one_is_done else None
        for start, end, one_is_done in zip(ends[:-1], ends[1:], is_done, strict=True)
    ]


@given(TUPLES, st.lists(st.tuples(st.integers(0, 3), st.integers(PART_INTEGER, PART_SCALAR)), min_size=1, max_size=3))
@settings(max_examples=100 if INTERPRETED else 500, deadline=None)
def test_kernel_accesses_no_memory_outside_its_buffers(tuples: list[bytes], parts: list[tuple[int, int]]) -> None:
    encoded(tuples, [field for field, _ in parts], [kind for _, kind in parts])


def test_value_that_cannot_be_encoded_is_marked_and_has_an_empty_key() -> None:
    tuples = [pack((1, "a")), pack((1.5, "a")), pack((1, 5)), pack((1,)), pack((-1, "b\x00"))]
    found = encoded(tuples, [1, 0], [PART_STRING, PART_INTEGER])
    assert found == [
        b"\x80a\x00\x00\x40" + bytes(7) + b"\x01",
        None,
        None,
        None,
        b"\x80b\x00\xff\x00\x00\x3f" + b"\xff" * 8,
    ]
    assert encoded([b"\x91\xd8\x03" + bytes(16)], [0], [PART_UUID]) == [None]


def test_interpreted_kernel_passes_bounds_checks() -> None:
    here = Path(__file__).resolve()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    done = subprocess.run(
        [*command, "-k", "outside", str(here)],
        cwd=ROOT,
        env=os.environ | {"FLOWSTONE_INTERPRETED": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
