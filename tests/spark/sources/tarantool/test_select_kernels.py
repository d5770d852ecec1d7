"""Tuples in answers to SELECT: found in any form of array, and no byte is read outside the answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flowstone.iproto.constants import Key
from flowstone.iproto.msgpack import pack
from flowstone.iproto.scan import Bytes, Cells
from flowstone.spark.sources.tarantool.select_kernels import tuple_spans
from tests.native.twins import twin

Scan = Callable[[Bytes, Cells], int]


@pytest.fixture(params=["compiled", "interpreted"])
def scan(request: pytest.FixtureRequest) -> Scan:
    return tuple_spans if request.param == "compiled" else twin(tuple_spans)


def found(scan: Scan, body: bytes, room: int = 10) -> tuple[int, list[int]]:
    edges = np.full(room, -7, np.int64)
    count = scan(np.frombuffer(body, np.uint8), edges)
    return count, edges[: count + 1].tolist() if count >= 0 else []


@pytest.mark.parametrize("head", [b"\x92", b"\xdc\x00\x02", b"\xdd\x00\x00\x00\x02"])
def test_spans_lie_between_the_tuples(scan: Scan, head: bytes) -> None:
    tuples = [pack((1, "a")), pack((2, {"b": (None,)}))]
    body = b"\x82" + pack(0x31) + pack("ignored") + pack(Key.DATA.value) + head + b"".join(tuples)
    first, last = len(body) - sum(map(len, tuples)), len(body)
    assert found(scan, body) == (2, [first, first + len(tuples[0]), last])
    assert found(scan, body, room=3)[0] == 2
    assert found(scan, body, room=2)[0] == -4


def test_answer_without_whole_data_is_rejected(scan: Scan) -> None:
    body = pack({0x31: "ignored", Key.DATA.value: [(1, "a"), (2,)]})
    for end in range(len(body)):
        assert found(scan, body[:end])[0] == -1
    for broken in (b"\x80", b"\x81\x30\xc0", b"\x81\xc0\x01", b"\xc1"):
        assert found(scan, broken)[0] == -1
