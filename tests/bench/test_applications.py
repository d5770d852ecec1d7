"""The applications part of the benchmark at a tiny scale, compared with the real server."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import msgpack
import numpy as np
import pytest

from bench import applications, replication, serving
from bench.load import Requests, interleaved, pings, selects, sequential
from flowstone.iproto.constants import Key, RequestType


def test_applications_benchmark_runs_to_its_end(
    tarantool: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = {"ROUNDS": 1, "TUPLES": 4_000, "REQUESTS": 400, "TRANSACTIONS": 100, "ROWS": 1_000}
    for module in (applications, serving, replication):
        for name, value in scale.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    # Use cached kernels: compilation takes a dozen seconds.
    monkeypatch.setattr(applications, "_with_empty_home", lambda home: home.mkdir(parents=True) or dict(os.environ))
    results = list(applications.run(tmp_path))
    assert len(results) >= 18
    assert all(result.ratio is not None for result in results)


def test_interleaved_requests_keep_the_order_of_each_kind() -> None:
    reads, pinged = selects(sequential(3)), pings(2)
    mixed = interleaved(np.array([0, 1, 0, 0, 1]), reads, pinged)
    assert packets(mixed) == [packets(reads)[0], packets(pinged)[0], *packets(reads)[1:], packets(pinged)[1]]
    assert mixed.answer_size == pinged.answer_size


def test_interleaved_requests_must_have_a_place_for_each() -> None:
    with pytest.raises(ValueError, match="kind 0 has 3 requests for 1 places"):
        interleaved(np.array([0]), selects(sequential(3)))


def test_transactions_are_complete_and_each_is_in_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applications, "TRANSACTIONS", 3)
    headers = [header(packet) for packet in packets(applications._transaction_requests(1))]
    begin, replace, update, commit = (
        type.value for type in (RequestType.BEGIN, RequestType.REPLACE, RequestType.UPDATE, RequestType.COMMIT)
    )
    assert [each[Key.REQUEST_TYPE] for each in headers] == 3 * [begin, replace, *4 * [update], commit]
    streams = [each[Key.STREAM_ID] for each in headers]
    assert streams == [streams[0]] * 7 + [streams[7]] * 7 + [streams[14]] * 7
    assert len(set(streams)) == 3


def header(packet: bytes) -> dict[int, int]:
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(packet[5:])
    read: dict[int, int] = unpacker.unpack()
    return read


def packets(requests: Requests) -> list[bytes]:
    blob, edges = requests.blob.tobytes(), requests.edges.tolist()
    return [blob[start:end] for start, end in pairwise(edges)]
