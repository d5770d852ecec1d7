"""Compiled updates: equal to the plain ones byte for byte, and within their arrays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.box.update.bulk import OPERATIONS_MAX, scratch, update_bound
from flowstone.box.update.kernels import update_tuples
from flowstone.box.update.update import UpdateRules, decode_operations, update_raw, upsert_raw
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack
from tests.places import ROOT

INTERPRETED = os.environ.get("FLOWSTONE_INTERPRETED") == "1"
GUARD = 16
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(-200, 300) | st.sampled_from((-(1 << 63), (1 << 63) - 1))
VALUES = NUMBERS | st.none() | st.text(max_size=40) | st.floats() | st.lists(NUMBERS, max_size=20) | st.just({"a": [1]})
TUPLES = st.lists(VALUES, min_size=1, max_size=18)
FIELDS = st.integers(-2, 19) | st.sampled_from(("name", "[1]", "[2].a"))
OPERATIONS = st.lists(
    st.tuples(st.sampled_from("==++--!#&"), FIELDS, VALUES | NUMBERS)
    | st.tuples(st.just("="), st.integers(1, 5), VALUES),
    max_size=4,
)


def updated(
    tuples: list[bytes], operations: list[bytes], bases: list[int], keys: tuple[int, ...] = ()
) -> list[bytes | None]:
    """Return the results; None for a row that the kernel leaves to the plain path. Guards reveal stray writes."""
    buf, ops = np.frombuffer(b"".join(tuples), np.uint8), np.frombuffer(b"".join(operations), np.uint8)
    offsets, ops_offsets = np.cumsum([0, *map(len, tuples)]), np.cumsum([0, *map(len, operations)])
    guarded = np.full(2 * GUARD + update_bound(len(buf), len(ops), len(tuples)), 0xEE, np.uint8)
    ends, is_done = np.zeros(len(tuples) + 1, np.int64), np.zeros(len(tuples), np.uint8)
    out = guarded[GUARD:-GUARD]
    fields, numbers = np.array(keys, np.int64), np.array(bases, np.int64)
    done = update_tuples(buf, offsets, ops, ops_offsets, numbers, fields, scratch(), out, ends[1:], is_done)
    assert done == is_done.sum()
    assert (guarded[:GUARD] == 0xEE).all()
    assert (guarded[-GUARD:] == 0xEE).all()
    spans = zip(ends[:-1], ends[1:], is_done, strict=True)
    return [out[start:end].tobytes() if one_is_done else None for start, end, one_is_done in spans]


@given(st.lists(st.tuples(TUPLES, OPERATIONS, st.integers(0, 1)), min_size=1, max_size=5))
@settings(max_examples=60 if INTERPRETED else 500, deadline=None)
def test_compiled_updates_equal_the_plain_operations(rows: list[tuple[list[Any], Any, int]]) -> None:
    tuples, operations = [pack(values) for values, _, _ in rows], [pack(each) for _, each, _ in rows]
    found = updated(tuples, operations, [base for _, _, base in rows])
    for raw, each, (_, _, base), result in zip(tuples, operations, rows, found, strict=True):
        if result is None:
            continue
        decoded = decode_operations(each, index_base=base)
        for rules in (UpdateRules(), UpdateRules(True, True)):
            assert update_raw(raw, decoded, None, rules) == upsert_raw(raw, decoded, None, rules) == result


def test_kernel_executes_common_operations() -> None:
    raw = pack((1, "a", -5, 1 << 40))
    done = [
        ([("=", 2, "b")], (1, "b", -5, 1 << 40)),
        ([("+", 3, 300), ("=", 2, None), ("-", 4, 1)], (1, None, 295, (1 << 40) - 1)),
        ([("=", 5, [1])], (1, "a", -5, 1 << 40, (1,))),
    ]
    assert updated([raw] * 3, [pack(each) for each, _ in done], [1] * 3, (0,)) == [pack(result) for _, result in done]


def test_kernel_leaves_other_operations_to_the_plain_path() -> None:
    raw = pack((1, "a", -5, (1 << 63) - 1, 1.5))
    left: list[Any] = [
        [("=", 1, 2)],  # the key
        [("=", 7, 2)],
        [("=", -1, 2)],
        [("=", 0, 2)],  # below the base
        [("=", "name", 2)],
        [("+", 4, 1)],
        [("+", 5, 1)],
        [("-", 3, -(1 << 63))],
        [("=", 2, 2), ("=", 2, 3)],
        [("=", 6, 2), ("=", 6, 3)],
        [("!", 2, 2)],
        [("=", 2)],
        [],
        [("=", 2, number) for number in range(OPERATIONS_MAX + 1)],
        5,
    ]
    assert updated([raw] * len(left), [pack(each) for each in left], [1] * len(left), (0,)) == [None] * len(left)
    assert updated([raw[:-1], b"", b"\x91"], [pack([("=", 2, 2)])] * 3, [1] * 3) == [None] * 3
    assert updated([raw], [pack([("=", 2, 2)])], [-1]) == [None]


def test_array_header_is_shortened() -> None:
    raw = b"\xdc\x00\x02\x01\x02"
    operations = pack([("=", 1, 5)])
    assert updated([raw], [operations], [0]) == [update_raw(raw, decode_operations(operations))] == [pack((1, 5))]


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), min_size=1, max_size=4))
@settings(max_examples=100 if INTERPRETED else 500, deadline=None)
def test_kernel_does_not_access_memory_outside_its_buffers(rows: list[tuple[bytes, bytes]]) -> None:
    tuples, operations = [b"\x92" + raw for raw, _ in rows], [b"\x91\x93\xa1=" + raw for _, raw in rows]
    for raw, each, result in zip(tuples, operations, updated(tuples, operations, [0] * len(rows)), strict=True):
        if result is not None:
            try:
                assert update_raw(raw, decode_operations(each)) == result
            except (TarantoolError, ValueError):
                continue


def test_interpreted_kernel_passes_bounds_checks() -> None:
    here = Path(__file__).resolve()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    done = subprocess.run(
        [*command, "-k", "outside or plain_operations", str(here)],
        cwd=ROOT,
        env=os.environ | {"FLOWSTONE_INTERPRETED": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
