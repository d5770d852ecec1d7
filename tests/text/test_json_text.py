"""The kernel's output equals that of the plain formatter; malformed bytes cause no access outside the buffers."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowstone.iproto.limits import NESTING_MAX
from flowstone.iproto.scan_kernels import skip_value
from flowstone.text.json_limits import FULL as OUT_FULL
from flowstone.text.json_limits import MALFORMED, OK, ROOM, TOO_DEEP, UNSUPPORTED
from flowstone.text.json_plain import JsonError, json_value
from flowstone.text.json_text import json_column
from flowstone.text.json_text_kernels import write_column
from tests.conftest import FULL
from tests.places import ROOT

INTERPRETED = os.environ.get("FLOWSTONE_INTERPRETED") == "1"
ROUNDS = 400 if INTERPRETED else 200_000 if FULL else 10_000

extensions = st.builds(msgpack.ExtType, st.sampled_from([1, 2, 3, 4, 6, 99]), st.binary(max_size=18))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-300, 300)
    | st.floats()
    | st.text(max_size=40)
    | st.text('ab"\\\n\x01é€😀', max_size=40)
    | st.binary(max_size=40)
    | extensions
)
keys = st.text(max_size=12) | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.none() | st.booleans() | st.binary()
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(keys, inner, max_size=20))


def written(data: bytes, room: int = 1 << 14) -> tuple[int, int, str]:
    """Return status, offset after the value, text. Guards around the output reveal stray writes."""
    buf = np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)
    guarded = np.full(room + 32, 0xEE, np.uint8)
    out = guarded[16:-16]
    at = skip_value(buf, 0, len(data))
    end = at if at >= 0 else len(data)
    offsets = np.zeros(2, np.int64)
    bounds = np.array([0]), np.array([end])
    _, status = write_column(buf, *bounds, 0, out, offsets, np.empty(NESTING_MAX, np.int64))
    assert (guarded[:16] == 0xEE).all()
    assert (guarded[-16:] == 0xEE).all()
    assert at >= 0 or status != OK
    return status, end, out[: offsets[1]].tobytes().decode() if status == OK else ""


def agree(data: bytes) -> None:
    """Check that kernel and plain formatter agree on `data`, or that the kernel does not support it."""
    status, at, text = written(data)
    if status == OK:
        assert text == json_value(data[:at])
        json.loads(text)
    elif status != UNSUPPORTED:
        with pytest.raises(JsonError):
            json_value(data)


@given(values)
def test_kernel_equals_the_plain_formatter(value: Any) -> None:
    agree(msgpack.packb(value))


@given(st.binary(max_size=60))
def test_kernel_equals_the_plain_formatter_for_any_string_of_bytes(data: bytes) -> None:
    agree(bytes((0xD9, len(data))) + data)
    agree(bytes((0xD9, len(data))) + data + bytes(8))


@pytest.mark.parametrize("lead", range(0x80, 0x100))
def test_kernel_equals_the_plain_formatter_for_every_short_utf8_sequence(lead: int) -> None:
    """Try all second bytes, with third and fourth bytes at every bound of the encoding."""
    tails = (b"", b"\x80", b"\xbf", b"\x7f", b"\xc0", b"\x80\x80", b"\xbf\xbf", b"\x80\xc0")
    strings = [bytes((lead, second)) + tail for second in range(256) for tail in tails]
    packed = [bytes((0xA0 + len(s),)) + s for s in strings]
    ends = np.cumsum([len(p) for p in packed])
    starts = np.concatenate([[0], ends[:-1]])
    offsets, text = json_column(np.frombuffer(b"".join(packed), np.uint8), starts, ends)
    data = text.tobytes().decode()
    at = np.array([len(text[:o].tobytes().decode()) for o in offsets]) if not data.isascii() else offsets
    assert [data[a:b] for a, b in itertools.pairwise(at)] == [json_value(p) for p in packed]


def test_random_bytes_cause_no_access_outside_the_buffers() -> None:
    source = random.Random(7)
    for _ in range(ROUNDS):
        agree(source.randbytes(source.randrange(40)))


def test_mutated_and_truncated_values_cause_no_access_outside_the_buffers() -> None:
    source = random.Random(8)
    sample: Any = [1, "text", {"k": [1.5, None, b"bin"], 7: "é" * 9}, 2**40, msgpack.ExtType(1, b"\x02\x15\x0c")]
    whole = msgpack.packb([*sample, msgpack.ExtType(4, bytes(16)), "x" * 40, [[[[]]]], -5])
    for _ in range(ROUNDS):
        data = bytearray(whole[: source.randrange(1, len(whole) + 1)])
        for _ in range(source.randrange(3)):
            data[source.randrange(len(data))] = source.randrange(256)
        agree(bytes(data))


def test_full_output_is_reported_and_never_overrun() -> None:
    data = msgpack.packb([1, "x" * 300, b"y" * 300, {"k": "\x01" * 100}, [[[[1.5] * 20]]]])
    needed = len(json_value(data))
    rooms = range(0, needed + 2 * ROOM, 97 if INTERPRETED else 1)
    statuses = [written(data, room)[0] for room in rooms]
    assert set(statuses) == {OUT_FULL, OK}
    assert statuses == sorted(statuses, reverse=True)
    assert statuses[-1] == OK


def test_nesting_is_bounded() -> None:
    deepest = b"\x91" * (NESTING_MAX - 1) + b"\x90"
    assert written(deepest)[0] == OK
    assert written(b"\x91" + deepest)[0] == TOO_DEEP
    assert written(b"\x81\x01" * NESTING_MAX + b"\x80")[0] == TOO_DEEP


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff\x01", b"\xdb\xff\xff\xff\xffx"]
)
def test_invalid_values_are_malformed(data: bytes) -> None:
    assert written(data)[0] == MALFORMED


@given(st.lists(st.none() | values, max_size=12))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_column_has_the_text_of_each_value(column: list[Any]) -> None:
    packed = [b"" if value is None else msgpack.packb(value) for value in column]
    ends = np.cumsum([len(p) for p in packed], dtype=np.int64)
    starts = np.array([end - len(p) if p else -1 for end, p in zip(ends, packed, strict=True)], np.int64)
    offsets, text = json_column(np.frombuffer(b"".join(packed) or b"\0", np.uint8), starts, ends)
    data = text.tobytes()
    found = [data[a:b].decode() for a, b in itertools.pairwise(offsets)]
    assert found == [json_value(p) if p else "" for p in packed]


def test_column_buffer_grows_on_demand() -> None:
    packed = [msgpack.packb("\x01" * 5000), msgpack.packb(msgpack.ExtType(99, b"z" * 9000)), b"\x01"]
    ends = np.cumsum([len(p) for p in packed], dtype=np.int64)
    starts = ends - np.array([len(p) for p in packed])
    _, text = json_column(np.frombuffer(b"".join(packed), np.uint8), starts, ends)
    assert text.tobytes().decode() == "".join(json_value(p) for p in packed)


def test_column_with_an_invalid_value_raises_an_error() -> None:
    with pytest.raises(JsonError):
        json_column(np.frombuffer(b"\x01\xa5abc", np.uint8), np.array([0, 1]), np.array([1, 5]))


@pytest.mark.skipif(INTERPRETED, reason="already interpreted")
@pytest.mark.parametrize("module", ["test_json_text.py", "test_json_rows.py", "test_flow_text.py"])
def test_interpreted_kernels_pass_bounds_checks(module: str) -> None:
    """Run the tests of memory access interpreted: each out-of-bounds access raises an error."""
    here = Path(__file__)
    chosen = "outside or overrun or bounded or flow"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    done = subprocess.run(
        [*command, "-k", chosen, str(here.with_name(module))],
        cwd=ROOT,
        env=os.environ | {"FLOWSTONE_INTERPRETED": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
