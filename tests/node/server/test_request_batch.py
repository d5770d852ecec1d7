"""Parts of a scanned turn, and the connections of their requests."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from flowstone.iproto import request_scan as scan
from flowstone.iproto.request_scan_kernels import scan_requests
from flowstone.node.server.request_batch import ScannedBatch
from tests.node.server.test_executor import INSERT, Served, numbered


def scanned(served: Served, *batches: bytes) -> ScannedBatch:
    data = b"".join(batches)
    buf = np.frombuffer(data, np.uint8)
    spans = np.zeros((len(batches), scan.SPAN_COLUMNS), np.int64)
    ends = np.cumsum([len(batch) for batch in batches])
    spans[:, scan.END] = ends
    spans[1:, scan.START] = ends[:-1]
    spans[:, scan.AT] = spans[:, scan.START]
    spans[:, scan.SIZE_MAX] = 1 << 20
    cells = np.empty((scan.LINES, 100), np.int64)
    count = scan_requests(buf, spans, cells)
    assert count == 5
    return ScannedBatch(data, buf, cells, cast("Any", served.peers))


def test_part_knows_the_connections_of_its_requests() -> None:
    served = Served(users=(1, 1))
    batch = scanned(served, numbered(INSERT, [1, 2], first=7), numbered(INSERT, [3, 4, 5], first=70))
    part = batch.part(1, 4)
    assert [(served.peers.index(peer), *span) for peer, *span in part.by_peer()] == [(0, 0, 1), (1, 1, 3)]  # type: ignore[arg-type]
    assert part.syncs.tolist() == [8, 70, 71]
    assert part.peers_of() == served.peers
    assert batch.size(0, 5) <= len(batch.data)


def test_subset_of_a_part_is_a_part() -> None:
    served = Served(users=(1, 1))
    batch = scanned(served, numbered(INSERT, [1, 2]), numbered(INSERT, [3, 4, 5], first=70))
    chosen = batch.part(0, 5).choose(np.array([0, 4]))
    assert chosen.syncs.tolist() == [0, 72]
    assert [peer for peer, _, _ in chosen.by_peer()] == served.peers


def test_part_waits_when_one_of_its_connections_waits() -> None:
    served = Served(users=(1, 1))
    batch = scanned(served, numbered(INSERT, [1, 2]), numbered(INSERT, [3, 4, 5]))
    served.peers[1].is_waiting = True
    assert batch.part(0, 3).is_waiting
    assert not batch.part(0, 2).is_waiting
