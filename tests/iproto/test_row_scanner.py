"""Tables of rows: their size, and malformed spans."""

from __future__ import annotations

import numpy as np
import pytest

from flowstone.iproto import row_scanner, scan
from tests.iproto.test_scan_kernels import scanned


def test_table_grows_with_the_number_of_rows() -> None:
    data = b"\x81\x00\x0c" * 100_000
    found = scanned(data)
    assert len(found) == 100_000
    assert found.cells[scan.ROW_END, -1] == len(data)


def test_malformed_span_is_skipped_on_request() -> None:
    good, bad = b"\x82\x00\x0c\x03\x07", b"\xc1\x00"
    data = good + good + bad + good + good
    spans = [(0, 5), (5, 12), (12, 17), (17, 22)]
    found = scanned(data, spans, leave_out_wrong=True)
    assert found.wrong == ((1, 10),)
    assert found.cells[scan.SPAN].tolist() == [0, 2, 3]
    assert scanned(data, spans).wrong == ((1, 10),)


def test_impossibly_short_rows_use_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scanner, "ROWS_BELOW_SUSPICION", 1000)
    flood = np.frombuffer(b"\x81\x00\x0c" * 100_000, np.uint8)
    found = row_scanner.scan(flood, np.array([[0, len(flood)]]))
    assert len(found) <= len(flood) // row_scanner.ROW_SIZE_MIN
    assert found.wrong
