"""Tuples of entries and shares of keys, compiled and interpreted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import pytest

from flowstone.limestone.format.entries import Entry, encode, put, remove
from flowstone.limestone.format.entry_table import TABLE_ROWS
from flowstone.limestone.format.entry_table_kernels import walk_table
from flowstone.spark.index.limestone_kernels import (
    BLOB_ROOM,
    HEAD_ROOM,
    TUPLE_ROOM,
    entry_tuples,
    join_fields,
    key_shares,
)
from tests.native.twins import twin
from tests.spark.limestone_directories import version

ENTRIES = [
    put(1, b"", b"", version(0)),
    put(1, b"key", b"v" * 300, version(5, 1 << 63)),
    put(7, b"k" * 70_000, b"", version(200, (1 << 64) - 1), (1, 300, (1 << 64) - 1)),
    remove(1 << 40, b"key", version((1 << 64) - 1, 70_000)),
    put(1, b"key", b"v", version(1 << 33, 127), tuple(range(20))),
]


@pytest.fixture(params=["compiled", "interpreted"])
def bodies(request: pytest.FixtureRequest) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda function: function if request.param == "compiled" else twin(function)


def walked(entries: list[Entry]) -> tuple[Any, Any]:
    buf = np.frombuffer(b"".join(map(encode, entries)), np.uint8)
    table = np.zeros((TABLE_ROWS, len(entries)), np.uint64)
    assert walk_table(buf, 0, table, 0)[0] == len(entries)
    return buf, table


def check_tuples(body: Any, entries: list[Entry]) -> None:
    buf, table = walked(entries)
    room = sum(TUPLE_ROOM + len(each.key) + len(each.value) + BLOB_ROOM * len(each.blob_ids) for each in entries)
    out, ends = np.zeros(room, np.uint8), np.zeros(len(entries), np.int64)
    size = body(buf, table, np.arange(len(entries)), out, ends)
    edges = [0, *ends.tolist()]
    found = [msgpack.unpackb(out[start:end].tobytes()) for start, end in pairwise(edges)]
    assert size == edges[-1] <= room
    low = (1 << 63) - 1
    assert found == [
        [each.key, each.value, each.version.major, each.version.minor & low, each.version.minor > low, [*each.blob_ids]]
        for each in entries
    ]
    assert out[:size].tobytes() == b"".join(map(msgpack.packb, found)), "the encoding is not the shortest one"


def test_tuples_equal_their_entries(bodies: Any) -> None:
    check_tuples(bodies(entry_tuples), ENTRIES)


def test_entry_with_65536_blobs_is_encoded() -> None:
    check_tuples(entry_tuples, [put(1, b"key", b"v", version(1, 1), tuple(range(1 << 16)))])


def test_equal_keys_have_the_same_share(bodies: Any) -> None:
    entries = [put(storage, b"%d" % number, b"x" * place, version(1)) for place in (0, 9) for storage in (1, 2)
               for number in range(200)]  # fmt: skip
    buf, table = walked(entries)
    shares = np.zeros(len(entries), np.int64)
    bodies(key_shares)(buf, table, np.arange(len(entries)), 3, shares)
    assert (shares[:400] == shares[400:]).all()
    assert set(shares.tolist()) == {0, 1, 2}
    assert np.bincount(shares[:400]).min() > 80


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300])
def test_fields_are_joined_to_tuples(bodies: Callable[..., Any], count: int) -> None:
    rows = 3
    pieces = [[msgpack.packb([field, "x" * row]) for row in range(rows)] for field in range(count)]
    data = np.frombuffer(b"".join(b"".join(column) for column in pieces), np.uint8)
    edges = np.zeros((count, rows + 1), np.int64)
    at = 0
    for field, column in enumerate(pieces):
        edges[field] = at + np.cumsum([0, *map(len, column)])
        at = int(edges[field, -1])
    out, ends = np.zeros(len(data) + HEAD_ROOM * rows, np.uint8), np.zeros(rows, np.int64)
    size = bodies(join_fields)(data, edges, out, ends)
    found = [msgpack.unpackb(out[start:end].tobytes()) for start, end in pairwise([0, *ends.tolist()])]
    assert size == ends[-1]
    assert found == [[[field, "x" * row] for field in range(count)] for row in range(rows)]
