"""Bounds of the encoder's kernels; `test_tuple_encoder` tests their results."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame
from flowstone.spark.sources.tarantool.encode_kernels import scan_replies
from tests.places import ROOT

UNCOMPILED = os.environ.get("NUMBA_DISABLE_JIT") == "1"


@pytest.mark.skipif(UNCOMPILED, reason="this is that run")
def test_no_kernel_leaves_its_arrays() -> None:
    """The same tests, uncompiled: each read and write outside an array raises."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=ci"]
    files = [
        "tests/spark/sources/tarantool/test_tuple_encoder.py",
        "tests/spark/sources/tarantool/test_encode_kernels.py",
    ]
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "FLOWSTONE_SCALE": ""}
    root = ROOT
    done = subprocess.run([*command, *files], cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def replies(data: bytes, room: int = 10) -> tuple[tuple[int, int, int, int], list[int], list[list[int]]]:
    syncs, refused = np.zeros(room, np.int64), np.zeros((4, room), np.int64)
    found = scan_replies(np.frombuffer(data, np.uint8), syncs, refused)
    return found, syncs[: found[1]].tolist(), refused[:, : found[2]].T.tolist()


def test_replies_are_counted_and_errors_told() -> None:
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
def test_what_is_no_reply_is_said(garbage: bytes) -> None:
    assert replies(garbage)[0] == (0, 0, 0, 1)
