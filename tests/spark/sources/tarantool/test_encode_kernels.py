"""Bounds of the encoder's kernels; `test_tuple_encoder` tests their results."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

from flowstone.iproto.extensions import Datetime
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.packet import frame
from flowstone.spark.sources.tarantool.encode_kernels import DATETIME_SIZE, put_datetimes, scan_replies
from tests.places import ROOT

INTERPRETED = os.environ.get("FLOWSTONE_INTERPRETED") == "1"


@pytest.mark.skipif(INTERPRETED, reason="already running interpreted")
def test_kernels_never_access_memory_outside_their_arrays() -> None:
    """Run the same tests interpreted: each read and write outside an array raises."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=ci"]
    files = [
        "tests/spark/sources/tarantool/test_tuple_encoder.py",
        "tests/spark/sources/tarantool/test_encode_kernels.py",
    ]
    environment = os.environ | {"FLOWSTONE_INTERPRETED": "1", "FLOWSTONE_SCALE": ""}
    root = ROOT
    done = subprocess.run([*command, *files], cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def replies(data: bytes, room: int = 10) -> tuple[tuple[int, int, int, int], list[int], list[list[int]]]:
    syncs, refused = np.zeros(room, np.int64), np.zeros((4, room), np.int64)
    found = scan_replies(np.frombuffer(data, np.uint8), syncs, refused)
    return found, syncs[: found[1]].tolist(), refused[:, : found[2]].T.tolist()


def test_replies_are_counted_and_errors_located() -> None:
    good = frame(pack({0: 0, 1: 7, 5: 80}) + pack({0x30: [[1]]}))
    bad = frame(pack({0: 0x8003, 1: 8}) + pack({0x31: "Duplicate"}))
    assert replies(good + bad + good[:5]) == (
        (len(good + bad), 2, 1, 0),
        [7, 8],
        [[8, 3, len(good) + 5, len(good + bad)]],
    )
    assert replies(good * 3, room=2)[0] == (2 * len(good), 2, 0, 0)
    assert replies(b"")[0] == (0, 0, 0, 0)


@pytest.mark.parametrize("garbage", [b"\x00", b"\xc0\x01", frame(b"\x01\x02"), frame(pack({5: 1})), frame(b"\x82\x00")])
def test_garbage_instead_of_a_reply_is_reported(garbage: bytes) -> None:
    assert replies(garbage)[0] == (0, 0, 0, 1)


@pytest.mark.parametrize("size", [2**32, 2**63 - 1])
def test_reply_of_any_claimed_size_is_awaited(size: int) -> None:
    good = frame(pack({0: 0, 1: 7}) + pack({}))
    assert replies(good + b"\xcf" + size.to_bytes(8) + good)[0] == (len(good), 1, 0, 0)


@pytest.mark.parametrize("value", [-(2**63), -(2**63) + 1, -1_000_001, -1_000_000, -999_999, -1, 0, 1, 2**63 - 1])
def test_moments_are_rounded_down_to_seconds_over_the_whole_range(value: int) -> None:
    out, edges = np.zeros(DATETIME_SIZE, np.uint8), np.empty(2, np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # interpreted, an overflow is one
        assert put_datetimes(np.array([value], np.int64), np.ones(1, np.uint8), out, edges) == -1
    assert unpack(out[: edges[1]].tobytes()) == Datetime(value // 1_000_000, value % 1_000_000 * 1000)
